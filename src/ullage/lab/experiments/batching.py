"""One at a time, in whole groups, continuously: throughput and latency of the same requests.

Holds the experiment over HTTP. All requests wait from the start, whichever way they are let in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from ullage.lab.lengths import recorded_lengths, scaled
from ullage.lab.result import Axis, Bars, Column, Lines, Result, Series, Table
from ullage.lab.server import Served, require_answered, served
from ullage.lab.setting import Setting
from ullage.lab.units import times
from ullage.pages.words import seconds
from ullage.traffic.load import RequestResult, run_closed
from ullage.traffic.summary import Distribution

CONCURRENT = 16
SINGLE, STATIC, CONTINUOUS = "one at a time", "static groups", "continuous"
SCHEDULER = "static scheduler"
LIMIT_S = 300.0
FLOAT32_TARGET = 4.0
"""What continuous batching at 16 is expected to give over one at a time, in float32."""


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are let in: so many at once, in whole groups or each as a place gets free.

    `sent_at_once` requests leave the client together where the server itself limits them.
    """

    name: str
    concurrency: int
    whole_groups: bool = False
    sent_at_once: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One load's figures; times in seconds, `end` and `ttft` from when all requests were there.

    `between` has one value per request: its mean time between tokens. (A client that is busy takes
    in several events at once, so single gaps would say little.)
    """

    load: Load
    output_tokens: int
    wall_s: float
    ttft: Distribution
    end: Distribution
    between: Distribution

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s


def run(setting: Setting) -> Result:
    most = 4 if setting.quick else CONCURRENT
    loads = [Load(SINGLE, 1), Load(STATIC, most, whole_groups=True), Load(CONTINUOUS, most)]
    if not setting.quick:
        loads += [Load(CONTINUOUS, 4), Load(CONTINUOUS, 32)]
    recorded = recorded_lengths(setting.trace)
    with served(setting) as server:
        lengths = scaled(
            recorded,
            8 if setting.quick else 6 * CONCURRENT,
            mean_prompt=12 if setting.quick else 32,
            mean_output=6 if setting.quick else 24,
            most=server.max_model_len,
        )
        outcomes = []
        for load in loads:
            setting.progress(f"batching: {load.name}, {load.concurrency} at once")
            outcomes.append(_measure(server, load, lengths.rows))
        what = server.what
    single, static, continuous = outcomes[:3]
    if setting.url is None:
        # All requests are sent at once and the engine itself forms the groups.
        flags: dict[str, int | str] = {"scheduling": "static", "max_num_seqs": most}
        setting.progress("batching: the engine's own static scheduling")
        with served(setting, flags) as server:
            load = Load(SCHEDULER, most, sent_at_once=len(lengths.rows))
            outcomes.insert(2, _measure(server, load, lengths.rows))
    return Result(
        name="batching",
        learnt=_learnt(single, static, continuous),
        how=(
            f"{what}: {len(lengths.rows)} requests, {lengths.words}.",
            "All requests wait from the start, so their times include the wait for a place. Static "
            "groups: the next group leaves only when the whole one before has ended. Static "
            "scheduler: the same, formed by the embedded engine itself (--scheduling static).",
        ),
        tables=(_table(outcomes, single),),
        plots=_plots(outcomes, (single, static, continuous)),
        data={
            "target_times_single": FLOAT32_TARGET,
            "continuous_times_single": continuous.tokens_per_s / single.tokens_per_s,
            "loads": [_plain(outcome) for outcome in outcomes],
        },
    )


def _measure(server: Served, load: Load, rows: tuple[tuple[int, int], ...]) -> Outcome:
    # Each load has prompts of its own, or a prefix cache would know the later ones' by then.
    seed = 1000 * (1 + load.concurrency + 500 * load.whole_groups + 900 * bool(load.sent_at_once))
    requests = [
        server.request(prompt, output, seed=seed + i) for i, (prompt, output) in enumerate(rows)
    ]
    results = asyncio.run(
        run_closed(
            server.target,
            requests,
            concurrency=load.sent_at_once or load.concurrency,
            limit_s=LIMIT_S,
            whole_groups=load.whole_groups,
        )
    )
    require_answered(results, f"{load.name}, {load.concurrency} at once")
    return Outcome(
        load,
        output_tokens=sum(_tokens(result) for result in results),
        wall_s=max(result.end_s for result in results),
        ttft=_sorted(result.sent_s + (result.ttft_s or 0.0) for result in results),
        end=_sorted(result.end_s for result in results),
        between=_sorted(
            sum(gaps) / len(gaps) for result in results if (gaps := result.inter_token_s)
        ),
    )


def _tokens(result: RequestResult) -> int:
    """The server's own count, else the events seen."""
    return len(result.event_times_s) if result.output_tokens is None else result.output_tokens


