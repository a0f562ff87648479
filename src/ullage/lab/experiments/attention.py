"""Attention naive, by SDPA and over paged KV: time and peak memory against length.

Holds the experiment on one layer; the calls are `kernels.py`, peak memory `peak.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ullage.checkup.machine import available_bytes
from ullage.lab.kernels import NAIVE, SDPA, Job, attention_call, engine_paths, path_words
from ullage.lab.peak import peak_bytes
from ullage.lab.result import Axis, Column, Lines, Result, Series, Table
from ullage.lab.setting import Setting
from ullage.lab.shape import AttentionShape, attention_shape
from ullage.lab.timing import race
from ullage.lab.units import times
from ullage.pages.words import byte_size

LENGTHS, QUICK_LENGTHS = (256, 512, 1024, 2048, 4096), (64, 256)
DECODE_BATCH = 8
# The naive way holds scores, their masked copy and the weights at once.
NAIVE_MATRICES = 3


@dataclass(frozen=True, slots=True)
class Point:
    """One variant at one length: seconds of a call, and bytes beyond the inputs (None: unknown)."""

    name: str
    length: int
    seconds: float
    peak: int | None = None


def run(setting: Setting) -> Result:
    shape = attention_shape(setting.model)
    lengths = tuple(n for n in (QUICK_LENGTHS if setting.quick else LENGTHS) if _fits(shape, n))
    names = (NAIVE, SDPA, *engine_paths())
    budget_s = 0.3 if setting.quick else 2.0
    prefill = _measured(setting, shape, names, lengths, budget_s, prefill=True)
    decode = _measured(setting, shape, names, lengths, budget_s, prefill=False)
    peaks = {}
    for name in names:
        setting.progress(f"attention: peak memory of {name}")
        jobs = [_job(shape, length, prefill=True) for length in lengths]
        for length, peak in zip(lengths, peak_bytes(name, jobs), strict=True):
            peaks[name, length] = peak
    prefill = [Point(p.name, p.length, p.seconds, peaks[p.name, p.length]) for p in prefill]
    return Result(
        name="attention",
        learnt=_learnt(prefill, decode, names),
        how=(
            f"One layer, {shape.words}, float32. A prompt: all rows of one sequence. Decoding: the "
            f"last row of {DECODE_BATCH} sequences. Paged KV lies in blocks of 16 tokens in random "
            f"order, for the engine's paths: {', '.join(engine_paths())}.",
            "Times are the fastest of rounds in which the variants take turns; their results were "
            "compared within 1e-4 before timing. Peak memory is the rise of the process's "
            "high-water mark (VmHWM) during one call in a process of its own, inputs not counted.",
        ),
        tables=(
            _time_table("A prompt: time", prefill, names),
            _peak_table(prefill, names, shape),
            _time_table(f"Decoding, {DECODE_BATCH} sequences: time", decode, names),
        ),
        plots=_plots(prefill, decode, names, shape),
        data={
            "prefill": [_plain(point) for point in prefill],
            "decode": [_plain(point) for point in decode],
        },
    )


def _job(shape: AttentionShape, length: int, *, prefill: bool) -> Job:
    batch = 1 if prefill else DECODE_BATCH
    return Job(shape.num_heads, shape.num_kv_heads, shape.head_dim, batch, length, prefill)


def _score_bytes(shape: AttentionShape, length: int) -> int:
    """One matrix of scores: heads × length² float32."""
    return shape.num_heads * length * length * 4


def _fits(shape: AttentionShape, length: int) -> bool:
    free = available_bytes()
    return length <= 1024 or (
        free is not None and 2 * NAIVE_MATRICES * _score_bytes(shape, length) < free
    )


def _measured(
    setting: Setting,
    shape: AttentionShape,
    names: tuple[str, ...],
    lengths: tuple[int, ...],
    budget_s: float,
    *,
    prefill: bool,
) -> list[Point]:
    points = []
    for length in lengths:
        what = "a prompt" if prefill else "decoding"
        setting.progress(f"attention: {what} at {length}")
        job = _job(shape, length, prefill=prefill)
        calls = {name: attention_call(name, job) for name in names}
        expected = calls[SDPA]()
        for name, call in calls.items():
            assert torch.allclose(call(), expected, atol=1e-4), f"{name} computes something else"
        timings = race(calls, budget_s=budget_s)
        points += [Point(name, length, timings[name]) for name in names]
    return points


def _time_table(title: str, points: list[Point], names: tuple[str, ...]) -> Table:
    return Table(
        title,
        (Column("tokens", source=""), *(Column(name, "s") for name in names)),
        tuple(
            (length, *(here[name].seconds for name in names)) for length, here in _by_length(points)
        ),
    )


def _peak_table(points: list[Point], names: tuple[str, ...], shape: AttentionShape) -> Table:
    rows = tuple(
        (length, *(here[name].peak for name in names), _score_bytes(shape, length))
        for length, here in _by_length(points)
    )
    return Table(
        "A prompt: peak memory",
        (
            Column("tokens", source=""),
            *(Column(name, "bytes", "measured in a child") for name in names),
            Column("one matrix of scores", "bytes", "modelled: heads × tokens² × 4"),
        ),
        rows,
        note="" if points[0].peak is not None else "The system does not tell: not known.",
    )


def _by_length(points: list[Point]) -> list[tuple[int, dict[str, Point]]]:
    lengths = dict.fromkeys(point.length for point in points)
    return [(n, {point.name: point for point in points if point.length == n}) for n in lengths]


def _plots(
    prefill: list[Point], decode: list[Point], names: tuple[str, ...], shape: AttentionShape
) -> tuple[Lines, ...]:
    length = Axis("tokens", log=True)
    lengths = tuple(dict.fromkeys(point.length for point in prefill))

    def series(points: list[Point], value: str) -> tuple[Series, ...]:
        return tuple(
            Series(
                path_words(name),
                tuple(
                    (float(p.length), float(getattr(p, value)))
                    for p in points
                    if p.name == name and getattr(p, value)
                ),
            )
            for name in names
        )

    plots = [
        Lines("A prompt: time", length, Axis("time", "s", log=True), series(prefill, "seconds"))
    ]
    known = tuple(line for line in series(prefill, "peak") if line.points)
    if known:
        model = Series(
            "heads × tokens² × 4 bytes",
            tuple((float(n), float(_score_bytes(shape, n))) for n in lengths),
            "modelled",
        )
        memory = Axis("bytes beyond the inputs", "bytes", log=True)
        plots.append(Lines("A prompt: peak memory", length, memory, (*known, model)))
    title = f"Decoding, {DECODE_BATCH} sequences: time"
    plots.append(Lines(title, length, Axis("time", "s", log=True), series(decode, "seconds")))
    return tuple(plots)


def _plain(point: Point) -> dict[str, object]:
    return {
        "variant": point.name,
        "tokens": point.length,
        "seconds": point.seconds,
        "peak_bytes": point.peak,
    }


def _learnt(prefill: list[Point], decode: list[Point], names: tuple[str, ...]) -> str:
    longest = max(point.length for point in prefill)
    first = min(point.length for point in prefill)
    at = {point.name: point for point in prefill if point.length == longest}
    start = {point.name: point for point in prefill if point.length == first}
    decoding = {point.name: point for point in decode if point.length == longest}
    paged = min(names[2:], key=lambda name: decoding[name].seconds)
    said = [
        f"On a prompt of {longest:,} tokens writing the scores out takes "
        f"{times(at[NAIVE].seconds / at[SDPA].seconds)} the time of SDPA"
    ]
    naive_peak, sdpa_peak = at[NAIVE].peak, at[SDPA].peak
    if naive_peak and sdpa_peak:
        said.append(f" and {byte_size(naive_peak, 2)} of memory against {byte_size(sdpa_peak, 2)}")
        if start[NAIVE].peak and longest > first:
            power = math.log(naive_peak / start[NAIVE].peak) / math.log(longest / first)  # type: ignore[operator]
            said.append(f", growing with the {power:.1f}th power of the length")
    ratio = decoding[paged].seconds / decoding[SDPA].seconds
    verdict = "costs" if ratio > 1.03 else "saves" if ratio < 0.97 else "costs next to"
    amount = "nothing" if verdict == "costs next to" else f"{abs(ratio - 1):.0%}"
    said.append(
        f"; decoding {DECODE_BATCH} sequences of {longest:,}, paging (the {paged!r} path) "
        f"{verdict} {amount} against KV that lies in one piece."
    )
    return "".join(said)
