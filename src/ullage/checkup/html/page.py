"""`render(document) -> str`: the whole report as one HTML file without any outside reference.

Holds the page's frame and the order of its sections; each section is a function in `sections.py`
and its neighbours. Only the document is read, so that an old report.json can be shown again.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from ullage.checkup.html import run_sections, sections
from ullage.pages.words import escape, figure_text, value_and_unit

SECTIONS = (
    sections.findings,
    sections.ledger,
    sections.fits,
    run_sections.kv_growth,
    run_sections.roofline,
    run_sections.run,
    run_sections.comparison,
    sections.not_evaluated,
    sections.machine,
)
STATES = {
    "sound": "Sound",
    "attention": "Needs attention",
    "fault": "A fault was found",
    "incomplete": "Incomplete: the run could not be evaluated",
}


def render(document: Mapping[str, Any]) -> str:
    """The report of one checkup document (schema ullage.checkup/1) as HTML."""
    style = (files("ullage.pages") / "style.css").read_text(encoding="utf-8")
    model = document["model"]
    body = "".join(part(document) for part in SECTIONS)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\"/>"
        f"<title>Checkup of {escape(model['name'])}</title><style>{style}</style></head><body>"
        f"{_header(document)}<main>{body}</main>{_footer(document)}</body></html>\n"
    )


def _header(document: Mapping[str, Any]) -> str:
    model = document["model"]
    verdict = document["verdict"]
    facts = [
        f"{figure_text(model['parameters'])} parameters",
        f"{figure_text(model['num_layers'])} layers",
        model["architecture"] or model["model_type"],
        f"{figure_text(model['max_positions'])} positions",
        f"stored as {model['stored_as']}",
    ]
    keys = "".join(_key_figure(item["name"], item["figure"]) for item in document["highlights"])
    return (
        f'<header><p class="kicker">ullage checkup</p><h1>{escape(model["name"])}</h1>'
        f'<p class="meta">{escape(" · ".join(facts))}</p>'
        f'<div class="verdict {escape(verdict["state"])}">'
        f"<strong>{escape(STATES[verdict['state']])}</strong>"
        f"<p>{escape(verdict['paragraph'])}</p></div>"
        f'<dl class="keys">{keys}</dl></header>'
    )


def _key_figure(name: str, figure: Mapping[str, Any]) -> str:
    number, unit = value_and_unit(figure)
    return (
        f"<div><dt>{escape(name)}</dt><dd>{escape(number)} <span>{escape(unit)}</span>"
        f"<small>{escape(figure.get('source', ''))}</small></dd></div>"
    )


def _footer(document: Mapping[str, Any]) -> str:
    return (
        f"<footer><p>Written by ullage {escape(document['ullage'])} at "
        f"{escape(document['created'])} in {escape(figure_text(document['wall']))}. "
        f"Model: {escape(document['model']['path'])}. Every figure, with its source and without "
        "rounding, is in report.json beside this file. Byte units are decimal: 1 GB is "
        "1,000,000,000 bytes.</p></footer>"
    )
