"""Counters and histograms of one replica as one vector that only grows, whatever restarts.

Holds the vector's places, how resets are recognised, and the differences of two vectors. When
vectors are kept is `history.py`'s.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from operator import add, lt, sub
from typing import TypeAlias

from ullage.telemetry.histogram import Histogram
from ullage.telemetry.snapshot import (
    LABELLED_COUNTERS,
    Counter,
    Histograms,
    Labelled,
    Snapshot,
)

Vector: TypeAlias = "array[float]"
MAX_PLACES = 4096
"""A full page of vLLM needs about 250; one that keeps naming new labels needs any number."""
NAN = math.nan


class TooManyPlaces(Exception):
    """The endpoint has named more series over time than are kept apart."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a histogram lies: its counts from `start` on, one per bound, then its sum."""

    start: int
    bounds: tuple[float, ...]

    @property
    def sum_at(self) -> int:
        return self.start + len(self.bounds)


class Places:
    """Which number of a vector is what. Only ever appended to, so that old vectors stay readable:
    what lies beyond a vector's end was not known when it was made."""

    def __init__(self) -> None:
        self.num = 0
        self.counters: dict[Counter, int] = {}
        self.labelled: dict[tuple[Labelled, str], int] = {}
        self.histograms: dict[Histograms, list[Place]] = {}  # one for each set of bounds

    def extend(self, snapshot: Snapshot) -> None:
        """Room for all that the snapshot holds; a histogram with other bounds is another one.

        Raises TooManyPlaces.
        """
        for counter in snapshot.counters:
            if counter not in self.counters:
                self.counters[counter] = self._new(1)
        for name in LABELLED_COUNTERS & snapshot.labelled.keys():
            for label in snapshot.labelled[name]:
                if (name, label) not in self.labelled:
                    self.labelled[name, label] = self._new(1)
        for field, histogram in snapshot.histograms.items():
            places = self.histograms.setdefault(field, [])
            if not any(place.bounds == histogram.bounds for place in places):
                start = self._new(len(histogram.bounds) + 1)
                places.append(Place(start, histogram.bounds))

    def flatten(self, snapshot: Snapshot) -> Vector:
        """The snapshot's numbers in their places, NaN where it has none."""
        vector = array("d", repeat(NAN, self.num))
        for counter, value in snapshot.counters.items():
            vector[self.counters[counter]] = value
        for name in LABELLED_COUNTERS & snapshot.labelled.keys():
            for label, value in snapshot.labelled[name].items():
                vector[self.labelled[name, label]] = value
        for field, histogram in snapshot.histograms.items():
            places = self.histograms[field]
            place = next(place for place in places if place.bounds == histogram.bounds)
            vector[place.start : place.sum_at] = array("d", histogram.counts)
            vector[place.sum_at] = NAN if histogram.sum is None else histogram.sum
        return vector

    def _new(self, num: int) -> int:
        start, self.num = self.num, self.num + num
        if self.num > MAX_PLACES:
            raise TooManyPlaces
        return start


