"""Why a request is not taken, or ends without an answer; `http` gives each its status."""

from __future__ import annotations

import math

from ullage.errors import UllageError


class Refused(UllageError):
    """A request that is not taken now; `status` is HTTP's, `retry_after_s` when to come back."""

    status = 429

    def __init__(self, sentence: str, retry_after_s: float = 1) -> None:
        # HTTP's Retry-After is whole seconds; none at all would invite a storm.
        self.retry_after_s = max(1, math.ceil(retry_after_s))
        super().__init__(sentence)


class QueueFull(Refused):
    """As many requests wait as may."""


class Draining(Refused):
    """The server is going away: what runs is finished, nothing new is taken."""

    status = 503


class Cancelled(Refused):
    """A request that was taken and then ended from outside, by an operator or a shutdown."""

    status = 503


class DeadlinePassed(UllageError):
    """A request that was not finished by the time its sender named."""

    status = 408


class NotFinite(UllageError):
    """The model's numbers were not finite, so that no token could be chosen; becomes a 500."""


class EngineFailed(UllageError):
    """The engine's thread died; nothing can be served any more."""
