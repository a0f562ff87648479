"""A real vLLM in an overload: what `ullage watch` says, a cancel that keeps its promise, a drain.

vLLM 0.32 on the CPU with a small pool and long outputs: more requests run than the pool can hold to
their ends, so that vLLM preempts one after the other and computes them again. Told from outside:

    .venv/bin/python benchmarks/watch/overload.py [--seconds 60] [--interval 2]

Holds the load and what is demanded; exit status 1 with a sentence for each demand that failed. The
server and its plugin are those of tests/vllm (tools/vllm_setup.sh).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "vllm"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from plugin_server import BLOCK_SIZE, ON, Server, Stream, prompt_of, save_model, servers
from watched import Round, evidence, heard, watching

NUM_BLOCKS = 64
"""Of 32 tokens: two requests of the longest kind."""
SEATS = 16
PROMPT_TOKENS = (20, 49)
OUTPUT_TOKENS = 900
FLAGS = ("--num-gpu-blocks-override", str(NUM_BLOCKS + 1), "--max-num-seqs", str(SEATS))
ENDS = ("length", "abort")
"""How a request may end: as it was asked to, or by the cancel."""
EXPECTED = ("W003",)
"""What has to fire: the preemption storm."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--interval", type=float, default=2.0)
    args = parser.parse_args()
    home = os.environ.get("ULLAGE_VLLM_VENV") or "~/.cache/ullage/vllm-0.32"
    python = Path(home).expanduser() / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model")
        with servers(python, model) as launched:
            server = launched.start(FLAGS, ON)
            problems = overload(server, args.seconds, args.interval)
    for problem in problems:
        print(f"FAILED: {problem}")
    return int(bool(problems))


def overload(server: Server, seconds: float, interval_s: float) -> list[str]:
    """Load, watch, cancel, drain; a sentence for whatever did not hold."""
    load = Load(server)
    load.fill()
    time.sleep(2 * interval_s)
    rounds = watched(server, load, seconds, interval_s)
    problems = said(rounds)
    problems += cancelled(server)
    problems += drained(server, load)
    return problems


class Load:
    """Twice as many streams as there are seats; each that ends is replaced until the drain."""

    def __init__(self, server: Server) -> None:
        self._server, self._number = server, 0
        self.streams: list[Stream] = []

    def fill(self) -> None:
        while sum(not stream.ended for stream in self.streams) < 2 * SEATS:
            self._number += 1
            least, most = PROMPT_TOKENS
            prompt = prompt_of(self._number % 140, least + self._number % (most - least + 1))
            self.streams.append(self._server.stream(prompt, OUTPUT_TOKENS))


def watched(server: Server, load: Load, seconds: float, interval_s: float) -> list[Round]:
    """Every round of a `ullage watch` in a process of its own."""
    end = time.monotonic() + seconds
    with watching(server.url, "--interval", str(interval_s)) as watch:
        while time.monotonic() < end:
            watch.await_round(len(watch.rounds))
            load.fill()
    return watch.rounds


def said(rounds: Sequence[Round]) -> list[str]:
    """Print how often each rule fired and the last words of each; what should have and did not."""
    told = heard(rounds)
    print(f"{len(rounds)} rounds")
    for rule, found in told.items():
        if found.last is not None:
            print(f"{rule} fired in {found.states['fired']}: {found.last['cause']}")
            print(f"    [{evidence(found.last)}]")
            print(f"    → {found.last['remedy']}")
    newest = rounds[-1]["replicas"][0]
    for name in ("kv_used_bytes", "kv_total_bytes", "page_utilization_ratio", "preemptions_per_s"):
        print(f"{name}: {newest[name]}")
    problems = [f"{rule} never fired" for rule in EXPECTED if told[rule].last is None]
    if (storm := told["W003"].last) is not None:
        problems += untrue(storm)
    # The plugin says them; a null is a name that was not read.
    problems += [
        f"{name} is not told"
        for name in ("kv_used_bytes", "kv_total_bytes", "page_utilization_ratio")
        if newest[name] is None
    ]
    return problems


def untrue(storm: dict[str, Any]) -> list[str]:
    """What of the storm's cause is not so: too many are admitted for the room that they grow to."""
    if "run at once" not in storm["cause"]:
        return [f"W003 tells no reason: {storm['cause']}"]
    facts = {fact["name"]: fact["value"] for fact in storm["evidence"]}
    least, most = (PROMPT_TOKENS[n] + OUTPUT_TOKENS for n in (0, 1))
    pool = NUM_BLOCKS * BLOCK_SIZE
    problems = []
    if not least <= facts["mean length"] <= most:
        problems.append(f"requests of {least} to {most} tokens have a mean of {facts}")
    # vLLM counts one block more than can be held.
    if not pool / most - 0.1 <= facts["requests that fit"] <= (pool + BLOCK_SIZE) / least + 0.1:
        problems.append(f"{pool} tokens hold {pool / most:.2f} of {most}: {facts}")
    if facts["running mean"] <= facts["requests that fit"]:
        problems.append(f"no more run than fit: {facts}")
    return problems


def cancelled(server: Server) -> list[str]:
    """Cancel a quarter; what came free beside what was promised."""
    answer = server.http.post("/ullage/cancel_oldest", params={"percent": 25})
    report = answer.raise_for_status().json()
    print(
        f"cancelled {len(report['request_ids'])}: promised {report['promised_bytes']:,} bytes, "
        f"freed {report['freed_bytes']:,}"
    )
    if report["freed_bytes"] != report["promised_bytes"] or not report["freed_bytes"]:
        return ["the cancel freed other bytes than it promised"]
    return []


def drained(server: Server, load: Load) -> list[str]:
    """Drain under full load; every request that was taken must end as it was asked to."""
    before = [stream for stream in load.streams if not stream.ended]
    answer = server.http.post("/ullage/drain").raise_for_status().json()
    refused = server.ask(prompt_of(3, 5), 5).status_code
    for stream in before:
        stream.wait(600)
    # A stream that reached the server only after the drain began was refused, not lost.
    ends = Counter(
        "refused" if stream.status == 503 else str(stream.reason) for stream in load.streams
    )
    print(
        f"drained with {answer['in_flight']} in flight; new ones got {refused}; ends: {dict(ends)}"
    )
    problems = [] if refused == 503 else [f"a new request got {refused} in the drain"]
    if lost := [s for s in load.streams if s.status != 503 and s.reason not in ENDS]:
        found = [(stream.status, stream.reason, stream.tokens) for stream in lost]
        problems.append(f"{len(lost)} requests were lost: {found}")
    if short := [s for s in load.streams if s.reason == "length" and s.tokens != OUTPUT_TOKENS]:
        problems.append(f"{len(short)} answers were cut short")
    if left := server.http.get("/ullage/drain").json()["in_flight"]:
        problems.append(f"{left} requests are left")
    return problems


if __name__ == "__main__":
    sys.exit(main())
