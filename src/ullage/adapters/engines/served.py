"""The module tree that vLLM serves, got from the base model's: `served_tree`.

Holds renames, packed modules and towers, per architecture as recorded from a real vLLM
(`vllm_0_32.jsonl`, made by tools/record_vllm_lora.py). What becomes of an adapter is `vllm.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from ullage.adapters.base import MAX_PATH_CHARS, BaseModule, BaseTree, without_root

TABLES = {"0.32": "vllm_0_32.jsonl"}
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Renames:
    """Renames in the order in which they are tried; each list's rules all apply, one after another.

    As vLLM 0.32's WeightsMapper: library renames, regular expressions, substrings (once each),
    prefixes, suffixes (model_executor/models/utils.py).
    """

    renaming: tuple[tuple[re.Pattern[str], str], ...] = ()
    regex: tuple[tuple[re.Pattern[str], str], ...] = ()
    substr: Pairs = ()
    prefix: Pairs = ()
    suffix: Pairs = ()

    def apply(self, key: str) -> str:
        """`key` renamed."""
        for pattern, new in self.renaming:
            match = pattern.search(key)
            if match is not None:
                filled = new.replace(r"\1", match.group(1)) if r"\1" in new else new
                key = key.replace(match.group(0), filled, 1)
        for pattern, new in self.regex:
            key = pattern.sub(new, key)
        for old, new in self.substr:
            if old in key:
                key = key.replace(old, new, 1)
        for old, new in self.prefix:
            if key.startswith(old):
                key = key.replace(old, new, 1)
        for old, new in self.suffix:
            if key.endswith(old):
                key = new.join(key.rsplit(old, 1))
        return key


@dataclass(frozen=True, slots=True)
class ModuleKind:
    """What vLLM makes of modules of one path: its class, the LoRA class that wraps it (or None),
    how many slices of output it holds (0: undivided)."""

    kind: str
    wrapper: str | None
    slices: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """What one architecture says of adapters. `modules` maps path patterns ({i} for numbers),
    `aliases` second names of modules to their first.

    `built` is False where no model could be built when it was recorded; `modules` and `supported`
    are then empty. `language_model`, `connector`, `tower` are prefixes of a multimodal model that
    tells its parts, None for one that does not.
    """

    name: str
    built: bool
    supports_lora: bool
    class_name: str
    embedding_modules: tuple[str, ...]
    skip_prefixes: tuple[str, ...]
    is_3d: bool
    non_gated: bool
    tower_lora: bool
    packed: Mapping[str, tuple[str, ...]]
    renames: Renames | None
    language_model: tuple[str, ...] | None
    connector: tuple[str, ...]
    tower: tuple[str, ...]
    supported: tuple[str, ...]
    modules: Mapping[str, ModuleKind]
    aliases: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ServedPart:
    """One adapter-visible part of a served module: the name an adapter must give, the base module.

    `expert` is the template's {e} where the name has one; `base` is None for modules that the base
    tree does not list (towers).
    """

    name: str
    base: BaseModule | None


@dataclass(frozen=True, slots=True)
class ServedModule:
    """One module that vLLM wraps (or would): its path, its parts in slice order."""

    path: str
    kind: ModuleKind
    parts: tuple[ServedPart, ...]
    packed: bool

    @property
    def suffix(self) -> str:
        return self.path.rpartition(".")[2]


class ServedTree:
    """What a base model is served as. `visible` maps an adapter's (renamed) module name to where it
    goes: the served module and the number of the part; experts by template ({e})."""

    def __init__(
        self, architecture: Architecture, modules: Sequence[ServedModule], *, pooling: bool
    ) -> None:
        self.architecture = architecture
        self.modules: dict[str, ServedModule] = {m.path: m for m in modules}
        self.pooling = pooling
        self.visible: dict[str, tuple[ServedModule, int]] = {}
        for module in modules:
            for number, part in enumerate(module.parts):
                self.visible.setdefault(part.name, (module, number))

    def rename(self, text: str) -> str:
        """A key or path as vLLM renames it, `base_model.model.` kept aside."""
        renames = self.architecture.renames
        start = "base_model.model."
        if not text.startswith(start):
            return renames.apply(text) if renames is not None else text
        text = text.replace(start, "")
        return start + (renames.apply(text) if renames is not None else text)

    def find(self, name: str) -> tuple[ServedModule, int] | None:
        """The served module, and its part, for a renamed module name; None when there is none."""
        if len(name) > MAX_PATH_CHARS:
            return None
        for tried in (name, f"model.{name}" if self.pooling else name):
            found = self.visible.get(tried)
            if found is not None:
                return found
            found = self._expert(tried)
            if found is not None:
                return found
        tower = self.visible.get(_pattern(name))
        if tower is None or tower[0].parts[0].base is not None:
            return None
        return replace(tower[0], path=_filled(tower[0].path, name)), tower[1]

    def _expert(self, name: str) -> tuple[ServedModule, int] | None:
        before, experts, rest = name.partition(".experts.")
        number, dot, leaf = rest.partition(".")
        if not dot or not number.isdecimal():
            return None
        found = self.visible.get(f"{before}{experts}{{e}}.{leaf}")
        if found is None:
            return None
        base = found[0].parts[found[1]].base
        fits = base is None or int(number) < base.num_experts
        return found if fits else None

    def second_owner(self, path: str) -> ServedModule | None:
        """The served module that holds this one too, under a second name; None when none does."""
        pattern = _pattern(path)
        for alias, first in self.architecture.aliases.items():
            if first == pattern:
                return self.modules.get(_filled(alias.rpartition(".")[0], path))
        return None


@lru_cache(maxsize=8)
def architecture(name: str, version: str = "0.32") -> Architecture | None:
    """The record of one architecture, None when vLLM does not have it."""
    marker = b'{"architecture": ' + json.dumps(name).encode() + b","
    data = Path(__file__).with_name(TABLES[version]).read_bytes()
    start = data.find(marker)
    if start < 0:
        return None
    end = data.find(b"\n", start)
    return _architecture(json.loads(data[start:end]))


def _architecture(record: dict[str, object]) -> Architecture:
    towers = _object(record.get("towers"))
    modules = {
        path: ModuleKind(str(kind), None if wrapper is None else str(wrapper), int(str(slices)))
        for path, (kind, wrapper, slices) in _object(record.get("modules")).items()
    }
    mapper = record.get("mapper")
    return Architecture(
        name=str(record["architecture"]),
        built=bool(record["built"]),
        supports_lora=bool(record.get("supports_lora")),
        class_name=str(record.get("class") or record["architecture"]),
        embedding_modules=_names(record.get("embedding_modules")),
        skip_prefixes=_names(record.get("skip_prefixes")),
        is_3d=bool(record.get("is_3d")),
        non_gated=bool(record.get("non_gated")),
        tower_lora=bool(record.get("tower_lora")),
        packed={k: _names(v) for k, v in _object(record.get("packed")).items()},
        renames=None if mapper is None else _renames(_object(mapper)),
        language_model=_names(towers["language_model"]) if towers else None,
        connector=_names(towers.get("connector")),
        tower=_names(towers.get("tower_model")),
        supported=_names(record.get("supported")),
        modules=modules,
        aliases={k: str(v) for k, v in _object(record.get("aliases")).items()},
    )


def _object(value: object) -> dict[str, list[object]]:
    return value if isinstance(value, dict) else {}


def _names(value: object) -> tuple[str, ...]:
    return tuple(str(v) for v in value) if isinstance(value, list | tuple) else ()


def _renames(mapper: Mapping[str, Any]) -> Renames:
    renaming = [
        (re.compile(source), str(target))
        for sources, targets in mapper["renaming"]
        for source, target in zip(sources, targets, strict=False)
    ]
    return Renames(
        tuple(renaming),
        tuple((re.compile(old), str(new)) for old, new in mapper["regex"]),
        tuple((str(old), str(new)) for old, new in mapper["substr"]),
        tuple((str(old), str(new)) for old, new in mapper["prefix"]),
        tuple((str(old), str(new)) for old, new in mapper["suffix"]),
    )


def _pattern(path: str) -> str:
    """The path with its numbers as {i}."""
    parts = path.split(".")
    return ".".join("{i}" if part.isdecimal() else part for part in parts)


def _filled(pattern: str, path: str) -> str:
    """The pattern with the numbers of a path, in their order."""
    numbers = iter([part for part in path.split(".") if part.isdecimal()])
    return ".".join(next(numbers, part) if part == "{i}" else part for part in pattern.split("."))


def served_tree(tree: BaseTree, found: Architecture, *, pooling: bool) -> ServedTree:
    """The served modules of a base model, parts in the order of the packed module's slices."""
    places = _Places(found, tree.shared_kv)
    slots: dict[str, dict[str, BaseModule]] = {}
    for path, base in tree.modules.items():
        place = places.of(path, tree.tail(path), base)
        if place is not None:
            slots.setdefault(place[0], {})[place[1]] = base
    head = next((p for p, k in found.modules.items() if k.kind == "ParallelLMHead"), None)
    if head is not None and head not in slots:  # served, though this class has no use for it
        width = tree.spec.embedding_size or tree.spec.hidden_size
        lone = BaseModule(head, "head", "lm_head", width, tree.spec.vocab_size, None)
        slots[head] = {head: lone}
    modules = [_module(path, parts, found) for path, parts in slots.items()]
    modules += _towers(found, {_pattern(path) for path in slots})
    return ServedTree(found, modules, pooling=pooling)


