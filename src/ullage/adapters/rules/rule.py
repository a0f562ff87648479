"""What a rule about adapters is: `Rule`, and `Seen`, all that it may look at.

Holds the types and few words that all rules share. The rules lie in `adapter.py`,
`base.py` and `engine.py`; `table.py` is the table of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ullage.adapters.base import BaseTree, Match
from ullage.adapters.parts import FUSED, ROLES, layer_and_leaf
from ullage.adapters.verdict import EngineAnswer, ModuleVerdict, ServeOptions, State, Verdict
from ullage.anatomy.adapters.adapter import Adapter, AdapterModule, Matrix
from ullage.findings.answer import Answer, Clear
from ullage.findings.finding import Evidence, Severity

MERGE = "Merge it into the base with PEFT (merge_and_unload) and serve the merged model."


@dataclass(frozen=True, slots=True)
class Base:
    """What is known of the base model besides its spec: the name it was given, its revision."""

    name: str | None = None
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """An adapter, its base, what the engine makes of it. `null` are modules that add nothing.

    `matches` pairs the adapter's modules with the base's, None where the base has no such module.
    """

    adapter: Adapter
    tree: BaseTree
    answer: EngineAnswer
    verdict: Verdict
    options: ServeOptions
    base: Base
    null: frozenset[int]
    matches: tuple[tuple[AdapterModule, Match | None], ...]

    @property
    def fix(self) -> str:
        """The command that rewrites the adapter for this engine."""
        return (
            f"ullage adapter fix {self.adapter.path} --base {self.base.name or 'MODEL'} "
            f"--engine {self.options.engine} --save DIR"
        )

    def rewrite(self, lead: str) -> str:
        """`lead` and the command that rewrites the adapter, or what to do where none can."""
        return self._beyond_rewriting() or f"{lead}: {self.fix}."

    def _beyond_rewriting(self) -> str | None:
        """What `rewriting/` refuses for certain: more than B·A, or modules in no layer."""
        config = self.adapter.config
        if config.peft_type != "LORA" or config.use_dora or config.lora_bias or config.variants:
            return MERGE
        lost = [m.module for m, match in self.matches if match is None and not _placeable(m)]
        if not lost:
            return None
        if not self.tree.spec.towers:
            return (
                f"Use the base model that it was trained on: no name leads from {some(lost, 1)} "
                "to a module of this one."
            )
        return (
            f"Train the language model alone, or merge the adapter into the base with PEFT "
            f"(merge_and_unload) and serve the merged model: names of towers ({some(lost, 1)}) "
            "cannot be rewritten."
        )

    @property
    def whole(self) -> bool:
        """Whether this engine applies all of it, as training meant."""
        return self.verdict == "works"

    @property
    def at_most_a_hint(self) -> Severity | None:
        """What a rule about an adapter's writing weighs: `info` where this engine takes it whole,
        since another may not; None is the rule's own severity."""
        return Severity.info if self.whole else None

    def of(self, state: State) -> list[ModuleVerdict]:
        """The engine's verdicts of one state."""
        return [module for module in self.answer.modules if module.state is state]


def _placeable(module: AdapterModule) -> bool:
    """Whether the last name alone may say where it belongs, or it is not to be placed at all."""
    layer, leaf = layer_and_leaf(module.module)
    return module.a is None or (layer is not None and (leaf in ROLES or leaf in FUSED))


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that can be wrong with an adapter, and the pure function that looks for it.

    The words are those of `findings.answer.Described`; `example` is what it fires on.
    """

    id: str
    title: str
    severity: Severity
    category: str
    why: str
    fix: str
    source: str
    example: str
    check: Callable[[Seen], Answer]


def told(
    name: str, value: int | float | str | bool | None, source: str, unit: str = ""
) -> Evidence:
    """One evidence."""
    return Evidence(name, value, unit, source)


def clear(name: str, value: int | float | str | bool | None, source: str, unit: str = "") -> Clear:
    """Clear, on one evidence."""
    return Clear((told(name, value, source, unit),))


def some(names: Sequence[str], most: int = 3) -> str:
    """A few of the names, and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown


def of_matrix(adapter: Adapter, *kinds: Matrix) -> list[str]:
    """The keys of the adapter's tensors of these kinds."""
    return [tensor.key.text for tensor in adapter.tensors if tensor.key.matrix in kinds]
