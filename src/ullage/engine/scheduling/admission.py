"""Who may wait, in which order, and for how long a newcomer would: the line before the scheduler.

Holds what can never run here, and the order and the pace of the line. Who is let in next, and why
others are not, is `scheduler`.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator

from ullage.engine.request import Request, SamplingParams
from ullage.errors import BadInput

# Of how many ends the pace is taken: enough to even out, few enough to follow a change.
ENDS_REMEMBERED = 64


class RequestRefused(BadInput):
    """A request that this engine can never serve: too long, or without a prompt."""


def require_fits(
    prompt_ids: tuple[int, ...], params: SamplingParams, max_model_len: int, vocab_size: int
) -> None:
    """Raise RequestRefused unless prompt and answer fit the model's length and vocabulary."""
    num_prompt = len(prompt_ids)
    if params.n < 1:
        raise RequestRefused(str(params.n), field="n", expected="at least 1")
    if num_prompt == 0:
        raise RequestRefused("no tokens", field="prompt", expected="at least one token")
    if num_prompt + params.max_tokens > max_model_len:
        raise RequestRefused(
            f"{num_prompt} prompt tokens and max_tokens {params.max_tokens}",
            field="prompt",
            expected=f"at most {max_model_len} together (max_model_len)",
        )
    outside = next((token for token in prompt_ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise RequestRefused(
            f"a token id outside the vocabulary: {outside}",
            field="prompt",
            expected=f"ids from 0 to {vocab_size - 1}",
        )


class Line:
    """Requests that wait, first the one that runs first. A leader stands for its followers too."""

    def __init__(self, *, by_priority: bool = False) -> None:
        self._by_priority = by_priority
        self._waiting: list[Request] = []
        self._num_arrived = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def key(self, request: Request) -> tuple[int, int]:
        """What requests are ordered by: the lowest is first in line and last to be preempted."""
        return (request.priority if self._by_priority else 0, request.arrival)

    def arrive(self, request: Request) -> None:
        """Give `request` its place in the order of arrival, for good."""
        request.arrival = self._num_arrived
        self._num_arrived += 1

    def add(self, request: Request) -> None:
        insort(self._waiting, request, key=self.key)

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)


class Pace:
    """How fast requests end, from the last of them; times in `time.monotonic()` seconds."""

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque(maxlen=ENDS_REMEMBERED)

    def ended(self, now_s: float) -> None:
        self._ends_s.append(now_s)

    def wait_s(self, num_ahead: int, now_s: float) -> float | None:
        """How long until `num_ahead` requests have ended at the present pace; None: no pace yet.

        The time since the last end counts, so that a stalled engine promises less and less.
        """
        if len(self._ends_s) < 2:
            return None
        span_s = max(now_s - self._ends_s[0], 1e-6)
        return num_ahead * span_s / (len(self._ends_s) - 1)
