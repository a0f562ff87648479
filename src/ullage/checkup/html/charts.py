"""The report's drawings, each a function of plain data and a width in pixels.

Holds what is drawn and labelled; primitives are `svg.py`. Measured is drawn solid, predicted
dashed, everywhere; lines are named at their ends and not in a legend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ullage.pages import svg, words
from ullage.pages.svg import Frame, Point, Scale

LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 26.0, 40.0
NUM_BINS = 36
RATE_LETTERS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))


def ledger_bar(rows: Sequence[Mapping[str, Any]], width: float) -> str:
    """One bar: each part of the memory in its true share; parts wide enough carry their name."""
    total = sum(row["bytes"] for row in rows)
    height, x = 46.0, 0.0
    body: list[str] = []
    for row in rows:
        size = row["bytes"] / total * width
        share = words.percent(row["bytes"] / total, 1)
        hint = f"{row['name']}: {words.byte_size(row['bytes'])} ({share})"
        body.append(svg.rect(x, 0, size, height, f"part {row['kind']}", hint))
        value = words.byte_size(row["bytes"])
        if size > 7.4 * max(len(row["name"]), len(value)) + 16:
            body.append(svg.text(x + 8, 20, row["name"], kind=f"on {row['kind']}"))
            body.append(svg.text(x + 8, 37, value, kind=f"on light {row['kind']}"))
        x += size
    return svg.canvas(width, height, "Memory ledger", body)


def kv_growth(
    measured: Sequence[Point], predicted: Sequence[Point], token_at_a_time: float, width: float
) -> str:
    """KV bytes of one sequence against its tokens: dots measured, dashed stairs predicted."""
    tokens = max(x for x, _ in (*measured, *predicted))
    top = svg.nice_top(max(y for _, y in (*measured, *predicted)))
    frame = _frame(width, 250.0, (0.0, tokens), (0.0, top))
    body = svg.axes(
        frame,
        x_ticks=svg.linear_ticks(0, tokens, 6 if width > 500 else 4),
        y_ticks=svg.linear_ticks(0, top, 4),
        x_text=words.count,
        y_text=lambda v: words.byte_size(v, 2) if v else "0",
        x_title="tokens held by the sequence",
        y_title="KV cache in use",
    )
    ideal = [(0.0, 0.0), (tokens, tokens * token_at_a_time)]
    body.append(svg.path(frame.points(ideal), "ideal"))
    body.append(svg.path(frame.points(svg.stairs(predicted)), "predicted"))
    body.extend(svg.circle(frame.at(x, y), 2.6, "measured-dot") for x, y in measured)
    if measured:
        middle = measured[len(measured) // 2]
        x, y = frame.at(*middle)
        x = min(x + 16, frame.x.end - 112)
        body.append(
            svg.text(x, min(y + 28, frame.y.start - 8), "measured (dots)", kind="label measured")
        )
    anchor = predicted[int(len(predicted) * 0.42)]
    x, y = frame.at(*anchor)
    name = "predicted, in blocks"
    x = max(x - 8, frame.x.start + svg.text_width(name) + 4)
    body.append(svg.text(x, y - 20, name, kind="label predicted", anchor="end"))
    x, y = frame.at(tokens * 0.16, tokens * 0.16 * token_at_a_time)
    body.append(svg.text(x + 10, y + 16, "bytes that tokens need", kind="label muted"))
    return svg.canvas(width, 250.0, "KV cache growth, predicted and measured", body)


def roofline(
    bandwidth: float, flops: float, points: Sequence[Mapping[str, Any]], width: float
) -> str:
    """Attainable FLOP/s against FLOPs per byte, with what was reached; both axes logarithmic."""
    intensities = [p["flops_per_byte"] for p in points]
    ridge = flops / bandwidth
    low = 10.0 ** _floor_log(min([*intensities, ridge]) * 0.6)
    high = 10.0 ** (_floor_log(max([*intensities, ridge]) * 1.7) + 1)
    rates = [p["flops_per_s"] for p in points]
    bottom = 10.0 ** _floor_log(min([*rates, flops]) * 0.7)
    top = 10.0 ** (_floor_log(max([*rates, flops]) * 1.2) + 1)
    frame = _frame(width, 300.0, (low, high), (bottom, top), log=True)
    body = svg.axes(
        frame,
        x_ticks=svg.log_ticks(low, high),
        y_ticks=svg.log_ticks(bottom, top),
        x_text=lambda v: words.significant(v, 1),
        y_text=_rate_tick,
        x_title="FLOPs per byte read",
        y_title="FLOP/s",
    )
    foot = max(low, bottom / bandwidth)
    roof = [(foot, bandwidth * foot), (ridge, flops), (high, flops)]
    body.append(svg.path(frame.points(roof), "roof"))
    x, y = frame.at(ridge, flops)
    body.append(svg.text(x + 4, y - 8, f"multiply {words.quantity(flops, 'FLOP/s')}", kind="label"))
    body.append(_slope_label(frame, bandwidth, foot, ridge))
    body.extend(_roofline_points(frame, points, bandwidth, flops))
    return svg.canvas(width, 300.0, "Roofline of this machine", body)


def _slope_label(frame: Frame, bandwidth: float, low: float, ridge: float) -> str:
    """What the slanted part of the roof is, left of it where there is always room above."""
    at = low * (ridge / low) ** 0.72
    x, y = frame.at(at, bandwidth * at)
    rate = f"{words.byte_size(bandwidth)}/s"
    full = f"read {rate}"
    fits = x - 10 - svg.text_width(full) > frame.x.start
    return svg.text(x - 10, y, full if fits else rate, kind="label", anchor="end")


def _roofline_points(
    frame: Frame, points: Sequence[Mapping[str, Any]], bandwidth: float, flops: float
) -> list[str]:
    """Each point, a hairline up to the roof over it, and its name kept clear of its neighbours."""
    out: list[str] = []
    spots = [frame.at(p["flops_per_byte"], p["flops_per_s"]) for p in points]
    heights = svg.spread([y + 4 for _, y in spots], 15.0, frame.y.end + 10, frame.y.start - 4)
    roomy = frame.x.end - frame.x.start > 500
    for point, (x, y), label_y in zip(points, spots, heights, strict=True):
        roof = min(flops, bandwidth * point["flops_per_byte"])
        out.append(svg.line((x, y), (x, frame.y(roof)), "gap"))
        out.append(svg.circle((x, y), 4.2, "measured-dot"))
        share = words.percent(point["flops_per_s"] / roof)
        label = f"{point['name'] if roomy else point['short']} · {share}"
        if abs(label_y - 4 - frame.y(roof)) < 13:  # the roof's own line would strike it out
            label_y = frame.y(roof) + 18
        out.append(svg.beside(frame, (x, label_y), label, "label measured"))
    return out


def histogram(
    values: Sequence[float], quantiles: Sequence[tuple[str, float]], thing: str, width: float
) -> str:
    """How often each time occurred, with named quantiles as marks above it. Values in seconds."""
    height = 190.0
    top_value = svg.nice_top(max(values) * 1e3)
    counts = [0] * NUM_BINS
    for value in values:
        counts[min(NUM_BINS - 1, int(value * 1e3 / top_value * NUM_BINS))] += 1
    frame = Frame(
        Scale(0.0, top_value, 8.0, width - RIGHT), Scale(0.0, max(counts), height - BOTTOM, 46.0)
    )
    body = svg.axes(
        frame,
        x_ticks=svg.linear_ticks(0, top_value, 4),
        y_ticks=[0.0],
        x_text=words.count if top_value >= 5 else lambda v: words.significant(v, 2),
        y_text=lambda _: "",
        x_title="ms",
    )
    step = (frame.x.end - frame.x.start) / NUM_BINS
    for i, number in enumerate(counts):
        if number:
            y = max(min(frame.y(number), frame.y.start - 1.5), frame.y.end)
            hint = f"{number} of {len(values)}"
            body.append(
                svg.rect(frame.x.start + i * step, y, step - 1, frame.y.start - y, "bar", hint)
            )
    body.extend(_quantile_marks(frame, quantiles))
    return svg.canvas(width, height, thing, body)


def _quantile_marks(frame: Frame, quantiles: Sequence[tuple[str, float]]) -> list[str]:
    """A thin line per quantile; the names stand above, moved apart where they would touch."""
    spots = [frame.x(value * 1e3) for _, value in quantiles]
    labels = [f"{name} {words.seconds(value)}" for name, value in quantiles]
    wide = svg.text_width(max(labels, key=len)) + 10
    placed = svg.spread(spots, wide, frame.x.start + 2, frame.x.end - wide + 8)
    out: list[str] = []
    for spot, at, label in zip(spots, placed, labels, strict=True):
        out.append(svg.path([(at + 2, 20.0), (spot, 32.0), (spot, frame.y.start)], "mark"))
        out.append(svg.text(at, 14, label, kind="label"))
    return out


def occupancy(
    times: Sequence[float], ratios: Sequence[float | None], span_s: float, width: float
) -> str:
    """Share of the KV cache in use over the run, filled; what is left above is the ullage."""
    pairs = [(t, r) for t, r in zip(times, ratios, strict=True) if r is not None]
    frame = _frame(width, 180.0, (0.0, span_s), (0.0, 1.0))
    body = svg.axes(
        frame,
        x_ticks=svg.linear_ticks(0, span_s, 6 if width > 500 else 4),
        y_ticks=[0.0, 0.5, 1.0],
        x_text=words.count,
        y_text=words.percent,
        y_title="KV cache in use",
        x_title="seconds",
    )
    steps = svg.stairs(pairs)
    body.append(svg.path(frame.points(steps), "filled", close_at=frame.y.start))
    body.append(svg.path(frame.points(steps), "measured"))
    peak_t, peak = max(pairs, key=lambda pair: pair[1])
    x, y = frame.at(peak_t, peak)
    left = x > width * 0.7
    body.append(svg.circle((x, y), 3.4, "measured-dot"))
    body.append(
        svg.text(
            x - 7 if left else x + 7,
            max(y - 7, frame.y.end + 12),
            f"peak {words.percent(peak, 1)}",
            kind="label measured",
            anchor="end" if left else "start",
        )
    )
    return svg.canvas(width, 180.0, "KV cache occupancy over time", body)


def queue(
    times: Sequence[float],
    lines: Sequence[tuple[str, str, Sequence[float | None]]],
    span_s: float,
    width: float,
) -> str:
    """Requests running and waiting over the run. `lines`: name, class, values."""
    kept = [
        (name, kind, [(t, v) for t, v in zip(times, values, strict=True) if v is not None])
        for name, kind, values in lines
    ]
    kept = [row for row in kept if row[2]]
    top = max([2.0, *(v for _, _, pairs in kept for _, v in pairs)])
    ticks = [t for t in svg.linear_ticks(0, top, 4) if t == int(t)]
    frame = _frame(width, 180.0, (0.0, span_s), (0.0, max(top, ticks[-1])))
    body = svg.axes(
        frame,
        x_ticks=svg.linear_ticks(0, span_s, 6 if width > 500 else 4),
        y_ticks=ticks,
        x_text=words.count,
        y_text=words.count,
        y_title="requests",
        x_title="seconds",
    )
    right = frame.x.end
    for name, kind, pairs in reversed(kept):
        body.append(svg.path(frame.points(svg.stairs(pairs)), kind))
        label = f"{name}, peak {max(v for _, v in pairs):.0f}"
        body.append(svg.text(right, frame.y.end - 12, label, kind=f"label {kind}", anchor="end"))
        right -= svg.text_width(label) + 10
    return svg.canvas(width, 180.0, "Requests running and waiting over time", body)


def lanes(requests: Sequence[Mapping[str, Any]], span_s: float, width: float) -> str:
    """Each request as a lane: pale until its first token, solid while it decodes."""
    pitch = 7.0
    height = TOP + pitch * len(requests) + BOTTOM
    frame = Frame(Scale(0.0, span_s, 8.0, width - RIGHT), Scale(0.0, 1.0, height - BOTTOM, TOP))
    body = svg.axes(
        frame,
        x_ticks=svg.linear_ticks(0, span_s, 6 if width > 500 else 4),
        y_ticks=[],
        x_text=words.count,
        y_text=words.count,
        x_title="seconds",
        y_title="each request: waiting for its first token, then decoding",
    )
    body.append(svg.line((8.0, frame.y.start), (width - RIGHT, frame.y.start), "base"))
    for i, request in enumerate(requests):
        y = TOP + pitch * i + 1
        begin, end = request["sent_s"], request["end_s"]
        first = end if request["ttft_s"] is None else begin + request["ttft_s"]
        hint = f"{request['prompt_tokens']} prompt tokens, {request['output_tokens']} output tokens"
        kind = "lane-failed" if request["error"] else "lane-wait"
        body.append(_lane(frame, y, begin, first, kind, request["error"] or hint))
        if not request["error"]:
            body.append(_lane(frame, y, first, end, "lane-decode", hint))
    return svg.canvas(width, height, "Requests over time", body)


def _lane(frame: Frame, y: float, begin: float, end: float, kind: str, hint: str) -> str:
    x = frame.x(begin)
    return svg.rect(x, y, max(1.0, frame.x(end) - x), 5.0, kind, hint)


def error_bar(ratio: float, limit: float, width: float = 120.0) -> str:
    """One error on a common axis: a bar from the centre line, left where actual fell short."""
    half = width / 2
    size = min(abs(ratio) / limit, 1.0) * (half - 2)
    x = half if ratio >= 0 else half - size
    body = [
        svg.line((half, 0), (half, 14), "base"),
        svg.rect(x, 3, max(size, 0.8), 8, "bar" if abs(ratio) <= limit else "bar over"),
    ]
    return svg.canvas(width, 14, f"error {words.signed_percent(ratio)}", body)


def _frame(
    width: float,
    height: float,
    xs: tuple[float, float],
    ys: tuple[float, float],
    *,
    log: bool = False,
) -> Frame:
    return Frame(Scale(*xs, LEFT, width - RIGHT, log), Scale(*ys, height - BOTTOM, TOP, log))


def _floor_log(value: float) -> int:
    import math

    return math.floor(math.log10(value))


def _rate_tick(value: float) -> str:
    """1e12 → 1 T: the axis title has the unit, and the ticks are powers of ten."""
    size, letter = next((s, u) for s, u in RATE_LETTERS if value >= s or s == 1)
    return f"{words.count(value / size)} {letter}".strip()


def thinned(values: Sequence[Point], most: int = 400) -> list[Point]:
    """At most `most` of the points, evenly taken, first and last kept: enough for a drawing."""
    if len(values) <= most:
        return list(values)
    step = (len(values) - 1) / (most - 1)
    picked = [round(i * step) for i in range(most)]
    return [values[i] for i, following in pairwise([*picked, -1]) if i != following]
