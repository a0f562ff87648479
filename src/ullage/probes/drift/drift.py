"""Sizes of activations at norms and residuals, per layer and channel, and whether they drifted.

Holds a reading and the comparison of two, without torch. Taking one is `take`, its document
`file`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from ullage.errors import BadUsage

Floats = NDArray[np.float32]
_T = Callable[[Floats, Floats], tuple[Floats, Floats]]

PLACES = ("x", "normed", "qkv", "mixed", "middle", "mlp_normed", "hidden")
"""Of `engine.taps`, in the order of a layer; behind the layers stand `x` and `normed` once more."""
LIMITS: Mapping[str, float] = {
    "float16": 65504.0,
    "bfloat16": float.fromhex("0x1.fep127"),
    "float32": float.fromhex("0x1.fffffep127"),
}
NEAR = 1 / 8
"""Of a type's limit: three doublings more and it is infinite."""
MASSIVE = 20.0
"""So many times the median of its layer's channels: named, not judged, for healthy models have
some (Sun, Chen, Kolter, Liu: Massive activations in large language models, 2024)."""

FALSE_ALARMS = 0.01
"""How often at most a comparison of sound models says that anything moved."""
RELABELLINGS = 499
"""Drawn, of more than so many:"""
MOST_RELABELLINGS = 2_000
LEAST_SPREAD = 0.02
"""Nats of log-rms that prompts are taken to differ by at least: rounding must not count."""
LEAST_CHANGE = 0.2
"""Nats, of prompts held against themselves: less may be another rounding of sound weights. To
bfloat16 it moves one channel of SmolLM2-135M by 0.08 whatever the text, of a head that gives next
to nothing (layer 18, which rests on the first token)."""
LOWEST, HIGHEST = -20.0, 32.0
"""Log-rms is cut there: e⁻²⁰ stands for a channel without anything in it."""
_CHANNELS_AT_ONCE = 8_192
_SAME = 1e-3
"""Two equal halves that change places give the same figures, but for rounding."""
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Spot:
    """One place of one layer. `layer` of the last norm and what goes into it: that of no layer."""

    place: str
    layer: int


@dataclass(frozen=True, slots=True)
class Largest:
    """The number that is furthest from zero, and where."""

    value: float
    prompt: int
    position: int
    channel: int


@dataclass(frozen=True, slots=True)
class SpotReading:
    """Of all rows: `rms` and `mean` (the first tokens left out, which many models make huge),
    `largest` (first tokens too), shares of numbers above an eighth of a type's limit.

    `dead` channels are 0 in every row; `massive` have an rms of 20 times the median or more.
    """

    spot: Spot
    rms: float
    mean: float
    largest: Largest
    near: Mapping[str, float]
    dead: tuple[int, ...]
    massive: tuple[tuple[int, float], ...]
    not_finite: int


@dataclass(frozen=True, slots=True, eq=False)
class DriftReading:
    """Of one model and its prompts. `dtype` is what it is served in unless told otherwise.

    `log_rms_PC` are the channels of all `widths`' spots beside each other, in the order of running;
    a prompt's first token is left out. `prompts` mark each one's tokens: the same prompts can be
    held against themselves.
    """

    model: str
    by: str
    dtype: str
    num_layers: int
    widths: Mapping[str, int]
    heads: tuple[int, int, int]
    tokens: tuple[int, ...]
    prompts: tuple[str, ...]
    spots: tuple[SpotReading, ...]
    log_rms_PC: Floats

    @property
    def overflows(self) -> tuple[SpotReading, ...]:
        """Spots whose largest number the type that the model is served in does not hold."""
        limit = LIMITS[self.dtype]
        return tuple(one for one in self.spots if abs(one.largest.value) > limit)

    @property
    def not_finite(self) -> tuple[SpotReading, ...]:
        return tuple(one for one in self.spots if one.not_finite)


def spots(num_layers: int) -> Iterator[Spot]:
    """In the order of running."""
    for layer in range(num_layers):
        yield from (Spot(place, layer) for place in PLACES)
    yield from (Spot(place, num_layers) for place in PLACES[:2])


