"""Sections of the run: KV growth, roofline, the load and its times, predicted beside actual.

Holds how these parts of the document are shown. A part that is absent shows nothing here; why it
is absent stands under "What could not be evaluated".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ullage.checkup.html import charts
from ullage.pages import words as say
from ullage.pages.markup import (
    HALF,
    NARROW,
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
from ullage.pages.words import escape, figure_text

Document = Mapping[str, Any]
QUANTILES = (("p50", "p50"), ("p90", "p90"), ("p99", "p99"))


def kv_growth(document: Document) -> str:
    """One sequence growing: bytes in use against tokens held."""
    growth = document["kv_growth"]
    if growth is None:
        return ""
    measured = [(float(x), float(y)) for x, y in growth["measured"]]
    predicted = [(float(x), float(y)) for x, y in growth["predicted"]]
    each = float(growth["bytes_per_token_predicted"]["value"])
    body = drawing(
        lambda width: charts.kv_growth(charts.thinned(measured, 160), predicted, each, width)
    )
    body += figures_table(
        [
            ("KV bytes per token, predicted", growth["bytes_per_token_predicted"]),
            ("KV bytes per token, measured", growth["bytes_per_token_measured"]),
            ("block size", growth["block_size"]),
        ]
    )
    return section("How the KV cache grows", growth["captions"], body, name="kv-growth")


def roofline(document: Document) -> str:
    """What the machine could do at most, and what the engine reached."""
    roof = document["roofline"]
    if roof is None:
        return ""
    body = drawing(
        lambda width: charts.roofline(
            roof["bandwidth"]["value"], roof["flops"]["value"], roof["points"], width
        )
    )
    body += '<p class="note">The percentage is of the roof right above the point.</p>'
    return section("Roofline", roof["captions"], body, name="roofline")


def run(document: Document) -> str:
    """The trace slice: figures, distributions, occupancy and queue, the lanes, what was scaled."""
    part = document["run"]
    if part is None:
        return ""
    body = _latencies(part["distributions"])
    body += _distributions(part)
    body += _over_time(part)
    body += "<h3>Totals</h3>"
    body += figures_table([(row["name"], row["figure"]) for row in part["figures"]])
    if part["errors"]:
        rows = [(f"{item['count']} ×", item["reason"]) for item in part["errors"]]
        body += f"<h3>Requests that failed</h3>{plain_list(rows)}"
    body += "<h3>How the trace was scaled</h3>"
    body += figures_table([(row["name"], row["figure"]) for row in part["scaling"]["figures"]])
    body += f'<p class="note">{escape(part["scaling"]["sentence"])}</p>'
    return section("The run", part["captions"], body, name="run")


def _latencies(distributions: Mapping[str, Any]) -> str:
    """One line per kind of time, one column per quantile."""
    names = {
        "ttft": "time to first token",
        "inter_token": "time between tokens",
        "end_to_end": "whole request",
    }
    rows = [
        [
            words(name),
            roomy(say.count(len(data["values"]))),
            *(value(figure_text(data[field])) for _, field in QUANTILES),
            roomy(figure_text(data["mean"])),
        ]
        for key, name in names.items()
        if (data := distributions[key]) is not None
    ]
    head = [words("measured at the client"), roomy("count")]
    head += [value(name) for name, _ in QUANTILES] + [roomy("mean")]
    return table(head, rows)


def _distributions(part: Mapping[str, Any]) -> str:
    charts_html = ""
    for key, title in (("ttft", "Time to first token"), ("inter_token", "Time between tokens")):
        data = part["distributions"][key]
        if data is None:
            continue
        marks = [(name, data[field]["value"]) for name, field in QUANTILES]
        wide = charts.histogram(data["values"], marks, title, HALF)
        narrow = charts.histogram(data["values"], marks, title, NARROW)
        charts_html += (
            f"<div><h3>{title}, {say.count(len(data['values']))} measured</h3>"
            f'<figure class="wide">{wide}</figure><figure class="narrow">{narrow}</figure></div>'
        )
    return f'<div class="pair">{charts_html}</div>' if charts_html else ""


def _over_time(part: Mapping[str, Any]) -> str:
    series, span = part["series"], part["span_s"]
    times = series["time_s"]
    out = ""
    if any(v is not None for v in series["kv_usage_ratio"]):
        ratios = series["kv_usage_ratio"]
        out += "<h3>KV cache occupancy</h3>"
        out += drawing(lambda width: charts.occupancy(times, ratios, span, width))
    counts = [
        ("running", "measured", series["num_running"]),
        ("waiting", "waiting", series["num_waiting"]),
    ]
    if any(v is not None for _, _, values in counts for v in values):
        out += "<h3>Running and waiting</h3>"
        out += drawing(lambda width: charts.queue(times, counts, span, width))
    if part["requests"]:
        out += "<h3>Every request</h3>"
        out += drawing(lambda width: charts.lanes(part["requests"], span, width))
    return out


def comparison(document: Document) -> str:
    """What the models of ullage said beforehand beside what happened."""
    part = document["comparison"]
    if not part["rows"]:
        return ""
    limit = 1.0
    rows = []
    for row in part["rows"]:
        error = row["error"]
        rows.append(
            [
                words(row["name"]),
                value(figure_text(row["predicted"])),
                value(figure_text(row["actual"])),
                value(say.signed_percent(error["value"])),
                Cell(charts.error_bar(error["value"], limit), kind="bar-cell"),
                source(joined(row["predicted"]["source"], row["note"])),
            ]
        )
    head = [
        words("what"),
        value("predicted"),
        value("actual"),
        value("error"),
        words(""),
        words("how it was predicted"),
    ]
    return section(
        "Predicted beside actual",
        part["captions"],
        table(head, rows, kind="stack compare"),
        name="comparison",
    )
