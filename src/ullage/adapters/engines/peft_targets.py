"""Which modules PEFT 0.21 puts its layers on, by the adapter's configuration: `targets_of`.

Holds target_modules, target_parameters, exclude_modules, layers_to_transform and modules_to_save
as PEFT reads them, and what it says when they fit nothing. Keys and sizes are `peft.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ullage.adapters.engines.peft_tree import TrainedTree
from ullage.anatomy.adapters.adapter import Adapter, AdapterConfig
from ullage.anatomy.adapters.automaton import automaton_of
from ullage.errors import MalformedConfig

# utils/transformers_weight_conversion.py, _MOE_TARGET_MODULE_MAPPING and _MOE_FUSED_TARGETS: names
# of transformers 4 and what took their place.
_MOE: dict[str, dict[str, str]] = {
    "mixtral": {
        "gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj",
    },
    "qwen2_moe": {
        "gate": "gate.weight", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
        "down_proj": "down_proj",
    },
}  # fmt: skip
_FUSED = {"mixtral": ("w1", "w3"), "qwen2_moe": ("gate_proj", "up_proj")}
# peft_model.py: heads that a task's model class saves whatever the configuration says.
_TASK_HEADS = {"SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score"),
               "QUESTION_ANS": ("qa_outputs",)}  # fmt: skip
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
_UNTARGETED = ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT",
               "CARTRIDGE", "ADAPTION_PROMPT", "TRAINABLE_TOKENS")  # fmt: skip


class Refused(Exception):
    """PEFT raises; the text is what it prints."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The configuration as it is once PEFT has turned older targets of mixtures into newer ones.

    `modules` is None where any module of a linear kind counts (`all-linear`), a text for a regular
    expression.
    """

    config: AdapterConfig
    tree: TrainedTree
    modules: tuple[str, ...] | str | None
    parameters: tuple[str, ...]
    saved: tuple[str, ...]

    def takes(self, path: str) -> bool:
        """Whether a layer is put on the module (tuners_utils.py, check_target_module_exists)."""
        if self.config.peft_type in _UNTARGETED:
            return True
        if self._is_excluded(path):
            return False
        if self.modules is None:
            place = self.tree.find(path)
            linear = place is not None and place.kind in ("linear", "conv1d")
            return linear and path != self.tree.record.output
        if isinstance(self.modules, str):
            return _matches(self.config, "target_modules", self.modules, path)
        if self._is_tied(path):
            return True
        if not _ends_with(path, self.modules):
            return False
        return self._layer_counts(path)

    def _is_tied(self, path: str) -> bool:
        """Whether it is a head that shares the weight of an embedding that is targeted, with
        ensure_weight_tying."""
        raw = self.config.raw or {}
        if not raw.get("ensure_weight_tying") or path != self.tree.record.output:
            return False
        names = self.modules if isinstance(self.modules, tuple) else ()
        return self.tree.base.spec.tie_embeddings and any(
            name.rpartition(".")[2] == "embed_tokens" for name in names
        )

    def takes_parameter(self, path: str) -> bool:
        """Whether a layer is put on the parameter (_inject_parameters)."""
        return _ends_with(path, self.parameters)

    def why_not(self, path: str) -> str:
        """Why no layer is put there."""
        if self._is_excluded(path):
            return "exclude_modules or modules_to_save leaves it out"
        if not isinstance(self.modules, tuple) or not _ends_with(path, self.modules):
            return "target_modules of adapter_config.json leaves it out"
        return "layers_to_transform of adapter_config.json leaves its layer out"

    def saved_paths(self) -> Iterator[str]:
        """Modules that are wrapped to be saved whole (utils/other.py, _set_trainable)."""
        if not self.saved:
            return
        for path in self.tree.paths():
            if path.endswith(self.saved):
                yield path

    def _is_excluded(self, path: str) -> bool:
        excluded = self.config.exclude_modules
        if isinstance(excluded, str) and excluded:
            if _matches(self.config, "exclude_modules", excluded, path):
                return True
        elif excluded and _ends_with(path, excluded):
            return True
        return bool(self.config.modules_to_save) and not _names(
            self.config.modules_to_save
        ).isdisjoint(_inside(path))

    def _layer_counts(self, path: str) -> bool:
        layers = self.config.layers_to_transform
        if not layers:
            return True
        number = self._layer(path)
        if number is None:
            return False
        return number in layers

    def _layer(self, path: str) -> int | None:
        patterns = self.config.layers_pattern
        if not patterns:
            match = _LAYER.match(path)
            return int(match.group(1)) if match else None
        parts = path.split(".")
        for pattern in patterns:
            for name, number in pairwise(parts):
                if name == pattern and number.isdecimal():
                    return int(number)
        return None


def targets_of(adapter: Adapter, tree: TrainedTree) -> Targets:
    """The targets of the adapter's configuration in this tree.

    Raises Refused where PEFT raises: nothing is targeted, a module of a kind that it has no layer
    for, experts' targets that belong together and are not all there.
    """
    config = adapter.config
    modules: tuple[str, ...] | str | None = config.target_modules or ()
    if config.target_modules is None and not config.target_parameters:
        # tuners/lora/model.py: defaults by the base's type.
        modules = tree.record.targets
        if config.peft_type == "LORA" and tree.known and not modules:
            raise Refused("Please specify `target_modules` or `target_parameters`in `peft_config`")
    if isinstance(modules, str) and modules.lower() == "all-linear":
        modules = None
    parameters = tuple(config.target_parameters)
    if config.peft_type == "LORA" and tree.record.moe in _MOE:
        modules, parameters = _of_mixture(tree.record.moe, modules, parameters, tree)
    heads = _TASK_HEADS.get(config.task_type or "", ())
    saved = tuple(dict.fromkeys((*config.modules_to_save, *heads)))
    targets = Targets(config, tree, modules, parameters, saved)
    if config.peft_type not in _UNTARGETED and (modules != () or config.target_modules is not None):
        _require_any(targets, tree)
    return targets


def _of_mixture(
    moe: str, modules: tuple[str, ...] | str | None, parameters: tuple[str, ...], tree: TrainedTree
) -> tuple[tuple[str, ...] | str | None, tuple[str, ...]]:
    """_convert_peft_config_moe. A regular expression is resolved by the model's own names first."""
    table = _MOE[moe]
    if modules is None:
        modules = (*_linear_names(tree), *table)
    if isinstance(modules, str):
        modules = _resolved(modules, table, tree)
        if not modules:
            return modules, parameters
    kept, new, old = [], list(parameters), set()
    for target in modules:
        name = next((n for n in table if target == n or target.endswith(f".{n}")), None)
        if name is None:
            kept.append(target)
            continue
        new.append(table[name])
        old.add(name)
    fused = _FUSED[moe]
    present = [name for name in fused if name in old]
    if present and len(present) < len(fused):
        missing = ", ".join(sorted(set(fused) - set(present)))
        raise Refused(
            f"Cannot convert PEFT target(s) {', '.join(sorted(present))} without also targeting "
            f"{missing} because they are fused into gate_up_proj."
        )
    return tuple(kept), tuple(dict.fromkeys(new))


