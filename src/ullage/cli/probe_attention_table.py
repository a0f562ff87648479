"""The table of `ullage probe attention`: layers × heads of one figure, then what stands out.

Holds the text only; the readings are taken elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ullage.probes.attention.readings import AttentionReading, HeadReading

# Wider tables are written with a digit per head.
MAX_WIDTH = 100
SHOWN = 8
_ABSENT = "·"
_BROKEN = "!"


@dataclass(frozen=True, slots=True)
class Figure:
    """What a cell shows. `top` is what a whole ten tenths stand for; None: the largest shown."""

    title: str
    value: Callable[[HeadReading], float | None]
    top: float | None
    form: str


FIGURES: Mapping[str, Figure] = {
    "entropy": Figure(
        "entropy in % of its highest possible (0: one key has all the weight, 100: all alike)",
        lambda head: _percent(head.entropy_normalized),
        100.0,
        ".0f",
    ),
    "sink": Figure(
        "weight on the first token in %", lambda head: _percent(head.sink_mass), 100.0, ".0f"
    ),
    "band": Figure(
        "weight on the keys within ±16 positions in %",
        lambda head: _percent(head.band_mass),
        100.0,
        ".0f",
    ),
    "context": Figure(
        "effective context in keys (e^H)", lambda head: head.effective_context, None, ".4g"
    ),
    "score": Figure("highest score before softmax", lambda head: head.max_score, None, ".3g"),
}


def lines(reading: AttentionReading, show: str) -> list[str]:
    """The lines of the table."""
    figure = FIGURES[show]
    out = [
        f"{_shown(reading.model)}: {reading.tokens:,} tokens, {reading.rows:,} query rows, "
        f"{reading.source}",
        "",
        figure.title,
    ]
    cells = [
        (layer.layer, [_cell(head, figure) for head in layer.heads]) for layer in reading.layers
    ]
    width = max(len(cell) for _, row in cells for cell in row)
    heads = max(len(row) for _, row in cells)
    width = max(width, len(str(heads - 1)))
    if 7 + heads * (width + 2) <= MAX_WIDTH:
        out.append("layer  " + "".join(f"{head:>{width + 2}}" for head in range(heads)))
        out += [f"{layer:5}  " + "".join(f"{c:>{width + 2}}" for c in row) for layer, row in cells]
    else:
        out += _digits(reading, figure)
    return [*out, "", *_remarkable(reading)]


def _digits(reading: AttentionReading, figure: Figure) -> list[str]:
    """One digit per head, in tenths, eight by eight."""
    top = figure.top
    if top is None:
        values = [value for _, head in reading.heads() if (value := figure.value(head)) is not None]
        top = max(values, default=1.0) or 1.0
    out = [f"a digit per head: 0 for less than a tenth of {top:{figure.form}}, 9 for nine and more"]
    for layer in reading.layers:
        marks = ""
        for head in layer.heads:
            value = figure.value(head)
            if head.not_finite:
                marks += _BROKEN
            elif value is None:
                marks += _ABSENT
            else:
                marks += str(min(max(int(10 * value / top), 0), 9))
        groups = " ".join(marks[at : at + 8] for at in range(0, len(marks), 8))
        out.append(f"{layer.layer:5}  {groups}")
    return out


def _cell(head: HeadReading, figure: Figure) -> str:
    value = figure.value(head)
    text = _ABSENT if value is None else f"{value:{figure.form}}"
    return f"{text}{_BROKEN}" if head.not_finite else text


def _remarkable(reading: AttentionReading) -> list[str]:
    """Where to look first, and how far folklore's estimate is off here."""
    every = list(reading.heads())
    broken = [(layer, head) for layer, head in every if head.not_finite]
    out = [
        _line("not finite", f"{_place(layer, head)}: {head.not_finite:,} of {head.rows:,} rows")
        for layer, head in broken[:SHOWN]
    ]
    if len(broken) > SHOWN:
        out.append(_line("not finite", f"{len(broken) - SHOWN:,} heads more"))
    for title, value, pick, form in _EXTREMES:
        known = [(v, layer, head) for layer, head in every if (v := value(head)) is not None]
        if known:
            found, layer, head = pick(known, key=lambda one: one[0])
            out.append(_line(title, f"{_place(layer, head)}: {form(found, head)}"))
    errors = [
        (abs(head.band_entropy_nats - head.entropy_nats.mean), layer, head)
        for layer, head in every
        if head.band_entropy_nats is not None and head.entropy_nats is not None
    ]
    if errors:
        worst, layer, head = max(errors, key=lambda one: one[0])
        mean = sum(error for error, _, _ in errors) / len(errors)
        off = f"off by {mean:.2f} nats on average, {worst:.2f} at {_place(layer, head)}"
        out.append(_line("±16 estimate", off))
    return out


def _line(title: str, text: str) -> str:
    return f"{title:17}{text}"


def _place(layer: int, head: HeadReading) -> str:
    return f"layer {layer} head {head.head}"


_EXTREMES: tuple[
    tuple[
        str,
        Callable[[HeadReading], float | None],
        Callable[..., tuple[float, int, HeadReading]],
        Callable[[float, HeadReading], str],
    ],
    ...,
] = (
    (
        "lowest entropy",
        lambda head: head.entropy_normalized,
        min,
        lambda value, head: f"{100 * value:.1f}%, {_nats(head)}",
    ),
    (
        "highest entropy",
        lambda head: head.entropy_normalized,
        max,
        lambda value, head: f"{100 * value:.1f}%, {_nats(head)}",
    ),
    (
        "largest sink",
        lambda head: head.sink_mass,
        max,
        lambda value, _: f"{100 * value:.1f}% of the weight on the first token",
    ),
    (
        "learned sink",
        lambda head: head.learned_sink_mass,
        max,
        lambda value, _: f"{100 * value:.1f}% of the weight on no key",
    ),
    ("highest score", lambda head: head.max_score, max, lambda value, _: f"{value:.4g}"),
)


def _nats(head: HeadReading) -> str:
    spread, context = head.entropy_nats, head.effective_context
    if spread is None or context is None:
        return "no row"
    nats = f"{spread.mean:.2f} nats ({spread.p5:.2f} to {spread.p95:.2f})"
    return f"{nats}, as if over {context:.3g} keys"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)[:200]
