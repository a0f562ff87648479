"""What is different about a replica that is not load: flags, version, model, adapters, its pod.

Holds the comparison of identities over time. That a process began anew is `history.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.telemetry.snapshot import Identity
from ullage.watch.view import Change

POD_FACTS = ("image", "revision", "uid", "node", "ready", "restarts")
"""Of `View.pod`, what tells of a deployment, or of what was done to a replica."""
MAX_CHANGES = 64
"""The latest are kept; a setting that changes all the time says no more after that."""


class Known:
    """What a replica last said of itself. What it stops saying is no change; saying other is."""

    def __init__(self) -> None:
        self._facts: dict[str, str] = {}
        self._last: Identity | None = None
        self.changes: tuple[Change, ...] = ()

    def take(self, identity: Identity, time_s: float) -> None:
        if identity == self._last:
            return
        self._last = identity
        self._note(_facts_of(identity), time_s)

    def take_pod(self, pod: Mapping[str, str], time_s: float) -> None:
        """The same of what Kubernetes says of the replica's pod."""
        self._note({f"pod {what}": pod[what] for what in POD_FACTS if what in pod}, time_s)

    def _note(self, facts: Mapping[str, str], time_s: float) -> None:
        found = []
        for what, after in facts.items():
            before = self._facts.get(what)
            self._facts[what] = after
            if before is not None and before != after:
                found.append(Change(time_s, what, before, after))
        if found:
            self.changes = (*self.changes, *found)[-MAX_CHANGES:]


def _facts_of(identity: Identity) -> Mapping[str, str]:
    """Name → value of what is known. No adapter is known of a server that tells its models."""
    facts: dict[str, object] = {
        "engine": identity.engine or None,
        "version": identity.version or None,
        "models": ", ".join(identity.models) or None,
        "max_model_len": identity.max_model_len,
        "block_size": identity.block_size,
        "num_blocks": identity.num_blocks,
        "num_engines": identity.num_engines if identity.engine else None,
        "adapters": ", ".join(identity.adapters) if identity.models else None,
    }
    facts.update({name: _tidy(text) for name, text in identity.settings.items()})
    return {what: str(value) for what, value in facts.items() if value is not None}


def _tidy(text: str) -> str:
    """A long fraction to six digits (`7.083333333333333` → `7.08333`); anything else as it is."""
    whole, point, fraction = text.partition(".")
    if not (point and whole.isdecimal() and fraction.isdecimal() and len(text) > 8):
        return text
    return f"{float(text):.6g}"
