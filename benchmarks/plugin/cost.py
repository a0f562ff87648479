"""What the plugin costs a vLLM server: CPU-seconds per token with it over without it.

One server, in which the plugin is taken out and put back (cost_switch.py) between turns of a second
or two. A turn is the same work each time: every seat full of requests that begin together, and one
scrape. Turns come in pairs, one without the plugin and one with it, who goes first is drawn: what
the machine does besides lies on both alike, and so does what one process has by luck (the layout of
its memory). The bound is that of the pairs or that of blocks of them, whichever is wider. CPU time
is that of every process of the server, by its own clock, read from outside. What is done is kept in
~/.cache/ullage/bench/plugin-cost.json, so that a run can be done start by start:

    .venv/bin/python benchmarks/plugin/cost.py [--starts 4] [--at-most 1] [--seconds 220]

It needs tools/vllm_setup.sh. Writes RESULTS.md; exit status 1 when the upper bound is above 1%.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from plugin_pairs import Ratio, adjusted_ratio, ratio_of, ratio_of_groups

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "vllm"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from plugin_server import DEV, ON, Server, prompt_of, save_model, spawned

HERE = Path(__file__).parent
STATE = Path("~/.cache/ullage/bench/plugin-cost.json").expanduser()
RESULTS = HERE / "RESULTS.md"
LIMIT = 1.01
PAIRS_OF_A_BLOCK = 10
"""Half a minute or more: what comes and goes on the machine lies on a whole block."""
LEAST_BLOCKS = 6
WARM_TURNS = 4
CORE = max(os.sched_getaffinity(0))
CONCURRENCY = 16
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 400
GATHERED_S = 0.2
"""How long the requests of a turn have to arrive, before any of them begins."""
STEPS = "vllm:iteration_tokens_total_count"
MOST_STEPS = 1.02 * OUTPUT_TOKENS
"""Of a turn whose requests all ran together: one token of each in every step."""
FLAGS = ("--max-num-seqs", str(CONCURRENCY), "--no-enable-prefix-caching")
ENTRY_POINTS = """
[vllm.general_plugins]
cost_switch = cost_switch:general
[vllm.endpoint_plugins]
cost_switch = cost_switch:Endpoint
"""


CROSS_CHECK = """\
Two servers, one without any plugin, each stopped (SIGSTOP) while the other answered, said +0.16%,
95% interval -3.66% to +4.14%, on this machine on 2026-11-30: 30 pairs that scattered by 10%."""


class NotQuiet(Exception):
    """The requests of a turn did not run together; says nothing of what it cost."""


@dataclass(frozen=True, slots=True)
class Turn:
    """CPU-seconds per generated token of the API process, the engine core and the worker, and how
    long it was. The plugin does nothing in the worker."""

    api_s: float
    core_s: float
    worker_s: float
    wall_s: float

    @property
    def own_s(self) -> float:
        return self.api_s + self.core_s

    @property
    def cpu_s(self) -> float:
        return self.own_s + self.worker_s


One = TypeVar("One")
Pair = tuple[Turn, Turn]
"""(Without, with)."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--at-most", type=int, help="so many starts in this call")
    parser.add_argument("--seconds", type=float, default=220, help="for how long in each start")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    args = parser.parse_args()
    starts = [] if args.fresh else _kept()
    with tempfile.TemporaryDirectory() as folder:
        home = _switch_in(Path(folder))
        model = save_model(Path(folder) / "model")
        last = min(args.starts, len(starts) + (args.at_most or args.starts))
        while len(starts) < last:
            starts.append([])
            for block in _measured(home, model, len(starts), args.seconds):
                starts[-1].append(block)
                _keep(starts)
            if not starts[-1]:
                raise NotQuiet(f"not one block of pairs in {args.seconds:g} s")
            say(f"start {len(starts)}: {_told(_ratio_of(_flat(starts[-1])))}")
    blocks = _flat(starts)
    if len(blocks) < LEAST_BLOCKS:
        return 0
    by_pair = _ratio_of(_flat(blocks))
    by_block = ratio_of_groups([[_cpu(pair) for pair in block] for block in blocks])
    say(f"by pair  {_told(by_pair)}")
    say(f"by block {_told(by_block)}")
    controls = [(lacking.worker_s, having.worker_s) for lacking, having in _flat(blocks)]
    own = [(lacking.own_s, having.own_s) for lacking, having in _flat(blocks)]
    adjusted = adjusted_ratio(own, controls)
    say(f"adjusted {_told(adjusted)}")
    _write(by_pair, by_block, adjusted, starts)
    return int(max(by_pair.high, by_block.high) > LIMIT)


