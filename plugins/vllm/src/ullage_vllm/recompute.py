"""Tokens that vLLM computes again because a preemption threw their KV away.

Holds the count and the two wrappers of a scheduler's methods that keep it. A preempted request
starts anew; what its prefix still finds in the cache is not computed again and not counted.
"""

from __future__ import annotations

import functools
from typing import Any


class Recomputation:
    """The count of one scheduler, from `watch` on. `requests`: resumptions that recomputed."""

    def __init__(self) -> None:
        self.tokens = 0
        self.requests = 0
        # Request id → [how far it had been computed when it was preempted, whether counted].
        self._lost: dict[str, list[int]] = {}

    def preempted(self, request: Any) -> None:
        """Before vLLM sets the request's computed tokens to none."""
        lost = self._lost.setdefault(request.request_id, [0, 0])
        lost[0] = max(lost[0], request.num_computed_tokens)
        lost[1] = 0

    def scheduled(self, scheduler: Any, scheduler_output: Any) -> None:
        """Before vLLM counts the tokens of this step as computed."""
        if not self._lost:
            return
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            lost = self._lost.get(request_id)
            if lost is None:
                continue
            start = scheduler.requests[request_id].num_computed_tokens
            again = max(min(start + count, lost[0]) - start, 0)
            self.tokens += again
            if again and not lost[1]:
                lost[1] = 1
                self.requests += 1
            if start + count >= lost[0]:
                del self._lost[request_id]

    def forget_all_but(self, alive: Any) -> None:
        """Drop what was lost by requests that ended while they waited."""
        for request_id in [one for one in self._lost if one not in alive]:
            del self._lost[request_id]

    def watch(self, scheduler: Any) -> None:
        """Count from now on. Wraps methods of this one scheduler, not of its class."""
        preempt, advance = scheduler._preempt_request, scheduler._update_after_schedule

        @functools.wraps(preempt)
        def counted_preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.preempted(request)
            return preempt(request, *args, **kwargs)

        @functools.wraps(advance)
        def counted_advance(scheduler_output: Any) -> Any:
            self.scheduled(scheduler, scheduler_output)
            return advance(scheduler_output)

        scheduler._preempt_request = counted_preempt
        scheduler._update_after_schedule = counted_advance