@dataclass(frozen=True, slots=True)
class Drifted:
    """Channels of one spot that moved, all by one part of the model.

    `kind` is the part that makes the spot what it is. `factor`: the worst channel's rms against the
    other reading's; `channels` how many moved of how many, the first of them in `some`.
    """

    spot: Spot
    kind: str
    layer: int | None
    channels: int
    of: int
    some: tuple[int, ...]
    channel: int
    factor: float
    died: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """`drifted` in the order of running: the first is where it began.

    `paired`: both read the same prompts, and each is held against itself. `why_not`: nothing could
    be said, and what is missing. `p`: how often sound models would differ by as much somewhere.
    `visible_factor`: what half of the channels would have to grow by to be seen.
    """

    against: str
    paired: bool
    channels: int
    p: float | None
    visible_factor: float | None
    drifted: tuple[Drifted, ...]
    why_not: str | None = None


def compare(now: DriftReading, before: DriftReading) -> Comparison:
    """Whether channels are larger or smaller than before, by more than prompts differ.

    Raises BadUsage for readings of unlike models.
    """
    for name in ("num_layers", "widths", "heads"):
        own, other = getattr(now, name), getattr(before, name)
        if own != other:
            raise BadUsage(
                f"{name} {other}", file=before.model, expected=f"as in {now.model}, {own}"
            )
    before_PC, now_PC = before.log_rms_PC, now.log_rms_PC
    channels, counts = now_PC.shape[1], (len(before_PC), len(now_PC))
    paired = now.prompts == before.prompts and 2.0 ** (1 - counts[1]) <= FALSE_ALARMS
    if not paired and _least_p(*counts) > FALSE_ALARMS:
        told = f"{counts[1]} prompts against {counts[0]} cannot say anything at {FALSE_ALARMS:.0%}"
        told += "; 5 against 5 can, and 8 against themselves"
        return Comparison(before.model, False, channels, None, None, (), told)
    if paired:
        t_C, spread_C, most_K = _tested(now_PC - before_PC, _signs(counts[1]), _t_of_one)
    else:
        both_PC = np.concatenate([before_PC, now_PC])
        t_C, spread_C, most_K = _tested(both_PC, _labels(sum(counts), counts[1]), _t_of_two)
    # The first is the true one: a channel's figure may be reached by so many of all.
    critical = float(np.sort(most_K)[::-1][int(FALSE_ALARMS * len(most_K))])
    p = float((most_K >= most_K[0] * (1 - _SAME)).mean())
    least = LEAST_CHANGE if paired else 0.0
    shift_C = now_PC.mean(0) - before_PC.mean(0)
    visible = math.exp(min(max(float(np.median(spread_C)) * critical, least), HIGHEST))
    moved = (np.abs(t_C) > critical) & (np.abs(shift_C) >= least)
    found = tuple(_drifted(now, moved, shift_C)) if moved.any() else ()
    return Comparison(before.model, paired, channels, p, visible, found)


def _least_p(before: int, now: int) -> float:
    """The least p that so many prompts can give: two equal halves can change places unseen."""
    return (2 if before == now else 1) / math.comb(before + now, now)


def _tested(values_PC: Floats, ways_KP: Floats, t_of: _T) -> tuple[Floats, Floats, Floats]:
    """t and its standard error for each channel, and the largest |t| for each way of labelling.

    Were both readings of one model, any way could have been the true one: the largest |t| over all
    channels then has the distribution of all ways, whatever the channels have to do with each other
    (Westfall, Young 1993: max-T). The first is the true one.
    """
    most_K = np.zeros(len(ways_KP), np.float32)
    t, spread = [], []
    for at in range(0, values_PC.shape[1], _CHANNELS_AT_ONCE):
        t_KC, spread_KC = t_of(values_PC[:, at : at + _CHANNELS_AT_ONCE], ways_KP)
        most_K = np.maximum(most_K, np.abs(t_KC).max(1))
        t.append(t_KC[0])
        spread.append(spread_KC[0])
    return np.concatenate(t), np.concatenate(spread), most_K