def _measured(home: Path, model: Path, number: int, for_s: float) -> Iterator[list[Pair]]:
    """Blocks of pairs, of a server that is started for it."""
    venv = os.environ.get("ULLAGE_VLLM_VENV") or "~/.cache/ullage/vllm-0.32"
    environment = {
        **ON,
        **DEV,
        "VLLM_PLUGINS": f"{ON['VLLM_PLUGINS']},cost_switch",
        "PYTHONPATH": os.pathsep.join([str(home), str(HERE)]),
        "VLLM_CPU_OMP_THREADS_BIND": str(CORE),
    }
    python = Path(venv).expanduser() / "bin" / "python"
    with spawned(python, model, FLAGS, environment) as server:
        _bind(server)
        for warm in range(WARM_TURNS):
            _switch(server, warm % 2 == 0)
            _served(server)
        yield from _blocks(server, number, for_s)


def _blocks(server: Server, number: int, for_s: float) -> Iterator[list[Pair]]:
    """So many whole blocks as fit; in each, half of the pairs begin without the plugin."""
    end_s = time.monotonic() + for_s
    for block in itertools.count():
        order = [False, True] * (PAIRS_OF_A_BLOCK // 2)
        random.Random(f"{number} {block}").shuffle(order)  # noqa: S311
        pairs = []
        while order and time.monotonic() < end_s:
            first = order[-1]
            try:
                turns = {on: _turn(server, on) for on in (first, not first)}
            except NotQuiet as error:
                say(f"dropped a pair: {error}")
                continue
            order.pop()
            pairs.append((turns[False], turns[True]))
        if order:
            return
        yield pairs


def _bind(server: Server) -> None:
    """All of it on one core, which costs no CPU time and spares it what migrations cost."""
    for pid in _session(server.pid):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {CORE})


def _switch_in(folder: Path) -> Path:
    """Where vLLM finds cost_switch.py named as a plugin."""
    about = folder / "cost_switch-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cost_switch\nVersion: 0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def _switch(server: Server, on: bool) -> None:
    """With proof: the scheduler's methods, a route and the series are there, or are not."""
    answer = server.http.post("/cost_switch", params={"on": "true" if on else "false"})
    wrapped = answer.raise_for_status().json()["wrapped"]
    there = server.http.get("/ullage/drain").status_code == 200
    assert (len(wrapped), there) == ((2, True) if on else (0, False)), (on, wrapped, there)


def _turn(server: Server, on: bool) -> Turn:
    _switch(server, on)
    steps_before = server.metrics()[STEPS]
    before_s, began_s = _cpu_s(server.pid), time.monotonic()
    tokens, metrics = _served(server)
    after_s, wall_s = _cpu_s(server.pid), time.monotonic() - began_s
    assert before_s.keys() == after_s.keys(), "a process of the server came or went"
    assert any(name.startswith("ullage_") for name in metrics) == on
    steps = metrics[STEPS] - steps_before
    if steps > MOST_STEPS:
        raise NotQuiet(f"{steps:g} steps for {OUTPUT_TOKENS} tokens of each request")
    used_s = {pid: after_s[pid] - before_s[pid] for pid in after_s}
    by_name = dict.fromkeys(("api", "core", "worker"), 0.0)
    for pid, one_s in used_s.items():
        by_name["api" if pid == server.pid else _is_of(pid)] += one_s / tokens
    assert all(by_name.values()), "a process was not found"
    return Turn(by_name["api"], by_name["core"], by_name["worker"], wall_s)


def _is_of(pid: int) -> str:
    title = Path(f"/proc/{pid}/cmdline").read_bytes()
    return "worker" if title.startswith(b"VLLM::Worker") else "core"


def _served(server: Server) -> tuple[int, dict[str, float]]:
    """Every seat full of requests of one length, and a scrape; how many tokens came."""
    tokens = [0] * CONCURRENCY

    def ask(number: int) -> None:
        answer = server.ask(prompt_of(number, PROMPT_TOKENS), OUTPUT_TOKENS)
        tokens[number] = answer.raise_for_status().json()["usage"]["completion_tokens"]

    server.pause()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CONCURRENCY)]
    for thread in threads:
        thread.start()
    time.sleep(GATHERED_S)
    server.resume()
    for thread in threads:
        thread.join()
    assert tokens == [OUTPUT_TOKENS] * CONCURRENCY, "a request failed"
    return sum(tokens), server.metrics()


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


def _cpu_s(leader: int) -> dict[int, float]:
    """CPU-seconds that each process of the session has run, threads that ended included."""
    # The clock of another process by its id, as clock_getcpuclockid(3) makes it.
    return {pid: time.clock_gettime((~pid << 3) | 2) for pid in _session(leader)}


def _flat(lists: list[list[One]]) -> list[One]:
    return [one for each in lists for one in each]


def _kept() -> list[list[list[Pair]]]:
    if not STATE.exists():
        return []
    return [
        [[(Turn(**lacking), Turn(**having)) for lacking, having in block] for block in start]
        for start in json.loads(STATE.read_text())
    ]


