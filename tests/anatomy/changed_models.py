"""Configurations of transformers' classes with sizes changed at random, and their meta models.

Holds the draw: which keys may change and by how much. What is asked of it is in
`test_changed_sizes.py`.
"""

from __future__ import annotations

import random
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers_models as oracle

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import generate_inventory as inventory

CLASSES = inventory.classes()
TRIES = 12
DEPTHS = frozenset(
    [
        "num_hidden_layers",
        "n_layer",
        "num_layers",
        "n_layers",
        "encoder_layers",
        "decoder_layers",
        "num_decoder_layers",
        "num_encoder_layers",
    ]
)
_WIDTHS = re.compile(
    r"""hidden_size | d_model | n_embd | n_embed | dim | emb_dim | embed_dim | embedding_size
    | .*intermediate_size | .*ffn_dim | d_ff | n_inner | ffn_hidden_size | dim_ff | hidden_dim
    | .*vocab_size | max_position_embeddings | n_positions | .*head_dim | d_kv | kv_channels
    | .*attention_heads | n_head | n_heads | num_heads | num_key_value_heads | num_kv_heads
    | num_experts | num_local_experts | n_routed_experts | n_shared_experts | .*lora_rank
    | state_size | .*n_groups | mamba_.* | linear_.* | conv_.* | expand""",
    re.VERBOSE,
)
_FLAGS = frozenset(
    [
        "attention_bias",
        "mlp_bias",
        "use_bias",
        "add_bias_linear",
        "qkv_bias",
        "use_qkv_bias",
        "use_qk_norm",
        "bias",
        "use_conv_bias",
        "mamba_conv_bias",
        "mamba_proj_bias",
        "lm_head_bias",
    ]
)
_PARTS = ("text_config", "decoder", "language_config", "decoder_config", "thinker_config")


@dataclass(frozen=True, slots=True)
class Drawn:
    """`count`: the elements that the library's model stores, tied ones once."""

    raw: dict[str, Any]
    count: int
    changes: dict[str, Any]


def drawn(name: str, number: int) -> Drawn | None:
    """The number-th draw of a class; None where none of its tries builds a model."""
    for seed in range(number * TRIES, (number + 1) * TRIES):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return _try(name, random.Random(f"{name} {seed}"))  # noqa: S311
            except Exception:  # sizes that do not go together: the library raises anything
                continue
    return None


def _try(name: str, rng: random.Random) -> Drawn:
    default = inventory.default_config(name, CLASSES[name])
    settings = dict(inventory.SETTINGS.get(name, {}))
    how_many = rng.choice((0.25, 0.5, 0.8))
    ties = name.endswith("ForCausalLM")  # wrappers and encoders: see LISTED in the test
    changes = _changes(rng, default, how_many, ties)
    for part in _PARTS:
        inner = getattr(default, part, None)
        if hasattr(inner, "to_dict"):
            given = settings.get(part)
            own = given if isinstance(given, dict) else {}
            changes[part] = (
                {"model_type": inner.model_type} | own | _changes(rng, inner, how_many, False)
            )
    config = type(default)(**settings | changes)
    with oracle.torch.device("meta"):
        model = getattr(oracle.transformers, name)._from_config(config)
    count = sum(_elements(shape) for shape in oracle.state_shapes(model).values())
    return Drawn(inventory.written(config, name), count, changes)


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _changes(rng: random.Random, config: Any, how_many: float, ties: bool) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for key in getattr(type(config), "__dataclass_fields__", {}):
        value = getattr(config, key, None)
        if isinstance(value, bool):
            flips = key in _FLAGS or (ties and key == "tie_word_embeddings")
            if flips and rng.random() < how_many:
                changes[key] = not value
        elif isinstance(value, int):
            if key in DEPTHS:
                changes[key] = min(value, rng.randint(2, 5))
            elif _WIDTHS.fullmatch(key) and rng.random() < how_many:
                changes[key] = _scaled(rng, key, value)
    _agree(config, changes)
    return changes


def _agree(config: Any, changes: dict[str, Any]) -> None:
    """Take back numbers of heads that do not divide what they must, which no reader accepts."""
    for heads, parts in (
        ("num_attention_heads", "num_key_value_heads"),
        ("hidden_size", "num_attention_heads"),
    ):
        whole, part = (changes.get(k, getattr(config, k, None)) for k in (heads, parts))
        if isinstance(whole, int) and isinstance(part, int) and (part == 0 or whole % part):
            for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"):
                changes.pop(key, None)


def _scaled(rng: random.Random, key: str, value: int) -> int:
    if "vocab_size" in key:  # never below a special token
        return value + rng.choice((0, 8, 64, 136))
    scaled = value * rng.choice((0.5, 1.5, 2))
    return int(scaled) if scaled >= 1 and scaled == int(scaled) else value
