"""One step as it happened: what it gave each request, when, and what it cost.

Holds the report of a step. The steps are made by `engine`, counted and shown by `serving`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ullage.engine.request import Request
from ullage.engine.scheduling.scheduler import Plan, Work

if TYPE_CHECKING:
    from ullage.engine.sampler import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Output:
    """What one step gave one request: at most one token, and the text that became certain.

    `since_previous_s` is the time since the request's token before, None for its first.
    """

    request: Request
    token_id: int | None
    text: str
    finished: bool
    since_previous_s: float | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step as it happened; times in `time.monotonic()` seconds.

    The plan was made by `scheduled_s`, the logits by `forwarded_s`, the tokens chosen by `ended_s`.
    `num_recomputed` tokens had been computed before and lost. `waits_s` are seconds that requests
    waited since the step before, added up by scheduler.WAIT_CAUSES. `num_freed` blocks have become
    free since then, by ends, preemptions, cancels and windows.
    """

    plan: Plan
    outputs: tuple[Output, ...]
    started_s: float
    scheduled_s: float
    forwarded_s: float
    ended_s: float
    num_recomputed: int = 0
    waits_s: Mapping[str, float] = field(default_factory=dict)
    num_freed: int = 0


def advance(work: Work, now_s: float) -> int:
    """Take in that `work` was computed; how much of it had been before."""
    request, end = work.request, work.start + work.count
    if request.first_scheduled_s is None:
        request.first_scheduled_s = now_s
    request.num_computed = end
    again = max(min(end, request.most_computed) - work.start, 0)
    request.most_computed = max(end, request.most_computed)
    return again