def _keep(starts: list[list[list[Pair]]]) -> None:
    STATE.parent.mkdir(parents=True, exist_ok=True)
    scratch = STATE.with_suffix(".tmp")
    scratch.write_text(
        json.dumps(
            [[[[*map(asdict, pair)] for pair in block] for block in start] for start in starts]
        )
    )
    scratch.replace(STATE)


def _cpu(pair: Pair) -> tuple[float, float]:
    return pair[0].cpu_s, pair[1].cpu_s


def _ratio_of(pairs: list[Pair]) -> Ratio:
    return ratio_of([_cpu(pair) for pair in pairs])


def _told(found: Ratio) -> str:
    return f"{found.mean - 1:+.2%}, {found.low - 1:+.2%} to {found.high - 1:+.2%}"


def _write(
    by_pair: Ratio, by_block: Ratio, adjusted: Ratio, starts: list[list[list[Pair]]]
) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "startup"))
    from measure_process import cpu_name

    by_start = [_flat(start) for start in starts]
    pairs = _flat(by_start)
    wider = max(by_pair, by_block, key=lambda found: found.high)
    off_by = statistics.stdev(with_ / without - 1 for without, with_ in map(_cpu, pairs))
    rows = "\n".join(
        f"| {number} | {len(start)} | {_mean_us(start, 0):.1f} | {_mean_us(start, 1):.1f} "
        f"| {' | '.join(_cells(_ratio_of(start)))} |"
        for number, start in enumerate(by_start, 1)
    )
    RESULTS.write_text(
        f"""# What the vLLM plugin costs

CPU-seconds per generated token of a vLLM 0.32 server with the plugin, over the same without it:
**{wider.mean - 1:+.2%}**, 95% interval {wider.low - 1:+.2%} to **{wider.high - 1:+.2%}** \
(allowed: an upper end of {LIMIT - 1:.0%}).

| the interval of | | from | to |
|---|---|---|---|
| {by_pair.count} interleaved pairs | {" | ".join(_cells(by_pair))} |
| {by_block.count} blocks of {PAIRS_OF_A_BLOCK} pairs, each as one | \
{" | ".join(_cells(by_block))} |
| API process and engine core alone, less what the worker shows as well | \
{" | ".join(_cells(adjusted))} |

{time.strftime("%Y-%m-%d")}, {cpu_name()}, {os.cpu_count()} cores. A random model of two layers, \
so that a step is nearly all vLLM's own Python, which is where a plugin costs most. A turn is \
{CONCURRENCY} requests of {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens together and a scrape of \
/metrics, {statistics.median(turn.wall_s for pair in pairs for turn in pair):.1f} s in the median; \
a pair is one turn without and one with the plugin, in drawn order, and scatters by \
{off_by:.1%}. So a request's share of the cost lies on {OUTPUT_TOKENS} tokens, a scrape comes more \
often than in production, and the question that the plugin asks of the engine each second comes \
as it comes. Without means in the same server: the scheduler's own methods, no such question, no \
middleware, no series (`cost_switch.py`); left behind is a timer that fires once a second. No \
request is preempted in a turn, and the probe of attention is off. The server is held to one core, \
and its processes wait for each other without spinning: as vLLM runs they spin, which adds CPU \
time to both sides and would flatter the plugin. \
Other work ran on the machine, with less priority.

The third line was chosen after the numbers were seen and is no bound; it is the pairs' \
again, of the two processes in which the plugin runs, over their CPU \
time alone. The worker's, where the plugin does nothing, tells how much of a pair's difference is \
the machine's: the line is fitted through both and read where the worker's is alike (bounds by its \
residuals). It cannot see what the plugin would do to the worker from outside, through caches they \
share; the first two lines can.

| process | without, µs per token | with | |
|---|---|---|---|
{_row("API", "api_s", pairs)}
{_row("engine core", "core_s", pairs)}
{_row("worker", "worker_s", pairs)}

| start | pairs | without, µs | with, µs | | from | to |
|---|---|---|---|---|---|---|
{rows}

{CROSS_CHECK}
"""
    )


def _row(name: str, part: str, pairs: list[Pair]) -> str:
    lacking, having = (
        1e6 * statistics.fmean(getattr(pair[at], part) for pair in pairs) for at in (0, 1)
    )
    return f"| {name} | {lacking:.1f} | {having:.1f} | {having - lacking:+.2f} |"


def _mean_us(pairs: list[Pair], at: int) -> float:
    return 1e6 * statistics.fmean(pair[at].cpu_s for pair in pairs)


def _cells(found: Ratio) -> list[str]:
    return [f"{one - 1:+.2%}" for one in (found.mean, found.low, found.high)]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
