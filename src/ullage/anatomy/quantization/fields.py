"""Checked access to one section of a quantisation configuration.

Holds the reading of typed fields with one-sentence errors; what they mean is in
`methods.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ullage.errors import MalformedConfig

MAX_PATTERNS = 100_000
MAX_PATTERN_CHARS = 1_000


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object of a configuration: its values, the file and the dotted path for messages."""

    values: Mapping[str, object]
    file: str
    path: str

    def error(self, key: str, found: object, expected: str) -> MalformedConfig:
        shown = repr(found)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return MalformedConfig(
            f"found {shown}", file=self.file, field=self._field(key), expected=expected
        )

    def _field(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def first(self, *keys: str) -> str:
        """The first of the keys that holds something, else the first of all."""
        return next((key for key in keys if self.values.get(key) is not None), keys[0])

    def integer(self, key: str, default: int | None, low: int, high: int) -> int:
        value = self.values.get(key, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, value, f"a whole number from {low} to {high}")
        return value

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key, default)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.error(key, value, "a string")
        return value[:200]

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def section(self, key: str) -> Fields | None:
        """The object under the key, or None when it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, value, "an object")
        return Fields(value, self.file, self._field(key))

    def sections(self) -> list[tuple[str, Fields]]:
        """Every value as an object, by key."""
        return [(key, part) for key in self.values if (part := self.section(key)) is not None]

    def strings(self, *keys: str) -> tuple[str, ...]:
        """The list of strings under the first of the keys that holds one; () when none does."""
        key = self.first(*keys)
        value = self.values.get(key)
        if value is None:
            return ()
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple) or len(value) > MAX_PATTERNS:
            raise self.error(key, value, "a list of strings")
        for item in value:
            if not isinstance(item, str) or len(item) > MAX_PATTERN_CHARS:
                raise self.error(key, item, f"a string of at most {MAX_PATTERN_CHARS} characters")
        return tuple(value)