def _sorted(values: Iterable[float]) -> Distribution:
    return Distribution(tuple(sorted(values)))


def _table(outcomes: list[Outcome], single: Outcome) -> Table:
    return Table(
        "The same requests, let in three ways",
        (
            Column("let in", source=""),
            Column("at once", source=""),
            Column("throughput", "tokens/s"),
            Column("against one", "times", "quotient of the throughputs"),
            Column("first token p50", "s"),
            Column("first token p99", "s"),
            Column("ended p50", "s"),
            Column("ended p99", "s"),
            Column("per token p50", "s"),
            Column("per token p99", "s"),
        ),
        tuple(
            (
                outcome.load.name,
                outcome.load.concurrency,
                outcome.tokens_per_s,
                outcome.tokens_per_s / single.tokens_per_s,
                outcome.ttft.quantile(0.5),
                outcome.ttft.quantile(0.99),
                outcome.end.quantile(0.5),
                outcome.end.quantile(0.99),
                outcome.between.quantile(0.5),
                outcome.between.quantile(0.99),
            )
            for outcome in outcomes
        ),
        note="Times to the first token and to the end count from when all requests were there; "
        "p99 of so few requests is the slowest.",
    )


def _plots(outcomes: list[Outcome], three: tuple[Outcome, ...]) -> tuple[Bars | Lines, ...]:
    names = tuple(f"{o.load.name}, {o.load.concurrency}" for o in three)
    bars = Bars(
        "Throughput",
        "tokens/s",
        ("output tokens per second",),
        names,
        tuple((o.tokens_per_s,) for o in three),
    )
    latency = Bars(
        "Latency",
        "s",
        ("first token, p50", "request ended, p50", "request ended, p99"),
        names,
        tuple((o.ttft.quantile(0.5), o.end.quantile(0.5), o.end.quantile(0.99)) for o in three),
    )
    sweep = sorted(
        (o for o in outcomes if o.load.name in (SINGLE, CONTINUOUS)),
        key=lambda o: o.load.concurrency,
    )
    points = tuple((float(o.load.concurrency), o.tokens_per_s) for o in sweep)
    gaps = tuple((float(o.load.concurrency), o.between.quantile(0.5)) for o in sweep)
    at_once = Axis("requests at once", log=True)
    return (
        bars,
        latency,
        Lines(
            "Throughput against requests at once",
            at_once,
            Axis("tokens/s", "tokens/s"),
            (Series("continuous", points),),
        ),
        Lines(
            "Time between tokens against requests at once",
            at_once,
            Axis("median", "s"),
            (Series("continuous", gaps),),
        ),
    )


def _plain(outcome: Outcome) -> dict[str, object]:
    return {
        "name": outcome.load.name,
        "concurrency": outcome.load.concurrency,
        "output_tokens": outcome.output_tokens,
        "wall_s": outcome.wall_s,
        "tokens_per_s": outcome.tokens_per_s,
        "ttft_s": list(outcome.ttft.values),
        "end_s": list(outcome.end.values),
        "between_tokens_p50_s": outcome.between.quantile(0.5),
        "between_tokens_p99_s": outcome.between.quantile(0.99),
    }


def _learnt(single: Outcome, static: Outcome, continuous: Outcome) -> str:
    gain = continuous.tokens_per_s / single.tokens_per_s
    over_static = continuous.tokens_per_s / static.tokens_per_s
    gap = continuous.between.quantile(0.5) / single.between.quantile(0.5)
    last = continuous.end.quantile(0.99)
    return (
        f"With {continuous.load.concurrency} at once, continuous batching gives "
        f"{times(gain)} the throughput of one at a time and {times(over_static)} that of static "
        f"groups; each token then takes {times(gap)} as long, yet half of the requests are done "
        f"after {seconds(continuous.end.quantile(0.5), 2)} instead of "
        f"{seconds(single.end.quantile(0.5), 2)} and all of them after {seconds(last, 2)} instead "
        f"of {seconds(single.end.quantile(0.99), 2)}."
    )
