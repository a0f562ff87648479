"""Encoder-decoders (T5, BART, Whisper and their kin): two stacks from one flat configuration.

Reads the sizes that such configurations give per stack. Parts that both kinds of model share are
read by `mixers.py` and `feed_forward.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ullage.anatomy.config.keys import Section
from ullage.anatomy.config.layer_kinds import MAX_LAYERS
from ullage.anatomy.config.mixers import MAX_HEADS, MAX_WIDTH
from ullage.anatomy.families.family import Family
from ullage.anatomy.spec import Attention, Dense, LayerSpec, PositionKind, Positions


@dataclass(frozen=True, slots=True)
class Stacks:
    """The two stacks and how each knows positions."""

    encoder: tuple[LayerSpec, ...]
    decoder: tuple[LayerSpec, ...]
    encoder_positions: Positions | None
    decoder_positions: Positions
    max_positions: int


def read_stacks(text: Section, family: Family) -> Stacks:
    """Both stacks; `max_positions` is the decoder's."""
    if family.positions == "relative":
        return _t5(text, family)
    return _bart(text, family)


def _attention(
    family: Family, num_heads: int, head_dim: int, *, causal: bool, k_bias: bool = True
) -> Attention:
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        causal=causal,
        q_bias=family.q_bias is True,
        kv_bias=family.kv_bias is True and k_bias,
        o_bias=family.o_bias is True,
    )


def _layers(
    n: int, attention: Attention, dense: Dense, cross: Attention | None
) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec(i, attention, dense, cross_attention=cross) for i in range(n))


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
    decoder = _attention(family, num_heads, head_dim, causal=True)
    encoder = replace(decoder, causal=False)
    positions = Positions("relative", buckets)
    # T5 has no longest length; n_positions is what it was trained at.
    longest = text.optional_integer("n_positions") or 0
    return Stacks(
        encoder=_layers(n, encoder, dense, None),
        decoder=_layers(m, decoder, dense, encoder),
        encoder_positions=positions,
        decoder_positions=positions,
        max_positions=longest,
    )


def _bart(text: Section, family: Family) -> Stacks:
    hidden = text.integer("d_model", maximum=MAX_WIDTH)
    act = text.text("activation_function", "gelu", why="default: gelu")
    stacks = {}
    for side in ("encoder", "decoder"):
        heads = text.integer(f"{side}_attention_heads", maximum=MAX_HEADS)
        if hidden % heads:
            raise text.error(f"{side}_attention_heads", heads, f"a divisor of d_model, {hidden}")
        attention = _attention(family, heads, hidden // heads, causal=side == "decoder")
        width = text.integer(f"{side}_ffn_dim", maximum=MAX_WIDTH)
        n = text.integer(f"{side}_layers", maximum=MAX_LAYERS)
        cross = replace(attention, causal=False) if side == "decoder" else None
        dense = Dense(width, act, gated=False, bias=family.mlp_bias is True)
        stacks[side] = _layers(n, attention, dense, cross)
    text.ignore("num_hidden_layers", "scale_embedding", "encoder_layerdrop", "decoder_layerdrop")
    longest = text.optional_integer("max_position_embeddings")
    if longest is None:
        longest = text.integer("max_target_positions")
    source = text.optional_integer("max_source_positions") or longest
    offset = family.position_offset
    kind: PositionKind = "sinusoidal" if family.positions == "sinusoidal" else "learned"
    # Whisper stores the encoder's sinusoids; m2m_100 computes its own.
    stored = family.stored_positions
    return Stacks(
        encoder=stacks["encoder"],
        decoder=stacks["decoder"],
        encoder_positions=Positions(kind, source + offset if stored else 0),
        decoder_positions=Positions(kind, longest + offset if stored else 0),
        max_positions=longest,
    )
