"""A merged checkpoint against base + scale·B·A, tensor by tensor: `merge_check`.

Holds the comparison and its error bounds. Where an adapter's pairs belong in the base is
`adapters/rewriting/placing.py`, reading values `adapters/rewriting/values.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ullage.adapters.base import base_tree
from ullage.adapters.rewriting.pairs import NewPair
from ullage.adapters.rewriting.placing import FixRefused, is_whole, place_all
from ullage.adapters.rewriting.values import Floats, decoded, element_bytes, floats, raw_rows
from ullage.anatomy.adapters.adapter import Adapter
from ullage.anatomy.checkpoint import CheckpointIndex, TensorEntry
from ullage.anatomy.spec import ModelSpec
from ullage.errors import BadUsage

Wide = npt.NDArray[np.float64]

# Half a unit in the last place, relative: 2^-p for a significand of p bits.
_ROUNDOFF = {"F64": 2.0**-53, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}
# The smallest number above zero: below it float16 in particular rounds by more than a share.
_SMALLEST = {"F64": 2.0**-1074, "F32": 2.0**-149, "F16": 2.0**-24, "BF16": 2.0**-133}
_CHUNK_ELEMENTS = 1 << 21


class MergeState(StrEnum):
    """What one tensor of the merged checkpoint is.

    `merged`: base + scale·B·A within rounding. `wrong_scale`: base + another multiple of it.
    `not_merged`: the base's own weight, though the adapter changes it. `below_rounding`: the change
    is smaller than the merged type can hold beside this weight, so that merging it does nothing.
    `wrong`: something else. `unchanged`: not adapted, and equal to the base. `changed`: not
    adapted, and another than the base's. `missing`: not there, or of another shape.
    """

    MERGED = "merged"
    WRONG_SCALE = "wrong_scale"
    NOT_MERGED = "not_merged"
    BELOW_ROUNDING = "below_rounding"
    WRONG = "wrong"
    UNCHANGED = "unchanged"
    CHANGED = "changed"
    MISSING = "missing"


GOOD = (MergeState.MERGED, MergeState.UNCHANGED, MergeState.BELOW_ROUNDING)


@dataclass(frozen=True, slots=True)
class MergedTensor:
    """One tensor: `worst_ratio` is the largest error by the error that rounding explains;
    `scale_found` the multiple of scale·B·A that fits best (1 when merged as trained)."""

    name: str
    state: MergeState
    worst_ratio: float | None = None
    scale_found: float | None = None
    detail: str = ""


def merge_check(
    adapter: Adapter, spec: ModelSpec, base: CheckpointIndex, merged: CheckpointIndex
) -> tuple[MergedTensor, ...]:
    """Every tensor of the base and the merged checkpoint, in the base's order.

    ΔW = scale·B·A is computed in float64 from the stored values. An element may differ from
    W + ΔW by u·(2·|W + ΔW| + |W| + 4·scale·|B||A|), where u is the merged type's unit roundoff:
    the rounding of the sum, of W to that type, and of a product that was formed in it.

    Raises:
        FixRefused: an adapter whose ΔW is not certain.
        BadUsage: a checkpoint that is not plain safetensors.
    """
    for index, word in ((base, "--base"), (merged, "--merged")):
        if index.format != "safetensors" or not index.is_complete:
            raise BadUsage(
                "not a whole safetensors checkpoint", file=word, expected="weights to compare"
            )
    if whole := [module.module for module in adapter.modules if is_whole(module)]:
        raise FixRefused(
            "was trained whole", file=adapter.path, field=whole[0], expected="lora_A and lora_B"
        )
    pairs = _by_weight(adapter, spec)
    stored = {tensor.name: tensor for tensor in merged.tensors}
    found = [_tensor(entry, stored.get(entry.name), pairs) for entry in base.tensors]
    known = {entry.name for entry in base.tensors}
    lost = [name for name in pairs if name not in known]
    if lost:
        raise FixRefused(
            "is not in the base's files", file=adapter.path, field=lost[0],
            expected="a weight to add to",
        )  # fmt: skip
    extra = (
        MergedTensor(name, MergeState.CHANGED, detail="the base has no such tensor")
        for name in stored
        if name not in known
    )
    return (*found, *extra)


def _by_weight(adapter: Adapter, spec: ModelSpec) -> dict[str, NewPair]:
    tree = base_tree(spec)
    pairs: dict[str, NewPair] = {}
    for placed in place_all(adapter.modules, tree, adapter.path):
        pair = placed.pair
        if tree.find(pair.module) is None:
            raise FixRefused(
                "a stack of experts", file=adapter.path, field=pair.module,
                expected="experts one by one",
            )  # fmt: skip
        pairs[f"{pair.module}.weight"] = pair
    return pairs


def _tensor(
    base: TensorEntry, merged: TensorEntry | None, pairs: Mapping[str, NewPair]
) -> MergedTensor:
    if merged is None:
        return MergedTensor(base.name, MergeState.MISSING, detail="not in the merged checkpoint")
    if merged.shape != base.shape:
        return MergedTensor(
            base.name, MergeState.MISSING, detail=f"{list(merged.shape)}, base {list(base.shape)}"
        )
    pair = pairs.get(base.name)
    return _plain(base, merged) if pair is None else _adapted(base, merged, pair)


def _plain(base: TensorEntry, merged: TensorEntry) -> MergedTensor:
    """A tensor that nobody adapted: equal, or rounded from one float type to another."""
    if base.dtype == merged.dtype or base.dtype not in _ROUNDOFF or merged.dtype not in _ROUNDOFF:
        same = base.dtype == merged.dtype and all(
            np.array_equal(b, m) for b, m in zip(_bytes(base), _bytes(merged), strict=True)
        )
        return MergedTensor(base.name, MergeState.UNCHANGED if same else MergeState.CHANGED)
    unit = max(_ROUNDOFF[base.dtype], _ROUNDOFF[merged.dtype])
    smallest = max(_SMALLEST[base.dtype], _SMALLEST[merged.dtype])
    for first, last in _rows(base.shape):
        before, after = _wide(base, first, last), _wide(merged, first, last)
        if not bool(np.all(np.abs(after - before) <= 2 * unit * np.abs(before) + smallest)):
            return MergedTensor(base.name, MergeState.CHANGED)
    return MergedTensor(base.name, MergeState.UNCHANGED)


@dataclass(slots=True)
class _Sums:
    """What is added up over the chunks of one tensor."""

    worst: float = 0.0
    to_change: float = 0.0  # Σ (M − W)·ΔW
    change: float = 0.0  # Σ ΔW²
    moved: bool = False  # M differs from W somewhere
    visible: bool = False  # ΔW stands out of rounding somewhere


def _adapted(base: TensorEntry, merged: TensorEntry, pair: NewPair) -> MergedTensor:
    for entry in (base, merged):
        element_bytes(entry.dtype)  # raises for types whose values are not read
    made_a, made_b = pair.written("")[:2]
    a: Wide = decoded(made_a.dtype, made_a.make(), made_a.shape).astype(np.float64)
    b: Wide = decoded(made_b.dtype, made_b.make(), made_b.shape).astype(np.float64) * pair.scale
    turned = "embedding" in pair.layout[0] or (b.shape[0], a.shape[1]) != base.shape
    if turned:
        a, b = b.T, a.T  # the weight is stored as [in, out]
    if (b.shape[0], a.shape[1]) != base.shape:
        detail = f"the pair makes {[b.shape[0], a.shape[1]]}, the weight is {list(base.shape)}"
        return MergedTensor(base.name, MergeState.MISSING, detail=detail)
    unit = max(_ROUNDOFF[merged.dtype], 2.0**-24)  # nobody multiplies in more than float32
    sums = _compare(base, merged, a, b, unit, 1.0)
    fit = sums.to_change / sums.change if sums.change else None
    if sums.worst <= 1:
        state = MergeState.MERGED if sums.visible else MergeState.BELOW_ROUNDING
    elif not sums.moved:
        state = MergeState.NOT_MERGED
    else:
        scaled = _compare(base, merged, a, b, unit, fit or 0.0)
        state = MergeState.WRONG_SCALE if scaled.worst <= 1 else MergeState.WRONG
    return MergedTensor(base.name, state, sums.worst, fit)


def _compare(
    base: TensorEntry, merged: TensorEntry, a: Wide, b: Wide, unit: float, factor: float
) -> _Sums:
    sums = _Sums()
    for first, last in _rows(base.shape):
        before, after = _wide(base, first, last), _wide(merged, first, last)
        change = b[first:last] @ a
        exact = before + factor * change
        product = np.abs(b[first:last]) @ np.abs(a)
        allowed = unit * (2 * np.abs(exact) + np.abs(before) + 4 * abs(factor) * product)
        allowed += _SMALLEST[merged.dtype]
        sums.worst = max(sums.worst, float(np.max(np.abs(after - exact) / allowed, initial=0.0)))
        sums.to_change += float(np.vdot(after - before, change))
        sums.change += float(np.vdot(change, change))
        sums.moved |= bool(np.any(np.abs(after - before) > unit * np.abs(before)))
        sums.visible |= bool(np.any(np.abs(change) > allowed))
    if not np.isfinite(sums.worst):
        sums.worst = float("inf")
    return sums


def _rows(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Ranges of the first dimension that together hold a few MB."""
    count = shape[0] if shape else 1
    width = max(1, int(np.prod(shape[1:], dtype=np.int64))) if shape else 1
    step = max(1, _CHUNK_ELEMENTS // width)
    for first in range(0, count, step):
        yield first, min(count, first + step)


def wide_rows(entry: TensorEntry) -> Iterator[Wide | None]:
    """The tensor's values some rows at a time; one None for a type whose values are not read."""
    if entry.dtype not in _ROUNDOFF:
        yield None
        return
    for first, last in _rows(entry.shape):
        yield _wide(entry, first, last)


def _bytes(entry: TensorEntry) -> Iterator[npt.NDArray[np.uint8]]:
    with Path(entry.file).open("rb") as stream:
        stream.seek(entry.start)
        left = entry.end - entry.start
        while left > 0:
            data = stream.read(min(left, _CHUNK_ELEMENTS))
            if not data:
                return
            left -= len(data)
            yield np.frombuffer(data, dtype=np.uint8)


def _wide(entry: TensorEntry, first: int, last: int) -> Wide:
    shape = entry.shape or (1,)
    raw = raw_rows(entry.file, entry.start, entry.dtype, shape, first, last)
    return _as_wide(entry.dtype, raw)


def _as_wide(dtype: str, raw: npt.NDArray[np.generic]) -> Wide:
    if dtype == "F64":
        return raw.astype(np.float64)
    narrow: Floats = floats(dtype, raw)
    return narrow.astype(np.float64)
