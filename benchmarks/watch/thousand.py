"""What it costs to watch 1,000 engines every 5 s: processor time and memory of one process.

It starts the fleet (`thousand_pages.py`) and the watcher as processes of their own and prints a row
for RESULTS.md. Behind every replica lies an hour of looks when it begins, so that memory is what it
will be; all rules are judged in every round.

    python benchmarks/watch/thousand.py [--num 1000] [--interval 5] [--seconds 90] [--page FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import thousand_pages

if TYPE_CHECKING:
    from ullage.telemetry.histogram import Histogram
    from ullage.telemetry.snapshot import Snapshot
    from ullage.watch.watcher import Watcher

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "tests" / "telemetry" / "pages" / "vllm-0.32-overload.prom"
# From a start, connections are opened and every engine is asked who it is.
WARM_UP_ROUNDS = 3
HOUR_S, STEP_S = 3600.0, 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--interval", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--watch", help=argparse.SUPPRESS)
    parser.add_argument("--profile", type=Path, help="write cProfile's numbers of watching there")
    args = parser.parse_args()
    if args.watch:
        asyncio.run(_watch(args))
        return
    with subprocess.Popen(
        [sys.executable, str(HERE / "thousand_pages.py"), str(args.num), str(args.page)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as fleet:
        assert fleet.stdin and fleet.stdout
        ports = fleet.stdout.readline().strip()
        try:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--watch", ports], check=True)
        finally:
            fleet.stdin.close()


async def _watch(args: argparse.Namespace) -> None:
    from ullage.telemetry.scrape import DirectSource
    from ullage.watch.watcher import Watcher

    urls = [f"http://127.0.0.1:{port}" for port in json.loads(args.watch)]
    source = DirectSource(urls, interval_s=args.interval)
    watcher = Watcher(source, args.interval)
    profile = cProfile.Profile(time.process_time) if args.profile else None
    _live_an_hour(watcher, urls, args.page.read_bytes(), args.interval)
    begin_s, cpu_s, num_rounds = time.monotonic(), 0.0, 0
    start_cpu_s, warm_s, warm_cpu_s = time.process_time(), begin_s, 0.0
    async for sight in watcher.rounds():
        num_rounds += 1
        now_s, cpu_s = time.monotonic(), time.process_time()
        num_failed = sum(bool(view.error) for view in sight.views)
        fired = sum(judged.finding.state == "fired" for judged in sight.judged)
        print(
            f"{now_s - begin_s:6.1f} s: {cpu_s - start_cpu_s:6.2f} s CPU, {num_failed} failed, "
            f"{len(sight.judged)} judged, {fired} fired, {_vm_hwm_mb():.0f} MB",
            file=sys.stderr,
        )
        if num_rounds == WARM_UP_ROUNDS:
            warm_s, warm_cpu_s = now_s, cpu_s
            if profile is not None:
                profile.enable()
        if now_s - begin_s > args.seconds and num_rounds > WARM_UP_ROUNDS:
            break
    if profile is not None:
        profile.disable()
        profile.dump_stats(args.profile)
    await source.close()
    wall_s = now_s - warm_s
    cores = (cpu_s - warm_cpu_s) / wall_s
    each_ms = 1e3 * (cpu_s - warm_cpu_s) / (num_rounds - WARM_UP_ROUNDS) / len(urls)
    pace_s = wall_s / (num_rounds - WARM_UP_ROUNDS)
    now = sight.views[-1].now
    assert now is not None and num_failed == 0
    print(
        f"| {len(urls):,} | {pace_s:.1f} s | {args.page.stat().st_size / 1e3:.0f} kB | "
        f"{wall_s:.0f} s | {cores:.2f} | {each_ms:.2f} ms | {_vm_hwm_mb():.0f} MB | "
        f"{now.identity.engine} {now.identity.version}, {_cpu_name()}, "
        f"Python {platform.python_version()} |"
    )


def _live_an_hour(watcher: Watcher, urls: list[str], page: bytes, interval_s: float) -> None:
    """Give each replica the past that its next pages go on from."""
    from ullage.telemetry.reading import Told, snapshot_of
    from ullage.telemetry.scrape import Look
    from ullage.watch.history import History

    models = range(thousand_pages.NUM_MODELS)
    now_s = time.time()
    pairs = []
    for which in models:
        name = thousand_pages.name_of(which)
        told = Told(version="0.32.0", models=(name,))
        pages = thousand_pages.pages_of(page, name.encode(), which)[:2]
        pairs.append([snapshot_of(page, time_s=now_s, told=told) for page in pages])
    for back in range(int(HOUR_S / STEP_S), 0, -1):
        steps = -back * STEP_S / interval_s
        said = [_extrapolated(*pair, steps, now_s - back * STEP_S) for pair in pairs]
        for place, url in enumerate(urls):
            history = watcher._histories.setdefault(url, History(url))
            history.push(Look(url, now_s - back * STEP_S, said[place % len(said)]))


def _extrapolated(zero: Snapshot, one: Snapshot, steps: float, time_s: float) -> Snapshot:
    """The snapshot `steps` after `zero`, where `one` is one step after it."""

    def line(name: str, before: Histogram) -> Histogram:
        after = one.histograms[name]  # type: ignore[index]
        pairs = zip(before.counts, after.counts, strict=True)
        return replace(before, counts=tuple(a + steps * (b - a) for a, b in pairs))

    counters = {n: v + steps * (one.counters[n] - v) for n, v in zero.counters.items()}
    histograms = {name: line(name, before) for name, before in zero.histograms.items()}
    return replace(zero, time_s=time_s, counters=counters, histograms=histograms)


def _vm_hwm_mb() -> float:
    """This process's largest resident size in 10^6 bytes; its parent's does not count in it."""
    for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("no VmHWM")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
