"""5,000 requests of a real trace against `ullage serve`, with all that clients and operators do.

Lengths and shared prefixes are the Mooncake conversation trace's, divided; clients leave at any
point, deadlines pass, the operator cancels the oldest and swaps an adapter, arrivals come at four
times the capacity that was measured. Wanted: an answer for each, no block held at the end, flat
memory, exit 0 at SIGTERM under load. Writes RESULTS.md beside itself:

    .venv/bin/python benchmarks/soak/soak.py [--requests 5000] [--model tiny|smollm2]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from soak_load import Disturbances
from soak_plan import Limits, read_trace
from soak_run import GROWTH_LIMIT_BYTES, SLOPE_LIMIT_BYTES, Soaked, Subject, soak
from soak_watch import percentile

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "startup"))

from measure_process import cpu_name

import ullage

REPOSITORY = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("RESULTS.md")
TRACE = REPOSITORY.parent / "shared" / "traces" / "mooncake-conversation.jsonl"


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


SUBJECTS = {"tiny": (tiny, 5000), "smollm2": (smollm2, 1000)}


def disturbances(subject: Subject) -> Disturbances:
    """A cancel of the oldest tenth every few seconds, an adapter that comes and goes."""
    swapped = subject.adapters.get("swapped")
    return Disturbances(
        cancel_every_s=3.0,
        cancel_percent=10,
        swap_every_s=0.7 if swapped else 0.0,
        adapter=("swapped", swapped) if swapped else None,
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
        "| phase | requests | arrived/s | ended/s | complete | refused (429) | cancelled "
        "| expired | rejected | left | faults | p50 s | p99 s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in found.phases:
        kinds = result.kinds
        times = [o.seconds for o in result.outcomes if o.kind == "complete"] or [float("nan")]
        lines.append(
            f"| {result.phase.name} | {len(result.outcomes)} "
            f"| {len(result.outcomes) / result.sending_s:.0f} "
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
    parser.add_argument("--requests", type=int, help="default: 5000 tiny, 1000 smollm2")
    parser.add_argument("--model", choices=[*SUBJECTS, "all"], default="all")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    chosen = list(SUBJECTS) if args.model == "all" else [args.model]
    rows = read_trace(args.trace)
    lines = [
        "# Soak of `ullage serve`",
        "",
        f"Requests with lengths and shared prefixes of {args.trace.name}; a tenth in a closed loop "
        "measures capacity, four tenths arrive at 4× of it, the rest at 0.9×. Each must be "
        "answered whole, refused with Retry-After (429), ended by its own deadline (408), or said "
        "to be cancelled. Made by `benchmarks/soak/soak.py`.",
        "",
        f"ullage {ullage.__version__} · Python {platform.python_version()} · "
        f"{cpu_name()} × {os.cpu_count()} · load {os.getloadavg()[0]:.1f} · "
        f"{time.strftime('%Y-%m-%d')}",
        "",
    ]
    failed = False
    with tempfile.TemporaryDirectory(prefix="ullage-soak-") as scratch:
        for name in chosen:
            make, usual = SUBJECTS[name]
            subject = make(Path(scratch))
            found = soak(subject, rows, args.requests or usual, disturbances(subject))
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
