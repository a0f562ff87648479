"""PromQL text: strings, matchers, and the names of all that a Snapshot is read from.

Holds what asking a Prometheus (`promql`) and writing rules for one (`watch.code`) share. No HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ullage.errors import BadUsage
from ullage.telemetry.dialects.source import Arithmetic, Dialect, Label, Source
from ullage.telemetry.dialects.table import DIALECTS
from ullage.telemetry.snapshot import HISTOGRAMS, Name

ENDS = ("_bucket", "_sum", "_count")
PROCESS = ("process_start_time_seconds", "process_cpu_seconds_total")
MARKERS: tuple[Name, ...] = ("running", "waiting", "kv_used_ratio", "generation_tokens")
MATCHER = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)\s*(=~|!~|!=|=)\s*("(?:[^"\\\n]|\\.)*")\s*(,|$)')


def selector_of(text: str, flag: str = "--prometheus-selector") -> str:
    """`job="vllm",cluster=~"eu.*"`, with braces around it or not, as matchers in PromQL.

    Raises:
        BadUsage: not a list of label matchers.
    """
    rest = text.strip()
    if rest.startswith("{") and rest.endswith("}"):
        rest = rest[1:-1].strip()
    whole, found = rest, []
    while rest:
        match = MATCHER.match(rest)
        if match is None or match[1] == "__name__":
            raise BadUsage(
                repr(whole[:80]),
                field=flag,
                expected='label matchers such as job="vllm",namespace=~"prod.*"',
            )
        found.append(f"{match[1]}{match[2]}{match[3]}")
        rest = rest[match.end() :].strip()
    return ",".join(found)


def quoted(text: str) -> str:
    """A PromQL string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def any_of(values: Iterable[str]) -> str:
    """A PromQL string for `=~` that matches exactly these values."""
    return quoted("|".join(re.escape(value) for value in values))


def page_names(dialects: Sequence[Dialect] = DIALECTS) -> str:
    """A PromQL string for `__name__=~` that matches all that a Snapshot is read from."""
    exact, marks = set(PROCESS), set[str]()
    for dialect in dialects:
        for name, sources in dialect.fields.items():
            read = {metric for source in sources for metric in metrics_in(source)}
            exact |= read if name not in HISTOGRAMS else {f"{m}{end}" for m in read for end in ENDS}
        exact |= _info_names(dialect)
        # A mark that begins no name which is asked for anyway tells engines apart.
        marks |= {m for m in dialect.marks if not any(name.startswith(m) for name in exact)}
    return quoted("|".join((*map(re.escape, sorted(exact)), *(f"{re.escape(m)}.*" for m in marks))))


def marker_names(dialects: Sequence[Dialect] = DIALECTS) -> tuple[str, ...]:
    """A few metrics of every engine, of which one is on each of its pages."""
    found = {
        metric
        for dialect in dialects
        for field in MARKERS
        for source in dialect.fields.get(field, ())
        for metric in metrics_in(source)
    }
    return tuple(sorted(found))


def metrics_in(source: Source) -> Iterator[str]:
    """Names of the metrics that a source reads; a histogram's without its end."""
    if isinstance(source, Arithmetic):
        yield from metrics_in(source.left)
        yield from metrics_in(source.right)
    elif isinstance(source, Label):
        yield source.metric
    else:
        yield source.name
        if source.weight:
            yield source.weight


def _info_names(dialect: Dialect) -> set[str]:
    info = dialect.info
    sources = (info.max_model_len, info.block_size, info.num_blocks)
    names = {metric for source in sources if source for metric in metrics_in(source)}
    names |= {*info.settings, *(pair[0] for pair in (info.version, info.adapters) if pair)}
    return names
