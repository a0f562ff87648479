"""What reading along costs the embedded engine: CPU-seconds per token with it over without it.

One engine on real SmolLM2-135M, read along with a baseline by turns: slices of steps with and
without, in the order ABBA, so that what a slice costs is held against its neighbour's. CPU time is
that of all threads of the process. Everything that a judged row costs is in it: the copies within
the step, attention from the cache, residuals, detectors.

    .venv/bin/python benchmarks/probes/live_cost.py [--pairs 40] [--steps 64] [--every 16]

It needs a quiet machine. LIVE_COST.md is written at the end of a run of at least 30 pairs; exit
status 1 when an upper bound is above 3%.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "startup"))
sys.path.insert(0, str(Path(__file__).parents[1] / "plugin"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from measure_process import cpu_name
from plugin_pairs import Pair, Ratio, ratio_of
from tests.engine.references import smollm2_gguf as smollm2_path

from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.request import SamplingParams
from ullage.probes.baseline.judging import Judge
from ullage.probes.baseline.learning import learn
from ullage.probes.baseline.live import EVERY, LiveReader, LiveReading
from ullage.probes.baseline.relations import Relations

RESULTS = Path(__file__).with_name("LIVE_COST.md")
LIMIT = 1.03
LEAST_PAIRS = 30
PROMPT = "The engineers wrote down what they had measured, and then what they had expected. "
USUAL_LEN, MAX_MODEL_LEN = 2048, 8192


@dataclass(frozen=True)
class Case:
    quantization: str
    sequences: int
    prompt_tokens: int
    longest: int = USUAL_LEN
    """A sequence that comes near it makes room for another."""


CASES = (
    Case("int8", 1, 128),
    Case("int8", 8, 128),
    Case("int8", 1, 1000),
    Case("int8", 1, 6000, MAX_MODEL_LEN),
    Case("none", 1, 128),
)


class Running:
    """An engine that always has as many sequences to go on with."""

    def __init__(self, engine: Engine, case: Case) -> None:
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(PROMPT * 500)
        self._engine, self.case = engine, case
        self._prompt = tuple(ids[: case.prompt_tokens])
        self._asked = 0

    def steps(self, count: int) -> int:
        """Run so many steps of decodes alone; how many tokens came."""
        tokens = 0
        for _ in range(count):
            tokens += len(self._engine.step().outputs)
        return tokens

    def fill(self) -> None:
        """Every sequence anew, its prompt computed."""
        engine, case = self._engine, self.case
        while engine.has_work:
            engine.cancel_oldest(100)
        for _ in range(case.sequences):
            self._asked += 1
            room = case.longest - case.prompt_tokens
            params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
            engine.add_request(str(self._asked), self._prompt, params)
        while len(engine.step().outputs) < case.sequences:
            pass


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=64, help="of a slice")
    parser.add_argument("--every", type=int, default=EVERY)
    parser.add_argument("--prompt-tokens", type=int, help="only cases of such prompts")
    args = parser.parse_args()
    found = {}
    asked = [case for case in CASES if args.prompt_tokens in (None, case.prompt_tokens)]
    for quantization in dict.fromkeys(case.quantization for case in asked):
        options = EngineOptions(
            quantization=quantization, max_model_len=MAX_MODEL_LEN,
            kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False,
        )  # fmt: skip
        baseline = learn(smollm2_path(), [PROMPT * 3] * 2, options, new_tokens=40)
        engine = Engine.load(smollm2_path(), options)
        judge = Judge(baseline)

        def see(one: LiveReading, judge: Judge = judge) -> None:
            assert one.residuals is not None
            judge.see(
                one.residuals, one.figures, one.request_id, compiled=one.compiled,
                figures_read=one.figures_read,
            )  # fmt: skip

        relations = Relations(baseline.sketch, baseline.rounding)
        for case in (case for case in asked if case.quantization == quantization):
            reader = LiveReader(engine, see, relations, every=args.every)
            pairs = list(_pairs(engine, Running(engine, case), reader, args))
            found[case] = (ratio_of(pairs), reader.spent_s / max(reader.rows_read, 1))
            say(f"{case}: {_told(found[case][0])}, {1e3 * found[case][1]:.2f} ms a row")
    if args.pairs >= LEAST_PAIRS and len(asked) == len(CASES):
        _write(found, args)
    return int(max(ratio.high for ratio, _ in found.values()) > LIMIT)


def _pairs(
    engine: Engine, running: Running, reader: LiveReader, args: argparse.Namespace
) -> Iterator[Pair]:
    running.fill()
    used = 0
    # As a server does in its warm-up: what is compiled for a row that is read is so by then.
    engine.reader = reader
    running.steps(2 * args.every)
    reader.spent_s, reader.rows_read = 0.0, 0
    for number in range(args.pairs):
        room = running.case.longest - running.case.prompt_tokens - 8 * args.every
        if used + 2 * args.steps > room:
            running.fill()
            used = 0
        costs = {}
        for reads in (False, True) if number % 2 == 0 else (True, False):
            engine.reader = reader if reads else None
            before = time.process_time()
            tokens = running.steps(args.steps)
            costs[reads] = (time.process_time() - before) / tokens
            used += args.steps
        engine.reader = None
        yield costs[False], costs[True]


def _told(found: Ratio) -> str:
    return f"{found.mean - 1:+.2%}, {found.low - 1:+.2%} to {found.high - 1:+.2%}"


def _write(found: dict[Case, tuple[Ratio, float]], args: argparse.Namespace) -> None:
    rows = "\n".join(
        f"| {'int8' if case.quantization == 'int8' else 'float32'} | {case.sequences} "
        f"| {case.prompt_tokens:,} | {ratio.mean - 1:+.2%} | {ratio.low - 1:+.2%} "
        f"| **{ratio.high - 1:+.2%}** | {1e3 * row_s:.2f} |"
        for case, (ratio, row_s) in found.items()
    )
    RESULTS.write_text(
        f"""# What reading along costs the embedded engine

CPU-seconds per generated token with `--probe-baseline` at the default sampling (one row of one \
step in {args.every}), over without, on SmolLM2-135M-Instruct: mean and 95% interval of \
{args.pairs} interleaved pairs of {args.steps} steps (allowed: an upper end of {LIMIT - 1:.0%}).

| weights | sequences | prompt tokens | mean | from | to | CPU ms a row |
|---|---|---|---|---|---|---|
{rows}

{time.strftime("%Y-%m-%d")}, {cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}, \
within one process and without HTTP, whose own cost would make the share smaller. Off, the engine \
makes not one call more: `Engine.reader` is None (`tests/engine/test_taps.py`).
"""
    )


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
