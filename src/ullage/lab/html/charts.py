"""Plots of results as SVG, each a function of a plot and a width in pixels.

Holds what is drawn and labelled; primitives are `pages.svg`. Measured lines are solid with
dots, predicted ones dashed; colours are classes that the page's style decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from ullage.lab.result import CACHED, MEASURED, Axis, Bars, Lines, Plot, Raster, Series
from ullage.lab.units import shown
from ullage.pages import svg, words
from ullage.pages.svg import Frame, Scale

LEFT, TOP, BOTTOM = 62.0, 26.0, 40.0
ROOMY = 500.0
LEGEND_LINE = 17.0
NUM_COLOURS = 8


def draw(plot: Plot, width: float) -> str:
    """The plot for a page of that width."""
    match plot:
        case Lines():
            return lines(plot, width)
        case Bars():
            return bars(plot, width)
        case Raster():
            return raster(plot, width)


def lines(plot: Lines, width: float) -> str:
    """y against x. Lines are named at their ends where there is room, in a legend above if not."""
    roomy = width > ROOMY
    several = len(plot.series) > 1
    names = [series.name for series in plot.series]
    right = min(230.0, max(map(svg.text_width, names)) + 14) if roomy and several else 16.0
    legend = [] if roomy or not several else _legend(names, width)
    top = TOP + LEGEND_LINE * (1 + legend[-1][0] if legend else 0)
    height = top + 230.0 + BOTTOM
    points = [point for series in plot.series for point in series.points]
    ys = [y for _, y in points] + [level for level, _ in plot.marks]
    x_scale = _ends(plot.x, [x for x, _ in points])
    frame = Frame(
        Scale(*x_scale, LEFT, width - right, plot.x.log),
        Scale(*_ends(plot.y, ys, from_zero=True), height - BOTTOM, top, plot.y.log),
    )
    body = svg.axes(
        frame,
        x_ticks=_x_ticks(plot, points, frame),
        y_ticks=_ticks(plot.y, frame.y, 4),
        x_text=lambda value: _tick(value, plot.x.unit),
        y_text=lambda value: _tick(value, plot.y.unit),
        x_title=plot.x.title,
        y_title=plot.y.title,
    )
    body += _marks(plot, frame)
    for index, series in enumerate(plot.series):
        kind = f"c{index % NUM_COLOURS}"
        at = frame.points(series.points)
        body.append(svg.path(at, f"series {kind} {_dash(series)}"))
        if series.source == MEASURED and len(at) <= 40:
            body += [svg.circle(spot, 3.0, f"dot {kind}") for spot in at]
    if roomy and several:
        body += _named_ends(plot.series, frame)
    body += [_legend_entry(row, x, name, i) for i, (name, (row, x)) in _numbered(names, legend)]
    return svg.canvas(width, height, plot.title, body)


def bars(plot: Bars, width: float) -> str:
    """Horizontal bars, grouped, each with its value; a common scale from zero."""
    name_width = min(0.4 * width, max(svg.text_width(name) for name in plot.series) * 0.92 + 10)
    pitch, gap = 19.0, 26.0
    height = 4.0 + len(plot.groups) * (gap + pitch * len(plot.series))
    known = [value for row in plot.values for value in row if value is not None]
    most = max(known, default=0.0) or 1.0
    room = width - name_width - 92.0
    body: list[str] = []
    y = 0.0
    for g, group in enumerate(plot.groups):
        y += gap - 8
        body.append(svg.text(0, y, group, kind="label"))
        y += 8
        for s, name in enumerate(plot.series):
            value = plot.values[s][g]
            body.append(svg.text(0, y + 12, name, kind="axis"))
            size = 0.0 if value is None else max(value / most * room, 1.0)
            if value is not None:
                body.append(svg.rect(name_width, y + 3, size, 11, f"fill c{s % NUM_COLOURS}"))
            body.append(svg.text(name_width + size + 7, y + 12, shown(value, plot.unit)))
            y += pitch
    return svg.canvas(width, height, plot.title, body)


def raster(plot: Raster, width: float) -> str:
    """Rows against time, each stretch in its owner's colour; a legend says whose it is."""
    legend = _legend(plot.owners, width)
    top = 24.0 + LEGEND_LINE * (1 + legend[-1][0] if legend else 0)
    pitch = min(9.0, max(2.5, 360.0 / plot.num_rows))
    bottom = top + pitch * plot.num_rows
    end = max((stretch.end for stretch in plot.stretches), default=1.0)
    frame = Frame(Scale(0.0, end, LEFT, width - 16.0), Scale(0.0, plot.num_rows, top, bottom))
    body = [svg.text(2, top - 10, plot.y.title, kind="axis")]
    body.append(svg.rect(LEFT, top, width - 16.0 - LEFT, bottom - top, "empty"))
    body += [
        svg.text(LEFT - 7, frame.y(tick) + 4, words.count(tick), kind="tick", anchor="end")
        for tick in svg.linear_ticks(0, plot.num_rows, 4)
    ]
    for tick in svg.linear_ticks(0, end, 6 if width > ROOMY else 4):
        x = frame.x(tick)
        body.append(svg.line((x, bottom), (x, bottom + 4), "base"))
        body.append(
            svg.text(x, bottom + 17, _tick(tick, plot.x.unit), kind="tick", anchor="middle")
        )
    body.append(svg.text(width - 16.0, bottom + 33, plot.x.title, kind="axis", anchor="end"))
    for stretch in plot.stretches:
        x = frame.x(stretch.start)
        body.append(
            svg.rect(
                x,
                frame.y(stretch.row),
                frame.x(stretch.end) - x,
                pitch - (0.5 if pitch > 3 else 0.0),
                f"fill {_owner_colour(plot, stretch.owner)}",
                plot.owners[stretch.owner],
            )
        )
    for i, (name, (row, x)) in _numbered(plot.owners, legend):
        y = 4.0 + LEGEND_LINE * row
        body.append(svg.rect(x, y, 11, 11, f"fill {_owner_colour(plot, i)}"))
        body.append(svg.text(x + 16, y + 10, name, kind="axis"))
    return svg.canvas(width, bottom + BOTTOM, plot.title, body)


