"""A small Llama with random weights, written from a configuration: for what no weights decide.

Holds the writing only, without transformers. Speeds and bytes of a shape are those of any weights
of that shape; perplexity and agreement are not, and no experiment measures them on this.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SEED = 7
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    # A tied head would answer each token with itself, since nothing was learnt.
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
QUICK = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4, "head_dim": 32}
QUICK |= {"num_attention_heads": 8}
NAME = "random-llama"
SPECIALS = ("<unk>", "<s>", "</s>")
NUM_WORDLESS = len(SPECIALS) + 256


def write_synthetic(directory: Path, *, quick: bool = False) -> Path:
    """config.json, model.safetensors and tokenizer.json in `directory`/NAME; the same each time."""
    place = directory / NAME
    place.mkdir(parents=True)
    config = CONFIG | (QUICK if quick else {})
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(_weights(config), place / "model.safetensors")
    _write_tokenizer(place, config["vocab_size"])
    return place


def write_encoder(
    directory: Path,
    *,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    max_tokens: int,
) -> Path:
    """A BERT of that shape with random weights, in `directory`/random-bert, without a tokenizer."""
    place = directory / "random-bert"
    place.mkdir(parents=True)
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "vocab_size": 1024,
        "max_position_embeddings": max_tokens,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "torch_dtype": "float32",
    }
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(_encoder_weights(config), place / "model.safetensors")
    return place


def _encoder_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(SEED)
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    tensors: dict[str, torch.Tensor] = {}

    def dense(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = torch.randn(rows, columns, generator=draw) / math.sqrt(columns)
        tensors[f"{name}.bias"] = torch.zeros(rows)

    def norm(name: str) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = torch.ones(hidden), torch.zeros(hidden)

    for name, rows in (
        ("word_embeddings", config["vocab_size"]),
        ("position_embeddings", config["max_position_embeddings"]),
        ("token_type_embeddings", config["type_vocab_size"]),
    ):
        tensors[f"embeddings.{name}.weight"] = torch.randn(rows, hidden, generator=draw)
    norm("embeddings.LayerNorm")
    for index in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{index}."
        for part in ("query", "key", "value"):
            dense(f"{layer}attention.self.{part}", hidden, hidden)
        dense(f"{layer}attention.output.dense", hidden, hidden)
        norm(f"{layer}attention.output.LayerNorm")
        dense(f"{layer}intermediate.dense", mlp, hidden)
        dense(f"{layer}output.dense", hidden, mlp)
        norm(f"{layer}output.LayerNorm")
    dense("pooler.dense", hidden, hidden)
    return tensors


def _weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(SEED)
    hidden, mlp, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) / math.sqrt(columns)

    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(config["vocab_size"], hidden),
    }
    # Never the special tokens or single bytes, which make no text of their own: of two thousand
    # random scores the largest is above zero.
    tensors["lm_head.weight"][:NUM_WORDLESS] = 0.0
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        tensors[layer + "input_layernorm.weight"] = torch.ones(hidden)
        tensors[layer + "post_attention_layernorm.weight"] = torch.ones(hidden)
        for name, rows, columns in (
            ("self_attn.q_proj", q, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, q),
            ("mlp.gate_proj", mlp, hidden),
            ("mlp.up_proj", mlp, hidden),
            ("mlp.down_proj", hidden, mlp),
        ):
            tensors[f"{layer}{name}.weight"] = matrix(rows, columns)
    return tensors


def _write_tokenizer(place: Path, vocab_size: int) -> None:
    """Every byte is a token; the rest of the vocabulary are words ` w0`, ` w1`, …

    So every token that the random model comes up with has text, and each is one event of a stream.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIALS, *alphabet]
    names += [f"Ġw{i}" for i in range(vocab_size - len(names))]
    fast = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    fast.save(str(place / "tokenizer.json"))