class _Places:
    """Where a base module is served: by its renamed name, else by its place in the language model.

    The second is for models whose loader renames in its own code, where no table says it.
    """

    def __init__(self, found: Architecture, shared_kv: Collection[int]) -> None:
        self.found = found
        self.shared_kv = shared_kv
        self.parents = {
            child: parent
            for parent, children in found.packed.items()
            if len(children) > 1
            for child in children
        }
        self.by_tail: dict[str, str] = {}
        for path in found.modules:
            if part_of(path, found) == "language" or path.endswith("lm_head"):
                self.by_tail.setdefault(without_root(path), path)

    def of(self, path: str, tail: str, base: BaseModule) -> tuple[str, str] | None:
        """(served path, the name that an adapter gives the part), None when it is not served."""
        renames = self.found.renames
        name = renames.apply(path + ".weight").removesuffix(".weight") if renames else path
        served = self._served(name, base)
        if base.layer in self.shared_kv and _pattern(name) in self.found.modules:
            return name, name  # queries alone: nothing to pack them with
        if not self.found.built or _pattern(served) in self.found.modules:
            return served, name
        for short in (self._served(tail, base), *_other_places(tail, base)):
            pattern = self.by_tail.get(_pattern(short))
            if pattern is not None:
                root = pattern.removesuffix(_pattern(short))
                return root + short, root + (tail if short == self._served(tail, base) else short)
        return None

    def _served(self, name: str, base: BaseModule) -> str:
        if base.kind in ("expert", "fused_expert") and ".experts." in name:
            return name[: name.rindex(".experts.")] + ".experts"
        before, dot, suffix = name.rpartition(".")
        return f"{before}{dot}{self.parents.get(suffix, suffix)}"


