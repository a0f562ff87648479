"""All rules about adapters, and their findings: `RULES`, `findings_of`.

Holds the table. The rules lie in `engine.py`, `base.py` and `adapter.py`.
"""

from __future__ import annotations

from ullage.adapters.base import BaseTree
from ullage.adapters.rules import adapter as rules_adapter
from ullage.adapters.rules import base as rules_base
from ullage.adapters.rules import engine as rules_engine
from ullage.adapters.rules.rule import Base, Rule, Seen
from ullage.adapters.verdict import EngineAnswer, ServeOptions, Verdict
from ullage.anatomy.adapters.adapter import Adapter, Matrix
from ullage.findings.answer import finding_of
from ullage.findings.finding import Finding

__all__ = ["RULES", "Base", "findings_of"]

RULES: tuple[Rule, ...] = tuple(
    sorted((*rules_engine.RULES, *rules_base.RULES, *rules_adapter.RULES), key=lambda rule: rule.id)
)


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
    matches = tuple(
        (module, tree.find(module.module))
        for module in adapter.modules
        if any(t.key.matrix is not Matrix.BASE for t in module.tensors)
    )
    seen = Seen(adapter, tree, answer, verdict, options, base, null, matches)
    return tuple(finding_of(rule, rule.check(seen)) for rule in RULES)
