"""Time to first token against the share of a prompt that the prefix cache knows.

Holds the experiment over HTTP: lone requests whose beginnings were sent once before.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ullage.lab.result import Axis, Column, Lines, Result, Series, Table
from ullage.lab.server import Served, metric, require_answered, served
from ullage.lab.setting import Setting
from ullage.pages.words import percent, seconds
from ullage.traffic.load import PlannedRequest, RequestResult, run_load

SHARES = (0.0, 0.25, 0.5, 0.75, 0.95)
HITS = "vllm:prefix_cache_hits_total"
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Point:
    """One share: tokens that were the same, tokens that the server counted as hits (None: it does
    not say), seconds to the first token, the fastest of several."""

    share: float
    shared_tokens: int
    hit_tokens: float | None
    ttft_s: float

    @property
    def saved_tokens(self) -> float:
        return self.shared_tokens if self.hit_tokens is None else self.hit_tokens


def run(setting: Setting) -> Result:
    length, repeats = (96, 2) if setting.quick else (768, 3)
    with served(setting) as server:
        length = min(length, server.max_model_len - 8)
        setting.progress(f"prefix: {repeats} rounds of {len(SHARES)} prompts")
        rounds = [
            [_measure(server, share, length, turn) for share in SHARES] for turn in range(repeats)
        ]
        # The shares take turns, and noise only ever adds: the fastest round of each counts.
        points = [min(same, key=lambda p: p.ttft_s) for same in zip(*rounds, strict=True)]
        what = server.what
    return Result(
        name="prefix",
        learnt=_learnt(points, length),
        how=(
            f"{what}: lone prompts of {length:,} tokens, {repeats} for each share. The shared "
            "beginning was sent once before with another end; the fastest time to the first "
            "token.",
            f"Tokens saved are the server's own count ({HITS})."
            if points[0].hit_tokens is not None
            else "The server does not count hits; tokens saved are those that were the same.",
            "Predicted: the time without hits × the share of tokens that were not saved.",
        ),
        tables=(_table(points, length),),
        plots=(_plot(points, length),),
        data={
            "prompt_tokens": length,
            "points": [
                {
                    "share": p.share,
                    "shared_tokens": p.shared_tokens,
                    "hit_tokens": p.hit_tokens,
                    "ttft_s": p.ttft_s,
                }
                for p in points
            ],
        },
    )


def _measure(server: Served, share: float, length: int, turn: int) -> Point:
    shared = round(share * length)
    seed = 40_000 + 1000 * round(100 * share) + 10 * turn
    head = server.request(max(shared, 1), 1, seed=seed)
    if shared:
        _alone(server, _joined(server, head, shared, length, seed + 1))
    before = asyncio.run(metric(server.target, HITS))
    result = _alone(server, _joined(server, head, shared, length, seed + 2))
    after = asyncio.run(metric(server.target, HITS))
    assert result.ttft_s is not None, "an answer without an error has a first token"
    hits = None if before is None or after is None else after - before
    return Point(share, shared, hits, result.ttft_s)


def _joined(
    server: Served, head: PlannedRequest, shared: int, length: int, seed: int
) -> PlannedRequest:
    """`shared` tokens of the head and an end of its own, `length` in all."""
    rest = server.request(max(1, length - shared), 1, seed=seed)
    if not shared:
        return PlannedRequest(0.0, rest.prompt, length, 2)
    if isinstance(head.prompt, str) or isinstance(rest.prompt, str):
        return PlannedRequest(0.0, f"{head.prompt} {rest.prompt}", length, 2)
    return PlannedRequest(0.0, (*head.prompt, *rest.prompt), length, 2)


def _alone(server: Served, request: PlannedRequest) -> RequestResult:
    results = asyncio.run(run_load(server.target, [request], limit_s=LIMIT_S))
    require_answered(results, "a lone prompt")
    return results[0]


def _predicted(points: list[Point], point: Point, length: int) -> float:
    return points[0].ttft_s * (1 - point.saved_tokens / length)


def _table(points: list[Point], length: int) -> Table:
    cold = points[0].ttft_s
    return Table(
        f"Prompts of {length:,} tokens",
        (
            Column("shared", "ratio", source=""),
            Column("tokens saved", "", "the server's count, where it gives one"),
            Column("of the prompt", "ratio", "quotient"),
            Column("first token", "s"),
            Column("sooner by", "ratio", "1 − time / time without hits"),
            Column("predicted", "s", "modelled: time without hits × share not saved"),
            Column("error", "change", "measured / predicted − 1"),
        ),
        tuple(
            (
                p.share,
                round(p.saved_tokens),
                p.saved_tokens / length,
                p.ttft_s,
                1 - p.ttft_s / cold,
                (predicted := _predicted(points, p, length)),
                p.ttft_s / predicted - 1 if predicted > 0 else None,
            )
            for p in points
        ),
    )


def _plot(points: list[Point], length: int) -> Lines:
    return Lines(
        "Time to first token",
        Axis("share of the prompt's tokens saved", "ratio"),
        Axis("time to first token", "s"),
        (
            Series(
                "measured", tuple((p.saved_tokens / length, p.ttft_s) for p in _by_saved(points))
            ),
            Series(
                "in proportion",
                tuple(
                    (p.saved_tokens / length, _predicted(points, p, length))
                    for p in _by_saved(points)
                ),
                "modelled",
            ),
        ),
    )


def _by_saved(points: list[Point]) -> list[Point]:
    return sorted(points, key=lambda p: p.saved_tokens)


def _learnt(points: list[Point], length: int) -> str:
    cold, best = points[0], max(points, key=lambda p: p.saved_tokens)
    if best.saved_tokens == cold.saved_tokens:
        return (
            f"This server saved no tokens of prompts whose beginnings it had seen: the first token "
            f"came after {seconds(points[-1].ttft_s, 2)} with {percent(points[-1].share)} shared, "
            f"after {seconds(cold.ttft_s, 2)} with nothing shared."
        )
    saved, sooner = best.saved_tokens / length, 1 - best.ttft_s / cold.ttft_s
    gap = max(abs((1 - p.ttft_s / cold.ttft_s) - p.saved_tokens / length) for p in points)
    judged = (
        "in proportion to the tokens saved"
        if gap <= 0.1
        else "not in proportion to the tokens saved"
    )
    return (
        f"With {percent(saved)} of {length:,} tokens saved the first token comes "
        f"{percent(sooner)} sooner ({seconds(best.ttft_s, 2)} instead of "
        f"{seconds(cold.ttft_s, 2)}); over all shares the time is cut {judged} (at most "
        f"{gap * 100:.0f} points apart)."
    )
