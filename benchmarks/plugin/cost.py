"""What the plugin costs a vLLM server: CPU-seconds per token with it over without it.

Two servers, one of them stopped (SIGSTOP) while the other answers the same requests; pairs are
interleaved, and who goes first alternates. Both servers start anew after every two pairs, one of
each order, so that what one process has by luck (the layout of its memory) does not pass for the
plugin: the bound is that of the pairs or that of the starts, whichever is wider. CPU time is that
of every process of the server's session, by its own clock, to the nanosecond. What is done is kept
in ~/.cache/ullage/bench/plugin-cost.json, so that a run that was broken off goes on:

    .venv/bin/python benchmarks/plugin/cost.py [--pairs 30] [--fresh]

It needs a quiet machine and tools/vllm_setup.sh. RESULTS.md is written at the end of a run of at
least 30 pairs; exit status 1 when the upper bound is above 1%.
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

from plugin_pairs import Pair, Ratio, ratio_of, ratio_of_starts

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "vllm"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from plugin_server import DEV, ON, Server, Servers, prompt_of, save_model, servers

STATE = Path("~/.cache/ullage/bench/plugin-cost.json").expanduser()
RESULTS = Path(__file__).parent / "RESULTS.md"
LIMIT = 1.01
PAIRS_OF_A_START = 2
"""One that begins without the plugin, one that begins with it."""
LEAST_PAIRS = 30
WITHOUT = {"VLLM_PLUGINS": ""}
"""vLLM loads no plugin of any kind."""
CONCURRENCY = 16
OUTPUT_TOKENS = 1200
GATHERED_S = 0.5
"""How long the requests of a turn have to arrive, before any of them begins."""
STEPS = "vllm:iteration_tokens_total_count"
MOST_STEPS = 1.02 * OUTPUT_TOKENS
"""Of a turn whose requests all ran together: one token of each in every step."""
MOST_DROPPED = 5
FLAGS = ("--max-num-seqs", str(CONCURRENCY), "--no-enable-prefix-caching")


class NotQuiet(Exception):
    """The requests of a turn did not run together; says nothing of what it cost."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=LEAST_PAIRS)
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    args = parser.parse_args()
    num_starts = max(-(-args.pairs // PAIRS_OF_A_START), 2)
    kept = [] if args.fresh or not STATE.exists() else json.loads(STATE.read_text())
    starts: list[list[Pair]] = [[(one, other) for one, other in start] for start in kept]
    with tempfile.TemporaryDirectory() as folder, _launchers(Path(folder)) as (plain, plugged):
        dropped = 0
        while len(starts) < num_starts:
            try:
                starts.append(_pairs_of_a_start(plain, plugged))
            except NotQuiet as error:
                say(f"dropped a start: {error}")
                dropped += 1
                if dropped > MOST_DROPPED:
                    raise
                continue
            _keep(starts)
            ratios = ", ".join(f"{having / lacking - 1:+.2%}" for lacking, having in starts[-1])
            say(f"start {len(starts)} of {num_starts}: {ratios}")
    by_pair = ratio_of([pair for start in starts for pair in start])
    by_start = ratio_of_starts(starts)
    say(f"by pair  {_told(by_pair)}")
    say(f"by start {_told(by_start)}")
    if by_pair.count >= LEAST_PAIRS:
        _write(by_pair, by_start, starts)
    return int(max(by_pair.high, by_start.high) > LIMIT)


def _pairs_of_a_start(plain: Servers, plugged: Servers) -> list[Pair]:
    """(Without, with) in CPU-seconds per token, of two servers that are started for it."""
    both = [plain.start(FLAGS, {**WITHOUT, **DEV}), plugged.start(FLAGS, {**ON, **DEV})]
    for server, environment in zip(both, (WITHOUT, ON), strict=True):
        _turn(server, output_tokens=100)
        assert any(name.startswith("ullage_") for name in server.metrics()) == (environment is ON)
        _all_of(server.pid, signal.SIGSTOP)
    pairs = []
    for number in range(PAIRS_OF_A_START):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        costs = {at: _measured(both[at]) for at in order}
        pairs.append((costs[0], costs[1]))
    for server in both:
        _all_of(server.pid, signal.SIGCONT)
    return pairs


@contextlib.contextmanager
def _launchers(folder: Path) -> Iterator[tuple[Servers, Servers]]:
    home = os.environ.get("ULLAGE_VLLM_VENV") or "~/.cache/ullage/vllm-0.32"
    python = Path(home).expanduser() / "bin" / "python"
    model = save_model(folder / "model")
    with servers(python, model) as plain, servers(python, model) as plugged:
        yield plain, plugged


def _measured(server: Server) -> float:
    """CPU-seconds per generated token of one turn and two scrapes; the server runs only in it."""
    _all_of(server.pid, signal.SIGCONT)
    try:
        before_s, steps_before = _cpu_s(server.pid), server.metrics()[STEPS]
        tokens = _turn(server)
        steps, after_s = server.metrics()[STEPS] - steps_before, _cpu_s(server.pid)
    finally:
        _all_of(server.pid, signal.SIGSTOP)
    assert before_s.keys() == after_s.keys(), "a process of the server came or went"
    if steps > MOST_STEPS:
        raise NotQuiet(f"{steps:g} steps for {OUTPUT_TOKENS} tokens of each request")
    return (sum(after_s.values()) - sum(before_s.values())) / tokens


def _turn(server: Server, output_tokens: int = OUTPUT_TOKENS) -> int:
    """Every seat full of requests of one length; how many tokens came."""
    tokens = [0] * CONCURRENCY

    def ask(number: int) -> None:
        answer = server.ask(prompt_of(number, 64), output_tokens)
        tokens[number] = answer.raise_for_status().json()["usage"]["completion_tokens"]

    server.pause()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CONCURRENCY)]
    for thread in threads:
        thread.start()
    time.sleep(GATHERED_S)
    server.resume()
    for thread in threads:
        thread.join()
    assert tokens == [output_tokens] * CONCURRENCY, "a request failed"
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


