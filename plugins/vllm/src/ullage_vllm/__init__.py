"""Runs inside a vLLM server and shows what it hides of its KV cache.

Imports nothing here: vLLM loads the entry points of `plugin`, and those do nothing unless
ULLAGE_VLLM=1.
"""

__version__ = "0.1.0"
