"""Findings as text for people: fired ones in full, then what could not be evaluated, then a count.

Holds layout only, in plain characters; colour is added by whoever knows that a terminal listens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from ullage.findings.finding import Evidence, Finding

INDENT = "  "
NARROWEST = 40
PLURALS = ("bytes", "devices", "layers", "ranks", "requests", "rows", "stages", "tokens")


def lines(
    findings: Sequence[Finding], *, width: int = 100, verbose: bool = False
) -> Iterator[tuple[str, str]]:
    """Each line of the text with its role: error, warning, info, dim or plain (for colour).

    Fired findings come first, the gravest at the top; with `verbose` the clear ones are listed
    with what they were judged on.
    """
    width = max(width, NARROWEST)
    fired = [f for f in findings if f.state == "fired" and not f.accepted]
    accepted = [f for f in findings if f.accepted]
    open_ones = [f for f in findings if f.state == "not_evaluable"]
    clear = [f for f in findings if f.state == "clear"]
    for finding in sorted(fired, key=lambda f: (-f.severity, f.id)):
        yield f"{finding.severity.name:<7} {finding.id}  {finding.title}", finding.severity.name
        yield from ((text, "plain") for text in _paragraph(finding.cause, width))
        yield from ((text, "plain") for text in _paragraph(finding.remedy, width, "→ "))
        yield from ((text, "dim") for text in _evidence(finding.evidence, width))
        yield "", "plain"
    if accepted:
        yield f"Accepted by the baseline ({len(accepted)}):", "plain"
        for finding in accepted:
            yield f"{INDENT}{finding.severity.name:<7} {finding.id}  {finding.title}", "dim"
            yield from ((text, "dim") for text in _paragraph(finding.cause, width))
        yield "", "plain"
    if open_ones:
        yield f"Not evaluated ({len(open_ones)}):", "plain"
        yield from ((text, "dim") for text in _for_want_of(open_ones, width))
        yield "", "plain"
    if verbose and clear:
        yield f"Clear ({len(clear)}):", "plain"
        for finding in clear:
            yield f"{INDENT}{finding.id}  {finding.title}", "plain"
            yield from ((text, "dim") for text in _evidence(finding.evidence, width))
        yield "", "plain"
    yield summary(findings), "plain"


def render(findings: Sequence[Finding], *, width: int = 100, verbose: bool = False) -> str:
    """The lines as one text without colour, ending in a newline."""
    return "".join(f"{text}\n" for text, _ in lines(findings, width=width, verbose=verbose))


def summary(findings: Sequence[Finding]) -> str:
    """`1 error, 2 warnings, 1 info; 30 clear; 4 not evaluated`."""
    parts = []
    for name in ("error", "warning", "info"):
        number = sum(
            1 for f in findings if f.state == "fired" and not f.accepted and f.severity.name == name
        )
        if number:
            parts.append(f"{number} {name}{'s' if number > 1 and name != 'info' else ''}")
    accepted = sum(1 for f in findings if f.accepted)
    if accepted:
        parts.append(f"{accepted} accepted")
    clear = sum(1 for f in findings if f.state == "clear")
    unknown = sum(1 for f in findings if f.state == "not_evaluable")
    return f"{', '.join(parts) or 'Nothing fired'}; {clear} clear; {unknown} not evaluated"


def _paragraph(text: str, width: int, mark: str = "") -> list[str]:
    return wrap(
        mark + text,
        width,
        initial_indent=INDENT * 2,
        subsequent_indent=INDENT * 2 + " " * len(mark),
        break_on_hyphens=False,
    )


def _for_want_of(findings: Sequence[Finding], width: int) -> Iterator[str]:
    """What was missing, each with the rules that it kept from being evaluated."""
    by_missing: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        by_missing.setdefault(finding.missing, []).append(finding)
    for missing, kept in by_missing.items():
        rules = ", ".join(f"{finding.id} {finding.title}" for finding in kept)
        yield from wrap(
            f"{INDENT}for want of {'; '.join(missing)}: {rules}",
            width,
            subsequent_indent=INDENT * 3,
            break_on_hyphens=False,
        )


def _evidence(evidence: Sequence[Evidence], width: int) -> Iterator[str]:
    """One line per fact, values aligned, sources after them; repeated facts once."""
    unique = tuple(dict.fromkeys(evidence))
    names = max((len(item.name) for item in unique), default=0)
    values = [_with_unit(item) for item in unique]
    column = max((len(value) for value in values), default=0)
    for item, value in zip(unique, values, strict=True):
        text = f"{INDENT * 2}{item.name:<{names}}  {value:<{column}}  [{item.source}]"
        yield from (
            wrap(text, width, subsequent_indent=INDENT * 4, break_on_hyphens=False)
            if len(text) > width
            else (text,)
        )


def _with_unit(item: Evidence) -> str:
    if item.value is None:
        settable = item.source.startswith(("flag", "default", "config", "side file"))
        return show_value(None) if settable else "none"
    if item.value == 1 and item.unit in PLURALS:
        return f"1 {item.unit[:-1]}"
    if item.unit == "token id":
        return f"token {item.value}"
    return f"{show_value(item.value)} {item.unit}".rstrip()


def show_value(value: int | float | str | bool | None) -> str:
    """A value as people read it: thousands grouped, six digits of a float, `not set` for None."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else value
