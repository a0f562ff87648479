"""MODEL as people type it → where it lies: a path, the hub's cache, or headers fetched from a hub.

Holds the order of these, and what counts as a hub id. The cache's layout is `hub_cache.py`, the
fetching `hub_files.py`; a path costs neither.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ullage.errors import BadUsage, Unreachable

DEFAULT_REVISION = "main"
_MAX_PART = 96
_MAX_REVISION = 200
_TRUE = ("1", "on", "yes", "true")


@dataclass(frozen=True, slots=True)
class HubId:
    """ORG/NAME[/FILE.gguf][@revision]. `file` names one of several GGUF models of a repository."""

    organisation: str
    name: str
    revision: str = DEFAULT_REVISION
    file: str | None = None

    def __str__(self) -> str:
        file = "" if self.file is None else f"/{self.file}"
        at = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.organisation}/{self.name}{file}{at}"


@dataclass(frozen=True, slots=True)
class Location:
    """Where a model lies. `headers_only`: files there are holes behind their headers."""

    path: Path
    headers_only: bool = False


def parse_hub_id(text: str) -> HubId | None:
    """The hub id that `text` can be read as, None when it can only be a path."""
    place, _, revision = text.partition("@")
    parts = place.split("/")
    if not 2 <= len(parts) <= 3 or not all(map(_is_name, parts)):
        return None
    if len(parts) == 3 and not parts[2].endswith(".gguf"):
        return None
    if "@" in text and not _is_revision(revision):
        return None
    return HubId(
        parts[0], parts[1], revision or DEFAULT_REVISION, parts[2] if len(parts) == 3 else None
    )


def _is_name(part: str) -> bool:
    plain = part.isascii() and all(c.isalnum() or c in "._-" for c in part)
    return plain and 0 < len(part) <= _MAX_PART and part[0] not in ".-" and ".." not in part


def _is_revision(text: str) -> bool:
    pieces = text.split("/")
    return 0 < len(text) <= _MAX_REVISION and all(map(_is_name, pieces))


def within_reach(model: str) -> bool:
    """Whether `model` is a hub id that the cache holds, or for which HF_ENDPOINT names a hub.

    A name that stands in a file asks no hub that nobody set: the default endpoint does not count.
    """
    wanted = parse_hub_id(model)
    if wanted is None:
        return False
    return _cached(wanted) is not None or bool(os.environ.get("HF_ENDPOINT") and not _offline())


def _cached(wanted: HubId) -> Path | None:
    from ullage.anatomy.hub_cache import cached_snapshot

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
    from ullage.anatomy.hub_cache import cache_folder

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
    from ullage.anatomy.hub_files import fetch_headers

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
