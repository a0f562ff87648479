"""Make a Q8_0 file of a GGUF file with llama.cpp's own quantiser, through float32.

Runs in llama.cpp's environment: python quantize_q8_0.py SOURCE TARGET
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp as lc


def main(source: str, target: str) -> int:
    params = lc.llama_model_quantize_default_params()
    params.ftype = lc.LLAMA_FTYPE_MOSTLY_Q8_0
    params.allow_requantize = True
    scratch = f"{target}.tmp"
    code: int = lc.llama_model_quantize(source.encode(), scratch.encode(), ctypes.byref(params))
    if code == 0:
        Path(scratch).replace(target)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
