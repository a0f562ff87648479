"""The table of `ullage adapter check`: what an engineer on call wants in ten lines.

Holds the text only; the judgement is made elsewhere.
"""

from __future__ import annotations

import argparse
from collections import Counter

from ullage.adapters.verdict import Judgement, ModuleVerdict, State

MEANING = {
    "works": "every module is applied, at the scale that training meant",
    "partial": "the output changes, but not as training meant",
    "no_effect": "the adapter loads and changes nothing: the base model answers",
    "rejected": "the engine refuses the adapter",
    "unknown": "what decides is not known",
}
SHOWN = 3


def lines(args: argparse.Namespace, judgement: Judgement) -> list[str]:
    """The lines of the table, the modules of one fate together."""
    verified = "verified on a running engine" if judgement.basis == "verified" else "from its code"
    out = [
        f"{judgement.verdict}: {MEANING[judgement.verdict]}",
        f"  {judgement.engine} {judgement.version} ({verified}): "
        f"{judgement.matched} of {judgement.total} modules applied",
    ]
    if judgement.message is not None:
        out.append(f"  it prints: {_short(judgement.message, 600)}")
    if judgement.slot_bytes is not None:
        limits = ", ".join(f"{name} {value}" for name, value in judgement.limits)
        out.append(f"  one adapter slot: {judgement.slot_bytes:,} bytes on one rank ({limits})")
    out += [f"  note: {note}" for note in judgement.notes]
    for state, number in Counter(m.state for m in judgement.modules).items():
        if state in (State.APPLIED, State.REFUSED) and not args.verbose:
            continue
        out += _group(state, number, judgement.modules, verbose=args.verbose)
    for finding in judgement.findings:
        if finding.state == "fired":
            out += [f"{finding.severity.name:7} {finding.id}  {finding.title}",
                    f"    {_short(finding.cause, 900)}",
                    f"    → {_short(finding.remedy, 900)}"]  # fmt: skip
        elif args.verbose:
            lacking = f": {', '.join(finding.missing)}" if finding.missing else ""
            out.append(f"{finding.state:7} {finding.id}  {finding.title}{lacking}")
    return out


def _group(
    state: State, number: int, modules: tuple[ModuleVerdict, ...], *, verbose: bool
) -> list[str]:
    shown = [module for module in modules if module.state is state]
    out = [f"  {state.value}: {number}"]
    for module in shown if verbose else shown[:SHOWN]:
        target = f" → {module.target}" if module.target else ""
        detail = f"  ({module.detail})" if module.detail else ""
        out.append(f"    {_short(module.key, 160)}{target}{_short(detail, 200)}")
    if not verbose and number > SHOWN:
        out.append(f"    … {number - SHOWN} more (-v lists them)")
    return out


def _short(text: str, most: int) -> str:
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return clean if len(clean) <= most else clean[: most - 1] + "…"
