"""A real vLLM under healthy mixed traffic: half an hour in which `ullage watch` must say nothing.

vLLM 0.32 on the CPU, followed by a `ullage watch` in a process of its own. Chats of several turns
with shared prefixes, long single questions, answers streamed and whole, clients that leave, times
in which nobody asks (tests/vllm/mixed_traffic.py).

    .venv/bin/python benchmarks/watch/healthy.py [--minutes 30] [--interval 5] [--core N]

Exit status 1 with a sentence for each finding that fired, for each request that failed, and where
the traffic was so light that nothing could have fired. `--core` keeps the server on that core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "vllm"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from healthy import FLAGS, UNSPOKEN, failures, save_healthy_model, silent
from mixed_traffic import Traffic
from plugin_server import KEY, ON, servers
from watched import Round, heard, spread, watching

FIGURES = (
    *("kv_used_ratio", "running", "waiting", "preemptions_per_s", "page_utilization_ratio"),
    *("prefix_hit_ratio", "prompt_tokens_per_s", "generation_tokens_per_s"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--interval", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--core", type=int, help="where the server is kept")
    parser.add_argument("--save", type=Path, help="write every round there, one to a line")
    args = parser.parse_args()
    home = os.environ.get("ULLAGE_VLLM_VENV") or "~/.cache/ullage/vllm-0.32"
    python = Path(home).expanduser() / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        model = save_healthy_model(Path(folder) / "model")
        with servers(python, model) as launched:
            if args.core is not None:
                os.sched_setaffinity(launched.process.pid, {args.core})
            with suppress(PermissionError):  # only root may take a niceness back
                os.setpriority(os.PRIO_PROCESS, launched.process.pid, 0)
            server = launched.start(FLAGS, ON)
            traffic = Traffic(server.url, KEY, args.minutes * 60, args.seed)
            with watching(server.url, "--interval", str(args.interval)) as watch:
                watch.await_round(0)
                traffic.run()
    if args.save:
        args.save.write_text("".join(json.dumps(one) + "\n" for one in watch.rounds))
    report(watch.rounds, traffic)
    problems = failures(watch.rounds, traffic)
    if watch.said:
        problems.append(f"the watch said: {watch.said[:500]}")
    for problem in problems:
        print(f"FAILED: {problem}")
    return int(bool(problems))


def report(rounds: Sequence[Round], traffic: Traffic) -> None:
    """Print the traffic, the figures, and in how many rounds each rule was clear."""
    replica = rounds[-1]["replicas"][0]
    print(
        f"{replica['engine']} {replica['version']} · Python {platform.python_version()} · "
        f"{os.cpu_count()} cores · {datetime.now(UTC):%Y-%m-%d}\n"
        f"{len(rounds)} rounds in {traffic.seconds:.0f} s; {traffic.ended.total():,} requests, "
        f"{dict(traffic.ended)}; lengths of {traffic.lengths}; seed {traffic.seed}\n"
    )
    print("| figure | least | mean | most |\n|---|---|---|---|")
    for name in FIGURES:
        print(f"| {name} | " + " | ".join(f"{value:.3g}" for value in spread(rounds, name)) + " |")
    print("\n| rule | clear | fired | not evaluable | why not |\n|---|---|---|---|---|")
    for rule, found in heard(rounds).items():
        states = [found.states[state] for state in ("clear", "fired", "not_evaluable")]
        print(f"| {rule} | {states[0]} | {states[1]} | {states[2]} | {found.why} |")
    for rule, why in silent(rounds).items():
        print(f"\n{rule} never spoke: {why}")
    print(f"\ncannot speak here: {UNSPOKEN}")


if __name__ == "__main__":
    sys.exit(main())
