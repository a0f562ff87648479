"""Findings over an adapter, a base and what an engine makes of it: `findings_of`."""

from __future__ import annotations

from dataclasses import dataclass

from ullage.adapters.adapter import Adapter
from ullage.adapters.base import BaseTree
from ullage.adapters.verdict import EngineAnswer, ServeOptions, Verdict
from ullage.findings.finding import Finding


@dataclass(frozen=True, slots=True)
class Base:
    """What is known of the base model besides its spec: the name it was given, its revision."""

    name: str | None = None
    revision: str | None = None


def findings_of(
    adapter: Adapter,
    tree: BaseTree,
    answer: EngineAnswer,
    verdict: Verdict,
    options: ServeOptions,
    base: Base,
    null: frozenset[int],
) -> tuple[Finding, ...]:
    """Every rule's finding, in the order of the rules."""
    return ()
