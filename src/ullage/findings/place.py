"""Where a finding stands in the user's files, and what a rule says: what the CI formats need.

Holds the two values and the spelling of a path as a URI. Finding the place is the judging room's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from ullage.findings.finding import Finding, Severity

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~/")


@dataclass(frozen=True, slots=True)
class Place:
    """A file as the user named it, and a line counted from 1, None where no line is at fault."""

    file: str
    line: int | None = None


PlaceOf = Callable[[Finding], Place | None]


@dataclass(frozen=True, slots=True)
class RuleText:
    """What a document says of a rule, whatever it found."""

    id: str
    title: str
    severity: Severity
    category: str
    why: str
    fix: str
    source: str


def uri_of(path: str) -> str:
    """The path as a URI reference: absolute paths with the file scheme, relative ones as they are.

    Every byte outside RFC 3986's unreserved set is escaped, so a colon in a name starts no scheme.
    """
    name = os.fsencode(os.path.normpath(path))
    quoted = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in name)
    return f"file:///{quoted.lstrip('/')}" if name.startswith(b"/") else quoted