def _other_places(tail: str, base: BaseModule) -> tuple[str, ...]:
    """Where vLLM puts parts of a mixture whose checkpoint has no `experts` or `gate` (Granite)."""
    before = tail.rpartition(".")[0]
    if base.kind in ("expert", "fused_expert"):
        return (f"{before}.experts",)
    if base.kind == "router":
        moe = before.rpartition(".")[0]
        return (f"{moe}.gate", f"{before}.gate", f"{before}.experts.gate")
    return ()


def _module(path: str, bases: Mapping[str, BaseModule], found: Architecture) -> ServedModule:
    kind = found.modules.get(_pattern(path)) or _guessed_kind(bases)
    suffix = path.rpartition(".")[2]
    children = found.packed.get(suffix, ())
    if kind.kind == "MoERunner":
        return ServedModule(path, kind, _experts(path, bases, children, found), packed=True)
    if len(children) <= 1:
        base = next(iter(bases.values()))
        return ServedModule(path, kind, (ServedPart(path, bases.get(path, base)),), packed=False)
    before = path[: -len(suffix)]
    split = _split(bases.get(path), children)
    parts = tuple(
        ServedPart(before + child, bases.get(before + child) or split.get(child))
        for child in children
    )
    return ServedModule(path, kind, _with_values(parts), packed=True)


