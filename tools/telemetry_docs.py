"""Write the tables of docs/telemetry.md from the dialects, between its two marks.

    .venv/bin/python tools/telemetry_docs.py

`tests/telemetry/test_docs.py` holds that they are what this writes.
"""

from __future__ import annotations

from pathlib import Path

from ullage.telemetry.dialects.source import Arithmetic, Dialect, Label, Metric, Source
from ullage.telemetry.dialects.table import DIALECTS
from ullage.telemetry.dialects.vllm import PLUGIN
from ullage.telemetry.reading import VOCABULARY
from ullage.telemetry.snapshot import Name

DOCUMENT = Path(__file__).parents[1] / "docs" / "telemetry.md"
BEGIN = "<!-- tables: written by tools/telemetry_docs.py -->\n"
END = "<!-- end of tables -->\n"
EXACT, NEAR, PLUGGED, NOT = "●", "◐", "○", "·"


def tables() -> str:
    """One table of all engines, then one for each with its metrics."""
    return "\n".join([_overview(), *(_engine(dialect) for dialect in DIALECTS)])


def _overview() -> str:
    lines = [
        "## Which engine says what",
        "",
        f"{EXACT} exported, {NEAR} derived or near it, {PLUGGED} with the plugin, {NOT} cannot be "
        "known. A field may need a newer version or a flag: see the engine's own table.",
        "",
        "| field | " + " | ".join(dialect.title for dialect in DIALECTS) + " |",
        "|---|" + ":-:|" * len(DIALECTS),
    ]
    lines += [
        f"| `{name}` | " + " | ".join(_mark(dialect, name) for dialect in DIALECTS) + " |"
        for name in VOCABULARY
    ]
    proofs = " | ".join(dialect.proof for dialect in DIALECTS)
    return "\n".join([*lines, f"| proof | {proofs} |", ""])


def _mark(dialect: Dialect, name: Name) -> str:
    sources = dialect.fields.get(name)
    if sources is None:
        return NOT
    if sources[0].versions == PLUGIN:
        return PLUGGED
    return EXACT if sources[0].exact else NEAR


def _engine(dialect: Dialect) -> str:
    lines = [
        f"## {dialect.title}",
        "",
        f"`engine`: `{dialect.engine}`; versions: {dialect.versions}; {dialect.proof}. A page is "
        f"its own when a metric begins with {_code(dialect.marks)}"
        + (f" and none with {_code(dialect.unless)}." if dialect.unless else "."),
        "",
        "| field | read from (newest first) |",
        "|---|---|",
    ]
    for name in VOCABULARY:
        sources = dialect.fields.get(name)
        if sources is None:
            lines.append(f"| `{name}` | absent: {dialect.absent[name]} |")
            continue
        said = "; ".join(_source(source) for source in sources)
        hint = dialect.hints.get(name)
        lines.append(f"| `{name}` | {said}{f' — {hint}' if hint else ''} |")
    return "\n".join([*lines, ""])


def _source(source: Source) -> str:
    text = f"{_named(source)}{'' if source.exact else ' ≈'}"
    if isinstance(source, Metric) and source.by:
        text += f" by `{source.by}`"
    return f"{text} ({source.versions})" if source.versions else text


def _named(source: Source) -> str:
    match source:
        case Metric():
            labels = ",".join(f'{label}="{value}"' for label, value in source.where)
            note = f", {source.note}" if source.note else ""
            return f"`{source.name}{{{labels}}}`{note}" if labels else f"`{source.name}`{note}"
        case Label():
            return f"label `{source.label}` of `{source.metric}`"
        case Arithmetic():
            parts = (source.left, source.right)
            left, right = (
                f"({_named(part)})" if isinstance(part, Arithmetic) else _named(part)
                for part in parts
            )
            return f"{left} {source.op} {right}"


def _code(texts: tuple[str, ...]) -> str:
    return " or ".join(f"`{text}`" for text in texts)


def main() -> None:
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(before + BEGIN + tables() + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