def _linear_names(tree: TrainedTree) -> Iterable[str]:
    names: dict[str, None] = {}
    for path in tree.paths():
        place = tree.find(path)
        if place is not None and place.kind in ("linear", "conv1d") and path != tree.record.output:
            names[path.rpartition(".")[2]] = None
    return names


def _resolved(pattern: str, table: dict[str, str], tree: TrainedTree) -> tuple[str, ...]:
    automaton = automaton_of(pattern, pattern)
    names: dict[str, None] = {}
    for path in tree.paths():
        place = tree.find(path)
        tried = [path, *(f"{path}.{name}" for name in (place.parameters if place else ()))]
        for text in tried:
            if automaton.matches(text):
                names[text.rpartition(".")[2]] = None
        if place is not None and place.parameters:
            for old in table:
                if automaton.matches(f"{path}.{old}"):
                    names[old] = None
    return tuple(names)


def _require_any(targets: Targets, tree: TrainedTree) -> None:
    """tuners_utils.py, inject_adapter: at least one module or parameter; and of a kind that there
    is a layer for (tuners/lora/model.py, _create_new_module)."""
    found = excluded = False
    for path in tree.paths():
        place = tree.find(path)
        if place is None:
            continue
        if targets.takes(path):
            found = True
            if place.kind in ("plain", "experts") and targets.config.peft_type == "LORA":
                name = place.class_name or "the experts' module"
                raise Refused(f"Target module {name}() is not supported.")
        excluded = excluded or targets._is_excluded(path)
        names = place.parameters or ("weight",)
        found = found or any(targets.takes_parameter(f"{path}.{name}") for name in names)
    if found:
        return
    if excluded:
        raise Refused("No modules were targeted for adaptation.")
    modules = targets.modules
    if not modules and not isinstance(modules, str):
        raise Refused("No `target_modules` passed but also no `target_parameters` found.")
    text = repr(modules) if isinstance(modules, str) else set_text(modules or ())
    if isinstance(modules, str):
        text = modules
    raise Refused(
        f"Target modules {text} not found in the base model. "
        "Please check the target modules and try again."
    )


def set_text(names: Iterable[str]) -> str:
    """A set as Python prints it; its order there is chance, here it is the alphabet."""
    return "{" + ", ".join(repr(name) for name in sorted(names)) + "}"


def _ends_with(path: str, names: tuple[str, ...]) -> bool:
    """Whether the path, or what follows one of its dots, is one of the names."""
    known = _names(names)
    start = 0
    while path[start:] not in known:
        start = path.find(".", start) + 1
        if not start:
            return False
    return True


def _inside(path: str) -> Iterator[str]:
    """Every run of whole components of the path."""
    parts = path.split(".")
    for first in range(len(parts)):
        for end in range(first + 1, len(parts) + 1):
            yield ".".join(parts[first:end])


@lru_cache(maxsize=8)
def _names(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(names)


def _matches(config: AdapterConfig, field: str, pattern: str, path: str) -> bool:
    """utils: the whole path has to match."""
    try:
        return automaton_of(pattern, pattern).matches(path)
    except ValueError as error:
        raise MalformedConfig(
            str(error), file=config.file, field=field, expected="a regular expression of paths"
        ) from None
