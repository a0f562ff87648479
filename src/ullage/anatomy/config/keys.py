"""One section of a configuration, read key by key: types checked, sources kept, leftovers listed.

Holds the reader (`Section`), the state of one reading (`Reading`) and strict JSON parsing. It does
not know what any key means beyond its spellings; that is `families/table.py` and the part readers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

from ullage.anatomy.config.spellings import (
    IRRELEVANT,
    IRRELEVANT_ENDINGS,
    IRRELEVANT_STARTS,
    SPELLINGS,
)
from ullage.anatomy.spec import FieldSource, Unknown
from ullage.errors import MalformedConfig

T = TypeVar("T")
Mode = Literal["likely", "low", "high"]
Widens = Literal["weights", "kv", "state", "flops"]

MAX_INTEGER = 1 << 40
MAX_HEADS = 1 << 16
MAX_WIDTH = 1 << 24
MAX_DEPTH = 64
_SHOWN = 60
_ABSENT = object()


def show(value: object) -> str:
    """A short, printable form of any JSON value, for messages and sources."""
    if isinstance(value, Mapping):
        return f"an object of {len(value)} keys"
    if isinstance(value, list | tuple):
        if len(value) > 8:
            return f"a list of {len(value)}"
        return "[" + ", ".join(show(item) for item in value) + "]"
    if isinstance(value, str):
        text = json.dumps(value[: _SHOWN + 1], ensure_ascii=False)
        return text if len(value) <= _SHOWN else text[:_SHOWN] + '…"'
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1 << 200:
        return f"an integer of {value.bit_length()} bits"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def parse_json(text: str, *, file: str) -> object:
    """`text` as JSON. Duplicate keys are an error; Infinity is let through (Nemotron's limits).

    Raises:
        MalformedConfig: not JSON, a duplicate key, NaN, or nested too deeply.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise MalformedConfig(f"the key {show(key)} appears twice", file=file)
                seen.add(key)
        return made

    def constant(word: str) -> float:
        if word == "NaN":
            raise MalformedConfig("NaN is not a value", file=file, expected="a number")
        return float(word.replace("Infinity", "inf"))

    def integer(digits: str) -> int:
        if len(digits) > 400:
            raise MalformedConfig(f"an integer of {len(digits)} digits", file=file)
        return int(digits)

    try:
        return json.loads(
            text, object_pairs_hook=unique, parse_constant=constant, parse_int=integer
        )
    except RecursionError:
        raise MalformedConfig("JSON nested too deeply", file=file) from None
    except ValueError as error:
        raise MalformedConfig(f"not JSON: {error}", file=file) from None


class Reading:
    """The state of one pass over one file: sources, unknowns, and which bracket is wanted.

    `mode` picks what `decide` answers, so that the same code makes the likely, low and high spec.
    """

    __slots__ = ("file", "mode", "sources", "unknowns")

    def __init__(self, file: str, mode: Mode = "likely") -> None:
        self.file = file
        self.mode = mode
        self.sources: dict[str, FieldSource] = {}
        self.unknowns: dict[str, Unknown] = {}

    def source(self, field: str, value: object, source: str) -> None:
        """Remember where `field` came from (the first word wins)."""
        if field not in self.sources:
            self.sources[field] = FieldSource(field, show(value), source)

    def unknown(self, field: str, found: str, *widens: Widens) -> None:
        """Remember that `field` was not understood and which results that widens."""
        self.unknowns.setdefault(field, Unknown(field, found, widens))

    def decide(
        self, field: str, found: str, *, likely: T, low: T, high: T, widens: Iterable[Widens]
    ) -> T:
        """One undetermined fact: noted as Unknown, answered by the bracket being built."""
        if low == high:
            return low
        self.unknown(field, found, *widens)
        return {"likely": likely, "low": low, "high": high}[self.mode]

    def error(
        self, found: str, *, field: str | None = None, expected: str | None = None
    ) -> MalformedConfig:
        return MalformedConfig(found, file=self.file, field=field, expected=expected)


class Section:
    """One JSON object of the configuration, with the defaults of its config class behind it.

    Every getter takes a field's standard name; other spellings come from `SPELLINGS`. A value is
    taken from the file, else from the class's defaults, else from the caller's `default`.
    An explicit null counts as absent for required fields and as None for optional ones.
    """

    __slots__ = ("_used", "defaults", "label", "origins", "path", "reading", "values")

    def __init__(
        self,
        values: Mapping[str, object],
        reading: Reading,
        path: str = "",
        defaults: Mapping[str, object] | None = None,
        label: str = "",
    ) -> None:
        self.values = values
        self.reading = reading
        self.path = path
        self.defaults: Mapping[str, object] = defaults or {}
        self.label = label
        self.origins: dict[str, str] = {}
        self._used: set[str] = set()

    def flatten(self, name: str) -> None:
        """Make the keys of the nested object `name` readable as this section's own."""
        nested = self.values.get(name)
        if isinstance(nested, Mapping):
            self._used.add(name)
            self.values = {**nested, **self.values}
            self.origins.update((key, f"{name}.{key}") for key in nested)
        inner = self.defaults.get(name)
        if isinstance(inner, Mapping):
            self.defaults = {**inner, **self.defaults}

    # --- finding -------------------------------------------------------------------------------

    def field(self, name: str) -> str:
        return self.path + name

    def error(self, name: str, value: object, expected: str) -> MalformedConfig:
        return self.reading.error(f"found {show(value)}", field=self.field(name), expected=expected)

    def names(self, name: str) -> tuple[str, ...]:
        return (name, *SPELLINGS.get(name, ()))

    def has(self, name: str) -> bool:
        """Whether the file itself holds a value that is not null (under any spelling)."""
        return any(self.values.get(n) is not None for n in self.names(name))

    def knows(self, name: str) -> bool:
        """Whether the file or the class's defaults hold this key at all, null included."""
        return any(n in self.values or n in self.defaults for n in self.names(name))

    def ignore(self, *names: str) -> None:
        """Mark keys as looked at and of no consequence here."""
        self._used.update(names)

    def find(self, name: str, *, null_counts: bool = False) -> object:
        """The raw value of `name`, or `_ABSENT`; a spelling that disagrees stays unread."""
        found: object = _ABSENT
        found_as = ""
        for spelling in self.names(name):
            if spelling not in self.values:
                continue
            value = self.values[spelling]
            if value is None and not null_counts:
                self._used.add(spelling)
                continue
            if found is _ABSENT or (found is None and value is not None):
                found, found_as = value, spelling
                self._used.add(spelling)
            elif value is None or value == found:
                self._used.add(spelling)
        if found is not _ABSENT:
            origin = self.origins.get(found_as, found_as)
            self.reading.source(self.field(name), found, f"config: {self.path}{origin}")
            return found
        for spelling in self.names(name):
            if self.defaults.get(spelling) is not None or (
                null_counts and spelling in self.defaults
            ):
                value = self.defaults[spelling]
                self.reading.source(self.field(name), value, f"default: {self.label}")
                return value
        return _ABSENT

    def _fallback(self, name: str, default: T | None, why: str) -> T:
        if default is None:
            raise self.reading.error("missing", field=self.field(name), expected="a value")
        self.reading.source(self.field(name), default, why or "default: the family's")
        return default

    # --- typed getters -------------------------------------------------------------------------

    def integer(
        self,
        name: str,
        default: int | None = None,
        *,
        why: str = "",
        minimum: int = 1,
        maximum: int = MAX_INTEGER,
    ) -> int:
        value = self.find(name)
        if value is _ABSENT:
            return self._fallback(name, default, why)
        return self._check_integer(name, value, minimum, maximum)

    def optional_integer(
        self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INTEGER
    ) -> int | None:
        value = self.find(name, null_counts=True)
        if value is _ABSENT:
            return default
        if value is None or value is False:  # Hunyuan and others write false for "none"
            return None
        return self._check_integer(name, value, minimum, maximum)

    def _check_integer(self, name: str, value: object, minimum: int, maximum: int) -> int:
        if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
            value = int(value)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # Hunyuan repeats one number per layer
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, value, "an integer")
        if not minimum <= value <= maximum:
            raise self.error(name, value, f"an integer from {minimum} to {maximum}")
        return value

    def number(
        self,
        name: str,
        default: float | None = None,
        *,
        why: str = "",
        minimum: float = 0.0,
        maximum: float = 1e300,
    ) -> float:
        value = self.find(name)
        if value is _ABSENT:
            return self._fallback(name, default, why)
        return self._check_number(name, value, minimum, maximum)

    def optional_number(
        self, name: str, *, minimum: float = 0.0, maximum: float = 1e300
    ) -> float | None:
        value = self.find(name, null_counts=True)
        if value is _ABSENT or value is None:
            return None
        return self._check_number(name, value, minimum, maximum)

    def _check_number(self, name: str, value: object, minimum: float, maximum: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, value, "a number")
        if not minimum <= value <= maximum:
            raise self.error(name, value, f"a number from {minimum:g} to {maximum:g}")
        return float(value)

    def boolean(self, name: str, default: bool | None = None, *, why: str = "") -> bool:
        value = self.find(name)
        if value is _ABSENT:
            return self._fallback(name, default, why)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None, *, why: str = "") -> str:
        value = self.find(name)
        if value is _ABSENT:
            return self._fallback(name, default, why)
        if not isinstance(value, str) or len(value) > 200:
            raise self.error(name, value, "a short string")
        return value

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if self.find(name) is not _ABSENT else None

    def optional_text_or_integer(self, name: str) -> str | int | None:
        """A value that is a word ("auto") or an integer; None when absent or null."""
        value = self.find(name, null_counts=True)
        if value is _ABSENT or value is None or isinstance(value, str):
            return value if isinstance(value, str) else None
        return self._check_integer(name, value, 0, MAX_INTEGER)

    def integers(
        self,
        name: str,
        *,
        length: int | None = None,
        minimum: int = 0,
        maximum: int = MAX_INTEGER,
    ) -> tuple[int, ...] | None:
        """A list of integers, or None when absent or null."""
        items = self._list(name, length)
        if items is None:
            return None
        return tuple(
            self._check_integer(f"{name}[{i}]", item, minimum, maximum)
            for i, item in enumerate(items)
        )

    def texts(self, name: str, *, length: int | None = None) -> tuple[str, ...] | None:
        """A list of strings, or None when absent or null."""
        items = self._list(name, length)
        if items is None:
            return None
        for i, item in enumerate(items):
            if not isinstance(item, str):
                raise self.error(f"{name}[{i}]", item, "a string")
        return tuple(str(item) for item in items)

    def _list(self, name: str, length: int | None) -> list[object] | None:
        value = self.find(name)
        if value is _ABSENT:
            return None
        if isinstance(value, tuple):
            value = list(value)
        if not isinstance(value, list):
            raise self.error(name, value, "a list")
        if length is not None and len(value) != length:
            raise self.error(name, value, f"a list of {length}")
        return value

    def section(self, name: str, defaults: Mapping[str, object] | None = None) -> Section | None:
        """A nested object, or None when absent or null."""
        value = self.find(name)
        if value is _ABSENT:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, value, "an object")
        return Section(value, self.reading, f"{self.path}{name}.", defaults, self.label)

    # --- leftovers -----------------------------------------------------------------------------

    def unread(self) -> list[str]:
        """Keys of this object that nobody read and that may matter, dotted."""
        return [
            self.path + self.origins.get(key, key)
            for key in self.values
            if key not in self._used
            and self.values[key] is not None
            and key not in IRRELEVANT
            and not key.startswith(IRRELEVANT_STARTS)
            and not key.endswith(IRRELEVANT_ENDINGS)
        ]
