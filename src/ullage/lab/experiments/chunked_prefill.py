"""What a long prompt does to those who are decoding, for several sizes of its chunks.

Holds the experiment over HTTP; the engine is started again for each chunk size.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass
from itertools import pairwise

from ullage.errors import UllageError
from ullage.lab.registry import EXPERIMENTS
from ullage.lab.result import Axis, Column, Lines, Result, Series, Table
from ullage.lab.server import Served, require_answered, require_restarts, served
from ullage.lab.setting import Setting
from ullage.lab.units import times
from ullage.pages.words import count, seconds
from ullage.traffic.load import RequestResult, run_load

FLAG = EXPERIMENTS["chunked-prefill"].varies
CHUNKS, QUICK_CHUNKS = (64, 128, 256, 512, 2048), (32, 256)
NUM_OTHERS = 4
LIMIT_S = 180.0
ATTEMPTS = 4
"""A long prompt that comes when the others have ended, since they were faster than before or the
machine was busy elsewhere, tells nothing and is sent again, earlier."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens: the others' prompts and answers, the long prompt; how often it comes."""

    other_prompt: int
    other_output: int
    long_prompt: int
    repeats: int


FULL, QUICK = Sizes(32, 72, 1024, 2), Sizes(12, 24, 192, 1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One chunk size: the others' mean gap undisturbed, their gaps while the prompt came, its TTFT.

    `gaps` hold every gap that overlaps the prompt's arrival, over all repeats.
    """

    chunk: int
    quiet_s: float
    gaps: tuple[float, ...]
    worst_s: float
    long_ttft_s: float


def run(setting: Setting) -> Result:
    require_restarts(setting, "chunked-prefill", FLAG)
    sizes = QUICK if setting.quick else FULL
    outcomes = []
    what = ""
    for chunk in QUICK_CHUNKS if setting.quick else CHUNKS:
        setting.progress(f"chunked-prefill: chunks of {chunk}")
        # Fewer places than tokens in a step, so that decodes leave room for chunks; and nothing
        # else that limits a long prompt's share.
        flags = {
            FLAG: chunk,
            "max_num_seqs": NUM_OTHERS + 1,
            "long_prefill_token_threshold": 0,
        }
        with served(setting, flags) as server:
            outcomes.append(_measure(server, chunk, sizes))
            what = server.what
    return Result(
        name="chunked-prefill",
        learnt=_learnt(outcomes, sizes),
        how=(
            f"{what}, and the same with the other sizes: {NUM_OTHERS} requests decode while a "
            f"prompt of {count(sizes.long_prompt)} tokens arrives, {sizes.repeats} times.",
            "A gap counts when any part of it lies between the long prompt's sending and its first "
            "token. Worst: the longest gap of each repeat, their median.",
        ),
        tables=(_table(outcomes),),
        plots=_plots(outcomes),
        data={
            "long_prompt_tokens": sizes.long_prompt,
            "outcomes": [
                {
                    "chunk": o.chunk,
                    "quiet_s": o.quiet_s,
                    "gaps_s": list(o.gaps),
                    "worst_s": o.worst_s,
                    "long_ttft_s": o.long_ttft_s,
                }
                for o in outcomes
            ],
        },
    )


def _measure(server: Served, chunk: int, sizes: Sizes) -> Outcome:
    # When the others have decoded a while: their pace is known from one load without the prompt.
    alone = _load(server, sizes, 10_000 + chunk, None)
    quiet_s = statistics.median(
        sum(each) / len(each) for result in alone if (each := result.inter_token_s)
    )
    begun = max(result.sent_s + (result.ttft_s or 0.0) for result in alone)
    arrival_s = begun + 6 * quiet_s
    gaps: list[float] = []
    worst: list[float] = []
    ttfts: list[float] = []
    for turn in range(sizes.repeats):
        ttft_s, during = _disturbed(server, chunk, sizes, turn, arrival_s)
        ttfts.append(ttft_s)
        gaps += during
        worst.append(max(during))
    return Outcome(
        chunk,
        quiet_s,
        tuple(gaps),
        statistics.median(worst),
        statistics.median(ttfts),
    )


def _disturbed(
    server: Served, chunk: int, sizes: Sizes, turn: int, arrival_s: float
) -> tuple[float, list[float]]:
    """(the long prompt's TTFT, the others' gaps meanwhile: one at least).

    Raises UllageError when nobody decoded meanwhile, however often it was tried.
    """
    length = min(sizes.long_prompt, server.max_model_len - 8)
    for attempt in range(ATTEMPTS):
        seed = 20_000 + 100 * chunk + 10 * turn + attempt
        *others, late = _load(server, sizes, seed, (arrival_s * 0.7**attempt, length))
        assert late.ttft_s is not None, "an answer without an error has a first token"
        during = [
            gap
            for result in others
            for gap in _overlapping(result, late.sent_s, late.sent_s + late.ttft_s)
        ]
        if during:
            return late.ttft_s, during
    raise UllageError(
        f"chunks of {chunk}: nobody was decoding any more when the long prompt came, "
        f"{ATTEMPTS} times"
    )


def _load(
    server: Served, sizes: Sizes, seed: int, newcomer: tuple[float, int] | None
) -> tuple[RequestResult, ...]:
    requests = [
        server.request(sizes.other_prompt, sizes.other_output, seed=seed * 10 + i)
        for i in range(NUM_OTHERS)
    ]
    if newcomer is not None:
        arrival_s, length = newcomer
        requests.append(server.request(length, 2, seed=seed * 10 + 9, arrival_s=arrival_s))
    results = asyncio.run(run_load(server.target, requests, limit_s=LIMIT_S))
    require_answered(results, "decoding beside a long prompt")
    return results


def _overlapping(result: RequestResult, begin_s: float, end_s: float) -> list[float]:
    """The gaps between this request's tokens that overlap [begin, end] on the load's clock."""
    moments = [result.sent_s + time_s for time_s in result.event_times_s]
    return [b - a for a, b in pairwise(moments) if b > begin_s and a < end_s]


def _table(outcomes: list[Outcome]) -> Table:
    return Table(
        "The others' time between tokens",
        (
            Column("chunk", "tokens", source=""),
            Column("undisturbed", "s"),
            Column("meanwhile p50", "s"),
            Column("worst", "s"),
            Column("worst / undisturbed", "times", "quotient"),
            Column("long prompt's first token", "s"),
            Column("gaps seen"),
        ),
        tuple(
            (
                o.chunk,
                o.quiet_s,
                statistics.median(o.gaps),
                o.worst_s,
                o.worst_s / o.quiet_s,
                o.long_ttft_s,
                len(o.gaps),
            )
            for o in outcomes
        ),
    )


def _plots(outcomes: list[Outcome]) -> tuple[Lines, ...]:
    return (
        Lines(
            "Waiting against the size of a chunk",
            Axis("tokens in one step", log=True),
            Axis("seconds", "s", log=True),
            (
                Series("others: worst gap", tuple((float(o.chunk), o.worst_s) for o in outcomes)),
                Series("others: undisturbed", tuple((float(o.chunk), o.quiet_s) for o in outcomes)),
                Series(
                    "long prompt: first token",
                    tuple((float(o.chunk), o.long_ttft_s) for o in outcomes),
                ),
            ),
        ),
    )


def _learnt(outcomes: list[Outcome], sizes: Sizes) -> str:
    small, large = outcomes[0], outcomes[-1]
    price = small.long_ttft_s / large.long_ttft_s
    worse = "shortens" if small.worst_s < large.worst_s else "does not shorten"
    paid = (
        f"the prompt itself waits {times(price)} as long for its first token"
        if price > 1.03
        else "the prompt itself waits no longer for its first token"
    )
    return (
        f"While a prompt of {count(sizes.long_prompt)} tokens arrives, others wait up to "
        f"{seconds(large.worst_s, 2)} for a token when steps take {large.chunk:,} tokens and up to "
        f"{seconds(small.worst_s, 2)} when they take {small.chunk:,} (undisturbed: "
        f"{seconds(small.quiet_s, 2)}): cutting {worse} the wait, and {paid} "
        f"({seconds(small.long_ttft_s, 2)} against {seconds(large.long_ttft_s, 2)})."
    )
