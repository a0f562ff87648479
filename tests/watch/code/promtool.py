"""Series over time, as promtool's unit tests want them, and which alerts fire at which minute.

Holds the writing and the asking; scenarios are the tests'.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SCRAPE_S = 15
PER_MINUTE = 60 // SCRAPE_S
Values = list[float | None]


def level(*parts: tuple[float | None, float]) -> Values:
    """A gauge: (value, minutes) one after the other. None: not scraped."""
    return [value for value, minutes in parts for _ in range(round(minutes * PER_MINUTE))]


def counter(*parts: tuple[float, float], start: float = 0.0) -> Values:
    """A counter: (gain per minute, minutes) one after the other."""
    found: Values = []
    at = start
    for gain, minutes in parts:
        for _ in range(round(minutes * PER_MINUTE)):
            at += gain / PER_MINUTE
            found.append(round(at, 6))
    return found


def ramp(first: float, last: float, minutes: float) -> Values:
    num = round(minutes * PER_MINUTE)
    return [first + (last - first) * i / (num - 1) for i in range(num)]


def notation(values: Values) -> str:
    """promtool's; runs of one value are shortened."""
    words: list[str] = []
    at = 0
    while at < len(values):
        end = at + 1  # NaN is not like itself
        while end < len(values) and values[end] == values[at]:
            end += 1
        value, num = values[at], end - at
        if value is None:
            # A scrape that no longer has a series marks it as stale.
            words += [*(["stale"] if at else ["_"]), *["_"] * (num - 1)]
        else:
            words.append(f"{value!r}+0x{num - 1}" if num > 1 else repr(value))
        at = end
    return " ".join(words)


@dataclass
class Scenario:
    """What is scraped, and at which minutes exactly which alerts fire."""

    series: dict[str, Values]
    firing: Mapping[float, Iterable[str]] = field(default_factory=dict)


def outcome(rule_file: Path, scenarios: Mapping[str, Scenario]) -> str:
    """ "" where promtool finds exactly these alerts at those times, else what it says.

    All scenarios are one run, since rules take as long for many replicas as for one: each is a job
    of its own, written `job="llm"` in its series.
    """
    series: dict[str, str] = {}
    tests = []
    for what, scenario in scenarios.items():
        job = f"job={json.dumps(what)}"
        for name, values in scenario.series.items():
            assert 'job="llm"' in name, name
            series[name.replace('job="llm"', job)] = notation(values)
        for minute, names in scenario.firing.items():
            samples = [
                {"labels": f"{{alertname={json.dumps(n)}}}", "value": 1} for n in sorted(names)
            ]
            tests.append(
                {
                    "expr": f'group by (alertname) (ALERTS{{alertstate="firing",{job}}})',
                    "eval_time": f"{round(minute * 60)}s",
                    "exp_samples": samples,
                }
            )
    return run(rule_file, series, tests)


def run(rule_file: Path, series: Mapping[str, str], tests: Sequence[Mapping[str, object]]) -> str:
    """ "" where promtool agrees with all `promql_expr_test`s, else what it says."""
    document = {
        "rule_files": [str(rule_file)],
        "evaluation_interval": f"{SCRAPE_S}s",
        "tests": [
            {
                "interval": f"{SCRAPE_S}s",
                "input_series": [{"series": n, "values": v} for n, v in series.items()],
                "promql_expr_test": list(tests),
            }
        ],
    }
    place = rule_file.with_suffix(".test.yml")
    place.write_text(json.dumps(document))  # JSON is YAML, and faster
    done = subprocess.run(
        ["promtool", "test", "rules", str(place)], capture_output=True, text=True, timeout=240
    )
    return "" if done.returncode == 0 else re.sub(r"\n +", " ", done.stdout + done.stderr)
