"""A round of watching on a terminal: totals, replicas, what is absent and why.

Holds the composition: what is shown, in which order, and what gives way where room ends. Cards and
the table are `cards.py`'s, findings `alarms.py`'s. Lines are rich's Text; the caller prints them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from rich.text import Text

from ullage.findings.finding import Finding
from ullage.pages.words import byte_size, count
from ullage.telemetry.gpus import UNSOUGHT
from ullage.watch import cells
from ullage.watch.alarms import alarms, severity_counts, verdicts
from ullage.watch.cards import (
    LATENCIES,
    SHOWN,
    Row,
    card,
    flow,
    latency,
    reasons_text,
    wrapped,
)
from ullage.watch.figures import Figures, figures_of
from ullage.watch.rows import table
from ullage.watch.sight import Sight
from ullage.watch.totals import Totals, totals_of

MAX_CARDS = 8
MAX_ROWS = 50
MAX_REASONS = 12
MAX_DROPPED = 3
NARROWEST = 40
TOTALS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("running", count),
    ("waiting", count),
    ("preemptions_per_s", cells.rate),
    ("prefix_hit_ratio", cells.percent),
)


def lines(
    sight: Sight, *, width: int, height: int | None = None, verbose: bool = False
) -> list[Text]:
    """The whole view. With `height` never more lines than that: what fires is sure of half of it,
    then replicas take what they need, then the rest of what fires, why there are dashes, and what
    could not be evaluated. `verbose` adds evidence, and the rules that were clear."""
    width = max(width, NARROWEST)
    figures = [figures_of(view) for view in sight.views]
    rows = ranked(_rows(sight, figures))
    top = _header(sight, width)
    if len(rows) > 1:
        top += [Text(), *_totals(totals_of(sight.views, figures), width)]
    found, rest = alarms(sight, width, verbose=verbose), verdicts(sight, width, verbose=verbose)
    notes = [*_dropped(sight, width), *_absences(rows, width)]
    if height is None:
        shown = _replicas(rows, width, None)
        return [*top, Text(), *shown, *_apart(notes), *_apart([*found, *rest])]
    below = height - len(top) - 1
    sure = cut(found, max(3, below // 2))
    shown = _replicas(rows, width, max(1, below - len(_apart(sure))))
    left = below - len(shown)
    found = cut(found, left - 1)
    left -= len(_apart(found))
    notes = cut(notes, left - 1)
    rest = cut(rest, left - len(_apart(notes)) - (not found))
    return [*top, Text(), *shown, *_apart(notes), *_apart([*found, *rest])][:height]


def ranked(rows: Sequence[Row]) -> list[Row]:
    """The worst first: what fired gravest, then who does not answer, then the fullest and longest
    queues; equals stay in the order in which they were given. Few replicas keep their order."""
    if len(rows) <= MAX_CARDS:
        return list(rows)

    def rank(row: Row) -> tuple[float, ...]:
        figures = row.figures
        return (
            -(row.gravest or 0),
            0.0 if figures.time_s is None else 1.0,
            -(figures.used_ratio or 0.0),
            -figures.numbers.get("waiting", 0.0),
        )

    return sorted(rows, key=rank)


def cut(found: list[Text], most: int) -> list[Text]:
    """At most so many lines, the last of them saying how many more there are."""
    if len(found) <= most:
        return found
    if most < 1:
        return []
    return [*found[: most - 1], Text(f"… {len(found) - most + 1:,} more lines", "dim")]


def _apart(found: list[Text]) -> list[Text]:
    return [Text(), *found] if found else []


def _rows(sight: Sight, figures: Sequence[Figures]) -> list[Row]:
    """Each replica with what fired for it."""
    fired: dict[str, list[Finding]] = defaultdict(list)
    for judged in sight.judged:
        if judged.finding.state == "fired":
            fired[judged.url].append(judged.finding)
    rows = []
    for one in figures:
        found = sorted(fired.get(one.url, ()), key=lambda finding: (-finding.severity, finding.id))
        gravest = found[0].severity if found else None
        rows.append(Row(one, gravest, tuple(finding.id for finding in found)))
    return rows


def _header(sight: Sight, width: int) -> list[Text]:
    num, down = len(sight.views), sum(1 for view in sight.views if view.error or not view.now)
    moment = datetime.fromtimestamp(sight.time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    parts = [Text("ullage watch", "bold"), Text(f"{num:,} replica{'s' if num != 1 else ''}")]
    if down:
        parts.append(Text(f"{down:,} not answering", "bold red"))
    parts += severity_counts(sight)
    parts += [Text(moment, "dim"), Text(f"every {sight.interval_s:g} s", "dim")]
    lines = flow(parts, width, "")
    if sight.error:
        lines += wrapped(f"the source of replicas failed: {sight.error}", width, "", "bold red")
    return lines


def _totals(totals: Totals, width: int) -> list[Text]:
    """All replicas together."""
    lines = [Text("total", "bold"), *flow(_total_cache(totals), width)]
    lines += flow(_total_requests(totals), width)
    latencies = []
    for name, label in LATENCIES:
        both = totals.spreads.get(name)
        text = latency(label, None if both is None else both[0])
        latencies.append(text.append("" if both is None else _of(totals, both[1])))
    return [*lines, *flow(latencies, width), *flow(_total_gpus(totals), width)]


def _total_gpus(totals: Totals) -> list[Text]:
    """Nothing where no accelerator is known of."""
    if not totals.num_gpus:
        return []
    parts = [Text(f"GPUs {totals.num_gpus:,}")]
    if (busy := totals.gpu_busy_ratio) is not None:
        text = f"busy {cells.percent(busy.value)} on average"
        known = busy.num_replicas
        parts.append(Text(text if known == totals.num_gpus else f"{text} (of {known:,})"))
    if totals.num_throttled_gpus:
        parts.append(Text(f"{totals.num_throttled_gpus:,} throttled", "bold yellow"))
    return parts


def _of(totals: Totals, num: int) -> str:
    """Of how many replicas a total speaks, where that is not all that answer."""
    return "" if num == totals.num_answering else f" (in {num:,} of {totals.num_answering:,})"


def _total_cache(totals: Totals) -> list[Text]:
    sums, parts = totals.sums, []
    if (ratio := totals.kv_used_ratio) is not None:
        told = f" {cells.percent(ratio.value)}"
        kv = Text("KV ").append(cells.bar(ratio.value, 12)).append(told, "bold")
        parts.append(kv.append(f" by {totals.basis}{_of(totals, ratio.num_replicas)}", "dim"))
    if (whole := sums.get("kv_total_bytes")) is not None:
        text = cells.used_of(sums["kv_used_bytes"].value, whole.value)
        parts.append(Text(text + _of(totals, whole.num_replicas)))
        parts.append(Text(f"{byte_size(sums['kv_free_bytes'].value)} free"))
    if (whole := sums.get("kv_total_tokens")) is not None:
        text = cells.tokens_of(sums["kv_used_tokens"].value, whole.value)
        parts.append(Text(text + _of(totals, whole.num_replicas)))
    return parts


def _total_requests(totals: Totals) -> list[Text]:
    parts = []
    for name, show in TOTALS:
        total = totals.sums.get(name)
        if total is None:
            parts.append(Text(f"{SHOWN[name]} {cells.NONE}", "dim"))
            continue
        text = Text(f"{SHOWN[name]} {show(total.value)}")
        if name == "waiting" and any(totals.waiting_by_reason.values()):
            text.append(f" ({reasons_text(totals.waiting_by_reason)})")
        parts.append(text.append(_of(totals, total.num_replicas)))
    return parts


def _replicas(rows: Sequence[Row], width: int, room: int | None) -> list[Text]:
    """Cards where they fit, else the table, else as much of the table as fits."""
    if len(rows) <= MAX_CARDS:
        cards: list[Text] = []
        for row in rows:
            cards += [*([Text()] if cards else []), *card(row, width)]
        if room is None or len(cards) <= room:
            return cards
    most = MAX_ROWS if room is None else max(room - 2, 1)
    if len(rows) <= most + 1:
        return table(rows, width)
    rest = f"… {len(rows) - most:,} more replicas, none of them worse"
    return [*table(rows[:most], width), Text(rest, "dim")]


def _dropped(sight: Sight, width: int) -> list[Text]:
    """What of pages could not be read: what stood there is missing above."""
    told: dict[str, int] = defaultdict(int)
    for view in sight.views:
        if view.now is not None and not view.error and view.now.dropped:
            told[view.now.dropped] += 1
    ranked = sorted(told.items(), key=lambda pair: -pair[1])
    found: list[Text] = []
    for what, num in ranked[:MAX_DROPPED]:
        where = "" if num == len(sight.views) else f" ({num:,} replica{'s' if num != 1 else ''})"
        text = f"not read of its page: {cells.clean(what)}{where}"
        found += wrapped(text, width, "", "bold yellow")
    if len(ranked) > MAX_DROPPED:
        text = f"and {sum(num for _, num in ranked[MAX_DROPPED:]):,} replicas more, in other ways"
        found += wrapped(text, width, "", "dim")
    return found


def _absences(rows: Sequence[Row], width: int) -> list[Text]:
    """Why there are dashes: each reason once, with the figures that it explains."""
    why: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        one = row.figures
        if one.time_s is None:
            continue
        for name, label in SHOWN.items():
            if name in one.absent and one.absent[name] not in UNSOUGHT:
                why[one.absent[name]][label] += 1
    found: list[Text] = []
    ranked = sorted(why.items(), key=lambda pair: -max(pair[1].values()))
    for reason, labels in ranked[:MAX_REASONS]:
        num = max(labels.values())
        where = "" if num == len(rows) else f" ({num:,} replica{'s' if num != 1 else ''})"
        text = f"{cells.NONE} {', '.join(labels)}: {cells.clean(reason)}{where}"
        found += wrapped(text, width, "", "dim")
    if len(ranked) > MAX_REASONS:
        text = f"{cells.NONE} and {len(ranked) - MAX_REASONS:,} more reasons"
        found += wrapped(text, width, "", "dim")
    return found
