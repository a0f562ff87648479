"""5,000 requests of a real trace against `ullage serve`, with all that clients and operators do.

Lengths and shared prefixes are the Mooncake conversation trace's, divided; clients leave at any
point, deadlines pass, the operator cancels the oldest and swaps an adapter, arrivals come at four
times the capacity that was measured. Wanted: an answer for each, no block held at the end, flat
memory, exit 0 at SIGTERM under load. Writes RESULTS.md beside itself:

    .venv/bin/python benchmarks/soak/run.py [--requests 5000] [--model tiny|smollm2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from soak_client import Outcome, send
from soak_load import Disturbances, Disturbed, Phase, PhaseResult, run_phases
from soak_plan import Ask, Limits, make_asks, read_trace
from soak_server import Served, serve
from soak_watch import MemoryLog, come_to_rest, get, percentile

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "startup"))

from measure_process import cpu_name

import ullage

REPOSITORY = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("RESULTS.md")
TRACE = REPOSITORY.parent / "shared" / "traces" / "mooncake-conversation.jsonl"
# Bytes that a request may add to the resident memory for good, and all of them together.
SLOPE_LIMIT_BYTES = 1024
GROWTH_LIMIT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to soak: how it is served, and how the trace is cut for it."""

    name: str
    path: str
    flags: tuple[str, ...]
    limits: Limits
    concurrency: int
    adapters: dict[str, str]
    threads: int


@dataclass(frozen=True, slots=True)
class Soaked:
    """What one soak found. `problems` is empty when all held."""

    subject: Subject
    phases: tuple[PhaseResult, ...]
    disturbed: Disturbed
    kv: dict[str, float]
    slope_bytes: float
    growth_bytes: int
    last_bytes: int
    drained: Counter[str]
    exit_code: int
    problems: tuple[str, ...]


def tiny(folder: Path) -> Subject:
    """A random Llama of three layers with three adapters: steps are cheap, HTTP is what works."""
    from tests.engine.adapters import write_adapter
    from tests.engine.families import write_model
    from tests.serving.conftest import TEMPLATE

    path = write_model("llama", folder / "tiny")
    settings = path / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    adapters = {
        name: str(write_adapter(path, folder / name, seed=seed))
        for seed, name in enumerate(("first", "second", "swapped"))
    }
    flags = ("--max-num-seqs", "16", "--max-num-batched-tokens", "128")
    memory = ("--kv-cache-memory-bytes", str(4 << 20), "--max-num-queued-reqs", "32")
    limits = Limits(64, 16, 200, 60, 512)
    return Subject("tiny Llama", str(path), (*flags, *memory), limits, 16, adapters, 1)


def smollm2(_: Path) -> Subject:
    """SmolLM2-135M with int8 weights and keys, at a cache that fits a fifth of what may run."""
    tool = REPOSITORY / "tools" / "smollm2_path.py"
    asked = subprocess.run([sys.executable, str(tool)], capture_output=True, text=True, check=True)
    flags = ("--quantization", "int8", "--kv-cache-dtype", "int8_per_token_head")
    sizes = ("--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--max-model-len", "512")
    memory = ("--kv-cache-memory-bytes", str(24 << 20), "--max-num-queued-reqs", "32")
    limits = Limits(128, 64, 100, 16, 512)
    return Subject(
        "SmolLM2-135M, int8", asked.stdout.strip(), (*flags, *sizes, *memory), limits, 16, {}, 2
    )


SUBJECTS = {"tiny": tiny, "smollm2": smollm2}


def phases_of(num_requests: int, concurrency: int) -> list[Phase]:
    """A tenth to measure capacity, four tenths at 4× of it, the rest at 0.9× of it."""
    tenth = num_requests // 10
    return [
        Phase("closed loop", tenth, concurrency=concurrency),
        Phase("overload", 4 * tenth, load=4.0),
        Phase("steady", num_requests - 5 * tenth, load=0.9),
    ]


