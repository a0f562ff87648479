"""The table of `ullage size`: aligned columns, human units beside exact bytes, sources last.

Holds formatting only; its input is the document of `planning.sizing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]

LABELS = {
    "parameters": "parameters, all ranks",
    "weights_bytes": "weights",
    "kv_bytes_per_token": "KV per token",
    "state_bytes_per_sequence": "state per sequence",
    "kv_cache_bytes": "KV cache",
    "block_size": "block size",
    "num_blocks": "blocks",
    "kv_cache_tokens": "tokens in the KV cache",
    "max_concurrency": "longest requests at once",
    "max_model_len_that_fits": "longest request that fits",
}
UNITS = {
    "block_size": "tokens",
    "kv_cache_tokens": "tokens",
    "max_model_len_that_fits": "tokens",
}
PARTS = {
    "weights": "weights",
    "kv_and_state": "KV and state",
    "activations": "activations",
    "engine_and_graphs": "engine and graphs",
    "free": "free",
}
NOT_EVALUABLE = "not evaluable"
BEYOND_UNITS = 2**70
"""Bytes from which the units (the last is EiB) do not help."""


NARROW = 96
"""Below this many columns bytes are shown in human units alone; the JSON has them exactly."""
LEAST_CELL = 24
"""A last column narrower than this is not wrapped: one word a line helps nobody."""


def table_lines(document: Document, width: int | None = None) -> list[str]:
    """The whole answer as lines of plain text, at most `width` columns wide where that can be.

    Without a width (no terminal) every row is one line, for grep.
    """
    narrow = width is not None and width < NARROW
    lines = [*_wrapped("", _headline(document), width), *_wrapped("", _verdict(document), width)]
    lines += _section("memory of one rank", _ledger_rows(document, narrow=narrow), width)
    lines += _section("figures of one rank, the heaviest", _figure_rows(document, narrow), width)
    lines += _section("workload", _workload_rows(document), width)
    lines += _section("decisions", _decision_rows(document), width)
    for title, texts in (
        ("the engine would not start", document["refusals"]),
        ("why there are ranges", _reasons(document)),
        ("warnings", document["warnings"]),
        ("not understood", [f"{u['field']}: {u['found']}" for u in document["unknowns"]]),
        ("not read", document["unread"]),
        ("not evaluable", [f"{k}: {v}" for k, v in document["not_evaluable"].items()]),
    ):
        lines += _section(title, [(text,) for text in texts], width)
    return [_printable(line) for line in lines]


def human_bytes(count: float) -> str:
    """Three or four digits in binary units: `15.3 GiB`, `512 B`; 2^N B beyond the last unit."""
    sign, whole = ("-" if count < 0 else ""), abs(count)
    if not whole < BEYOND_UNITS:
        # From hostile files: not every integer has a float, nor is every float finite.
        if isinstance(whole, int):
            return f"{sign}2^{whole.bit_length() - 1} B"
        return f"{sign}{whole:.3g} B"
    size, unit = float(whole), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    digits = 0 if unit == "B" else (2 if size < 10 else 1)
    return f"{sign}{size:.{digits}f} {unit}"


def _headline(document: Document) -> str:
    gpu, parallel = document["gpu"], document["parallel"]
    device = "no device named" if gpu is None else f"{gpu['count']} × {gpu['name']}"
    sizes = " · ".join(
        f"{name} {parallel[key]}"
        for name, key in (
            ("tp", "tensor_parallel_size"),
            ("pp", "pipeline_parallel_size"),
            ("dp", "data_parallel_size"),
        )
        if parallel[key] > 1
    )
    engine = f"{document['engine']} {document['engine_version']} on {document['platform']}"
    return " · ".join(part for part in (document["model"], engine, device, sizes) if part)


def _verdict(document: Document) -> str:
    fits, deficit = document["fits"], document["deficit_bytes"]
    if fits:
        return "fits: yes"
    if fits is False:
        if deficit:
            return f"fits: no, {_bytes_text(deficit)} short on one rank"
        return f"fits: no ({'; '.join(document['refusals'])})"
    return f"fits: cannot be told ({document['not_evaluable'].get('fits', '')})"


def _section(title: str, rows: Iterable[Sequence[str]], width: int | None) -> list[str]:
    body = _aligned(list(rows), width)
    return ["", title, *body] if body else []


def _wrapped(start: str, text: str, width: int | None) -> list[str]:
    """`start` and `text` in one line, or the text in lines that all begin under its first."""
    line = f"{start}{text}".rstrip()
    if width is None or len(line) <= width or width - len(start) < LEAST_CELL:
        return [line]
    from textwrap import wrap

    indent = len(start) or 2
    return wrap(text, width, initial_indent=start, subsequent_indent=" " * indent)


def _aligned(rows: list[Sequence[str]], width: int | None) -> list[str]:
    """Rows in columns; numbers (second column on, except the last) to the right."""
    if not rows:
        return []
    count = max(len(row) for row in rows)
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(count)]
    lines = []
    for row in rows:
        cells = [
            (cell.ljust if i == 0 else cell.rjust)(widths[i]) for i, cell in enumerate(row[:-1])
        ]
        lines += _wrapped("".join(f"  {cell}" for cell in cells) + "  ", row[-1], width)
    return lines


def _ledger_rows(document: Document, *, narrow: bool) -> list[Sequence[str]]:
    ledger = document["ledger"]
    if ledger is None:
        return []
    rows: list[Sequence[str]] = []
    for part in ledger["parts"]:
        low, high = part["min"], part["max"]
        bounds = "" if low == high else f"{human_bytes(low)} to {human_bytes(high)}"
        exact = () if narrow else (f"{part['bytes']:,}",)
        human = human_bytes(part["bytes"])
        rows.append((PARTS[part["name"]], human, *exact, bounds, _kind(part["provenance"])))
    total = ledger["device_bytes"]
    exact = () if narrow else (f"{total:,}",)
    rows.append(("device", human_bytes(total), *exact, "", "sum"))
    return rows


def _figure_rows(document: Document, narrow: bool) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for key, label in LABELS.items():
        value = document[key]
        source = document["provenance"][key]
        is_bytes = "bytes" in key
        human = _bytes_text(value) if is_bytes and value is not None else ""
        number, other, kind = NOT_EVALUABLE, "", ""
        if value is not None:
            unit = f" {UNITS[key]}" if key in UNITS else ""
            number = f"{_number_text(value)}{unit}"
            other, kind = _other_end(document, key), _kind(source)
        shown = (human or number,) if narrow else (human, number)
        rows.append((label, *shown, other, kind))
    return rows


def _workload_rows(document: Document) -> list[Sequence[str]]:
    workload = document["workload"]
    if workload is None:
        return []
    asked = f"{workload['context']:,} tokens each"
    if workload["concurrency"] is not None:
        asked = f"{workload['concurrency']:,} requests of {asked}"
    verdict = {True: "fits", False: "does not fit", None: "cannot be told"}[workload["fits"]]
    rows: list[Sequence[str]] = [
        ("asked", asked),
        ("answer", verdict),
        ("held at once", f"{_number_text(workload['holds'])}, limited by {workload['limit']}"),
        ("one request", f"{human_bytes(workload['request_bytes'])} of KV on one rank"),
    ]
    if workload["short_bytes"]:
        rows.append(("short", f"{_bytes_text(workload['short_bytes'])} of KV on one rank"))
    if workload["replicas"] is not None:
        devices = f"{workload['devices']:,} device{'s' if workload['devices'] != 1 else ''}"
        rows.append(("replicas", f"{workload['replicas']:,} ({devices})"))
    rows.append(("source", document["provenance"]["workload"]))
    return rows


def _reasons(document: Document) -> list[str]:
    """Each reason for a range once, with the figures that it widens."""
    keys: dict[str, list[str]] = {}
    for key, bounds in document["ranges"].items():
        keys.setdefault(bounds["reason"], []).append(key)
    return [f"{reason}: {', '.join(named)}" for reason, named in keys.items()]


def _other_end(document: Document, key: str) -> str:
    """The end of a range that the plan does not take: `to 25,862 (+6.5%)`."""
    bounds, value = document["ranges"].get(key), document[key]
    if bounds is None or isinstance(value, Mapping):
        return ""
    other = bounds["max"] if value == bounds["min"] else bounds["min"]
    share = f" ({(other / value - 1) * 100:+.1f}%)" if value and other else ""
    shown = human_bytes(other) if "bytes" in key else _number_text(other)
    return f"to {shown}{share}"


def _kind(source: str) -> str:
    """The kind of a source, without its particulars (those are in the JSON)."""
    return source.partition(":")[0]


def _decision_rows(document: Document) -> list[Sequence[str]]:
    return [
        (decision["name"], _value_text(decision["value"]), decision["source"])
        for decision in document["decisions"]
    ]


def _value_text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "on", False: "off", None: "none"}[value]
    return _number_text(value) if isinstance(value, int | float) else str(value)


def _number_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{_number_text(value['min'])} to {_number_text(value['max'])}"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _bytes_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{human_bytes(value['min'])} to {human_bytes(value['max'])}"
    return human_bytes(value)


def _printable(line: str) -> str:
    """Names come from files: nothing in them may steer a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