class Running:
    """The growing vector: what the server counts now, and what it had counted before resets."""

    def __init__(self) -> None:
        self.places = Places()
        self._lost: Vector = array("d")  # before the last reset of each number
        self._seen: Vector = array("d")  # the last value of each that was there

    def take(self, snapshot: Snapshot, *, restarted: bool) -> tuple[Vector, int]:
        """The vector after `snapshot`, and 1 if something counted from zero again, else 0.

        `restarted`: the server says that it is another process. Else a number that went back tells
        that all of the page counts from zero, those too that are above what they were. It does so
        in one process as well: vLLM 0.32 makes its metrics anew when it scales elastically
        (v1/engine/async_llm.py). The CPU time alone is the process's and goes on then.
        Raises TooManyPlaces.
        """
        self.places.extend(snapshot)
        missing = self.places.num - len(self._seen)
        self._lost.extend(repeat(0.0, missing))
        self._seen.extend(repeat(NAN, missing))
        now = self.places.flatten(snapshot)
        went_back = not restarted and self._went_back(now)
        if restarted:
            self._forget(range(len(now)))
        elif went_back:
            cpu = self.places.counters.get("process_cpu_s")
            self._forget(at for at in range(len(now)) if at != cpu or now[at] < self._seen[at])
        vector = array("d", map(add, now, self._lost))
        kept = self._seen
        self._seen = now
        if any(map(math.isnan, now)):
            known = zip(now, kept, strict=True)
            self._seen = array("d", [old if math.isnan(new) else new for new, old in known])
        return vector, int(restarted or went_back)

    def _went_back(self, now: Vector) -> bool:
        """Whether any count did. The sums of histograms tell nothing: they are rounded."""
        if True not in map(lt, now, self._seen):
            return False
        fell = {at for at in range(len(now)) if now[at] < self._seen[at]}
        every = chain.from_iterable(self.places.histograms.values())
        return not fell <= {place.sum_at for place in every}

    def _forget(self, at: Iterable[int]) -> None:
        for place in at:
            if not math.isnan(self._seen[place]):
                self._lost[place] += self._seen[place]
                self._seen[place] = NAN


def packed(vector: Vector) -> bytes:
    """The vector as it is kept while nobody reads it: a third of its size, as counts are small."""
    return zlib.compress(vector.tobytes(), 1)


def unpacked(kept: bytes) -> Vector:
    vector = array("d")
    vector.frombytes(zlib.decompress(kept))
    return vector


# --- between two vectors --------------------------------------------------------------------------


def rises(places: Places, before: Vector, after: Vector) -> dict[Counter, float]:
    """How much each counter grew that was there at both ends."""
    found = {}
    for name, at in places.counters.items():
        if at < len(before):
            rise = after[at] - before[at]
            if not math.isnan(rise):
                found[name] = rise
    return found


def labelled_rises(
    places: Places, before: Vector, after: Vector
) -> dict[Labelled, dict[str, float]]:
    """The same by label. A label that came after `before`, in a family that was there, began at
    zero: clients make a series when it first counts."""
    found: dict[Labelled, dict[str, float]] = {}
    families = {
        name
        for (name, _), at in places.labelled.items()
        if at < len(before) and not math.isnan(before[at])
    }
    for (name, label), at in places.labelled.items():
        if name in families and at < len(after):
            rise = after[at] - (before[at] if at < len(before) else 0.0)
            if not math.isnan(rise):
                found.setdefault(name, {})[label] = rise
    return found


class HistogramRises(Mapping[Histograms, Histogram]):
    """What histograms observed between two vectors: made when asked for, since most are not."""

    __slots__ = ("_after", "_before", "_made", "_places")

    def __init__(self, places: Places, before: Vector, after: Vector) -> None:
        self._places = places.histograms
        self._before = before
        self._after = after
        self._made: dict[Histograms, Histogram] = {}

    def __getitem__(self, name: Histograms) -> Histogram:
        made = self._made.get(name)
        if made is None:
            place = self._place(name)
            if place is None:
                raise KeyError(name)
            made = self._made[name] = self._make(place)
        return made

    def __iter__(self) -> Iterator[Histograms]:
        return (name for name in self._places if self._place(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def _place(self, name: Histograms) -> Place | None:
        """Where both ends had it, with the same bounds."""
        return next(filter(self._holds, self._places.get(name, ())), None)

    def _holds(self, place: Place) -> bool:
        """Its counts are there together or not at all, so the first one tells."""
        if not place.bounds or place.sum_at >= min(len(self._before), len(self._after)):
            return False
        return not math.isnan(self._after[place.start] - self._before[place.start])

    def _make(self, place: Place) -> Histogram:
        inside = slice(place.start, place.sum_at)
        counts = tuple(map(sub, self._after[inside], self._before[inside]))
        added = self._after[place.sum_at] - self._before[place.sum_at]
        return Histogram(place.bounds, counts, None if math.isnan(added) else added)