def soak(subject: Subject, trace: Path, num_requests: int) -> Soaked:
    """All phases, the rest, then SIGTERM while requests run."""
    rows = read_trace(trace)
    served_adapters = [name for name in subject.adapters if name != "swapped"]
    asks = make_asks(rows, num_requests, subject.limits, served_adapters)
    last = list(make_asks(rows, 40, subject.limits, served_adapters, seed=1))
    with started(subject) as served:
        memory = MemoryLog(served.pid)
        swapped = subject.adapters.get("swapped")
        disturbances = Disturbances(
            cancel_every_s=3.0,
            cancel_percent=10,
            swap_every_s=0.7 if swapped else 0.0,
            adapter=("swapped", swapped) if swapped else None,
        )
        phases = phases_of(num_requests, subject.concurrency)
        results, disturbed = asyncio.run(
            run_phases(served.target, asks, phases, disturbances, memory)
        )
        problems = [
            f"{result.phase.name}: {outcome.kind} {outcome.note} (request {outcome.ask.number})"
            for result in results
            for outcome in result.outcomes
            if outcome.kind in ("fault", "unconnected")
        ]
        problems += disturbed.faults
        num_answered = sum(len(result.outcomes) for result in results)
        if num_answered != num_requests:
            problems.append(f"{num_requests} requests sent, {num_answered} outcomes")
        try:
            asyncio.run(come_to_rest(served.target))
        except TimeoutError as error:
            problems.append(str(error))
        kv = json.loads(get(served.target, "/ullage/kv")[1])
        problems += leaks(kv)
        warm_after = num_requests // 2
        slope_bytes = memory.slope_bytes_per_request(warm_after)
        growth_bytes = memory.growth_bytes(warm_after)
        if slope_bytes > SLOPE_LIMIT_BYTES or growth_bytes > GROWTH_LIMIT_BYTES:
            problems.append(
                f"memory grows: {slope_bytes:.0f} bytes a request, {growth_bytes} in all"
            )
        drained, exit_code, log = asyncio.run(end_under_load(served, last))
        problems += [
            f"SIGTERM: {outcome.kind} {outcome.note}"
            for outcome in drained
            if outcome.kind not in ("complete", "refused", "rejected", "unconnected", "expired")
        ]
        if exit_code != 0 or log:
            problems.append(f"exit code {exit_code}, stderr {log[-500:]!r}")
        return Soaked(
            subject,
            tuple(results),
            disturbed,
            kv,
            slope_bytes,
            growth_bytes,
            memory.samples[-1][1],
            Counter(outcome.kind for outcome in drained),
            exit_code,
            tuple(problems),
        )


@contextmanager
def started(subject: Subject) -> Iterator[Served]:
    flags = [*subject.flags, "--enable-control-routes"]
    if subject.adapters:
        flags += ["--enable-lora", "--lora-modules"]
        flags += [f"{name}={path}" for name, path in subject.adapters.items() if name != "swapped"]
    with serve([subject.path, *flags], subject.threads) as served:
        yield served


def leaks(kv: dict[str, float]) -> list[str]:
    """What /ullage/kv says is still held; every block must be free or cached, and free counts."""
    found = []
    if kv["used_blocks"] != 0 or kv["free_blocks"] != kv["num_blocks"]:
        found.append(f"{kv['used_blocks']} of {kv['num_blocks']} blocks are still held")
    if kv["holders"] or kv["running"] or kv["waiting"]:
        found.append(f"{kv['running']} run, {kv['waiting']} wait, holders {kv['holders']}")
    return found


async def end_under_load(served: Served, asks: Sequence[Ask]) -> tuple[list[Outcome], int, str]:
    """Send `asks` from clients that stay, SIGTERM when the first have begun, wait for all."""
    staying = [ask for ask in asks if ask.leaves is None]
    sent = [asyncio.ensure_future(send(served.target, ask)) for ask in staying]
    while (await running(served)) == 0 and not all(task.done() for task in sent):
        await asyncio.sleep(0.01)
    code, log = await asyncio.to_thread(served.terminate)
    return list(await asyncio.gather(*sent)), code, log


async def running(served: Served) -> int:
    return int(
        json.loads((await asyncio.to_thread(get, served.target, "/ullage/kv"))[1])["running"]
    )


