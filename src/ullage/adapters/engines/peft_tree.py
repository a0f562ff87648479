"""The module tree that transformers 5.24 builds, in which PEFT puts its layers: `trained_tree`.

Holds trees and renames of older keys, per class as recorded from the library
(`transformers_5_24.jsonl`, made by tools/record_transformers_trees.py). What becomes of an adapter
is `peft.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from ullage.adapters.base import BaseModule, BaseTree

TABLE = "transformers_5_24.jsonl"
Kind = Literal["linear", "conv1d", "embedding", "experts", "plain"]
_KINDS: dict[str, Kind] = {
    "linear": "linear", "conv1d": "linear", "expert": "linear", "router": "linear",
    "head": "linear", "embedding": "embedding",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """One module of the trained tree. `parameters` are of stacked experts; `class_name` of a module
    that PEFT has no layer for. `base` gives the sides, None where the base's tree lists none."""

    path: str
    kind: Kind
    base: BaseModule | None = None
    parameters: tuple[str, ...] = ()
    class_name: str = ""


@dataclass(frozen=True, slots=True)
class Rename:
    """transformers' WeightRenaming: the first match of `pattern` becomes its replacement, within
    the part of the model that `scopes` name (core_model_loading.py of 5.24)."""

    pattern: re.Pattern[str]
    replacement: str
    scopes: tuple[str, ...]

    def apply(self, key: str) -> str:
        prefix = next((s for s in self.scopes if key.startswith(s)), None)
        if prefix is None:
            return key
        rest = key[len(prefix) :]
        match = self.pattern.search(rest)
        if match is None:
            return key
        new = self.replacement
        if r"\1" in new:
            name = next(n for n, value in match.groupdict().items() if value is not None)
            new = new.replace(r"\1", match.group(self.pattern.groupindex[name] + 1))
        return prefix + rest.replace(match.group(0), new, 1)


# conversion_mapping.py, "legacy", which every converted model has: the one that is of modules.
_LEGACY = Rename(
    re.compile(
        r"(?P<g0>^model\.language_model\.model(?!\w))|(?P<g1>^language_model\.model\.model(?!\w))"
    ),
    "model.language_model",
    ("",),
)


@dataclass(frozen=True, slots=True)
class Record:
    """One class as recorded. `merges` maps expressions of modules of single experts to the stacked
    parameter that they become a part of."""

    modules: Mapping[str, str | Sequence[str]]
    converted: bool = False
    moe: str | None = None
    output: str | None = None
    targets: tuple[str, ...] = ()
    renames: tuple[Rename, ...] = ()
    merges: tuple[tuple[re.Pattern[str], str], ...] = ()