def _signs(total: int) -> Floats:
    """Of one model, a prompt's difference could as well have the other sign."""
    if 2**total <= MOST_RELABELLINGS:
        ways = np.array(list(product((1, -1), repeat=total)))
    else:
        ways = np.random.default_rng(0).choice((1, -1), (RELABELLINGS + 1, total))
        ways[0] = 1
    return ways.astype(np.float32)


def _labels(total: int, now: int) -> Floats:
    """1 where a prompt counts as new: the true labelling, then all others, or some drawn."""
    true = tuple(range(total - now, total))
    if math.comb(total, now) <= MOST_RELABELLINGS:
        chosen = [true, *(one for one in combinations(range(total), now) if one != true)]
    else:
        generator = np.random.default_rng(0)
        drawn = (generator.permutation(total)[:now] for _ in range(RELABELLINGS))
        chosen = [true, *(tuple(one.tolist()) for one in drawn)]
    labels_KP = np.zeros((len(chosen), total), np.float32)
    for row, ones in zip(labels_KP, chosen, strict=True):
        row[list(ones)] = 1
    return labels_KP


def _t_of_two(values_PC: Floats, ways_KP: Floats) -> tuple[Floats, Floats]:
    """Student's t of those that are labelled against the others, with a least spread."""
    centred_PC = values_PC - values_PC.mean(0)
    total, now = len(values_PC), int(ways_KP[0].sum())
    before = total - now
    sum_KC, square_KC = ways_KP @ centred_PC, ways_KP @ centred_PC**2
    rest_KC = centred_PC.sum(0) - sum_KC
    within = square_KC - sum_KC**2 / now
    within += (centred_PC**2).sum(0) - square_KC - rest_KC**2 / before
    variance = np.maximum(within, 0) / (total - 2) + LEAST_SPREAD**2
    spread: Floats = np.sqrt(variance * np.float32(1 / now + 1 / before)).astype(np.float32)
    return ((sum_KC / now - rest_KC / before) / spread).astype(np.float32), spread


def _t_of_one(values_PC: Floats, ways_KP: Floats) -> tuple[Floats, Floats]:
    """Student's t of differences, their signs given, with a least spread."""
    total = len(values_PC)
    mean_KC = ways_KP @ values_PC / total
    within = np.maximum((values_PC**2).sum(0) - total * mean_KC**2, 0)
    variance = within / (total - 1) + LEAST_SPREAD**2
    spread: Floats = np.sqrt(variance / total).astype(np.float32)
    return (mean_KC / spread).astype(np.float32), spread


def _drifted(
    reading: DriftReading, moved_C: NDArray[np.bool_], shift_C: Floats
) -> Iterator[Drifted]:
    first = 0
    for spot in spots(reading.num_layers):
        width = reading.widths[spot.place]
        for kind, layer, low, high in _parts(spot, reading):
            here = moved_C[first + low : first + high].nonzero()[0] + low
            if not len(here):
                continue
            shifts = shift_C[first + here]
            worst = int(here[np.abs(shifts).argmax()])
            gone = bool((reading.log_rms_PC[:, first + worst] <= LOWEST).all())
            yield Drifted(
                spot, kind, layer, len(here), high - low, tuple(here[:_SHOWN].tolist()), worst,
                math.exp(min(float(shift_C[first + worst]), HIGHEST)), gone,
            )  # fmt: skip
        first += width


def _parts(spot: Spot, reading: DriftReading) -> Sequence[tuple[str, int | None, int, int]]:
    """Which part of which layer makes which channels of a spot: (kind, layer, from, to)."""
    layer, width = spot.layer, reading.widths[spot.place]
    if spot.place == "qkv":
        heads, kv_heads, size = reading.heads
        q, k = heads * size, (heads + kv_heads) * size
        return (("q", layer, 0, q), ("k", layer, q, k), ("v", layer, k, width))
    if spot.place == "x":
        return ((("mlp", layer - 1, 0, width) if layer else ("embedding", None, 0, width)),)
    kind = _KINDS[spot.place]
    return ((kind, None if layer == reading.num_layers else layer, 0, width),)


_KINDS: Mapping[str, str] = {
    "normed": "norm",
    "mixed": "attention",
    "middle": "o",
    "mlp_normed": "norm",
    "hidden": "mlp",
}