def _split(fused: BaseModule | None, children: Sequence[str]) -> dict[str, BaseModule]:
    """The parts of a matrix that the checkpoint fuses and vLLM names one by one."""
    if fused is None:
        return {}
    rows = fused.out_features
    if len(children) == 2:
        roles, sizes = ("gate", "up"), (rows // 2, rows // 2)
    elif len(children) == 3 and fused.grouped:
        half = fused.grouped // 2
        roles, sizes = ("q", "k", "v"), (rows - fused.grouped, half, half)  # type: ignore[assignment]
    else:
        return {}
    return {
        child: replace(fused, path=f"{fused.path}#{role}", role=role, out_features=size)
        for child, role, size in zip(children, roles, sizes, strict=True)
    }


def _with_values(parts: tuple[ServedPart, ...]) -> tuple[ServedPart, ...]:
    """A value slice as wide as the keys' where the model's values are its keys (Gemma-4)."""
    if len(parts) != 3 or parts[2].base is not None or parts[1].base is None:
        return parts
    return (parts[0], parts[1], ServedPart(parts[2].name, parts[1].base))


def _experts(
    path: str, bases: Mapping[str, BaseModule], children: Sequence[str], found: Architecture
) -> tuple[ServedPart, ...]:
    """Two parts for the stacked layout (gate_up as `.base_layer`, down), else those by expert."""
    before = path[: -len("experts")]
    fused = {base.role: base for base in bases.values() if base.kind == "fused_expert"}
    if found.is_3d:
        return (
            ServedPart(f"{path}.base_layer", fused.get("expert_gate_up")),
            ServedPart(path, fused.get("expert_down")),
        )
    single = _each(fused) | {base.role: base for base in bases.values() if base.kind == "expert"}
    order = ("expert_up", "expert_down") if found.non_gated else (
        "expert_gate", "expert_down", "expert_up",
    )  # fmt: skip
    return tuple(
        ServedPart(
            before + child, bases.get(before + child) or single.get(order[number % len(order)])
        )
        for number, child in enumerate(children)
    )


def _each(fused: Mapping[str, BaseModule]) -> dict[str, BaseModule]:
    """One expert's matrices, from the stacks of all."""
    made = {role: replace(base, kind="expert") for role, base in fused.items()}
    both = made.pop("expert_gate_up", None)
    if both is not None:
        half = replace(both, out_features=both.out_features // 2)
        made |= {role: replace(half, role=role) for role in ("expert_gate", "expert_up")}
    return made


def _guessed_kind(bases: Mapping[str, BaseModule]) -> ModuleKind:
    """For an architecture that could not be built when it was recorded: from the base's kinds."""
    kinds = {base.kind for base in bases.values()}
    if "expert" in kinds or "fused_expert" in kinds:
        return ModuleKind("MoERunner", "FusedMoE", 0)
    if "head" in kinds:
        return ModuleKind("ParallelLMHead", None, 0)
    if "embedding" in kinds:
        return ModuleKind("VocabParallelEmbedding", "VocabParallelEmbedding", 0)
    return ModuleKind("LinearBase", "Linear", len(bases) if len(bases) > 1 else 0)


def _towers(found: Architecture, taken: set[str]) -> list[ServedModule]:
    """Recorded modules outside the language model, by pattern: their numbers stay {i}."""
    prefixes = (*found.tower, *found.connector)
    made = []
    for path, kind in found.modules.items():
        if path in taken or not path.startswith(prefixes) or not prefixes:
            continue
        suffix = path.rpartition(".")[2]
        children = found.packed.get(suffix, ())
        names = (
            [path[: -len(suffix)] + child for child in children] if len(children) > 1 else [path]
        )
        parts = tuple(ServedPart(name, None) for name in names)
        made.append(ServedModule(path, kind, parts, packed=len(parts) > 1))
    return made


Part = Literal["language", "tower", "connector"]


def part_of(path: str, found: Architecture) -> Part | None:
    """Which part of a multimodal model holds a served path, by the longest prefix; None: none.

    `language` for every path of a model that does not tell its parts.
    """
    if found.language_model is None:
        return "language"
    candidates: list[tuple[int, Part]] = []
    for part, prefixes in (
        ("language", found.language_model), ("connector", found.connector), ("tower", found.tower),
    ):  # fmt: skip
        candidates += [(len(p), part) for p in prefixes if path.startswith(p)]  # type: ignore[misc]
    return max(candidates)[1] if candidates else None
