"""YAML with lines, within bounds: every document of a stream as `Node`s.

Holds the bounds (size, depth, what aliases expand to) and the merge key. PyYAML does the parsing,
is imported when a file is YAML, and constructs no objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ullage.errors import BadInput

MAX_DEPTH = 64
MAX_NODES = 50_000


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its line: a text, a sequence or a mapping. `kind` tells YAML's plain types."""

    value: str | tuple[Node, ...] | Mapping[str, Node]
    line: int
    kind: str

    def at(self, *keys: str) -> Node | None:
        """What lies under nested keys, None where one is missing or is no mapping."""
        node: Node | None = self
        for key in keys:
            if node is None or not isinstance(node.value, Mapping):
                return None
            node = node.value.get(key)
        return node

    def text(self) -> str | None:
        """A scalar's text as written, None for null and for what is no scalar."""
        return self.value if isinstance(self.value, str) and self.kind != "null" else None

    def number(self) -> float | None:
        """A scalar that is a plain number of at most 18 digits, else None."""
        text = self.text()
        if text is None or len(text) > 18 or not text.replace(".", "", 1).isdecimal():
            return None
        return float(text) if text.isascii() else None

    def truth(self) -> bool | None:
        """A boolean, None when it is none."""
        text = (self.text() or "").lower()
        if self.kind != "bool":
            return None
        return text in ("true", "yes", "on")

    def elements(self) -> tuple[Node, ...]:
        """A sequence's elements; empty for everything else."""
        return self.value if isinstance(self.value, tuple) else ()

    def list_at(self, *keys: str) -> tuple[Node, ...]:
        """The elements of the sequence under nested keys; empty where there is none."""
        node = self.at(*keys)
        return () if node is None else node.elements()

    def members(self) -> Mapping[str, Node]:
        """A mapping's members; empty for everything else."""
        return self.value if isinstance(self.value, Mapping) else {}


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it, parents first, each shared one once."""
    seen: set[int] = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        below = node.members().values() if isinstance(node.value, Mapping) else node.elements()
        waiting.extend(reversed(tuple(below)))


def shifted(node: Node, lines: int) -> Node:
    """The node with all its lines further down: text inside a document, read as one."""
    value = node.value
    if isinstance(value, tuple):
        value = tuple(shifted(part, lines) for part in value)
    elif isinstance(value, Mapping):
        value = {key: shifted(part, lines) for key, part in value.items()}
    return Node(value, node.line + lines, node.kind)


def as_json(node: Node) -> str:
    """The value as JSON text; scalars by YAML's own kinds."""
    import json  # few files hold objects

    return json.dumps(_plain(node))


def _plain(node: Node) -> object:
    if isinstance(node.value, Mapping):
        return {key: _plain(part) for key, part in node.value.items()}
    if isinstance(node.value, tuple):
        return [_plain(part) for part in node.value]
    if node.kind == "null":
        return None
    if node.kind == "bool":
        return node.truth()
    if node.kind in ("int", "float") and (number := node.number()) is not None:
        return int(number) if number == int(number) and "." not in node.value else number
    return node.value


def read_yaml(text: str, file: str) -> list[Node]:
    """Every document of the stream that is not empty.

    Raises:
        BadInput: it is not YAML, or leaves the bounds.
    """
    import yaml  # 15 ms that only YAML files cost

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    expected = "YAML as kubectl, Helm or compose read it"
    try:
        depth = 0
        for number, event in enumerate(yaml.parse(text, Loader=loader)):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise BadInput(
                    f"nested deeper than {MAX_DEPTH} levels", file=file,
                    field=f"line {event.start_mark.line + 1}" if event.start_mark else None,
                )  # fmt: skip
            if number > MAX_NODES:
                raise BadInput(f"more than {MAX_NODES:,} values", file=file)
        nodes = [n for n in yaml.compose_all(text, Loader=loader) if n is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        raise BadInput(
            f"is not YAML ({reason})",
            file=file,
            field=None if mark is None else f"line {mark.line + 1}",
            expected="a rendered manifest (`helm template`)" if "{{" in text else expected,
        ) from error
    return [_Conversion(file).node(node) for node in nodes]


class _Conversion:
    def __init__(self, file: str) -> None:
        self.file = file
        self.done: dict[int, tuple[Node, int]] = {}
        self.open: set[int] = set()

    def node(self, source: Any) -> Node:
        return self.convert(source)[0]

    def convert(self, source: Any) -> tuple[Node, int]:
        """The node, and how many values it holds when aliases are written out."""
        if id(source) in self.done:
            return self.done[id(source)]
        line = source.start_mark.line + 1
        if id(source) in self.open:
            raise self.error(line, "an alias that holds itself")
        self.open.add(id(source))
        made: tuple[Node, int]
        if isinstance(source.value, str):
            line += source.style in ("|", ">")  # the text of a block starts below its mark
            made = Node(source.value, line, source.tag.rsplit(":", 1)[-1]), 1
        elif source.id == "sequence":
            parts = [self.convert(part) for part in source.value]
            made = Node(tuple(n for n, _ in parts), line, "seq"), 1 + sum(s for _, s in parts)
        else:
            made = self.mapping(source, line)
        if made[1] > MAX_NODES:
            raise self.error(line, f"aliases that expand to more than {MAX_NODES:,} values")
        self.open.discard(id(source))
        self.done[id(source)] = made
        return made

    def mapping(self, source: Any, line: int) -> tuple[Node, int]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        size = 1
        for key, value in source.value:
            node, below = self.convert(value)
            size += 1 + below
            if not isinstance(key.value, str):
                raise self.error(key.start_mark.line + 1, "a key that is no text")
            if key.tag.endswith(":merge"):
                for part in node.elements() or (node,):
                    merged = {**part.members(), **merged}
            elif key.value in own:
                raise self.error(key.start_mark.line + 1, f"the key {key.value[:60]!r} twice")
            else:
                own[key.value] = node
        return Node({**merged, **own}, line, "map"), size

    def error(self, line: int, found: str) -> BadInput:
        return BadInput(found, file=self.file, field=f"line {line}")
