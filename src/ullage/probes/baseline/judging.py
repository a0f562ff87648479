"""Live rows judged by a baseline: which part of which layer does not do what its weights say.

Holds the running judgement and what it is sure of (`Alarm`); how that is said is `verdicts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ullage.probes.baseline import usual
from ullage.probes.baseline.baseline import PATHS, Baseline
from ullage.probes.baseline.relations import Cell, Residuals
from ullage.probes.baseline.sequential import RUN_LENGTH, Detectors
from ullage.probes.baseline.usual import Figure

Doubles = NDArray[np.float64]

MARGIN = 3.0
"""A residual counts in units of three times what the baseline's prompts showed."""
_KEEP = 0.9
"""How much of what explains a residual is kept at each further reading."""
_LEAST_EXPLAINED = 3
"""Rows that an explanation needs: one is explained by anything."""
_NOTHING = 0.02
"""So near to no output at all one row is enough."""
_SURE = 0.98
"""Share of a residual that an explanation must explain."""
_IN_TURN = frozenset({"attention", "entropy"})
"""Kinds of which a row of a long context shows some layers only (`probes.attention.turns`)."""
_ROUNDING = 0.0025
"""Share of a residual that rounding may be, where gate and up stand in each other's place."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A cell or figure that stands at an alarm.

    `z` is the largest so far; `readings` were taken of it, and it rose at number `since` of the
    rows. `factor` is what the output is times, where that explains it (0: no output at all);
    `adapter_share` how much of an adapter's part is there, where that does. `channel` of a norm.
    """

    at: Cell | Figure
    z: float
    since: int
    readings: int
    factor: float | None = None
    adapter_share: float | None = None
    channel: int | None = None
    made: float | None = None
    said: float | None = None