def section(found: Soaked) -> list[str]:
    """One subject's part of RESULTS.md."""
    subject = found.subject
    limits = subject.limits
    lines = [
        f"## {subject.name}",
        "",
        f"`ullage serve` with `{' '.join(subject.flags)}`, `ULLAGE_CHECK=1`, "
        f"{subject.threads} thread(s), adapters: {', '.join(subject.adapters) or 'none'}. "
        f"Prompts are the trace's divided by {limits.prompt_divisor:g} (at most "
        f"{limits.most_prompt}), answers by {limits.output_divisor:g} (at most "
        f"{limits.most_output}).",
        "",
        "| phase | requests | seconds | requests/s | complete | refused (429) | cancelled "
        "| expired | rejected | left | faults | p50 s | p99 s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in found.phases:
        kinds = result.kinds
        times = [o.seconds for o in result.outcomes if o.kind == "complete"] or [float("nan")]
        lines.append(
            f"| {result.phase.name} | {len(result.outcomes)} | {result.seconds:.1f} "
            f"| {len(result.outcomes) / result.seconds:.0f} | {kinds['complete']} "
            f"| {kinds['refused']} | {kinds['cancelled']} | {kinds['expired']} "
            f"| {kinds['rejected']} | {kinds['left']} | {kinds['fault'] + kinds['unconnected']} "
            f"| {percentile(times, 0.5):.2f} | {percentile(times, 0.99):.2f} |"
        )
    features = Counter(f for r in found.phases for o in r.outcomes for f in o.ask.features)
    ways = Counter(o.ask.leaves for r in found.phases for o in r.outcomes if o.kind == "left")
    kv = found.kv
    lines += [
        "",
        "Asked for: "
        + ", ".join(f"{name} {count}" for name, count in features.most_common())
        + ".",
        "Clients that left: "
        + ", ".join(f"{way} {count}" for way, count in ways.most_common())
        + ".",
        f"The operator cancelled the oldest tenth {found.disturbed.cancels} times and swapped an "
        f"adapter {found.disturbed.swaps} times.",
        f"At the end: {kv['used_blocks']} of {kv['num_blocks']} blocks held, "
        f"{kv['cached_blocks']} free ones cached.",
        f"Resident memory in the second half: {found.slope_bytes:+.0f} bytes a request (limit "
        f"{SLOPE_LIMIT_BYTES}), {found.growth_bytes / 2**20:+.1f} MiB in all (limit "
        f"{GROWTH_LIMIT_BYTES >> 20}), {found.last_bytes / 2**20:.0f} MiB at the end.",
        "SIGTERM while requests ran: "
        + ", ".join(f"{kind} {count}" for kind, count in found.drained.most_common())
        + f", exit code {found.exit_code}.",
        "",
        "**All held.**" if not found.problems else f"**{len(found.problems)} problems:**",
        *(f"- {problem}" for problem in found.problems[:20]),
        "",
    ]
    return lines


def main() -> int:
    """Soak, write RESULTS.md, print it; 1 when anything did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--model", choices=[*SUBJECTS, "all"], default="all")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    chosen = SUBJECTS if args.model == "all" else {args.model: SUBJECTS[args.model]}
    lines = [
        "# Soak of `ullage serve`",
        "",
        f"{args.requests} requests with lengths and shared prefixes of {args.trace.name}; a tenth "
        "in a closed loop measures capacity, four tenths arrive at 4× of it, the rest at 0.9×. Every "
        "request must be answered whole, refused with Retry-After (429), ended by its own deadline "
        "(408), or said to be cancelled; made by `benchmarks/soak/run.py`.",
        "",
        f"ullage {ullage.__version__} · Python {platform.python_version()} · "
        f"{cpu_name()} × {os.cpu_count()} · load {os.getloadavg()[0]:.1f} · "
        f"{time.strftime('%Y-%m-%d')}",
        "",
    ]
    failed = False
    with tempfile.TemporaryDirectory(prefix="ullage-soak-") as scratch:
        for make in chosen.values():
            found = soak(make(Path(scratch)), args.trace, args.requests)
            failed |= bool(found.problems)
            part = section(found)
            print("\n".join(part), flush=True)
            lines += part
    fresh = args.results.with_suffix(".tmp")
    fresh.write_text("\n".join(lines))
    fresh.replace(args.results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
