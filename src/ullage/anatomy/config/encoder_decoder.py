"""Encoder-decoders (T5, BART, Whisper and their kin): two stacks from one configuration.

Reads the sizes that such configurations give per stack. Parts that both kinds of model share are
read by `mixers.py` and `feed_forward.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ullage.anatomy.config.defaults import class_defaults
from ullage.anatomy.config.feed_forward import MAX_EXPERTS
from ullage.anatomy.config.keys import MAX_HEADS, MAX_WIDTH, Section
from ullage.anatomy.config.kind_words import MAX_LAYERS
from ullage.anatomy.config.layers import read_layers
from ullage.anatomy.config.mixers import cheaper_window, fact, read_attention
from ullage.anatomy.config.positions import read_rope
from ullage.anatomy.families.family import Family
from ullage.anatomy.spec import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    LayerSpec,
    Positions,
)


@dataclass(frozen=True, slots=True)
class Stacks:
    """The two stacks and how each knows positions; `sizes` as in `ModelSpec.family_sizes`."""

    encoder: tuple[LayerSpec, ...]
    decoder: tuple[LayerSpec, ...]
    encoder_positions: Positions | None
    decoder_positions: Positions
    max_positions: int
    encoder_hidden_size: int | None = None
    sizes: tuple[tuple[str, int], ...] = ()


def read_stacks(text: Section, around: list[Section], family: Family) -> Stacks:
    """Both stacks; `max_positions` is the decoder's."""
    if family.encoder_key is not None:
        return _nested(text, around, family, family.encoder_key)
    if family.positions == "relative":
        return _t5(text, family)
    return _bart(text, family)


def _attention(
    text: Section, family: Family, num_heads: int, head_dim: int, *, causal: bool
) -> Attention:
    q_bias = fact(text, family.q_bias, "attention_bias", likely=False, widens="weights")
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        window=None if causal else cheaper_window(text, family),
        causal=causal,
        q_bias=q_bias,
        kv_bias=fact(text, family.kv_bias, "kv_bias", likely=q_bias, widens="weights"),
        o_bias=fact(text, family.o_bias, "o_bias", likely=False, widens="weights"),
    )


def _layers(
    parts: list[FeedForward], attention: Attention, cross: Attention | None
) -> tuple[LayerSpec, ...]:
    return tuple(
        LayerSpec(i, attention, part, cross_attention=cross) for i, part in enumerate(parts)
    )


def _feed_forwards(text: Section, side: str, n: int, dense: Dense, first: int) -> list[FeedForward]:
    """A stack's feed-forwards: experts in every so many layers where the configuration has any.

    `first`: which of those is the first, counted from 0 (Switch: the second layer of a period,
    NLLB: the last).
    """
    count = text.optional_integer("num_experts", minimum=0, maximum=MAX_EXPERTS) or 0
    if not count:
        return [dense] * n
    step = text.integer(f"{side}_sparse_step", 4, why="default: 4", minimum=0, maximum=MAX_LAYERS)
    experts = Experts(
        num_experts=count,
        top_k=text.integer("num_experts_per_tok", maximum=count),
        intermediate=dense.intermediate,
        activation=dense.activation,
        gated=dense.gated,
        bias=dense.bias,
        router_bias=text.boolean("router_bias", False, why="default: false"),
    )
    text.ignore("router_bias")
    return [experts if step and i % step == first % step else dense for i in range(n)]


def _t5(text: Section, family: Family) -> Stacks:
    n = text.integer("num_layers", maximum=MAX_LAYERS)
    m = text.optional_integer("num_decoder_layers", maximum=MAX_LAYERS) or n
    num_heads = text.integer("num_heads", maximum=MAX_HEADS)
    head_dim = text.integer("d_kv", maximum=MAX_WIDTH)
    words = text.text("feed_forward_proj", "relu", why="default: relu")
    gated = words.startswith("gated-")
    text.ignore("dense_act_fn", "is_gated_act", "relative_attention_max_distance")
    dense = Dense(
        intermediate=text.integer("d_ff", maximum=MAX_WIDTH),
        activation=words.removeprefix("gated-"),
        gated=gated,
    )
    buckets = text.integer("relative_attention_num_buckets", 32, why="default: 32", maximum=1 << 16)
    decoder = _attention(text, family, num_heads, head_dim, causal=True)
    encoder = _attention(text, family, num_heads, head_dim, causal=False)
    cross = replace(decoder, causal=False)
    positions = Positions("relative", buckets)
    # T5 has no longest length; n_positions is what it was trained at.
    longest = text.optional_integer("n_positions") or 0
    return Stacks(
        encoder=_layers(_feed_forwards(text, "encoder", n, dense, 1), encoder, None),
        decoder=_layers(_feed_forwards(text, "decoder", m, dense, 1), decoder, cross),
        encoder_positions=positions,
        decoder_positions=positions,
        max_positions=longest,
    )


