"""The past of every replica and of all together, for charts: rows of numbers within a fixed size.

Holds `Series` (one subject) and `Past` (all of them). Fine rows are one per round; coarse ones keep
a day, each the worst of the rounds that it stands for, so that no spike is averaged away.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Mapping, Sequence

from ullage.telemetry.snapshot import Histograms
from ullage.watch.figures import Figures, Spread
from ullage.watch.totals import Totals

# Column → whether the worst of several rounds is the largest (else the smallest).
COLUMNS: dict[str, bool] = {
    "kv_used_ratio": True,
    "kv_used_bytes": True,
    "kv_total_bytes": True,
    "running": True,
    "waiting": True,
    "waiting_capacity": True,
    "waiting_deferred": True,
    "preemptions_per_s": True,
    "prompt_tokens_per_s": True,
    "generation_tokens_per_s": True,
    "prefix_hit_ratio": False,
    "gpu_busy_ratio": True,
    "ttft_p50_s": True,
    "ttft_p50_low_s": True,
    "ttft_p50_high_s": True,
    "ttft_p99_s": True,
    "ttft_p99_low_s": True,
    "ttft_p99_high_s": True,
    "itl_p50_s": True,
    "itl_p50_low_s": True,
    "itl_p50_high_s": True,
    "itl_p99_s": True,
    "itl_p99_low_s": True,
    "itl_p99_high_s": True,
}
NAMES = tuple(COLUMNS)
WIDTH = len(NAMES)
CHARTED: tuple[tuple[str, Histograms], ...] = (("ttft", "ttft_s"), ("itl", "itl_s"))
DAY_S = 86_400.0
MOST_FINE = 720
MOST_COARSE = 1440
LEAST_ROWS = 48
"""A short past even of a replica in a very large fleet."""
MAX_CELLS = 8_000_000
"""Of all replicas together, 4 bytes each."""
_UNKNOWN = math.nan


def row_of(figures: Figures) -> list[float]:
    """A row of one replica; NaN where it is not known."""
    busy = [gpu.busy_ratio for gpu in figures.gpus if gpu.busy_ratio is not None]
    known: dict[str, float | None] = {
        **figures.numbers,
        "kv_used_ratio": figures.used_ratio,
        "gpu_busy_ratio": sum(busy) / len(busy) if busy else None,
    }
    return _row(known, figures.labelled.get("waiting_by_reason", {}), figures.spreads)


def fleet_row(totals: Totals) -> list[float]:
    """A row of all together: sums over those that know them."""
    known: dict[str, float | None] = {name: total.value for name, total in totals.sums.items()}
    ratio = totals.kv_used_ratio
    known["kv_used_ratio"] = None if ratio is None else ratio.value
    spreads = {name: spread for name, (spread, _) in totals.spreads.items()}
    return _row(known, totals.waiting_by_reason, spreads)


def _row(
    known: dict[str, float | None],
    waiting: Mapping[str, float],
    spreads: Mapping[Histograms, Spread],
) -> list[float]:
    known["waiting_capacity"] = waiting.get("capacity")
    known["waiting_deferred"] = waiting.get("deferred")
    for short, name in CHARTED:
        spread = spreads.get(name)
        if spread is not None:
            for word, quantile in (("p50", spread.p50), ("p99", spread.p99)):
                known[f"{short}_{word}_s"] = quantile.estimate
                known[f"{short}_{word}_low_s"] = quantile.low
                known[f"{short}_{word}_high_s"] = quantile.high
    numbers = (known.get(name) for name in NAMES)
    return [_UNKNOWN if number is None else number for number in numbers]


class Rows:
    """Times and rows of numbers, oldest first; the oldest go when there are more than `most`."""

    __slots__ = ("cells", "most", "times")

    def __init__(self, most: int) -> None:
        self.most = most
        self.times = array("d")
        self.cells = array("f")

    def add(self, time_s: float, row: Sequence[float]) -> None:
        self.times.append(time_s)
        self.cells.extend(row)
        # A quarter more than asked for, so that the front is cut off now and then, not each time.
        if len(self.times) > self.most + self.most // 4:
            self.keep(self.most)

    def keep(self, num: int) -> None:
        gone = len(self.times) - num
        if gone > 0:
            del self.times[:gone]
            del self.cells[: gone * WIDTH]

    def since(self, time_s: float, until_s: float = math.inf) -> list[tuple[float, list[float]]]:
        """Those after `time_s` and before `until_s`."""
        first = bisect.bisect_right(self.times, time_s)
        last = bisect.bisect_left(self.times, until_s)
        return [
            (self.times[i], self.cells[i * WIDTH : (i + 1) * WIDTH].tolist())
            for i in range(first, last)
        ]


class Series:
    """The past of one subject."""

    __slots__ = ("_coarse_s", "_pending", "_pending_from_s", "coarse", "fine")

    def __init__(self, most_fine: int, most_coarse: int) -> None:
        self.fine = Rows(most_fine)
        self.coarse = Rows(most_coarse)
        self._coarse_s = DAY_S / most_coarse
        self._pending: list[float] = []
        self._pending_from_s = 0.0

    def add(self, time_s: float, row: list[float]) -> None:
        self.fine.add(time_s, row)
        if not self._pending:
            self._pending, self._pending_from_s = row, time_s
        elif time_s - self._pending_from_s >= self._coarse_s:
            self.coarse.add(self._pending_from_s, self._pending)
            self._pending, self._pending_from_s = row, time_s
        else:
            self._pending = _worst(self._pending, row)

    def resize(self, most_fine: int, most_coarse: int) -> None:
        """Hold so many from now on; a coarser step begins with the next coarse row."""
        self.fine.most, self.coarse.most = most_fine, most_coarse
        self._coarse_s = DAY_S / most_coarse
        self.fine.keep(most_fine)
        self.coarse.keep(most_coarse)

    def since(self, time_s: float) -> list[tuple[float, list[float]]]:
        """Rows after `time_s`, oldest first: coarse ones up to where the fine ones begin."""
        begins = self.fine.times[0] if self.fine.times else math.inf
        coarse = self.coarse.since(time_s, begins)
        if self._pending and time_s < self._pending_from_s < begins:
            coarse.append((self._pending_from_s, self._pending))
        return coarse + self.fine.since(time_s)


def _worst(one: Sequence[float], two: Sequence[float]) -> list[float]:
    """Column by column; what only one row knows is taken from it."""
    out = []
    for a, b, largest in zip(one, two, COLUMNS.values(), strict=True):
        if a != a or b != b:
            out.append(b if a != a else a)
        else:
            out.append(max(a, b) if largest else min(a, b))
    return out


class Past:
    """The series of all replicas by url, within MAX_CELLS however many they are.

    A replica that was not seen for a day is forgotten.
    """

    def __init__(self, max_cells: int = MAX_CELLS) -> None:
        self._max_cells = max_cells
        self._room = 0
        self._sizes = (MOST_FINE, MOST_COARSE)
        self._of: dict[str, Series] = {}
        self.fleet = Series(MOST_FINE, MOST_COARSE)

    def add(self, url: str, time_s: float, row: list[float]) -> None:
        series = self._of.get(url)
        if series is None:
            self._make_room(len(self._of) + 1, time_s)
            series = self._of[url] = Series(*self._sizes)
        series.add(time_s, row)

    def of(self, url: str) -> Series | None:
        return self._of.get(url)

    def __len__(self) -> int:
        return len(self._of)

    def _make_room(self, num: int, now_s: float) -> None:
        if num <= self._room:
            return
        for url in [u for u, s in self._of.items() if s.fine.times[-1] < now_s - DAY_S]:
            del self._of[url]
        # Rows are cut when a quarter too many; doubling makes shrinking rare.
        self._room = max(16, 1 << (num - 1).bit_length())
        rows = int(self._max_cells / 1.25 / WIDTH / self._room)
        fine = max(LEAST_ROWS, min(MOST_FINE, rows // 2))
        coarse = max(LEAST_ROWS, min(MOST_COARSE, rows - fine))
        self._sizes = (fine, coarse)
        for series in self._of.values():
            series.resize(fine, coarse)