def _cpu_s(leader: int) -> dict[int, float]:
    """CPU-seconds that each process of the session has run, threads that ended included."""
    # The clock of another process by its id, as clock_getcpuclockid(3) makes it.
    return {pid: time.clock_gettime((~pid << 3) | 2) for pid in _session(leader)}


def _keep(starts: list[list[Pair]]) -> None:
    STATE.parent.mkdir(parents=True, exist_ok=True)
    scratch = STATE.with_suffix(".tmp")
    scratch.write_text(json.dumps(starts))
    scratch.replace(STATE)


def _told(found: Ratio) -> str:
    return f"{found.mean - 1:+.2%}, {found.low - 1:+.2%} to {found.high - 1:+.2%}"


def _write(by_pair: Ratio, by_start: Ratio, starts: list[list[Pair]]) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "startup"))
    from measure_process import cpu_name

    wider = max(by_pair, by_start, key=lambda found: found.high)
    rows = "\n".join(
        f"| {number} | {lacking * 1e6:.1f} | {having * 1e6:.1f} | {having / lacking - 1:+.2%} |"
        for number, start in enumerate(starts, 1)
        for lacking, having in start
    )
    RESULTS.write_text(
        f"""# What the vLLM plugin costs

CPU-seconds per generated token of a vLLM 0.32 server with the plugin, over one without any:
**{wider.mean - 1:+.2%}**, 95% interval {wider.low - 1:+.2%} to **{wider.high - 1:+.2%}** \
(allowed: an upper end of {LIMIT - 1:.0%}).

| the interval of | | from | to |
|---|---|---|---|
| {by_pair.count} interleaved pairs | {_cells(by_pair)} |
| {by_start.count} starts of both servers | {_cells(by_start)} |

{time.strftime("%Y-%m-%d")}, {cpu_name()}, {os.cpu_count()} cores. A random model of two layers, \
so that a step is nearly all vLLM's own Python, which is where a plugin costs most; \
{CONCURRENCY} requests at a time, {OUTPUT_TOKENS} tokens each, and two scrapes of /metrics. In \
each start one pair begins without the plugin, one with it.

| start | without, µs | with, µs | |
|---|---|---|---|
{rows}
"""
    )


def _cells(found: Ratio) -> str:
    return " | ".join(f"{one - 1:+.2%}" for one in (found.mean, found.low, found.high))


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
