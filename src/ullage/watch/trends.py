"""Gauges over time as sums that can be joined: count, extremes, what least squares need.

Holds the sums and the Trend that they give. Between which instants is `history.py`'s.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from ullage.telemetry.snapshot import Gauge, Labelled, Snapshot
from ullage.watch.view import Trend

Name = TypeVar("Name", bound=str)
MAX_SERIES = 256
WAITING: Labelled = "waiting_by_reason"

# One gauge's sums: number, first, last, least, most, Σx, Σt, Σt², Σtx; t since an origin.
STRIDE = 9
NOTHING = (0.0, math.nan, math.nan, math.inf, -math.inf, 0.0, 0.0, 0.0, 0.0)
Sums = tuple[float, ...]


class TooManySeries(Exception):
    """The endpoint has named more reasons over time than are kept apart."""


class Series:
    """Which gauge lies where. Only ever appended to, as `cumulative.Places`."""

    def __init__(self) -> None:
        self.gauges: dict[Gauge, int] = {}
        self.waiting: dict[str, int] = {}

    def flatten(self, snapshot: Snapshot) -> array[float]:
        """Each gauge's value, NaN where the snapshot has none. Raises TooManySeries."""
        waiting = snapshot.labelled.get(WAITING) or {}
        for gauge in snapshot.gauges:
            self.gauges.setdefault(gauge, self._num)
        for reason in waiting:
            self.waiting.setdefault(reason, self._num)
        if self._num > MAX_SERIES:
            raise TooManySeries
        point = array("d", [math.nan]) * self._num
        for gauge, value in snapshot.gauges.items():
            point[self.gauges[gauge]] = value
        for reason, value in waiting.items():
            point[self.waiting[reason]] = value
        return point

    @property
    def _num(self) -> int:
        return len(self.gauges) + len(self.waiting)


def sums_of_point(point: array[float], time_s: float) -> array[float]:
    """The sums of one sample of every gauge, `time_s` after the origin."""
    sums = array("d")
    for value in point:
        sums.extend(_one(value, time_s))
    return sums


def joined(before: array[float], after: array[float], later_s: float) -> array[float]:
    """The sums of both; those of `after` count from an origin that is `later_s` later."""
    both = array("d")
    for at in range(0, max(len(before), len(after)), STRIDE):
        one, two = before[at : at + STRIDE], after[at : at + STRIDE]
        both.extend(
            _join(one, two, later_s) if one and two else _moved(two, later_s) if two else one
        )
    return both


def _one(value: float, time_s: float) -> Sums:
    if math.isnan(value):
        return NOTHING
    return (1.0, value, value, value, value, value, time_s, time_s * time_s, time_s * value)


def _join(one: Sequence[float], two: Sequence[float], later_s: float) -> Sums:
    if not two[0]:
        return tuple(one)
    moved = _moved(two, later_s)
    if not one[0]:
        return moved
    return (
        one[0] + moved[0],
        one[1],
        moved[2],
        min(one[3], moved[3]),
        max(one[4], moved[4]),
        one[5] + moved[5],
        one[6] + moved[6],
        one[7] + moved[7],
        one[8] + moved[8],
    )


def _moved(sums: Sequence[float], later_s: float) -> Sums:
    """The same sums, with times that count from an origin `later_s` earlier."""
    num, first, last, least, most, x, t, tt, tx = sums
    tt += 2 * later_s * t + num * later_s * later_s
    return (num, first, last, least, most, x, t + num * later_s, tt, tx + later_s * x)


def trend_of(sums: Sequence[float]) -> Trend | None:
    """The Trend of these samples; None of no sample."""
    num, first, last, least, most, x, t, tt, tx = sums
    if not num:
        return None
    spread = tt - t * t / num
    # A level gauge has a slope of exactly 0, whatever the sums round to.
    slope = (tx - t * x / num) / spread if spread > 0 and least < most else 0.0
    return Trend(first, last, least, most, x / num, int(num), slope)


class Part(Protocol):
    """Samples that follow an instant, up to and including `time_s`; `sums` count from it."""

    @property
    def time_s(self) -> float: ...
    @property
    def point(self) -> array[float]: ...
    @property
    def sums(self) -> array[float]: ...


class Trends(Mapping[Name, Trend], Generic[Name]):
    """Trends of all gauges from one instant on, over the parts after it: made when asked for."""

    __slots__ = ("_made", "_parts", "_series", "_start")

    def __init__(self, series: Mapping[Name, int], start: Part, parts: Sequence[Part]) -> None:
        self._series = series
        self._start = start
        self._parts = parts
        self._made: dict[Name, Trend | None] = {}

    def __getitem__(self, name: Name) -> Trend:
        trend = self._trend(name)
        if trend is None:
            raise KeyError(name)
        return trend

    def __iter__(self) -> Iterator[Name]:
        return (name for name in self._series if self._trend(name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def _trend(self, name: Name) -> Trend | None:
        if name not in self._series:
            return None
        if name not in self._made:
            self._made[name] = trend_of(self._sums(self._series[name]))
        return self._made[name]

    def _sums(self, at: int) -> Sums:
        """All samples' sums, with times since the start."""
        point = self._start.point
        sums = _one(point[at], 0.0) if at < len(point) else NOTHING
        origin_s = self._start.time_s
        for part in self._parts:
            there = part.sums[at * STRIDE : (at + 1) * STRIDE]
            if there:
                sums = _join(sums, there, origin_s - self._start.time_s)
            origin_s = part.time_s
        return sums
