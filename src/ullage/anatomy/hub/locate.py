"""MODEL as people type it → where it lies: a path, the hub's cache, or headers fetched from a hub.

Holds the order of these. What counts as a hub id is `ids.py`, the cache's layout `cache.py`, the
fetching `files.py`; a path costs neither.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ullage.anatomy.hub.ids import HubId, parse_hub_id
from ullage.errors import BadUsage, Unreachable

_TRUE = ("1", "on", "yes", "true")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a model lies. `headers_only`: files there are holes behind their headers."""

    path: Path
    headers_only: bool = False


def within_reach(model: str) -> bool:
    """Whether `model` is a hub id that the cache holds, or for which HF_ENDPOINT names a hub.

    A name that stands in a file asks no hub that nobody set: the default endpoint does not count.
    """
    wanted = parse_hub_id(model)
    if wanted is None:
        return False
    return _cached(wanted) is not None or bool(os.environ.get("HF_ENDPOINT") and not _offline())


def _cached(wanted: HubId) -> Path | None:
    from ullage.anatomy.hub.cache import cached_snapshot

    snapshot = cached_snapshot(wanted.organisation, wanted.name, wanted.revision)
    if snapshot is None or wanted.file is None:
        return snapshot
    return snapshot / wanted.file if (snapshot / wanted.file).is_file() else None


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE


def locate(model: str) -> Location:
    """The place of MODEL: a path that exists, else the cache, else what a hub's headers say.

    Raises:
        BadUsage: it is none of these, or the hub refuses it.
        Unreachable: the hub does not answer, or going out is forbidden (HF_HUB_OFFLINE).
    """
    wanted = None if os.path.lexists(model) else parse_hub_id(model)
    if wanted is None:
        return Location(Path(model))
    cached = _cached(wanted)
    if cached is not None:
        return Location(cached)
    from ullage.anatomy.hub.cache import cache_folder

    nowhere = f"neither a path nor in the cache ({cache_folder()})"
    if _offline():
        raise Unreachable(f"{model}: {nowhere}, and HF_HUB_OFFLINE forbids asking the hub")
    endpoint = _endpoint()
    if endpoint is None:
        raise BadUsage(
            f"{nowhere}, and HF_ENDPOINT is not set",
            file=model,
            expected="a directory or file, or HF_ENDPOINT naming the hub to ask",
        )
    from ullage.anatomy.hub.files import fetch_headers

    return Location(fetch_headers(endpoint, wanted), headers_only=True)


def _endpoint() -> str | None:
    """The hub's base address: HF_ENDPOINT, else what an installed huggingface_hub knows."""
    named = os.environ.get("HF_ENDPOINT")
    if named:
        return named.rstrip("/")
    try:
        from huggingface_hub.constants import ENDPOINT
    except ImportError:
        return None
    return str(ENDPOINT).rstrip("/")
