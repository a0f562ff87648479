"""Rotary tables as they are built, against exact ones: angle errors, and how far scores move.

Holds the values, the sweep over positions and the JSON document. Who builds is `builders`;
other processes' tables are `ranks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ullage.anatomy.distinct import mixer_parts
from ullage.anatomy.spec import Attention, CompressedAttention, LatentAttention
from ullage.engine.positions.scaling import Angles, Reach, length_note, rope_angles
from ullage.engine.positions.scaling import rope_fingerprint as fingerprint_of
from ullage.errors import BadUsage, UnsupportedModel
from ullage.probes.rope.builders import (
    Builder,
    Doubles,
    NotBuilt,
    embedded,
    exact_rows,
    from_transformers,
    product_in_dtype,
    stored_in_dtype,
    transformers_config,
)

if TYPE_CHECKING:
    from ullage.anatomy import Model
    from ullage.anatomy.spec import LayerSpec, ModelSpec, Rope

BOUND_RAD = 0.01
"""A pair turned this far amiss moves its part of a score by one percent: |e^(iδ) − 1| = δ."""
CHUNK = 4096
MAX_CHUNKS = 32
"""Up to 131,072 positions are all looked at; of longer tables the first half of this, and the rest
of this evenly spread up to the last position."""
Truths = NDArray[np.bool_]
_MEANINGLESS_RAD = 1.0
"""Where rounding alone may turn a pair so far, it says nothing of the formula."""


@dataclass(frozen=True, slots=True)
class ScoreShift:
    """How far q·k moves between the last position and one `distance` before it, for unit q and k.

    `worst`: when both lie in the worst pair. `rms`: over q and k of any direction in the head,
    whose scores themselves have an rms of 1/√head_dim. None: not finite.
    """

    distance: int
    worst: float | None
    rms: float | None


@dataclass(frozen=True, slots=True)
class TableReading:
    """One way of building one table.

    `angle_error_rad` is the worst pair's at the last position, `angle_error_max_rad` at any that
    was looked at. The `first_…` are positions, None: at none of them. `first_repeated`: its row
    equals the one before, so two tokens side by side turn alike. `formula_matches` False: more than
    this way's own rounding, so the angles follow from another formula or other numbers.
    """

    built_by: str
    dtype: str
    source: str
    angle_error_rad: float | None
    angle_error_max_rad: float | None
    first_beyond_bound: int | None
    first_repeated: int | None
    first_not_finite: int | None
    formula_matches: bool
    score_shifts: tuple[ScoreShift, ...]


@dataclass(frozen=True, slots=True)
class RopeTable:
    """The layers that turn alike, what they turn by, and each way to build it."""

    layers: tuple[int, ...]
    kind: str
    theta: float
    rotary_dim: int
    head_dim: int
    attention_factor: float
    readings: tuple[TableReading, ...]
    not_built: tuple[NotBuilt, ...]


@dataclass(frozen=True, slots=True)
class RopeReading:
    """All tables of one model for sequences of up to `num_positions` tokens."""

    num_positions: int
    positions_checked: int
    bound_rad: float
    fingerprint: str
    tables: tuple[RopeTable, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Turning:
    """Layers that share one rope and head, and its angles at the length that is asked about."""

    rope: Rope
    head_dim: int
    layers: tuple[int, ...]
    angles: Angles


# --- what a model turns by -----------------------------------------------------------------------


def turnings(spec: ModelSpec, num_positions: int) -> tuple[Turning, ...]:
    """The different ropes of a stack. Raises UnsupportedModel where one is not understood."""
    groups: dict[tuple[Rope, int], list[int]] = {}
    for layer in spec.layers:
        for key in _ropes(layer):
            groups.setdefault(key, []).append(layer.index)
    found = []
    for (rope, head_dim), layers in groups.items():
        reach = Reach(num_positions, spec.max_positions, head_dim)
        angles = rope_angles(replace(rope, sections=()), reach)
        found.append(Turning(rope, head_dim, tuple(layers), angles))
    return tuple(found)


def _ropes(layer: LayerSpec) -> Iterator[tuple[Rope, int]]:
    """Each rope of a layer, and the width of the vectors that it turns."""
    for mixer in mixer_parts(layer.mixer):
        if isinstance(mixer, Attention) and mixer.rope is not None:
            yield mixer.rope, mixer.head_dim
        elif isinstance(mixer, LatentAttention) and mixer.rope is not None:
            yield mixer.rope, mixer.qk_rope_head_dim
        elif isinstance(mixer, CompressedAttention) and mixer.rope is not None:
            yield mixer.rope, mixer.rope_head_dim


def fingerprint(spec: ModelSpec, found: Sequence[Turning]) -> str:
    """What servers of this model export where every layer is plain attention."""
    by_layer: dict[int, list[Angles | None]] = {layer.index: [] for layer in spec.layers}
    for turning in found:
        for layer in turning.layers:
            by_layer[layer].append(turning.angles)
    return fingerprint_of(one for angles in by_layer.values() for one in (angles or [None]))


# --- the sweep -----------------------------------------------------------------------------------


def probe_rope(
    model: Model,
    *,
    num_positions: int | None = None,
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16"),
    device: str = "cpu",
    bound_rad: float = BOUND_RAD,
) -> RopeReading:
    """Every table of `model` in every way, for sequences of `num_positions` (default: its longest).

    Raises BadUsage without a length, UnsupportedModel without rotation or of an unknown kind.
    """
    spec = model.anatomy.spec
    limit = num_positions or spec.max_positions
    if limit <= 0:
        raise BadUsage(
            "the configuration names no longest length",
            field="--max-model-len",
            expected="the positions to look at",
        )
    found = turnings(spec, limit)
    if not found:
        raise UnsupportedModel(
            f"no layer of this {spec.architecture} rotates ({spec.positions.kind} positions)",
            file=model.files.config_file,
            expected="a model with rotary positions",
        )
    chunks = list(_chunks(limit))
    config = transformers_config(model.files.config or {})
    tables = []
    for turning in found:
        ways = list(_ways(turning, config, dtypes, device, limit))
        builders = [way for way in ways if isinstance(way, Builder)]
        sweeps = [_Sweep(turning, builder, limit, bound_rad) for builder in builders]
        for positions_N in chunks:
            exact = exact_rows(turning.angles, positions_N)
            for sweep in sweeps:
                sweep.add(positions_N, exact)
        not_built = dict.fromkeys(way for way in ways if isinstance(way, NotBuilt))
        tables.append(_table(turning, [sweep.reading() for sweep in sweeps], tuple(not_built)))
    checked = len(np.unique(np.concatenate(chunks)))
    return RopeReading(
        limit,
        checked,
        bound_rad,
        fingerprint(spec, found),
        tuple(tables),
        _notes(spec, limit, found),
    )


def _ways(
    turning: Turning, config: object, dtypes: Sequence[str], device: str, limit: int
) -> Iterator[Builder | NotBuilt]:
    yield embedded(turning.angles)
    for dtype in dtypes:
        if isinstance(config, NotBuilt):
            yield config
        else:
            layer = turning.layers[0]
            yield from_transformers(config, layer, dtype, device, limit, cast=False)
            if dtype != "float32":
                yield from_transformers(config, layer, dtype, device, limit, cast=True)
        yield stored_in_dtype(turning.angles, dtype, device)
        if dtype != "float32":  # where it is the same as the one above
            yield product_in_dtype(turning.angles, dtype, device)


def _table(
    turning: Turning, readings: list[TableReading], not_built: tuple[NotBuilt, ...]
) -> RopeTable:
    rope = turning.rope
    return RopeTable(
        turning.layers, rope.scaling, rope.theta, rope.rotary_dim, turning.head_dim,
        turning.angles.attention_factor, tuple(readings), not_built,
    )  # fmt: skip


def _notes(spec: ModelSpec, limit: int, found: Sequence[Turning]) -> tuple[str, ...]:
    notes = [] if (note := length_note(spec, limit)) is None else [note]
    if 0 < spec.max_positions < limit:
        notes.append(f"{limit:,} positions are beyond the model's own {spec.max_positions:,}")
    if any(turning.rope.sections for turning in found):
        notes.append("multi-section rope: looked at as for text, whose sections turn alike")
    if limit > CHUNK * MAX_CHUNKS:
        notes.append(
            f"of {limit:,} positions the first {CHUNK * MAX_CHUNKS // 2:,}, and blocks of "
            f"{CHUNK:,} up to the last one, were looked at; `first` is meant among these"
        )
    return tuple(notes)


def _chunks(num_positions: int) -> Iterator[Doubles]:
    """Positions in blocks side by side, each with the one before it; the last block ends last."""
    starts = list(range(0, num_positions, CHUNK))
    if len(starts) > MAX_CHUNKS:
        near = starts[: MAX_CHUNKS // 2]
        far = np.linspace(near[-1] + CHUNK, num_positions - CHUNK, MAX_CHUNKS - len(near))
        starts = near + [round(start) for start in far]
    for start in starts:
        end = min(start + CHUNK, num_positions)
        yield np.arange(max(start - 1, 0), end, dtype=np.float64)


class _Sweep:
    """One builder's errors, block after block of positions."""

    def __init__(self, turning: Turning, builder: Builder, limit: int, bound_rad: float) -> None:
        self.turning = turning
        self.builder = builder
        self.last = limit - 1
        self.bound_rad = bound_rad
        self.error_last: float | None = None
        self.error_max: float | None = None
        self.first_beyond: int | None = None
        self.first_repeated: int | None = None
        self.first_not_finite: int | None = None
        self.formula_matches = True

    def add(self, positions_N: Doubles, exact: tuple[Doubles, Doubles]) -> None:
        """Looks at one block, whose exact rows are given."""
        with np.errstate(all="ignore"):  # float16 has no position above 65,504: Inf, and then NaN
            cos, sin = self.builder.build(positions_N)
        if cos.shape != exact[0].shape:
            self.formula_matches = False  # another number of pairs: no angle can be compared
            return
        finite_N: Truths = np.asarray(np.isfinite(cos + sin).all(axis=1))
        self.first_not_finite = _first(~finite_N, positions_N, self.first_not_finite)
        error_NP = _angles_between(cos, sin, *exact)
        worst_N = np.where(finite_N, error_NP.max(axis=1), -1.0)
        same_N: Truths = np.asarray(((cos[1:] == cos[:-1]) & (sin[1:] == sin[:-1])).all(axis=1))
        self.first_beyond = _first(worst_N > self.bound_rad, positions_N, self.first_beyond)
        self.first_repeated = _first(same_N, positions_N[1:], self.first_repeated)
        if finite_N.any():
            self.error_max = max(self.error_max or 0.0, float(worst_N.max()))
        if positions_N[-1] == self.last:
            self.error_last = float(worst_N[-1]) if finite_N[-1] else None
        self.formula_matches &= self._explained(positions_N, error_NP, cos, sin, finite_N)

    def _explained(
        self,
        positions_N: Doubles,
        error_NP: Doubles,
        cos: Doubles,
        sin: Doubles,
        finite_N: Truths,
    ) -> bool:
        """Whether rounding alone may be the cause of these errors and of the rows' lengths."""
        angles, builder = self.turning.angles, self.builder
        allowed_P = builder.frequency_eps * angles.frequencies + builder.frequency_step
        allowed_NP = positions_N[:, None] * allowed_P[None, :] + builder.table_eps
        looked_NP = (allowed_NP < _MEANINGLESS_RAD) & finite_N[:, None]
        length_NP = np.hypot(cos, sin) / angles.attention_factor
        stretched = np.abs(length_NP - 1.0)[finite_N].max(initial=0.0) > builder.table_eps
        return not ((error_NP > allowed_NP) & looked_NP).any() and not stretched

    def reading(self) -> TableReading:
        """What all blocks said."""
        return TableReading(
            self.builder.name,
            self.builder.dtype,
            self.builder.source,
            self.error_last,
            self.error_max,
            self.first_beyond,
            self.first_repeated,
            self.first_not_finite,
            self.formula_matches,
            () if self.error_max is None else tuple(self._score_shifts()),
        )

    def _score_shifts(self) -> Iterator[ScoreShift]:
        angles, head_dim = self.turning.angles, self.turning.head_dim
        distances = [16**power for power in range(8) if 16**power < self.last]
        for distance in (*distances, self.last):
            pair = np.array([self.last - distance, self.last], dtype=np.float64)
            with np.errstate(all="ignore"):
                cos, sin = self.builder.build(pair)
                turn_P = (cos[1] + 1j * sin[1]) * (cos[0] - 1j * sin[0])
                exact_P = np.exp(1j * distance * angles.frequencies) * angles.attention_factor**2
                off_P = np.abs(turn_P - exact_P)
            if not np.isfinite(off_P).all():
                yield ScoreShift(distance, None, None)
                continue
            # For random unit q and k in D dimensions E[(qᵀMk)²] = ‖M‖²/D²; a pair's block is
            # |off| times a rotation, of squared norm 2·off².
            rms = math.sqrt(2 * float((off_P**2).sum())) / head_dim
            yield ScoreShift(distance, float(off_P.max()), rms)


def _angles_between(cos: Doubles, sin: Doubles, true_cos: Doubles, true_sin: Doubles) -> Doubles:
    """The angle from one direction to the other, 0 … π, whatever their lengths."""
    across = sin * true_cos - cos * true_sin
    along = cos * true_cos + sin * true_sin
    return np.abs(np.arctan2(across, along))


def _first(hit_N: Truths, positions_N: Doubles, known: int | None) -> int | None:
    if known is not None or not hit_N.any():
        return known
    return int(positions_N[int(hit_N.argmax())])
