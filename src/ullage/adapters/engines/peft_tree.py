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
    that PEFT has no layer for. `base` gives the sides, None where the base's tree lists none.
    `unsure`: the class builds it for some configurations, and it is not known for this one."""

    path: str
    kind: Kind
    base: BaseModule | None = None
    parameters: tuple[str, ...] = ()
    class_name: str = ""
    unsure: bool = False


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
    parameter that they become a part of. `optional` are modules that some configurations, or some
    layers, do not have."""

    modules: Mapping[str, str | Sequence[str]]
    optional: frozenset[str] = frozenset()
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
        self._alike: bool | None = None
        self._expert_layers = {m.layer for m in base.modules.values() if m.num_experts}
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
        optional = pattern in self.record.optional
        if not isinstance(recorded, str):
            return self._experts(path, tuple(recorded), optional=optional)
        word, _, class_name = recorded.partition(" ")
        match = self.base.find(path)
        if match is None and (word != "plain" or optional) and self._has(pattern):
            return None
        base = match.module if match is not None else None
        if word == "plain":
            return Place(path, "plain", base, class_name=class_name)
        present = self._is_built(path) if optional and base is None else True
        if present is False:
            return None
        made: Kind = "embedding" if word == "embedding" else "linear"
        return Place(path, made, base, unsure=present is None)

    def _experts(self, path: str, parameters: tuple[str, ...], *, optional: bool) -> Place | None:
        """Stacked experts; the base's layers tell which of them are mixtures."""
        present: bool | None = True
        stack, _, rest = _pattern(path).partition("{i}")
        if optional and rest and stack in self._stacks:
            present = int(path[len(stack) :].partition(".")[0]) in self._expert_layers
        elif optional:
            present = self._is_built(path)
        if present is False:
            return None
        return Place(path, "experts", None, parameters, unsure=present is None)

    def _is_built(self, path: str) -> bool | None:
        """Whether this configuration has an optional module that the base's tree does not list.

        A tower's is there where the tower is. The language model's is not, if the base's names are
        the record's, for it lists all of them. None where neither tells."""
        inside = path.startswith(tuple(self._stacks))
        if not inside:
            for modality in ("vision", "audio"):
                if modality in path:
                    return any(tower.modality == modality for tower in self.base.spec.towers)
        root = f"{self.base.root}." if self.base.root and not self.base.spec.towers else ""
        inside = inside or bool(root and path.startswith(root))
        return False if inside and self._is_named_alike() else None

    def _is_named_alike(self) -> bool:
        """Whether the record has all of the base's modules by their names in the checkpoint."""
        if self._alike is None:
            self._alike = all(
                _pattern(path) in self.record.modules
                for path, module in self.base.modules.items()
                if not module.num_experts and module.tied_to is None
            )
        return self._alike

    def doubt(self, path: str) -> str | None:
        """What is not known of the module at `path`, None when its place, or that it has none, is.

        Absence is known only where the record speaks of the module, or the base has none either."""
        if not self.known or not path:
            return None
        new = self.renamed(path, "base_model.model.")
        for tried in (path, new):
            owner = tried.rpartition(".")[0]
            place = self.find(tried) or self.find(owner)
            if (
                place is not None
                and place.unsure
                and (place.path == tried or tried.rpartition(".")[2] in place.parameters)
            ):
                return f"whether this configuration's model has {place.path}"
            if place is not None or _pattern(tried) in self.record.modules:
                return None
        match = self.base.find(path)
        if match is None or match.naming != "checkpoint" or self.merged(new) is not None:
            return None
        rest = _pattern(path).partition("{i}")[2]
        if rest and any(pattern.partition("{i}")[2] == rest for pattern in self.record.modules):
            return None  # the library has it, below another root
        return f"whether the library builds {path}, which the checkpoint has and no record"

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
        optional=frozenset(raw["optional"]),
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
