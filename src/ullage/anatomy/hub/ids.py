"""What counts as a hub id: `HubId`, and how one is written.

Holds the names only; where such a model lies is `locate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_REVISION = "main"
_MAX_PART = 96
_MAX_REVISION = 200


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
