"""Drawing: scales, axes, labels that do not collide, as strings of SVG.

Holds primitives only; what is drawn is `charts.py`. Colours are classes, so that the page's style
(light or dark) decides them. Coordinates are CSS pixels at the width the chart was drawn for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ullage.pages.words import escape

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps data to pixels, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(value)
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def linear_ticks(low: float, high: float, wanted: int) -> list[float]:
    """About `wanted` round numbers (1, 2, 2.5, 5 times a power of ten) from low to high."""
    if high <= low:
        return [low]
    rough = (high - low) / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between low and high."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**i for i in range(first, last + 1)]


def nice_top(value: float) -> float:
    """The end of an axis from zero that holds `value`: the next tick at or above it."""
    if value <= 0:
        return 1.0
    ticks = linear_ticks(0.0, value, 4)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else value
    return math.ceil(value / step - 1e-9) * step


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, words: object, *, kind: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{number(x)}" y="{number(y)}" class="{kind}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def line(a: Point, b: Point, kind: str) -> str:
    return (
        f'<line x1="{number(a[0])}" y1="{number(a[1])}" x2="{number(b[0])}" y2="{number(b[1])}"'
        f' class="{kind}"/>'
    )


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    inner = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{number(x)}" y="{number(y)}" width="{max(0.0, width):.2f}"'
        f' height="{max(0.0, height):.2f}" class="{kind}">{inner}</rect>'
    )


def circle(at: Point, radius: float, kind: str) -> str:
    return (
        f'<circle cx="{number(at[0])}" cy="{number(at[1])}" r="{number(radius)}" class="{kind}"/>'
    )


def path(points: Sequence[Point], kind: str, *, close_at: float | None = None) -> str:
    """A polyline; with `close_at` it is filled down to that y."""
    if not points:
        return ""
    steps = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    if close_at is None:
        return f'<polyline points="{steps}" class="{kind}"/>'
    first, last = number(points[0][0]), number(points[-1][0])
    base = number(close_at)
    return f'<polygon points="{first},{base} {steps} {last},{base}" class="{kind}"/>'


def stairs(points: Sequence[Point]) -> list[Point]:
    """Hold each value until the next: what a sampled level looks like."""
    out: list[Point] = []
    for i, point in enumerate(points):
        if i:
            out.append((point[0], points[i - 1][1]))
        out.append(point)
    return out


def canvas(width: float, height: float, title: str, body: Sequence[str]) -> str:
    """The whole drawing, with its title for those who cannot see it."""
    return (
        f'<svg viewBox="0 0 {number(width)} {number(height)}" width="{number(width)}"'
        f' height="{number(height)}" role="img" aria-label="{escape(title)}">'
        f"{''.join(body)}</svg>"
    )


@dataclass(frozen=True, slots=True)
class Frame:
    """The inner area of a chart and its two scales."""

    x: Scale
    y: Scale

    def at(self, x: float, y: float) -> Point:
        return self.x(x), self.y(y)

    def points(self, pairs: Sequence[Point]) -> list[Point]:
        return [self.at(x, y) for x, y in pairs]


def axes(
    frame: Frame,
    *,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    x_title: str = "",
    y_title: str = "",
) -> list[str]:
    """Horizontal hairlines with numbers at the left, a base line with numbers below, two titles."""
    left, right = frame.x.start, frame.x.end
    bottom, top = frame.y.start, frame.y.end
    out: list[str] = []
    for tick in y_ticks:
        y = frame.y(tick)
        out.append(line((left, y), (right, y), "base" if y == bottom else "grid"))
        out.append(text(left - 7, y + 4, y_text(tick), kind="tick", anchor="end"))
    for i, tick in enumerate(x_ticks):
        x = frame.x(tick)
        out.append(line((x, bottom), (x, bottom + 4), "base"))
        edge = i == len(x_ticks) - 1 and x > right - 14
        out.append(
            text(
                min(x, right) if edge else x,
                bottom + 17,
                x_text(tick),
                kind="tick",
                anchor="end" if edge else "middle",
            )
        )
    if y_title:
        out.append(text(2, top - 12, y_title, kind="axis"))
    if x_title:
        out.append(text(right, bottom + 33, x_title, kind="axis", anchor="end"))
    return out


def text_width(words: str) -> float:
    """About how wide a bold label is; system fonts differ, so this errs on the wide side."""
    return 7.4 * len(words)


def beside(frame: Frame, at: Point, words: str, kind: str) -> str:
    """A label right of a point, left of it where the frame ends first, inside the frame always."""
    x, y = at
    wide = text_width(words)
    if x + 9 + wide <= frame.x.end + 8:
        return text(x + 9, y, words, kind=kind)
    if x - 9 - wide >= frame.x.start:
        return text(x - 9, y, words, kind=kind, anchor="end")
    return text(frame.x.end, y - 12, words, kind=kind, anchor="end")


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move label positions apart to at least `gap`, in order, within [low, high] where they fit."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    placed = [0.0] * len(positions)
    floor = low
    for i in order:
        placed[i] = max(positions[i], floor)
        floor = placed[i] + gap
    ceiling = high
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed
