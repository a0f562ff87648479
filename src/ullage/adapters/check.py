"""One adapter, one base, one engine → a `Judgement`: `check`.

Composes the base's tree, the engine's judge and the rules. Files are read by `anatomy`.
"""

from __future__ import annotations

from dataclasses import replace

from ullage.adapters.base import base_tree
from ullage.adapters.effect import without_effect
from ullage.adapters.engines.table import resolve
from ullage.adapters.rules.table import Base, findings_of
from ullage.adapters.verdict import (
    MATCHED,
    EngineAnswer,
    Judgement,
    ServeOptions,
    State,
    verdict_of,
)
from ullage.anatomy.adapters.adapter import Adapter
from ullage.anatomy.spec import ModelSpec


def check(
    adapter: Adapter, spec: ModelSpec, options: ServeOptions, base: Base | None = None
) -> Judgement:
    """What the engine makes of the adapter on this base model.

    Args:
        base: what is known of the base besides its spec (name, revision), for the rules.

    Raises:
        BadUsage: an engine, a version or a limit that is not known or not taken.
    """
    engine, resolved = resolve(options)
    tree = base_tree(spec)
    answer = engine.judge()(adapter, tree, resolved)
    null = without_effect(adapter)
    pairs = [module for module in adapter.modules if module.b is not None]
    if pairs and all(module.scale == 0 for module in pairs):
        answer = _nothing(answer)
    verdict = verdict_of(answer)
    findings = findings_of(adapter, tree, answer, verdict, resolved, base or Base(), null)
    return Judgement(
        verdict=verdict,
        matched=sum(module.state in MATCHED for module in answer.modules),
        total=len(answer.modules),
        modules=answer.modules,
        basis=answer.basis,
        message=answer.message,
        slot_bytes=answer.slot_bytes,
        findings=findings,
        engine=engine.name,
        version=answer.version,
        source=answer.source,
        limits=answer.limits,
        notes=answer.notes
        if answer.unsure is None
        else (f"not known: {answer.unsure}", *answer.notes),
    )


def _nothing(answer: EngineAnswer) -> EngineAnswer:
    """The answer for an adapter whose scale is 0 everywhere: what is applied changes nothing.

    A B of zeros is told by a rule alone (L050): the verdict is of headers and configuration.
    """
    detail = "it adds nothing: its scale is 0"
    modules = tuple(
        replace(m, state=State.IGNORED, detail=detail) if m.state in MATCHED else m
        for m in answer.modules
    )
    return replace(answer, modules=modules)
