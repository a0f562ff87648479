"""What reading one scrape costs: ours, first and again, beside prometheus_client's parser.

Pages are vLLM 0.32's own, recorded under tests/telemetry/pages, and the same of eight data-parallel
engines. Between two scrapes of one server the numbers differ and the names do not; each repeat here
has other numbers. Processor time, the median of turns that alternate. Writes RESULTS.md:

    .venv/bin/python benchmarks/telemetry/parse.py [--turns 15]
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from ullage.telemetry import exposition, reading
from ullage.telemetry.exposition import page_of
from ullage.telemetry.reading import snapshot_of

sys.path.insert(0, str(Path(__file__).parents[1] / "startup"))

from measure_process import cpu_name

RECORDED = Path(__file__).parents[2] / "tests" / "telemetry" / "pages"
RESULTS = Path(__file__).with_name("RESULTS.md")
NUM_SCRAPES = 20
LIMIT_S = 0.001
"""The issue's aim: well under a millisecond for a full-size page."""


def scrapes(page: bytes) -> list[bytes]:
    """The page as of NUM_SCRAPES moments: whole numbers of its series have risen."""
    risen = []
    for moment in range(NUM_SCRAPES):
        rise = b"%d.0" % (1000 + moment)
        risen.append(re.sub(rb"(?m)^([^#\n].*[\"}\w]) 0\.0$", rb"\1 " + rise, page))
    assert len(set(risen)) == NUM_SCRAPES
    return risen


def of_engines(page: bytes, count: int) -> bytes:
    """The page of a server with that many data-parallel engines."""
    lines: list[bytes] = []
    for line in page.splitlines(keepends=True):
        copies = range(count) if b'engine="0"' in line else range(1)
        lines += [line.replace(b'engine="0"', b'engine="%d"' % engine) for engine in copies]
    return b"".join(lines)


def cpu_s(work: Callable[[bytes], object], pages: list[bytes]) -> float:
    """Processor seconds of one page."""
    started = time.process_time()
    for page in pages:
        work(page)
    return (time.process_time() - started) / len(pages)


def forget() -> None:
    exposition._KEPT.clear()
    exposition._PAIRS.clear()
    reading._PLANS.clear()


def theirs(page: bytes) -> None:
    for family in text_string_to_metric_families(page.decode()):
        _ = family.samples


def first(page: bytes) -> None:
    forget()
    snapshot_of(page, time_s=0.0)


def again(page: bytes) -> None:
    snapshot_of(page, time_s=0.0)


WORKS: dict[str, Callable[[bytes], object]] = {
    "prometheus_client, every sample": theirs,
    "ours, every sample (`page_of`)": lambda page: page_of(page),
    "ours, a server's first scrape (`snapshot_of`)": first,
    "ours, every later scrape (`snapshot_of`)": again,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    turns = parser.parse_args().turns
    recorded = (RECORDED / "vllm-0.32-after.prom").read_bytes()
    pages = {"one engine": recorded, "eight engines": of_engines(recorded, 8)}
    lines = [
        "# Reading one scrape",
        "",
        f"Python {platform.python_version()}, {cpu_name()}, {os.cpu_count()} cores; load at the "
        f"start {os.getloadavg()[0]:.1f}. Milliseconds of processor time per page, the median of "
        f"{turns} turns of {NUM_SCRAPES} scrapes each.",
        "",
        "| page | lines | bytes | " + " | ".join(WORKS) + " | times faster, later scrapes |",
        "|---" * (len(WORKS) + 4) + "|",
    ]
    passed = True
    for name, page in pages.items():
        moments = scrapes(page)
        taken: dict[str, list[float]] = {work: [] for work in WORKS}
        for _ in range(turns):
            for work, run in WORKS.items():
                run(moments[0])
                taken[work].append(cpu_s(run, moments))
        medians = {work: statistics.median(values) for work, values in taken.items()}
        cells = " | ".join(f"{median * 1e3:.2f}" for median in medians.values())
        values = list(medians.values())
        lines.append(
            f"| {name} | {len(page.splitlines()):,} | {len(page):,} | {cells} "
            f"| {values[0] / values[-1]:.0f} |"
        )
        if name == "one engine":
            passed = values[-1] < LIMIT_S
    text = "\n".join(lines) + "\n"
    RESULTS.write_text(text)
    print(text)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