def _owner_colour(plot: Raster, owner: int) -> str:
    return "kept" if plot.owners[owner] == CACHED else f"r{owner % 12}"


def _legend(names: Sequence[str], width: float) -> list[tuple[int, float]]:
    """(line, x) of each name, wrapped to the width."""
    places: list[tuple[int, float]] = []
    line, x = 0, 0.0
    for name in names:
        wide = svg.text_width(name) + 32
        if x > 0 and x + wide > width:
            line, x = line + 1, 0.0
        places.append((line, x))
        x += wide
    return places


def _numbered(
    names: Sequence[str], places: Sequence[tuple[int, float]]
) -> list[tuple[int, tuple[str, tuple[int, float]]]]:
    return list(enumerate(zip(names, places, strict=False)))


def _legend_entry(line: int, x: float, name: str, index: int) -> str:
    y = 8.0 + LEGEND_LINE * line
    kind = f"c{index % NUM_COLOURS}"
    return svg.line((x, y), (x + 14, y), f"series {kind}") + svg.text(
        x + 19, y + 4, name, kind=f"label {kind}"
    )


def _named_ends(series: Sequence[Series], frame: Frame) -> list[str]:
    """Each line's name right of its last point, moved apart where they would touch; at a line
    that ends early, beside its end."""
    ends = [frame.at(*one.points[-1]) for one in series]
    late = [index for index, (x, _) in enumerate(ends) if x > frame.x.end - 80]
    heights = svg.spread(
        [ends[index][1] + 4 for index in late], 15.0, frame.y.end + 4, frame.y.start + 4
    )
    placed = dict(zip(late, heights, strict=True))
    out: list[str] = []
    for index, one in enumerate(series):
        kind = f"label c{index % NUM_COLOURS}"
        x, y = ends[index]
        if index in placed:
            out.append(svg.text(frame.x.end + 10, placed[index], one.name, kind=kind))
        else:
            out.append(svg.text(x + 8, min(y + 16, frame.y.start - 6), one.name, kind=kind))
    return out


def _marks(plot: Lines, frame: Frame) -> list[str]:
    out: list[str] = []
    for level, name in plot.marks:
        y = frame.y(level)
        out.append(svg.line((frame.x.start, y), (frame.x.end, y), "level"))
        out.append(svg.text(frame.x.start + 6, y - 5, name, kind="label muted"))
    return out


def _dash(series: Series) -> str:
    return "" if series.source == MEASURED else "dashed"


def _ends(axis: Axis, values: Sequence[float], *, from_zero: bool = False) -> tuple[float, float]:
    """Where an axis begins and ends; linear ones from zero (x: where the data begin)."""
    low, high = min(values), max(values)
    if axis.log:
        low, high = max(low, 1e-12), max(high, 1e-12)
        return (low * 0.8, high * 1.25) if from_zero else (low, high)
    if from_zero:
        return 0.0, svg.nice_top(high)
    return min(0.0, low), high if high > low else low + 1


def _ticks(axis: Axis, scale: Scale, wanted: int) -> list[float]:
    if not axis.log:
        return svg.linear_ticks(scale.low, scale.high, wanted)
    ticks = svg.log_ticks(scale.low, scale.high)
    if len(ticks) >= 3:
        return ticks[:: -(-len(ticks) // 6)]
    # Less than two decades: 2 and 5 between the powers as well.
    return [
        power * step
        for power in svg.log_ticks(scale.low / 10, scale.high)
        for step in (1, 2, 5)
        if scale.low <= power * step <= scale.high
    ]


def _x_ticks(plot: Lines, points: Sequence[tuple[float, float]], frame: Frame) -> list[float]:
    """On a logarithmic axis the values that were measured, as far as they can stand apart."""
    if not plot.x.log:
        roomy = frame.x.end - frame.x.start > 400
        return svg.linear_ticks(frame.x.low, frame.x.high, 6 if roomy else 4)
    kept: list[float] = []
    for x in sorted({x for x, _ in points}):
        if not kept or frame.x(x) - frame.x(kept[-1]) > 44:
            kept.append(x)
    return kept


def _tick(value: float, unit: str) -> str:
    """A number on an axis: short, with its unit where the unit scales (bytes, seconds)."""
    if value == 0:
        return "0"
    match unit:
        case "bytes":
            return words.byte_size(value, 2)
        case "s":
            return words.seconds(value, 2)
        case "ratio":
            return words.percent(value)
        case "times":
            return f"{words.significant(value, 2)}×"
        case _:
            return words.count(value) if value >= 10 else words.significant(value, 2)
