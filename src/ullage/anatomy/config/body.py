"""The stack of layers of a model, or its two: `Body`, `read_body`.

Holds which of an encoder-decoder's stacks a class has, and what they share. One stack is read by
`layers.py`, two by `encoder_decoder.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ullage.anatomy.config.encoder_decoder import Stacks, read_stacks
from ullage.anatomy.config.found import Found
from ullage.anatomy.config.heads import is_encoder_alone
from ullage.anatomy.config.keys import MAX_WIDTH, Section
from ullage.anatomy.config.layers import read_layers, read_mtp
from ullage.anatomy.config.positions import read_positions
from ullage.anatomy.families.family import Family
from ullage.anatomy.spec import LayerSpec, Positions


@dataclass(frozen=True, slots=True)
class Body:
    """`layers` are the main stack, `encoder` a second one in front of it. The fields are those of
    `ModelSpec`; `max_positions` is 0 where nothing limits the length, as in a stack of states."""

    kind: Literal["decoder", "encoder", "encoder-decoder"]
    layers: tuple[LayerSpec, ...]
    positions: Positions
    max_positions: int
    mtp: tuple[LayerSpec, ...] = ()
    encoder: tuple[LayerSpec, ...] = ()
    encoder_positions: Positions | None = None
    encoder_hidden_size: int | None = None
    sizes: tuple[tuple[str, int], ...] = ()


def read_body(found: Found, hidden_size: int) -> Body:
    """The layers of the class that the configuration names."""
    text, family = found.text, found.family
    if family.kind == "encoder-decoder":
        return _of_two(found, read_stacks(text, found.around, family))
    max_positions = text.optional_integer("max_position_embeddings") or 0
    layers, dense, experts = read_layers(text, family)
    mtp = read_mtp(text, family, layers, dense, experts)
    positions = read_positions(text, family, max_positions)
    width = _seen_width(text, family, hidden_size)
    return Body(family.kind, layers, positions, max_positions, mtp, encoder_hidden_size=width)


def _of_two(found: Found, stacks: Stacks) -> Body:
    """What a class holds of an encoder-decoder: both stacks, its decoder, or its encoder."""
    family = found.family
    body = Body(
        family.kind,
        stacks.decoder,
        stacks.decoder_positions,
        stacks.max_positions,
        encoder=stacks.encoder,
        encoder_positions=stacks.encoder_positions,
        encoder_hidden_size=stacks.encoder_hidden_size,
        sizes=stacks.sizes,
    )
    if is_encoder_alone(found):
        return replace(
            body,
            kind="encoder",
            layers=stacks.encoder,
            positions=stacks.encoder_positions or stacks.decoder_positions,
            encoder=(),
            encoder_positions=None,
        )
    if family.decoder_alone or found.architecture.endswith("ForCausalLM"):
        return replace(body, encoder=(), encoder_positions=None)
    return body


def _seen_width(text: Section, family: Family, hidden_size: int) -> int | None:
    """The width of what a decoder's cross-attention reads, where that is not its own."""
    if not family.cross_attention:
        return None
    width = text.optional_integer("encoder_hidden_size", maximum=MAX_WIDTH)
    return None if width == hidden_size else width