class Judge:
    """One model's rows as they come. Not thread-safe."""

    def __init__(self, baseline: Baseline, run_length: float = RUN_LENGTH) -> None:
        self.baseline = baseline
        self.cells = baseline.cells
        self.figures = usual.figures(baseline.sketch.form)
        self._num_cells = len(self.cells)
        self._detectors = Detectors(self._num_cells + len(self.figures), run_length)
        self._requests = usual.Requests()
        self._nothing = np.full(len(self.figures), np.nan)
        self.rows = 0
        self._most = np.zeros(self._num_cells + len(self.figures))
        self._since = np.zeros(len(self._most), np.int64)
        # Running sums that explain a residual: by what was said, by an adapter's part of it, by
        # rounding; and what is left of it where gate and up are taken for each other.
        self._sums = {
            name: np.zeros(self._num_cells) for name in ("rr", "rs", "ss", "ra", "aa", "ee", "xx")
        }
        self._other = _others(self.cells)
        every = [*(one.kind for one in self.cells), *(one.kind for one in self.figures)]
        self._kinds = tuple(dict.fromkeys(every))
        self._kind_of = np.array([self._kinds.index(kind) for kind in every])
        self._in_turn = self._numbers_in_turn()
        self._explained = np.zeros(self._num_cells, np.int64)
        self._layers = np.array([-1 if c.layer is None else c.layer for c in self.cells])
        self._adapted = False
        # What each cell's last reading was: made, said, and the channel of a norm.
        self._made, self._said = np.zeros(self._num_cells), np.zeros(self._num_cells)
        self._channels = np.full(self._num_cells, -1)

    def see(
        self,
        residuals: Residuals,
        figures: Doubles,
        request_id: str,
        *,
        compiled: bool,
        figures_read: NDArray[np.bool_] | None = None,
    ) -> bool:
        """Take in one row; whether it raised an alarm that did not stand before.

        `figures_read`: which of them were (None: all).
        """
        self.rows += 1
        noise = self.baseline.noise[PATHS.index("compiled" if compiled else "torch")]
        unusual = self._unusual(request_id, figures, figures_read)
        z = np.concatenate([z_of(residuals, noise), unusual])
        before = self._detectors.alarms
        alarms = self._detectors.see(z)
        rising = alarms & ~before
        self._since[rising] = self.rows
        self._most = np.where(alarms, np.fmax(self._most, np.abs(z)), 0.0)
        self._explain(residuals, rising[: self._num_cells], z[: self._num_cells])
        read = is_read(residuals)
        np.copyto(self._made, residuals.made, where=read)
        np.copyto(self._said, residuals.said, where=read)
        np.copyto(self._channels, residuals.channels, where=read)
        self._adapted |= bool((residuals.adapted != 0).any())
        return bool(rising.any())

    def _numbers_in_turn(self) -> NDArray[np.int64]:
        """Of cells and figures that the baseline knows, those that some rows leave out."""
        known = ~np.isnan(self.baseline.noise).all(axis=0), ~np.isnan(self.baseline.usual.mean)
        kinds = [number for number, kind in enumerate(self._kinds) if kind in _IN_TURN]
        return np.flatnonzero(np.isin(self._kind_of, kinds) & np.concatenate(known))

    def _unusual(
        self, request_id: str, figures: Doubles, read: NDArray[np.bool_] | None
    ) -> Doubles:
        mean = self._requests.add(request_id, figures, read)
        known = self.baseline.usual
        return self._nothing if mean is None else usual.z_of(mean, known.mean, known.spread)

    def _explain(self, found: Residuals, rising: NDArray[np.bool_], z: Doubles) -> None:
        """What was before the fault explains nothing of it: where one rises, sums begin anew.

        A row in which a cell was not read is none of its rows, and leaves it as it is.
        """
        read = ~np.isnan(found.size)
        self._explained = np.where(rising, 0, self._explained) + read
        keep = np.where(read, _KEEP, 1.0)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            off, unit = found.made - found.said, found.size + 1e-30
            parts = {
                "rr": (off / unit) ** 2,
                "rs": off * found.said / unit**2,
                "ss": (found.said / unit) ** 2,
                "ra": off * found.adapted / unit**2,
                "aa": (found.adapted / unit) ** 2,
                "ee": (found.residual / (unit * z)) ** 2,
                "xx": ((found.made - found.said[self._other]) / unit) ** 2,
            }
            for name, values in parts.items():
                kept = np.where(np.isfinite(values), values, 0.0)
                self._sums[name] = np.where(rising, 0.0, keep * self._sums[name]) + kept

    def read_kinds(self) -> frozenset[str]:
        """Kinds (`Rule.kinds`) that have been held against the baseline: at least one reading, and
        one of every layer where those are read in turn."""
        readings = self._detectors.readings
        read = self._kind_of[readings > 0]
        kinds = {self._kinds[number] for number in np.unique(read).tolist()}
        waiting = self._kind_of[self._in_turn[readings[self._in_turn] == 0]]
        kinds -= {self._kinds[number] for number in np.unique(waiting).tolist()}
        if (self._detectors.readings[: self._num_cells] > 0).any():
            kinds.add("not_finite")
        return frozenset(kinds | {"lora"} if self._adapted else kinds)

    def standing(self) -> frozenset[int]:
        """Which cells and figures stand at an alarm, by number: what is cheap to ask each row."""
        return frozenset(np.flatnonzero(self._detectors.alarms).tolist())

    def alarms(self) -> tuple[Alarm, ...]:
        """What stands at an alarm now, in the order in which a row passes it."""
        at = np.flatnonzero(self._detectors.alarms)
        return tuple(self._alarm(int(number)) for number in at)

    def _alarm(self, number: int) -> Alarm:
        is_cell = number < self._num_cells
        found = Alarm(
            self.cells[number] if is_cell else self.figures[number - self._num_cells],
            float(self._most[number]),
            int(self._since[number]),
            int(self._detectors.readings[number]),
        )
        if not is_cell:
            return found
        channel = int(self._channels[number])
        return replace(
            found,
            factor=self._factor(number),
            adapter_share=self._adapter_share(number),
            channel=None if channel < 0 else channel,
            made=float(self._made[number]),
            said=float(self._said[number]),
        )

    def _factor(self, number: int) -> float | None:
        """made = factor · said, where that leaves no more of the residual than rounding explains.

        A few rows of one text are much alike: nearly all of a residual is soon explained by a
        factor where a single weight is wrong, or the rows of a matrix lie in another order.
        """
        own = np.array([number])
        factor = self._share(own, "rs", "ss")
        if factor is None:
            return None
        rr, along, square, rounding = (self._sums[n][number] for n in ("rr", "rs", "ss", "ee"))
        return factor if rr - along**2 / square <= rounding * max(1.0, factor**2) else None

    def _adapter_share(self, number: int) -> float | None:
        """How much of the adapter's part is there, where that explains it.

        Of all cells of the layer that stand at an alarm together: one of them alone is soon
        explained by anything, and an adapter that is not whole is seldom so at one place.
        """
        if self._sums["aa"][number] <= 0:
            return None
        standing = self._detectors.alarms[: self._num_cells] & (self._sums["aa"] > 0)
        layer = self.cells[number].layer
        return self._share(np.flatnonzero(standing & (self._layers == layer)), "ra", "aa")

    def _share(self, numbers: NDArray[np.int64], product: str, square: str) -> float | None:
        rr, along, own = (float(self._sums[n][numbers].sum()) for n in ("rr", product, square))
        if own <= 0 or rr <= 0 or along**2 < _SURE * rr * own:
            return None
        share = 1 + along / own
        told = self._explained[numbers].sum() >= _LEAST_EXPLAINED or abs(share) < _NOTHING
        return share if told else None

    def exchanged(self, layer: int) -> bool:
        """Whether gate gives what up should, and up what gate should, but for rounding."""
        own = np.flatnonzero((self._layers == layer) & (self._other != np.arange(self._num_cells)))
        if not len(own) or not self._detectors.alarms[own].all():
            return False
        left, off = (self._sums[name][own].sum() for name in ("xx", "rr"))
        return bool(off > 0 and left < _ROUNDING * off)


def _others(cells: Sequence[Cell]) -> NDArray[np.int64]:
    """Of each gate the number of its layer's up, of each up that of its gate, else its own."""
    numbers = {cell: number for number, cell in enumerate(cells)}
    turned = {"gate": "up", "up": "gate"}
    return np.array([numbers[replace(c, part=turned.get(c.part, c.part))] for c in cells])


def is_read(residuals: Residuals) -> NDArray[np.bool_]:
    """Which cells were looked at; one that is not finite is always seen."""
    return ~np.isnan(residuals.size) | ~np.isfinite(residuals.made)


def z_of(residuals: Residuals, noise: Doubles) -> Doubles:
    """In units of what rounding explains; infinite where a part's numbers are not finite."""
    explained = np.sqrt((noise * residuals.size) ** 2 + residuals.floor**2)
    with np.errstate(invalid="ignore", divide="ignore"):
        z = residuals.residual / (MARGIN * explained)
    z = np.where(np.isfinite(residuals.residual) & np.isfinite(explained), z, np.inf)
    known = is_read(residuals) & ~np.isnan(noise)
    return np.where(known, z, np.nan)
