"""Tiny random models of several families, written to disk by transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Wide weights: with the usual 0.02 every continuation is a tie of nearly equal logits.
    "initializer_range": 0.3,
}


def _config(kind: str, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        return getattr(transformers, kind)(**{**COMMON, **more})

    return make


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig"),
    "llama-tied-mha": _config("LlamaConfig", tie_word_embeddings=True, num_key_value_heads=4),
    "llama3-rope": _config("LlamaConfig", rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope": _config(
        "LlamaConfig",
        rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    ),
    "llama-biases": _config("LlamaConfig", attention_bias=True, mlp_bias=True),
    "llama-wide-heads": _config("LlamaConfig", head_dim=32),
    "mistral": _config("MistralConfig", sliding_window=None, head_dim=16),
    "qwen2": _config("Qwen2Config", use_sliding_window=False),
    "qwen3": _config("Qwen3Config", use_sliding_window=False, head_dim=32),
}


def write_model(family: str, directory: Path, tokenizer: bool = True) -> Path:
    """A random model of `family` with config, safetensors and a byte-level tokenizer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(sorted(FAMILIES).index(family))
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                # transformers starts these at 0 and 1, where mistakes would not show.
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    if tokenizer:
        write_byte_tokenizer(directory)
    return directory


def write_byte_tokenizer(directory: Path) -> None:
    """Ids 0 … 2 are special, then one token per byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocab.update({character: index + 3 for index, character in enumerate(alphabet)})
    fast = Tokenizer(models.BPE(vocab, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(name, special=True) for name in ("<pad>", "<s>", "</s>")])
    fast.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
