"""Stacks found by architecture search (DeciLM, Nemotron-NAS): every layer says what it holds.

Reads `block_configs` and `num_key_value_heads_per_layer`; regular stacks are `layers.py`.
"""

from __future__ import annotations

from dataclasses import replace

from ullage.anatomy.config.feed_forward import activation, is_gated, read_dense
from ullage.anatomy.config.keys import MAX_HEADS, MAX_WIDTH, Section
from ullage.anatomy.config.kind_words import MAX_LAYERS
from ullage.anatomy.config.mixers import fact, read_attention
from ullage.anatomy.families.family import Family
from ullage.anatomy.spec import (
    Dense,
    FeedForward,
    LayerSpec,
    LinearFeedForward,
    LinearMixer,
    Mixer,
    NoFeedForward,
    NoMixer,
)


def read_blocks(text: Section, family: Family) -> tuple[LayerSpec, ...]:
    """One LayerSpec per entry of block_configs; without it, per layer of KV heads (DeciLM-7B)."""
    n = text.integer("num_hidden_layers", maximum=MAX_LAYERS)
    raw = text.find("block_configs")
    if not isinstance(raw, list):
        return _by_kv_heads(text, family, n)
    if len(raw) != n:
        raise text.error("block_configs", raw, f"a list of {n}")
    layers = []
    for i, values in enumerate(raw):
        if not isinstance(values, dict):
            raise text.error(f"block_configs[{i}]", values, "an object")
        block = Section(values, text.reading, f"{text.path}block_configs[{i}].")
        attention, ffn = block.section("attention"), block.section("ffn")
        if attention is None or ffn is None:
            raise text.error(f"block_configs[{i}]", values, "attention and ffn")
        layers.append(
            LayerSpec(i, _mixer(text, family, attention), _feed_forward(text, family, ffn))
        )
        for key in (*block.unread(), *attention.unread(), *ffn.unread()):
            text.reading.unknown(key, "not understood", "weights", "kv")
    text.ignore("intermediate_size", "num_key_value_heads")
    return tuple(layers)


def _by_kv_heads(text: Section, family: Family, n: int) -> tuple[LayerSpec, ...]:
    kv_heads = text.integers("num_key_value_heads_per_layer", length=n, minimum=1)
    base = read_attention(text, family, "full")
    dense = read_dense(text, family)
    layers = []
    for i in range(n):
        mixer = base if kv_heads is None else replace(base, num_kv_heads=kv_heads[i])
        if mixer.num_heads % mixer.num_kv_heads:
            raise text.error(
                "num_key_value_heads_per_layer", mixer.num_kv_heads, "divisors of the heads"
            )
        layers.append(LayerSpec(i, mixer, dense))
    return tuple(layers)


def _flag(section: Section, name: str) -> bool:
    return section.boolean(name, False, why="default: false")


def _mixer(text: Section, family: Family, attention: Section) -> Mixer:
    attention.ignore("sparsify", "unshifted_sink", "use_prefill_window_in_sink_attention")
    if _flag(attention, "no_op"):
        attention.ignore(*attention.values)
        return NoMixer()
    if _flag(attention, "replace_with_linear"):
        attention.ignore(*attention.values)
        return LinearMixer()
    base = read_attention(text, family, "full")
    group = attention.integer("n_heads_in_group", maximum=MAX_HEADS)
    if base.num_heads % group:
        raise attention.error("n_heads_in_group", group, f"a divisor of the {base.num_heads} heads")
    window = attention.optional_integer("window_length")
    attention.optional_integer("num_sink_tokens")
    return replace(base, num_kv_heads=base.num_heads // group, window=window)


def _feed_forward(text: Section, family: Family, ffn: Section) -> FeedForward:
    ffn.ignore("sparsify")
    if _flag(ffn, "no_op"):
        ffn.ignore(*ffn.values)
        return NoFeedForward()
    if _flag(ffn, "replace_with_linear"):
        ffn.ignore(*ffn.values)
        return LinearFeedForward()
    width = ffn.optional_integer("intermediate_size", maximum=MAX_WIDTH)
    if width is None:
        # NVIDIA's rule: two thirds of 2 × ffn_mult × hidden_size, rounded up to 256.
        hidden_size = text.integer("hidden_size", maximum=MAX_WIDTH)
        mult = ffn.number("ffn_mult", maximum=1024.0)
        width = -(-int(2 * mult * hidden_size / 3) // 256) * 256
    bias = fact(text, family.mlp_bias, "mlp_bias", likely=False, widens="weights")
    return Dense(width, activation(text, family), is_gated(text, family), bias)
