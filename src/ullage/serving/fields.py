"""What JSON values may be: how a field is read, what is said when it is wrong, its JSON Schema.

One description serves the parser and the OpenAPI document, so the two cannot disagree. Which
fields a request has is `protocol`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ullage.errors import BadInput

Json = dict[str, Any]
MAX_INT32 = 2**31 - 1
SHOWN_CHARS = 80


class BadRequest(BadInput):
    """The body is not a request that can be served; becomes a 400."""


class Kind(Protocol):
    """What a field may hold."""

    def read(self, value: Any, field: str) -> Any:
        """The value as the server uses it. Raises BadRequest naming `field`."""

    def schema(self) -> Json:
        """The same in JSON Schema."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body. null means absent; `default` is what then holds, as read."""

    name: str
    kind: Kind
    text: str
    default: Any = None
    required: bool = False


def read_fields(
    fields: Sequence[Field], body: Mapping[str, Any], where: str = ""
) -> dict[str, Any]:
    """Every field by name, absent ones with their defaults. Raises BadRequest; unknown ones too."""
    known = {field.name: field for field in fields}
    for name in body:
        if name not in known:
            raise BadRequest("this field is not known here", field=f"{where}{name[:SHOWN_CHARS]}")
    values = {}
    for name, field in known.items():
        value = body.get(name)
        if value is not None:
            values[name] = field.kind.read(value, f"{where}{name}")
        elif field.required:
            raise BadRequest("it is missing", field=f"{where}{name}", expected=field.text)
        else:
            values[name] = field.default
    return values


def schema_of(fields: Sequence[Field]) -> Json:
    """An object with exactly these fields."""
    properties = {}
    for field in fields:
        schema = field.kind.schema()
        if not field.required and schema:
            schema = {"anyOf": [schema, {"type": "null"}]}
        properties[field.name] = {**schema, "description": field.text}
    required = [field.name for field in fields if field.required]
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


@dataclass(frozen=True, slots=True)
class Anything:
    """Read by nobody: it changes no answer."""

    def read(self, value: Any, field: str) -> Any:  # noqa: ARG002
        return value

    def schema(self) -> Json:
        return {}


@dataclass(frozen=True, slots=True)
class Boolean:
    def read(self, value: Any, field: str) -> bool:
        if not isinstance(value, bool):
            raise BadRequest(show(value), field=field, expected="true or false")
        return value

    def schema(self) -> Json:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Integer:
    """Written with or without a point, as JSON Schema has it: 5.0 is an integer."""

    low: int
    high: int = MAX_INT32

    def read(self, value: Any, field: str) -> int:
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not self.low <= value <= self.high:
            raise BadRequest(
                show(value), field=field, expected=f"an integer from {self.low} to {self.high}"
            )
        return value

    def schema(self) -> Json:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Number:
    """`above`: the lower end itself is not allowed."""

    low: float
    high: float
    above: bool = False

    def read(self, value: Any, field: str) -> float:
        # NaN is in no range; a bool is not a number here.
        fine = type(value) in (int, float) and self.low <= value <= self.high
        if fine and not (self.above and value == self.low):
            return float(value)
        above = f"above {self.low:g}, up to" if self.above else f"from {self.low:g} to"
        raise BadRequest(show(value), field=field, expected=f"a number {above} {self.high:g}")

    def schema(self) -> Json:
        low = "exclusiveMinimum" if self.above else "minimum"
        return {"type": "number", low: self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Text:
    """A string. NUL is refused where `clean`: no path or name holds it."""

    low: int = 0
    high: int | None = None
    clean: bool = False

    def read(self, value: Any, field: str) -> str:
        fine = isinstance(value, str) and len(value) >= self.low
        if not fine or (self.high is not None and len(value) > self.high):
            some = "a string" if self.high is None else f"a string of {self.low} to {self.high}"
            raise BadRequest(show(value), field=field, expected=some)
        if self.clean and "\0" in value:
            raise BadRequest(show(value), field=field, expected="a string without NUL")
        assert isinstance(value, str)
        return value

    def schema(self) -> Json:
        return {
            "type": "string",
            **({"minLength": self.low} if self.low else {}),
            **({"maxLength": self.high} if self.high is not None else {}),
            **({"pattern": r"^[^\u0000]*$"} if self.clean else {}),
        }


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of values of one kind, read to a tuple."""

    item: Kind
    low: int = 0
    high: int | None = None
    what: str = "values"

    def read(self, value: Any, field: str) -> tuple[Any, ...]:
        fine = isinstance(value, list) and len(value) >= self.low
        if not fine or (self.high is not None and len(value) > self.high):
            size = "" if self.high is None else f"{self.low} to {self.high} "
            raise BadRequest(show(value), field=field, expected=f"a list of {size}{self.what}")
        return tuple(self.item.read(item, f"{field}[{at}]") for at, item in enumerate(value))

    def schema(self) -> Json:
        return {
            "type": "array",
            "items": self.item.schema(),
            **({"minItems": self.low} if self.low else {}),
            **({"maxItems": self.high} if self.high is not None else {}),
        }


@dataclass(frozen=True, slots=True)
class OneOrMany:
    """A value, or a list of them; read to a tuple."""

    many: ListOf

    def read(self, value: Any, field: str) -> tuple[Any, ...]:
        if isinstance(value, list):
            return self.many.read(value, field)
        return (self.many.item.read(value, field),)

    def schema(self) -> Json:
        return {"anyOf": [self.many.item.schema(), self.many.schema()]}


@dataclass(frozen=True, slots=True)
class Only:
    """Values with which a field that is not supported changes nothing; others are refused."""

    values: tuple[Any, ...]

    def read(self, value: Any, field: str) -> Any:
        if any(_same(value, accepted) for accepted in self.values):
            return value
        expected = " or ".join(show(accepted) for accepted in self.values)
        raise BadRequest(f"{show(value)} is not supported", field=field, expected=expected)

    def schema(self) -> Json:
        return {"enum": list(self.values)}


@dataclass(frozen=True, slots=True)
class Record:
    """An object with fields of its own; read to a mapping."""

    fields: tuple[Field, ...]

    def read(self, value: Any, field: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise BadRequest(show(value), field=field, expected="an object")
        return read_fields(self.fields, value, f"{field}.")

    def schema(self) -> Json:
        return schema_of(self.fields)


def show(value: Any) -> str:
    """A value in an error's sentence: as JSON when short, else what it is."""
    if isinstance(value, list) and len(value) > SHOWN_CHARS:
        return f"a list of {len(value)} values"
    if isinstance(value, dict) and len(value) > SHOWN_CHARS:
        return f"an object of {len(value)} fields"
    if isinstance(value, int) and value.bit_length() > 256:
        return "a huge number"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "a deeply nested value"
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "huge numbers"
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "…"


def _same(value: Any, accepted: Any) -> bool:
    """Equality of JSON values: true is not 1 there, as it is in Python."""
    return bool(value == accepted) and isinstance(value, bool) == isinstance(accepted, bool)
