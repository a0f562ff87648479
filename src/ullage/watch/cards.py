"""One replica as a card of a few lines, and many as a table: rows of styled text of a given width.

Holds which figure stands where. Styles are names of a terminal's own colours, and no colour says
anything that a word does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from textwrap import wrap

from rich.text import Text

from ullage.findings.finding import Severity
from ullage.pages.words import byte_size, count
from ullage.telemetry.gpus import NOBODY_ASKED, UNSOUGHT
from ullage.telemetry.snapshot import Gpu, Histograms
from ullage.watch import cells
from ullage.watch.figures import Figures, Spread

STYLES = {Severity.error: "bold red", Severity.warning: "bold yellow", Severity.info: "bold cyan"}
GAP = "   "
MAX_SENTENCE = 2000
INDENT = "  "
LATENCIES: tuple[tuple[Histograms, str], ...] = (("ttft_s", "TTFT"), ("itl_s", "ITL"))
SHOWN = {
    "kv_used_ratio": "KV use",
    "kv_used_bytes": "KV bytes",
    "kv_used_tokens": "KV tokens",
    "page_utilization_ratio": "pages",
    "prefix_hit_ratio": "prefix hits",
    "running": "running",
    "waiting": "waiting",
    "waiting_by_reason": "waiting by reason",
    "preemptions_per_s": "preemptions",
    "ttft_s": "TTFT",
    "itl_s": "ITL",
    "gpus": "GPUs",
}
"""Fields of a card whose absence is noted, as the card calls them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One replica to be shown: its figures, and the gravest of what fired for it, with the ids."""

    figures: Figures
    gravest: Severity | None
    ids: tuple[str, ...]


def flow(parts: Iterable[Text], width: int, indent: str = INDENT) -> list[Text]:
    """The parts side by side, broken between them where the width ends, and within one only where
    it is wider than that by itself."""
    lines: list[Text] = []
    for part in parts:
        if lines and len(lines[-1]) + len(GAP) + len(part) <= width:
            lines[-1].append(GAP).append_text(part)
            continue
        line = Text(indent).append_text(part)
        while len(line) > width:
            at = line.plain.rfind(" ", len(indent) + 1, width + 1)
            head, line = line.divide([at if at > 0 else width])
            lines.append(head)
            line = Text(indent + INDENT).append_text(line[1:] if at > 0 else line)
        lines.append(line)
    return lines


def wrapped(text: str, width: int, indent: str, style: str = "") -> list[Text]:
    """A sentence over as many lines as it needs, words whole where they can be."""
    made = wrap(
        cells.clean(text, MAX_SENTENCE),
        width,
        initial_indent=indent,
        subsequent_indent=indent + INDENT,
        break_on_hyphens=False,
    )
    return [Text(line, style) for line in made]


def card(row: Row, width: int) -> list[Text]:
    """Everything about one replica, in as many lines as `width` needs."""
    figures = row.figures
    lines = _title(row, width)
    if figures.time_s is None:
        why = Text(f"no answer: {cells.clean(figures.error or 'not asked yet')}", "bold red")
        return [*lines, *flow([why], width)]
    lines += flow(_cache(row, width), width)
    lines += flow(_requests(figures), width)
    latencies = [latency(label, figures.spreads.get(name)) for name, label in LATENCIES]
    lines += flow(latencies, width)
    for gpu in figures.gpus:
        lines += flow(_gpu(gpu), width)
    if figures.absent.get("gpus", NOBODY_ASKED) not in UNSOUGHT:
        lines += flow([Text(f"GPUs {cells.NONE}", "dim")], width)
    return lines


def _title(row: Row, width: int) -> list[Text]:
    identity = row.figures.identity
    parts = [Text(cells.shorten(cells.clean(row.figures.url), width), "bold")]
    if identity is not None:
        engine = f"{identity.engine or 'unknown engine'} {identity.version}".strip()
        parts.append(Text(cells.clean(engine, 40)))
        parts += [Text(cells.clean(model, 60), "dim") for model in identity.models[:1]]
        if len(identity.models) > 1:
            parts.append(Text(f"and {len(identity.models) - 1} more models", "dim"))
    if row.gravest is not None:
        parts.append(Text(" ".join(row.ids), STYLES[row.gravest]))
    return flow(parts, width, "")


def _cache(row: Row, width: int) -> list[Text]:
    figures, numbers = row.figures, row.figures.numbers
    parts = [Text("KV ").append_text(_bar(row, 24 if width >= 100 else 12))]
    parts.append(_pair(numbers, "kv_used_bytes", "kv_total_bytes", cells.used_of, "KV bytes"))
    if "kv_free_bytes" in numbers:
        parts.append(Text(f"{byte_size(numbers['kv_free_bytes'])} free"))
    parts.append(_pair(numbers, "kv_used_tokens", "kv_total_tokens", cells.tokens_of, "KV tokens"))
    if figures.time_to_full is not None:
        parts.append(Text(cells.to_full(figures.time_to_full), "bold"))
    parts.append(_share("pages", numbers.get("page_utilization_ratio"), "filled"))
    parts.append(_share("prefix hits", numbers.get("prefix_hit_ratio")))
    return parts


def _bar(row: Row, width: int) -> Text:
    """The bar and its per cent, in the colour of what fired for this replica."""
    ratio = row.figures.used_ratio
    if ratio is None:
        return Text(cells.NONE)
    style = "" if row.gravest is None else STYLES[row.gravest]
    return Text(cells.bar(ratio, width), style).append(f" {cells.percent(ratio)}", "bold")


def _pair(
    numbers: Mapping[str, float],
    used: str,
    total: str,
    together: Callable[[float, float], str],
    name: str,
) -> Text:
    """`60 of 80 GB`; what is used alone where the total is not known; a dash without either."""
    if used not in numbers:
        return Text(f"{name} {cells.NONE}", "dim")
    if total in numbers:
        return Text(together(numbers[used], numbers[total]))
    alone = byte_size(numbers[used]) if used.endswith("bytes") else f"{count(numbers[used])} tokens"
    return Text(f"{alone} used")


def _share(name: str, ratio: float | None, suffix: str = "") -> Text:
    if ratio is None:
        return Text(f"{name} {cells.NONE}", "dim")
    return Text(f"{name} {cells.percent(ratio)} {suffix}".rstrip())


def _requests(figures: Figures) -> list[Text]:
    numbers = figures.numbers
    parts = [
        Text(f"{name} {count(numbers[name])}" if name in numbers else f"{name} {cells.NONE}")
        for name in ("running", "waiting")
    ]
    reasons = figures.labelled.get("waiting_by_reason", {})
    if any(reasons.values()):
        parts[1].append(f" ({reasons_text(reasons)})")
    preempted = numbers.get("preemptions_per_s")
    parts.append(
        Text(f"preemptions {cells.NONE}", "dim")
        if preempted is None
        else Text(f"preemptions {cells.rate(preempted)}", "bold" if preempted else "")
    )
    if (output := numbers.get("generation_tokens_per_s")) is not None:
        parts.append(Text(f"output {cells.two_digits(output)} tokens/s"))
    return parts


def reasons_text(reasons: Mapping[str, float]) -> str:
    """`capacity 4, deferred 1`: the largest first, those with none left out."""
    held = sorted(((num, why) for why, num in reasons.items() if num), reverse=True)
    return ", ".join(f"{cells.clean(why, 24)} {count(num)}" for num, why in held[:4])


def latency(label: str, spread: Spread | None) -> Text:
    if spread is None:
        return Text(f"{label} {cells.NONE}", "dim")
    return (
        Text(f"{label} p50 {cells.time_range(spread.p50)}, ")
        .append(f"p99 {cells.time_range(spread.p99)}", "bold")
        .append(f" (of {count(spread.num)} in {cells.duration(spread.over_s)})", "dim")
    )


def _gpu(gpu: Gpu) -> list[Text]:
    """What the accelerator says; what it does not say is left out of the line."""
    parts = [Text(f"GPU {cells.clean(gpu.index, 20)} {cells.clean(gpu.name, 40)}".rstrip())]
    if gpu.busy_ratio is not None:
        parts.append(Text(f"busy {cells.percent(gpu.busy_ratio)}"))
    if gpu.sm_clock_hz is not None:
        most = "" if gpu.max_sm_clock_hz is None else f" of {cells.hertz(gpu.max_sm_clock_hz)}"
        parts.append(Text(f"clock {cells.hertz(gpu.sm_clock_hz)}{most}"))
    if gpu.used_bytes is not None and gpu.total_bytes is not None:
        parts.append(Text(cells.used_of(gpu.used_bytes, gpu.total_bytes)))
    if gpu.power_watts is not None:
        parts.append(Text(f"{gpu.power_watts:.0f} W"))
    if gpu.temperature_celsius is not None:
        parts.append(Text(f"{gpu.temperature_celsius:.0f} °C"))
    if gpu.throttled_because:
        why = ", ".join(cells.clean(one, 40) for one in gpu.throttled_because)
        parts.append(Text(f"throttled: {why}", "bold yellow"))
    if gpu.xid_errors:
        parts.append(Text(f"last Xid {gpu.xid_errors:.0f}", "bold red"))
    return parts
