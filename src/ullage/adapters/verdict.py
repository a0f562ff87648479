"""What a check answers: `ServeOptions` in, `EngineAnswer` from one engine, `Judgement` out.

Holds the nouns and how an answer becomes a verdict. What an engine does with an adapter is told by
one module of `engines/` each, with `judge(adapter, tree, options) -> EngineAnswer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from ullage.findings.finding import Finding

Verdict = Literal["works", "partial", "no_effect", "rejected", "unknown"]
Basis = Literal["verified", "source"]
"""`verified`: this version was asked on a running engine. `source`: read from its code."""


class State(StrEnum):
    """What becomes of one adapter module.

    `applied`: added to the served module, scaled as training meant. `wrong_scale`: added, with
    another factor. `unmapped`: its name leads to no served module, so that it is dropped.
    `ignored`: its name leads somewhere, and the engine leaves it out in silence all the same.
    `doubled`: two adapter modules lead to one served module and one of them is lost.
    `shape_mismatch`: it does not fit the served module, and is cut or padded without a word.
    `altered`: added, without something that the sum needs (a bias, a base that training changed).
    `refused`: the engine refuses the whole adapter.
    """

    APPLIED = "applied"
    WRONG_SCALE = "wrong_scale"
    UNMAPPED = "unmapped"
    IGNORED = "ignored"
    DOUBLED = "doubled"
    SHAPE_MISMATCH = "shape_mismatch"
    ALTERED = "altered"
    REFUSED = "refused"


MATCHED = (State.APPLIED, State.WRONG_SCALE)
"""States of modules that count as applied."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How the engine is started, as far as adapters are concerned. None: the engine's default.

    Names are vLLM's flags; other engines' own words for the same thing are translated by their
    modules. `version` None means the newest version that is known. `lora_dtype` is "float16",
    "bfloat16" or "float32"; None is the base model's.
    """

    engine: str = "vllm"
    version: str | None = None
    max_lora_rank: int | None = None
    max_loras: int | None = None
    lora_target_modules: tuple[str, ...] | None = None
    enable_tower_connector_lora: bool = False
    enable_mixed_moe_lora_format: bool = False
    is_3d_lora_weight: bool = False
    fully_sharded_loras: bool = False
    tensor_parallel_size: int = 1
    lora_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class ModuleVerdict:
    """What becomes of one adapter module: `key` as stored, `target` the served module's path.

    `key` is the text of the module's A matrix (of its first tensor without one). The scales are
    factors of B·A: what training meant, and what the engine multiplies with (None: not applied).
    `detail` is one sentence for every state but `applied`, else "".
    """

    key: str
    module: str
    target: str | None
    scale_expected: float | None
    scale_applied: float | None
    state: State
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """What one engine does with an adapter.

    `message` is what the engine prints when it refuses (the modules are then all `refused`), None
    when it loads. `unsure` names what decides and is not known; the verdict is then `unknown`.
    `slot_bytes` is what one adapter slot takes on one rank, None where it cannot be told.
    `limits` are the limits in force, as (flag, value) pairs. `supported` are the module names that
    the engine takes, where it has such a list.
    """

    modules: tuple[ModuleVerdict, ...]
    basis: Basis
    source: str
    version: str
    message: str | None = None
    unsure: str | None = None
    slot_bytes: int | None = None
    limits: tuple[tuple[str, int | str | None], ...] = ()
    supported: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on one adapter for one engine, with what it rests on.

    `matched` counts adapter modules that will be applied, `total` all of them.
    """

    verdict: Verdict
    matched: int
    total: int
    modules: tuple[ModuleVerdict, ...]
    basis: Basis
    message: str | None
    slot_bytes: int | None
    findings: tuple[Finding, ...]
    engine: str
    version: str
    source: str
    limits: tuple[tuple[str, int | str | None], ...] = ()
    notes: tuple[str, ...] = ()


def verdict_of(answer: EngineAnswer) -> Verdict:
    """The one word for what the engine does.

    An adapter of which nothing fits but something is cut or padded and then used is `partial`: the
    output does change, into something that nobody trained.
    """
    if answer.message is not None:
        return "rejected"
    if answer.unsure is not None:
        return "unknown"
    states = [module.state for module in answer.modules]
    if all(state is State.APPLIED for state in states) and states:
        return "works"
    used = (*MATCHED, State.SHAPE_MISMATCH, State.ALTERED)
    return "partial" if any(state in used for state in states) else "no_effect"
