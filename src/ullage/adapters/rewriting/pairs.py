"""LoRA pairs as they are rewritten: renamed, split, joined, padded, scaled. Pure but for `make`.

Holds ΔW = scale · B · A of each pair unchanged whatever is done to it. Which pairs an engine wants
is `fix.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ullage.adapters.rewriting.values import Floats, Made, Raw, element_bytes, floats, read_raw
from ullage.anatomy.adapters.adapter import AdapterModule, AdapterTensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a stored matrix (all for None), turned round first where it is stored so."""

    tensor: AdapterTensor
    index: tuple[tuple[int, int], ...] | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensor.shape[::-1] if self.transposed else self.tensor.shape
        if self.index is None:
            return shape
        return (sum(last - first for first, last in self.index), *shape[1:])

    def raw(self) -> Raw:
        stored = read_raw(self.tensor)
        if self.transposed:
            stored = stored.T
        if self.index is None:
            return stored
        return np.concatenate([stored[first:last] for first, last in self.index])


@dataclass(frozen=True, slots=True)
class Block:
    """One pair's share of a new pair: its A, and its B at rows first … of the new B."""

    a: Rows
    b: Rows
    first: int
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class NewPair:
    """A pair to be written for `module`: blocks that stand one after another in the rank.

    ΔW = scale · Σ factor · B · A over the blocks, each in its rows. `rank` may be larger than that
    of the blocks together: the rest is zero. `layout` names A and B as they are stored. `copies`
    are the base's own weight, which PEFT stores beside an embedding's pair.
    """

    module: str
    blocks: tuple[Block, ...]
    out_features: int
    rank: int
    scale: float
    layout: tuple[str, str] = ("lora_A.weight", "lora_B.weight")
    change: str = "renamed"
    copies: tuple[AdapterTensor, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        keys = [t.key.text for block in self.blocks for t in (block.a.tensor, block.b.tensor)]
        return tuple(dict.fromkeys(keys))

    def written(self, prefix: str) -> tuple[Made, ...]:
        """The tensors to write, named below `prefix`: A, B, and copies."""
        name = f"{prefix}{self.module}"
        return (
            self._made(f"{name}.{self.layout[0]}", [b.a for b in self.blocks], is_a=True),
            self._made(f"{name}.{self.layout[1]}", [b.b for b in self.blocks], is_a=False),
            *(copied(tensor, f"{name}.base_layer.weight") for tensor in self.copies),
        )

    def _made(self, name: str, parts: Sequence[Rows], *, is_a: bool) -> Made:
        first = parts[0]
        side = first.shape[1:] if is_a else ()
        shape = (self.rank, *side) if is_a else (self.out_features, self.rank)
        plain = len(parts) == 1 and first.shape == shape and self.blocks[0].factor == 1.0
        scaled = not is_a and any(block.factor != 1.0 for block in self.blocks)
        dtypes = {part.tensor.dtype for part in parts}
        # One type that is kept bit by bit; float32 where a product or a mixture needs more.
        dtype = "F32" if scaled or len(dtypes) > 1 else first.tensor.dtype
        for part in parts:
            element_bytes(part.tensor.dtype)

        def make() -> bytes:
            if plain:
                return np.ascontiguousarray(first.raw()).tobytes()
            whole = np.zeros(shape, dtype=np.float32 if dtype == "F32" else first.raw().dtype)
            rank = 0
            for part, block in zip(parts, self.blocks, strict=True):
                values: Raw | Floats = part.raw()
                if dtype == "F32":
                    values = floats(part.tensor.dtype, values)
                if is_a:
                    whole[rank : rank + values.shape[0]] = values
                    rank += values.shape[0]
                else:
                    if scaled:
                        values = floats(part.tensor.dtype, part.raw()) * np.float32(block.factor)
                    rows = slice(block.first, block.first + values.shape[0])
                    whole[rows, rank : rank + values.shape[1]] = values
                    rank += values.shape[1]
            return whole.tobytes()

        return Made(name, dtype, tuple(shape), tuple(p.tensor.key.text for p in parts), make)


def copied(tensor: AdapterTensor, name: str) -> Made:
    """The tensor as it is, under another name."""
    return Made(
        name, tensor.dtype, tensor.shape, (tensor.key.text,), lambda: read_raw(tensor).tobytes()
    )


def whole_pair(module: AdapterModule, name: str, layout: tuple[str, str]) -> NewPair:
    """The module's pair under another name, values as they are."""
    assert module.a is not None and module.b is not None
    assert module.rank is not None and module.scale is not None
    a, b = (
        Rows(module.a, transposed=module.transposed),
        Rows(module.b, transposed=module.transposed),
    )
    change = "turned round" if module.transposed else "renamed"
    # The rank in the tensors counts every expert of a stack; the scale is that of one.
    return NewPair(
        name,
        (Block(a, b, 0),),
        b.shape[0],
        a.shape[0],
        module.scale,
        layout,
        change,
        module.saved,
    )


def split_pair(
    pair: NewPair, parts: Sequence[tuple[str, tuple[tuple[int, int], ...]]]
) -> list[NewPair]:
    """One pair per part (name, its rows of B); all share the one A."""
    (block,) = pair.blocks
    shares = [(name, replace(block.b, index=rows)) for name, rows in parts]
    return [
        replace(
            pair,
            module=name,
            blocks=(replace(block, b=share),),
            out_features=share.shape[0],
            change="split",
        )
        for name, share in shares
    ]


def joined_pair(name: str, parts: Sequence[tuple[NewPair, int]], out_features: int) -> NewPair:
    """Pairs of the parts of one fused module (pair, its first row) as one, lossless: B is block by
    block, and the ranks add up."""
    scale = parts[0][0].scale
    blocks = tuple(
        replace(block, first=block.first + first, factor=block.factor * pair.scale / scale)
        for pair, first in parts
        for block in pair.blocks
    )
    rank = sum(pair.rank for pair, _ in parts)
    return NewPair(name, blocks, out_features, rank, scale, change="joined")


def rescaled(pair: NewPair, rank: int, scale: float) -> NewPair:
    """The pair with zeros up to `rank`, and B multiplied so that `scale` gives the same ΔW."""
    factor = pair.scale / scale
    if rank == pair.rank and factor == 1.0:
        return pair
    blocks = tuple(replace(block, factor=block.factor * factor) for block in pair.blocks)
    return replace(pair, blocks=blocks, rank=rank, scale=scale, change=f"{pair.change}, scaled")
