"""Deployments of which a value is not known: reading such a value raises, so nothing guesses it.

Holds the two values and the exception. Whoever catches it says which flag hides what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ullage.costs.deployment import Deployment, Parallel


class OpenValue(Exception):
    """A value was needed that the deployment file does not say. `str()` names flag and reason."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OpenParallel(Parallel):
    """Parallel sizes of which those in `hidden` (field → what hides it) are not known."""

    hidden: tuple[tuple[str, str], ...] = ()

    def __getattribute__(self, name: str) -> object:
        return _read(self, name)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OpenDeployment(Deployment):
    """A deployment of which the fields in `hidden` (field → what hides it) are not known."""

    hidden: tuple[tuple[str, str], ...] = ()

    def __getattribute__(self, name: str) -> object:
        return _read(self, name)


def _read(value: object, name: str) -> object:
    if not name.startswith("_"):
        for field, reason in object.__getattribute__(value, "hidden"):
            if field == name:
                raise OpenValue(reason)
    return object.__getattribute__(value, name)


def hide(deployment: Deployment, hidden: Mapping[str, str]) -> Deployment:
    """The deployment with those fields unknown; parallel sizes by their own names."""
    sizes = {field.name for field in fields(Parallel)}
    in_sizes = tuple((name, why) for name, why in hidden.items() if name in sizes)
    others = tuple((name, why) for name, why in hidden.items() if name not in sizes)
    values = {field.name: getattr(deployment, field.name) for field in fields(Deployment)}
    if in_sizes:
        known = {name: getattr(deployment.parallel, name) for name in sizes}
        values["parallel"] = OpenParallel(**known, hidden=in_sizes)
    if others:
        return OpenDeployment(**values, hidden=others)
    return Deployment(**values)


def known_or_none(value: Deployment | Parallel, name: str) -> object:
    """The field, or None where it is not known (for documents that show what is)."""
    try:
        return getattr(value, name)
    except OpenValue:
        return None
