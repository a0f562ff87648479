"""Tiny GGUF models with random weights, and llama.cpp's logits for them.

What a converter writes is `tests/anatomy/gguf_cases.py`. Run as a script (with llama-cpp-python
0.3.36 and numpy, `python tests/engine/llama_cpp_logits.py FILE TOKENS OUT`) llama.cpp answers; its
answers for every case here are kept in `fixtures/llama_cpp_logits.npz`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# Modules of that folder are imported by their bare names.
sys.path.append(str(Path(__file__).parents[1] / "anatomy"))

from gguf_cases import CASES, EXPERTS, Case, gguf_tensors, rms, written_metadata

from ullage.anatomy import read_config

ANSWERS = Path(__file__).parent / "fixtures" / "llama_cpp_logits.npz"
NUM_VOCAB = 80
TOKENS = np.random.default_rng(1).integers(0, NUM_VOCAB, 170)
_PLAIN = (
    *("llama", "llama, tied, biased, wide heads", "llama: Mixtral", "mistral3", "qwen2"),
    *("qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi3", "phi2", "starcoder2"),
    *("stablelm", "olmo2", "granite", "smollm3", "exaone4", "glm4", "ernie4_5", "seed_oss"),
    *("command-r", "cohere2", "nemotron", "gpt2", "gptneox", "arcee", "bloom", "falcon"),
    "starcoder",
)
_NEOX, _BLOOM = CASES["gptneox"], CASES["bloom"]
GGUF_CASES: dict[str, Case] = {
    **{name: CASES[name] for name in _PLAIN},
    "olmo: with its epsilon": Case(
        CASES["olmo"].config, {"attention.layer_norm_epsilon": ("float32", 1e-5)}
    ),
    "olmoe: as many keys as queries": Case(
        rms(
            "olmoe",
            "OlmoeForCausalLM",
            num_experts=8,
            num_experts_per_tok=2,
            num_key_value_heads=4,
        ),
        {**EXPERTS, "expert_feed_forward_length": ("uint32", 96)},
    ),
    "gptneox: one after the other": Case(
        {**_NEOX.config, "use_parallel_residual": False},
        {**_NEOX.extra, "use_parallel_residual": ("bool", False)},
        silent=_NEOX.silent,
    ),
    "bloom: six heads": Case(
        {**_BLOOM.config, "n_head": 6, "hidden_size": 96},
        {
            **_BLOOM.extra,
            "embedding_length": ("uint32", 96),
            "feed_forward_length": ("uint32", 384),
            "attention.head_count": ("uint32", 6),
            "attention.head_count_kv": ("uint32", 6),
        },
    ),
}
# ggml looks GELU up in a table of 16-bit floats (ggml-cpu, vec.h); its other operations are exact.
GELU_TOLERANCE = 5e-3


def tolerance(name: str) -> float:
    """How far llama.cpp's float32 logits may lie from ours."""
    words = ("gemma", "phi2", "starcoder", "gpt", "bloom", "falcon")
    return GELU_TOLERANCE if name.startswith(words) else 1e-4


def write_gguf(name: str, file: Path) -> Path:
    """The model of a case in float32, always with the same numbers."""
    import gguf

    case, architecture = GGUF_CASES[name], name.partition(":")[0].partition(",")[0]
    spec = read_config(case.config, file="config.json").spec
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(str(file), architecture)
    for key, (kind, value) in written_metadata(architecture, case).items():
        if key != "general.architecture":
            getattr(writer, f"add_{kind}")(key, value)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    writer.add_uint32(f"{architecture}.vocab_size", NUM_VOCAB)
    for tensor, (_, shape) in gguf_tensors(architecture, spec).items():
        weights = random.standard_normal(shape).astype(np.float32) * np.float32(0.15)
        if "norm" in tensor and tensor.endswith("weight"):
            weights += np.float32(1)
        writer.add_tensor(tensor, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def recorded(name: str) -> NDArray[np.float32]:
    """llama.cpp's logits [vocab] at the last of TOKENS."""
    with np.load(ANSWERS) as answers:
        found: NDArray[np.float32] = answers[name]
    return found
