"""A body of /metrics → Snapshot: identified, read by its dialect, each field sourced or absent.

Holds `snapshot_of` and what other routes told. Pages with the same keys share one plan, so that
the second scrape of a server costs only its numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ullage.telemetry.dialects.source import Info
from ullage.telemetry.dialects.table import DIALECTS
from ullage.telemetry.exposition import Dropped, Rows, Settled, rows_of, settled
from ullage.telemetry.identify import identify
from ullage.telemetry.plan import Fact, Plan, Steps
from ullage.telemetry.plan_making import HISTOGRAM_PARTS, adapter_names, plan_of
from ullage.telemetry.snapshot import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELLED,
    PROBED,
    Identity,
    Name,
    Snapshot,
)

VOCABULARY: tuple[Name, ...] = (*GAUGES, *COUNTERS, *LABELLED, *HISTOGRAMS, *PROBED)
MOST_PLANS = 16_384
"""Replicas whose plans are kept: one takes a few kilobytes, the steps of equal ones are shared."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a server says of itself on routes other than /metrics. "" or None: it does not say.

    `engine` is a dialect's name where a route shows it (`/ullage/kv`, `/get_server_info`, `/props`,
    `/info`). `settings` are by the engine's own names. `started_s` is Unix time. `refused` says
    which route was not answered for want of a key.
    """

    engine: str = ""
    version: str = ""
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    max_model_len: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    started_s: float | None = None
    refused: str = ""


NOTHING_TOLD = Told()


def snapshot_of(body: bytes, *, time_s: float, told: Told = NOTHING_TOLD) -> Snapshot:
    """What the page says, at `time_s` (Unix), in the vocabulary of `telemetry.snapshot`.

    Raises nothing: of a page that is no exposition, or that no dialect knows, everything is absent
    with the reason, and `identity.engine` is "".
    """
    body, changing = _parted(body)
    rows = rows_of(body)
    cut_short = rows.truncated > 0 or rows.beyond > 0
    key: _Key = (rows.digest(), told.engine, cut_short, frozenset())
    plan = _PLANS.get(key)
    if plan is not None:
        _PLANS.move_to_end(key)
        try:
            return _snapshot(plan, rows, changing, time_s, told)
        except ValueError:
            pass  # a value that is no number: its line is dropped below
    found = settled(rows)
    if not found.plain:
        key = (found.rows.digest(), told.engine, cut_short, found.damaged)
        plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS[key] = _plan(found, told.engine, cut_short)
        if len(_PLANS) > MOST_PLANS:
            _PLANS.popitem(last=False)
    return _snapshot(plan, found.rows, changing, time_s, told)


# Metrics that are read for their labels alone, which change as a server runs.
_CHANGING = tuple(
    sorted({dialect.info.adapters[0] for dialect in DIALECTS if dialect.info.adapters})
)


def _parted(body: bytes) -> tuple[bytes, bytes]:
    """The page without the block of lines whose labels change, and that block.

    A page whose lines of this metric do not stand together stays whole.
    """
    for name in _CHANGING:
        mark = f"\n{name}{{".encode()
        start = body.find(mark)
        if start < 0 or body.startswith(mark[1:]):
            continue
        end = body.find(b"\n", body.rfind(mark) + 1)
        block = body[start:end]
        if end >= 0 and block.count(b"\n") == block.count(mark):
            return body[:start] + body[end:], block[1:] + b"\n"
    return body, b""


def _adapters(changing: bytes, info: Info) -> tuple[str, ...]:
    """Names by commas in the labels of the block's lines; sorted."""
    if not changing or info.adapters is None:
        return ()
    found = settled(rows_of(changing)).series
    return adapter_names([series.labels for series in found if series], info.adapters[1])


_Key = tuple[bytes, str, bool, frozenset[str]]
_PLANS: OrderedDict[_Key, Plan] = OrderedDict()
_STEPS: dict[Steps, Steps] = {}


def _plan(found: Settled, told_engine: str, cut_short: bool) -> Plan:
    damaged = found.damaged
    # A line that cannot be read still says whose page it is.
    names = {one.name for one in found.series if one} | damaged
    if cut_short:
        last = next((one.name for one in reversed(found.series) if one), "")
        damaged |= _family(last)
    identified = identify(names, told_engine)
    if identified.dialect is None:
        nothing = Steps(absent_items=tuple((name, identified.reason) for name in VOCABULARY))
        return Plan(None, _shared(nothing), malformed=found.malformed)
    plan = plan_of(found.series, identified.dialect, damaged, malformed=found.malformed)
    return replace(plan, steps=_shared(plan.steps))


def _shared(steps: Steps) -> Steps:
    """These steps, or the same ones of another page of this shape."""
    if len(_STEPS) >= MOST_PLANS:
        _STEPS.clear()
    return _STEPS.setdefault(steps, steps)


def _family(name: str) -> frozenset[str]:
    """Every sample name of the family that `name` is of: its last lines may be cut off."""
    base = name
    for ending in HISTOGRAM_PARTS:
        base = base.removesuffix(ending)
    return frozenset({name, base, *(base + ending for ending in HISTOGRAM_PARTS)})


def _snapshot(plan: Plan, rows: Rows, changing: bytes, time_s: float, told: Told) -> Snapshot:
    read = plan.read(rows.values)
    sources, absent = plan.steps.sources, plan.steps.absent
    approximate = plan.steps.approximate
    if read.absent:
        sources = {name: text for name, text in sources.items() if name not in read.absent}
        absent = {**absent, **read.absent}
        approximate = approximate - read.absent.keys()
    dropped = Dropped(rows.truncated, plan.malformed, plan.duplicates, rows.beyond)
    return Snapshot(
        time_s=time_s,
        identity=_identity(plan, changing, told, read.facts),
        gauges=read.gauges,
        counters=read.counters,
        labelled=read.labelled,
        histograms=read.histograms,
        probe_findings=read.probed.get("probe_findings"),
        sources=sources,
        absent=absent,
        approximate=approximate,
        dropped=dropped.in_words(),
    )


def _identity(plan: Plan, changing: bytes, told: Told, facts: Mapping[Fact, float]) -> Identity:
    page = plan.identity
    adapters = told.adapters
    if not adapters and plan.dialect is not None:
        adapters = _adapters(changing, plan.dialect.info) or page.adapters
    return Identity(
        engine=plan.dialect.engine if plan.dialect else "",
        version=told.version or page.version,
        models=told.models or page.models,
        max_model_len=told.max_model_len or _whole(facts.get("max_model_len")),
        block_size=_whole(facts.get("block_size")),
        num_blocks=_whole(facts.get("num_blocks")),
        num_engines=page.num_engines,
        adapters=adapters,
        settings={**page.settings, **told.settings} if told.settings else page.settings,
        started_s=told.started_s if told.started_s is not None else facts.get("started_s"),
        unsaid=told.refused,
    )


def _whole(number: float | None) -> int | None:
    return int(number) if number is not None and number.is_integer() and number > 0 else None