def _bart(text: Section, family: Family) -> Stacks:
    hidden = text.integer("hidden_size", maximum=MAX_WIDTH)
    stacks: dict[str, tuple[LayerSpec, ...]] = {"encoder": ()}
    # TrOCR's decoder is saved alone, or inside a composite
    sides = ("encoder", "decoder") if text.knows("encoder_layers") else ("decoder",)
    for side in sides:
        heads = text.integer(f"{side}_attention_heads", maximum=MAX_HEADS)
        if hidden % heads:
            raise text.error(f"{side}_attention_heads", heads, f"a divisor of d_model, {hidden}")
        attention = _attention(text, family, heads, hidden // heads, causal=side == "decoder")
        if family.rotary:
            attention = replace(attention, rope=read_rope(text, hidden // heads, "full"))
        kv_heads = text.optional_integer(f"{side}_num_key_value_heads", maximum=MAX_HEADS)
        if kv_heads is not None:
            if heads % kv_heads:
                raise text.error(f"{side}_num_key_value_heads", kv_heads, f"a divisor of {heads}")
            attention = replace(attention, num_kv_heads=kv_heads)
        act = text.text(f"{side}_hidden_act", "", why="default: activation_function") or text.text(
            "activation_function", "gelu", why="default: gelu"
        )
        width = text.integer(f"{side}_ffn_dim", maximum=MAX_WIDTH)
        n = text.integer(f"{side}_layers", maximum=MAX_LAYERS)
        cross = replace(attention, causal=False, rope=None) if side == "decoder" else None
        gated = side == "decoder" and family.gated is True
        dense = Dense(width, act, gated=gated, bias=family.mlp_bias is True)
        parts = _feed_forwards(text, side, n, dense, -1)
        stacks[side] = _layers(parts, attention, cross)
    text.ignore("num_hidden_layers", "scale_embedding", "encoder_layerdrop", "decoder_layerdrop")
    if len(sides) == 1:
        text.ignore("cross_attention_hidden_size")
    longest = text.optional_integer("max_position_embeddings")
    if longest is None:
        longest = text.integer("max_decoder_position_embeddings")
    source = text.optional_integer("max_source_positions") or longest
    return Stacks(
        encoder=stacks["encoder"],
        decoder=stacks["decoder"],
        encoder_positions=_table(family, source) if len(sides) == 2 else None,
        decoder_positions=_table(family, longest),
        max_positions=longest,
    )


def _table(family: Family, rows: int) -> Positions:
    """Whisper stores the encoder's sinusoids; m2m_100 computes its own."""
    if family.rotary:
        return Positions("rope")
    stored = rows + family.position_offset if family.stored_positions else 0
    return Positions("sinusoidal" if family.positions == "sinusoidal" else "learned", stored)


def _cross(text: Section, own: Attention) -> Attention:
    """Cross-attention with heads of its own where the configuration counts them (Dia)."""
    heads = text.optional_integer("cross_num_attention_heads", maximum=MAX_HEADS) or own.num_heads
    kv_heads = text.optional_integer("cross_num_key_value_heads", maximum=MAX_HEADS)
    head_dim = text.optional_integer("cross_head_dim", maximum=MAX_WIDTH) or own.head_dim
    kv_heads = kv_heads or own.num_kv_heads
    if heads % kv_heads:
        raise text.error("cross_num_key_value_heads", kv_heads, f"a divisor of {heads}")
    return replace(
        own, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim
    )


def _encoder_section(outer: Section, key: str) -> Section | None:
    """The encoder's configuration over its class's defaults, which stand alone if it is absent."""
    root = class_defaults(str(outer.values.get("model_type")))
    stated = outer.values.get(key)
    named = stated.get("model_type") if isinstance(stated, Mapping) else None
    known = class_defaults(str(named or (root.nested.get(key) if root else None)))
    if known is None:
        return outer.section(key)
    if stated is None:
        return Section({}, outer.reading, f"{outer.path}{key}.", known.defaults, known.label)
    side = outer.section(key, known.defaults)
    if side is not None:
        side.label = known.label
    return side


def _nested(text: Section, around: list[Section], family: Family, encoder_key: str) -> Stacks:
    """Two whole configurations, one per stack; `text` is the decoder's."""
    outer = around[0] if around else text
    side = _encoder_section(outer, encoder_key)
    if side is None:
        raise outer.reading.error(
            "missing", field=outer.field(encoder_key), expected="the encoder's configuration"
        )
    outer.ignore("delay_pattern", *outer.names("norm_eps"))  # the stacks say theirs
    side.ignore("model_type", "architectures", "dtype", "torch_dtype", "tie_word_embeddings")
    # its norms and its limits are taken to be the decoder's; neither has a size
    for name in ("norm_eps", "max_position_embeddings", "final_logit_softcapping", "vocab_size"):
        side.ignore(*side.names(name))
    encoder, _, _ = read_layers(side, replace(family, kind="encoder", cross_attention=False))
    decoder, _, _ = read_layers(text, family)
    own = read_attention(text, family, "full")
    hidden = text.integer("hidden_size", maximum=MAX_WIDTH)
    wide = side.integer("hidden_size", maximum=MAX_WIDTH)
    cross = _cross(text, replace(own, causal=False, rope=None, qk_norm=None))
    longest = text.optional_integer("max_position_embeddings") or 0
    for key in side.unread():
        text.reading.unknown(key, "not understood", "weights")
    return Stacks(
        encoder=encoder,
        decoder=tuple(replace(layer, cross_attention=cross) for layer in decoder),
        encoder_positions=Positions("rope"),
        decoder_positions=Positions("rope"),
        max_positions=longest,
        encoder_hidden_size=None if wide == hidden else wide,
        sizes=(("encoder_vocab_size", side.integer("vocab_size", maximum=1 << 28)),),
    )
