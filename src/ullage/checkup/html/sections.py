"""Sections that need no run: findings, ledger, what fits where, the machine, what is not known.

Holds how these parts of the document are shown; the run's parts are `run_sections.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ullage.checkup.html import charts
from ullage.pages import words as say
from ullage.pages.markup import (
    Cell,
    drawing,
    figures_table,
    joined,
    plain_list,
    roomy,
    section,
    source,
    table,
    value,
    words,
)
from ullage.pages.words import escape

Document = Mapping[str, Any]


def findings(document: Document) -> str:
    """Fired findings in full, those that lacked something by name, the clear ones folded away."""
    audit = document["audit"]
    if audit is None:
        return ""
    fired = [f for f in audit["findings"] if f["state"] == "fired"]
    missing = [f for f in audit["findings"] if f["state"] == "not_evaluable"]
    clear = [f for f in audit["findings"] if f["state"] == "clear"]
    body = "".join(_finding(f) for f in fired) or "<p>No rule fired.</p>"
    if missing:
        body += f"<h3>Rules that could not be evaluated ({len(missing)}), by what they lacked</h3>"
        body += plain_list(_by_what_was_missing(missing))
    if clear:
        rows = [(f["id"], f["title"]) for f in clear]
        body += (
            f"<details><summary>Rules that were evaluated and are clear ({len(clear)})</summary>"
            f"{plain_list(rows)}</details>"
        )
    captions = (
        f"Judged for {audit['judged_for']}: {len(fired)} of {len(audit['findings'])} rules fired, "
        f"{len(clear)} were evaluated and are clear, {len(missing)} lacked something.",
        "A rule that was not evaluated says nothing about the model.",
        audit["hint"],
    )
    return section("Findings", captions, body, name="findings")


def _by_what_was_missing(findings: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(what was missing, the rules that needed it), most rules first; rules that belong to another
    question in one line each."""
    groups: dict[str, list[str]] = {}
    for finding in findings:
        rule = f"{finding['id']} {finding['title']}"
        groups.setdefault(", ".join(finding["missing"]), []).append(rule)
    quiet = [(lack, groups.pop(lack)) for lack in say.QUIET_LACKS if lack in groups]
    ranked = sorted(groups.items(), key=lambda item: -len(item[1]))
    rows = [(f"{lack}:", "; ".join(rules)) for lack, rules in ranked]
    for lack, rules in quiet:
        what, command = say.QUIET_LACKS[lack]
        rows.append((f"{len(rules)} on {what}:", f"{command} ({_id_range(rules)})"))
    return rows


def _id_range(rules: Sequence[str]) -> str:
    ids = sorted(rule.partition(" ")[0] for rule in rules)
    return ids[0] if len(ids) == 1 else f"{ids[0]} to {ids[-1]}"


def _finding(finding: Mapping[str, Any]) -> str:
    evidence = "".join(
        f"<li>{escape(item['name'])}: {escape(_evidence(item))} "
        f'<span class="source">{escape(item["source"])}</span></li>'
        for item in finding["evidence"]
    )
    severity = escape(finding["severity"])
    return (
        f'<div class="finding"><h3><span class="tag {severity}">{severity} '
        f"{escape(finding['id'])}</span>{escape(finding['title'])}</h3>"
        f"<p>{escape(finding['cause'])}</p><p>{escape(finding['remedy'])}</p>"
        f"<ul>{evidence}</ul></div>"
    )


def _evidence(item: Mapping[str, Any]) -> str:
    found, unit = item["value"], item["unit"]
    if isinstance(found, int | float) and not isinstance(found, bool):
        number = f"{found:,}" if isinstance(found, int) else say.significant(found, 4)
        return f"{number} {unit}".strip()
    return f"{found} {unit}".strip()


def ledger(document: Document) -> str:
    """Memory as one bar and one table that adds up to the byte."""
    body, captions = "", []
    for part in document["ledgers"]:
        rows = part["rows"]
        captions.append(part["caption"])
        body += f"<h3>{escape(part['device'])}</h3>"
        if all(row["bytes"] >= 0 for row in rows):
            body += drawing(lambda width, rows=rows: charts.ledger_bar(rows, width))  # type: ignore[misc]
        body += table(
            [words("part"), value("bytes"), value(""), roomy("share"), words("source")],
            [
                [
                    Cell(
                        f'<span class="swatch {escape(row["kind"])}"></span>{escape(row["name"])}'
                    ),
                    value(say.count(row["bytes"])),
                    value(say.byte_size(row["bytes"])),
                    roomy(say.percent(row["bytes"] / part["total_bytes"], 1)),
                    source(joined(row["source"], row["note"])),
                ]
                for row in rows
            ],
            total=[
                words("total"),
                value(say.count(part["total_bytes"])),
                value(say.byte_size(part["total_bytes"])),
                roomy("100%"),
                source(part["total_source"]),
            ],
            kind="stack ledger",
        )
    return section("Where the memory goes", captions, body, name="ledger") if body else ""


def fits(document: Document) -> str:
    """GPU × context → how many sequences are held at once."""
    fit = document["fits"]
    if fit is None:
        return ""
    head = [words("device"), roomy("memory")]
    head += [value(f"{say.count(context)} tokens") for context in fit["contexts"]]
    rows = []
    for row in fit["rows"]:
        memory = roomy(say.byte_size(row["memory_bytes"]))
        cells = [words(row["gpu"]), memory]
        cells += [_fit(cell) for cell in row["cells"]]
        rows.append(cells)
    body = table(head, rows)
    reasons = sorted({c["reason"] for row in fit["rows"] for c in row["cells"] if c["reason"]})
    if reasons:
        body += f'<p class="note">{escape("; ".join(reasons))}.</p>'
    return section("What fits where", fit["captions"], body, name="fits")


def _fit(cell: Mapping[str, Any]) -> Cell:
    low, high = cell["min"], cell["max"]
    if low is None:
        return Cell("not evaluable", numeric=True, kind="none")
    if high == 0:
        return Cell("does not fit", numeric=True, kind="none")
    if low == high:
        return value(say.count(low))
    return value(f"{say.count(low)}–{say.count(high)}")


def machine(document: Document) -> str:
    """What this computer was measured to do."""
    here = document["machine"]
    if here is None:
        return ""
    captions = (
        f"Measured with PyTorch's own threads just before the run, on {here['cpu']}. A limit is "
        "the best run; the median beside it shows how busy the machine was.",
    )
    return section(
        "This machine",
        captions,
        figures_table([(row["name"], row["figure"]) for row in here["figures"]]),
        name="machine",
    )


def not_evaluated(document: Document) -> str:
    """What nobody looked at, and why. Never silently empty."""
    items = document["not_evaluated"]
    body = (
        plain_list([(f"{item['what']}:", item["why"]) for item in items])
        if items
        else "<p>Everything that this checkup looks at was evaluated.</p>"
    )
    captions = ("Nothing in this list is called fine: it was not looked at, or could not be.",)
    return section("What could not be evaluated", captions, body, name="not-evaluated")
