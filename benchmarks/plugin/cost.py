"""What the plugin costs a vLLM server: CPU-seconds per token with it over without it.

Two servers, one of them stopped (SIGSTOP) while the other answers the same requests; pairs are
interleaved, and who goes first alternates. After every few pairs both servers start anew, so that
what one process has by luck (the layout of its memory) does not pass for the plugin. CPU time is
that of all threads of the server's session, as the scheduler counts it. What is done is kept in
~/.cache/ullage/bench/plugin-cost.json, so that a run that was broken off goes on:

    .venv/bin/python benchmarks/plugin/cost.py [--pairs 30] [--fresh]

It needs a quiet machine and tools/vllm_setup.sh. RESULTS.md is written at the end; exit status 1
when the upper bound is above 1%.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plugin_pairs import Ratio, ratio_of

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "vllm"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from plugin_server import ON, Server, Servers, prompt_of, save_model, servers

STATE = Path("~/.cache/ullage/bench/plugin-cost.json").expanduser()
RESULTS = Path(__file__).parent / "RESULTS.md"
LIMIT = 1.01
PAIRS_OF_A_START = 6
CONCURRENCY = 16
OUTPUT_TOKENS = 800
FLAGS = ("--max-num-seqs", str(CONCURRENCY), "--no-enable-prefix-caching")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    args = parser.parse_args()
    pairs = [] if args.fresh or not STATE.exists() else json.loads(STATE.read_text())
    with tempfile.TemporaryDirectory() as folder, _launchers(Path(folder)) as (plain, plugged):
        while len(pairs) < args.pairs:
            both = [plain.start(FLAGS, {}), plugged.start(FLAGS, ON)]
            for server in both:
                _turn(server, warm_up=True)
                _all_of(server.pid, signal.SIGSTOP)
            for _ in range(min(PAIRS_OF_A_START, args.pairs - len(pairs))):
                order = (0, 1) if len(pairs) % 2 == 0 else (1, 0)
                costs = {at: _measured(both[at]) for at in order}
                pairs.append([costs[0], costs[1]])
                _keep(pairs)
                say(f"pair {len(pairs)}: {costs[1] / costs[0] - 1:+.2%}")
            for server in both:
                _all_of(server.pid, signal.SIGCONT)
    found = ratio_of([(one, other) for one, other in pairs])
    _write(found, pairs)
    say(f"{found.mean - 1:+.2%} ({found.low - 1:+.2%} to {found.high - 1:+.2%})")
    return int(found.high > LIMIT)


@contextlib.contextmanager
def _launchers(folder: Path) -> Iterator[tuple[Servers, Servers]]:
    home = os.environ.get("ULLAGE_VLLM_VENV") or "~/.cache/ullage/vllm-0.32"
    python = Path(home).expanduser() / "bin" / "python"
    model = save_model(folder / "model")
    with servers(python, model) as plain, servers(python, model) as plugged:
        yield plain, plugged


def _measured(server: Server) -> float:
    """CPU-seconds per generated token of one turn; the server runs only during it."""
    _all_of(server.pid, signal.SIGCONT)
    try:
        before_s = _cpu_s(server.pid)
        tokens = _turn(server)
        return (_cpu_s(server.pid) - before_s) / tokens
    finally:
        _all_of(server.pid, signal.SIGSTOP)


def _turn(server: Server, *, warm_up: bool = False) -> int:
    """Every seat full of requests of one length, and a scrape; how many tokens came."""
    tokens = [0] * CONCURRENCY

    def ask(number: int) -> None:
        answer = server.ask(prompt_of(number, 64), 50 if warm_up else OUTPUT_TOKENS)
        tokens[number] = answer.raise_for_status().json()["usage"]["completion_tokens"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CONCURRENCY)]
    for thread in threads:
        thread.start()
    server.metrics()
    for thread in threads:
        thread.join()
    assert all(tokens), "a request failed"
    return sum(tokens)


def _session(leader: int) -> list[int]:
    """Every process of the session that the server leads."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            # After the name: state, parent, group, session (proc(5)).
            if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(entry.name))
    return found


def _all_of(leader: int, sign: signal.Signals) -> None:
    for pid in _session(leader):
        os.kill(pid, sign)


def _cpu_s(leader: int) -> float:
    """CPU-seconds that all threads of the session have run, to the nanosecond."""
    total = 0
    for pid in _session(leader):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _keep(pairs: list[Any]) -> None:
    STATE.parent.mkdir(parents=True, exist_ok=True)
    scratch = STATE.with_suffix(".tmp")
    scratch.write_text(json.dumps(pairs))
    scratch.replace(STATE)


def _write(found: Ratio, pairs: list[list[float]]) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "startup"))
    from measure_process import cpu_name

    rows = "\n".join(
        f"| {number} | {lacking * 1e6:.1f} | {having * 1e6:.1f} | {having / lacking - 1:+.2%} |"
        for number, (lacking, having) in enumerate(pairs, 1)
    )
    starts = [
        ratio_of([(one, other) for one, other in pairs[at : at + PAIRS_OF_A_START]]).mean - 1
        for at in range(0, len(pairs) - 1, PAIRS_OF_A_START)
    ]
    RESULTS.write_text(
        f"""# What the vLLM plugin costs

CPU-seconds per generated token of a vLLM 0.32 server with the plugin, over one without:
**{found.mean - 1:+.2%}**, 95% interval {found.low - 1:+.2%} to **{found.high - 1:+.2%}**, from \
{found.num_pairs} interleaved pairs (allowed: an upper end of {LIMIT - 1:.0%}).

{time.strftime("%Y-%m-%d")}, {cpu_name()}, {os.cpu_count()} cores. A random model of two layers, \
so that a step is nearly all vLLM's own Python, which is where a plugin costs most; \
{CONCURRENCY} requests at a time, {OUTPUT_TOKENS} tokens each. Both servers start anew after \
{PAIRS_OF_A_START} pairs; means of the starts: {", ".join(f"{one:+.2%}" for one in starts)}.

| pair | without, µs | with, µs | |
|---|---|---|---|
{rows}
"""
    )


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