class TrainedTree:
    """The tree of one base. Without a record its modules are the checkpoint's."""

    def __init__(self, base: BaseTree, record: Record | None) -> None:
        self.base = base
        self.known = record is not None
        self.record = record or Record({})
        # A class without a head (BertModel) is the part below the root of those that have one.
        name = base.spec.architecture
        self.headless = not self.known and name.endswith("Model") and "LMHead" not in name
        self._namings: tuple[str, ...] = ("checkpoint", "bare")
        if base.root:
            self._namings = ("bare",) if self.headless else ("checkpoint",)
        self._stacks = {pattern.partition("{i}")[0] for pattern in self._listed()}

    def _listed(self) -> Iterator[str]:
        """The patterns of repeated modules that the base's tree has too."""
        for pattern in self.record.modules:
            if "{i}" in pattern and self._has(pattern):
                yield pattern

    def _has(self, pattern: str) -> bool:
        """Whether the base's tree has the module in any layer."""
        for layer in range(self.base.num_layers):
            path = pattern.replace("{i}", str(layer), 1).replace("{i}", "0")
            if self.base.find(path) is not None:
                return True
        return False

    def renamed(self, path: str, prefix: str) -> str:
        """The path as the library's renames turn it (PEFT 0.21.2,
        utils/transformers_weight_conversion.py). A new path that the stored key, with its
        `prefix`, ends with is taken for one that only lost its beginning, and stays as it was."""
        new = path
        for rename in (*self.record.renames, _LEGACY):
            new = rename.apply(new)
        return path if (prefix + path).endswith(new) else new

    def merged(self, path: str) -> tuple[str, str] | None:
        """(path of the experts' module, parameter) that a single expert's module is a part of."""
        for pattern, target in self.record.merges:
            match = pattern.search(path)
            if match is not None and match.end() == len(path):
                owner, _, parameter = (path[: match.start()] + target.lstrip(".")).rpartition(".")
                return owner, parameter
        return None

    def find(self, path: str) -> Place | None:
        """The module at `path`, None when the tree has none."""
        if not self.known:
            found = self.base.find(path)
            if found is None or found.naming not in self._namings:
                return None
            kind = _KINDS.get(found.module.kind)
            return Place(path, kind, found.module) if kind else None
        pattern = _pattern(path)
        recorded = self.record.modules.get(pattern)
        if recorded is None or not self._in_range(path, pattern):
            return None
        if not isinstance(recorded, str):
            return Place(path, "experts", None, tuple(recorded))
        word, _, class_name = recorded.partition(" ")
        match = self.base.find(path)
        if match is None and word != "plain" and self._has(pattern):
            return None
        base = match.module if match is not None else None
        if word == "plain":
            return Place(path, "plain", base, class_name=class_name)
        return Place(path, "embedding" if word == "embedding" else "linear", base)

    def _in_range(self, path: str, pattern: str) -> bool:
        start = pattern.partition("{i}")[0]
        if start == pattern or start not in self._stacks:
            return True
        return int(path[len(start) :].partition(".")[0]) < self.base.num_layers

    def parameter(self, owner: str, name: str) -> BaseModule | None:
        """The base's own entry of a stacked parameter, where it has one."""
        match = self.base.find(f"{owner}.{name}")
        return match.module if match is not None and match.module.num_experts else None

    def paths(self) -> Iterator[str]:
        """Every module's path, those of repeated parts once per layer of the base."""
        if not self.known:
            root = f"{self.base.root}." if self.headless and self.base.root else ""
            yield from (p.removeprefix(root).replace("{e}", "0") for p in self.base.modules)
            return
        for pattern in self.record.modules:
            start, found, rest = pattern.partition("{i}")
            number = self.base.num_layers if found and start in self._stacks else 1
            for layer in range(number):
                path = f"{start}{layer}{rest.replace('{i}', '0')}" if found else pattern
                if self.find(path) is not None:
                    yield path


def trained_tree(base: BaseTree) -> TrainedTree:
    """The tree of the base model's class as the library builds it."""
    return TrainedTree(base, record_of(base.spec.architecture))


@lru_cache(maxsize=8)
def record_of(name: str) -> Record | None:
    """What was recorded of one class, None for a class that was not."""
    start = json.dumps({"class": name})[:-1] + ","
    with (Path(__file__).parent / TABLE).open(encoding="utf-8") as lines:
        line = next((text for text in lines if text.startswith(start)), None)
    if line is None:
        return None
    raw = json.loads(line)
    return Record(
        modules=raw["modules"],
        converted=raw["converted"],
        moe=raw["moe"],
        output=raw["output"],
        targets=tuple(raw["targets"]),
        renames=tuple(
            Rename(re.compile(pattern), targets[0], _scopes(*scope))
            for pattern, targets, scope in raw["renames"]
        ),
        merges=tuple(
            (_module_pattern(source), target)
            for sources, target, _ in raw["merges"]
            for source in sources
        ),
    )


def _scopes(scope: str | None, base: str | None) -> tuple[str, ...]:
    if scope is None:
        return ("",)
    below, above = (f"{part}." if part else "" for part in (scope, base))
    return above + below, below


def _module_pattern(source: str) -> re.Pattern[str]:
    """`mlp.experts.*.w1.weight` as an expression of the module's path."""
    module = source.removesuffix("$").removesuffix(".weight").replace(r"\.", ".")
    parts = [r"\d+" if part == "*" else re.escape(part) for part in module.lstrip("^.").split(".")]
    return re.compile(r"(?<![^.])" + r"\.".join(parts))


def _pattern(path: str) -> str:
    head, *rest = path.split(".")
    return ".".join([head, *("{i}" if part.isdecimal() else part for part in rest)])
