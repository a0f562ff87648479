"""The size of a block: room that nobody fills, and speed.

Holds the experiment over HTTP; the engine is started again for each size.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass

from ullage.lab.lengths import Lengths, recorded_lengths, scaled
from ullage.lab.registry import EXPERIMENTS
from ullage.lab.result import Axis, Column, Lines, Result, Series, Table
from ullage.lab.server import Served, Watch, require_answered, require_restarts, served
from ullage.lab.setting import Setting
from ullage.lab.units import times
from ullage.pages.words import percent
from ullage.traffic.load import RequestResult, run_closed

FLAG = EXPERIMENTS["block-size"].varies
SIZES, QUICK_SIZES = (1, 8, 16, 32, 64, 128), (8, 32)
UTILISATION = "ullage_kv_page_utilization_ratio"
CONCURRENT = 16
LIMIT_S = 240.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One block size: the share of held room that tokens fill, as predicted from the lengths and
    as the server says (None: it does not), and output tokens per second."""

    size: int
    predicted: float
    measured: float | None
    tokens_per_s: float


def run(setting: Setting) -> Result:
    require_restarts(setting, "block-size", FLAG)
    recorded = recorded_lengths(setting.trace)
    lengths = scaled(
        recorded,
        # Long enough that the server is looked at while it runs, however fast it is.
        12 if setting.quick else 32,
        mean_prompt=24 if setting.quick else 96,
        mean_output=48 if setting.quick else 20,
        most=1000,
    )
    outcomes = []
    what = ""
    for size in QUICK_SIZES if setting.quick else SIZES:
        setting.progress(f"block-size: blocks of {size}")
        with served(setting, {FLAG: size}) as server:
            outcomes.append(_measure(server, size, lengths))
            what = what or server.what
    as_recorded = [(size, _filled(recorded, size)) for size in (o.size for o in outcomes)]
    return Result(
        name="block-size",
        learnt=_learnt(outcomes),
        how=(
            f"{what}, and the same with the other sizes: {len(lengths.rows)} requests, "
            f"{CONCURRENT} at once; {lengths.words}.",
            f"Filled: tokens held over tokens that the held blocks could hold ({UTILISATION}, "
            "mean over the run). Predicted from the lengths: each request's tokens over its whole "
            "blocks, mean over its answer.",
        ),
        tables=(_table(outcomes, dict(as_recorded)),),
        plots=_plots(outcomes, as_recorded),
        data={
            "outcomes": [
                {
                    "block_size": o.size,
                    "predicted_filled": o.predicted,
                    "measured_filled": o.measured,
                    "predicted_filled_recorded": dict(as_recorded)[o.size],
                    "tokens_per_s": o.tokens_per_s,
                }
                for o in outcomes
            ]
        },
    )


def _measure(server: Served, size: int, lengths: Lengths) -> Outcome:
    requests = [
        server.request(prompt, output, seed=60_000 + 1000 * size + i)
        for i, (prompt, output) in enumerate(lengths.rows)
    ]

    async def load() -> tuple[tuple[RequestResult, ...], list[float]]:
        async with Watch(server.target, UTILISATION, interval_s=0.05) as watch:
            results = await run_closed(
                server.target, requests, concurrency=CONCURRENT, limit_s=LIMIT_S
            )
        return results, watch.values

    results, filled = asyncio.run(load())
    require_answered(results, f"blocks of {size}")
    tokens = sum(
        len(r.event_times_s) if r.output_tokens is None else r.output_tokens for r in results
    )
    return Outcome(
        size,
        _filled(lengths, size),
        statistics.fmean(filled) if filled else None,
        tokens / max(result.end_s for result in results),
    )


def _filled(lengths: Lengths, size: int) -> float:
    """Tokens over room in whole blocks, summed over every step of every answer."""
    tokens = room = 0
    for prompt, output in lengths.rows:
        for held in range(prompt, prompt + output):
            tokens += held
            room += -(-held // size) * size
    return tokens / room


def _table(outcomes: list[Outcome], as_recorded: dict[int, float]) -> Table:
    fastest = max(o.tokens_per_s for o in outcomes)
    return Table(
        "Block sizes",
        (
            Column("tokens per block", source=""),
            Column("filled, predicted", "ratio", "modelled from the lengths"),
            Column("filled, measured", "ratio"),
            Column("error", "change", "measured / predicted − 1"),
            Column("unscaled trace", "ratio", "modelled from the lengths as recorded"),
            Column("throughput", "tokens/s"),
            Column("of the fastest", "ratio", "quotient"),
        ),
        tuple(
            (
                o.size,
                o.predicted,
                o.measured,
                None if o.measured is None else o.measured / o.predicted - 1,
                as_recorded[o.size],
                o.tokens_per_s,
                o.tokens_per_s / fastest,
            )
            for o in outcomes
        ),
        note=""
        if any(o.measured is not None for o in outcomes)
        else f"The server does not say {UTILISATION}.",
    )


def _plots(outcomes: list[Outcome], as_recorded: list[tuple[int, float]]) -> tuple[Lines, ...]:
    tokens = Axis("tokens per block", log=True)
    measured = tuple((float(o.size), o.measured) for o in outcomes if o.measured is not None)
    series = [
        Series("predicted", tuple((float(o.size), o.predicted) for o in outcomes), "modelled"),
        Series(
            "predicted, unscaled trace", tuple((float(s), f) for s, f in as_recorded), "modelled"
        ),
    ]
    if measured:
        series.insert(0, Series("measured", measured))
    return (
        Lines("Held room that tokens fill", tokens, Axis("filled", "ratio"), tuple(series)),
        Lines(
            "Throughput",
            tokens,
            Axis("tokens/s", "tokens/s"),
            (Series("throughput", tuple((float(o.size), o.tokens_per_s) for o in outcomes)),),
        ),
    )


def _seen(outcome: Outcome) -> bool:
    return outcome.measured is not None


def _learnt(outcomes: list[Outcome]) -> str:
    small, large = outcomes[0], outcomes[-1]
    fastest = max(outcomes, key=lambda o: o.tokens_per_s)
    slowest = min(outcomes, key=lambda o: o.tokens_per_s)
    spread = fastest.tokens_per_s / slowest.tokens_per_s
    # One source for both: a short run may be over before it was ever looked at.
    if small.measured is not None and large.measured is not None:
        filled, source = (small.measured, large.measured), "measured"
    else:
        why = "not seen with each size" if any(map(_seen, outcomes)) else "this server does not say"
        filled, source = (small.predicted, large.predicted), f"predicted; {why}"
    return (
        f"Of the room that requests hold, tokens fill {percent(filled[1])} with blocks of "
        f"{large.size} and {percent(filled[0])} with blocks of {small.size} ({source}); "
        f"the fastest size was {fastest.size}, {times(spread)} the throughput of the slowest, "
        f"{slowest.size}."
    )
