"""A server that carries mixed_traffic.py with ease, and what counts as healthy in what was watched.

Holds the model, the flags and the verdict. Steps are long for such a small model (many narrow
layers), so that requests overlap as they do on large ones; the pool is so small that a few of them
hold a fair share of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mixed_traffic import MAX_MODEL_LEN, Traffic
from watched import Round, evidence, heard, spread

NUM_LAYERS = 24
NUM_BLOCKS = 896
"""Of 32 tokens. On a slow machine all users wait for their answers at once: even they fit."""
FLAGS = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "32"),
    *("--num-gpu-blocks-override", str(NUM_BLOCKS + 1)),
)
LEAST_HELD, LEAST_RUNNING = 0.1, 2.0
"""Means of KV held and of requests running: below, nothing could have fired."""
UNSPOKEN = {
    "W010": "one replica has no peers",
    "W018": "no GPU",
    "W019": "no GPU",
    "W022": "one replica has no peers",
    "W025": "no pod",
    "W026": "vLLM does not judge its model",
}
"""Rules that can say nothing here, and why."""


def save_healthy_model(folder: Path) -> Path:
    import transformers
    from tests.adapters.live.models import TEXT, TinyModel

    sizes = {**TEXT, "num_hidden_layers": NUM_LAYERS, "max_position_embeddings": MAX_MODEL_LEN}
    TinyModel(
        "tiny",
        "LlamaForCausalLM",
        lambda: transformers.LlamaConfig(**sizes, tie_word_embeddings=False),
    ).save(folder)
    return folder


def failures(rounds: Sequence[Round], traffic: Traffic) -> list[str]:
    """A sentence for each thing that was not as under healthy traffic."""
    problems = list(traffic.problems)
    for rule, found in heard(rounds).items():
        if found.last is not None:
            num, last = found.states["fired"], found.last
            problems.append(
                f"{rule} fired in {num} of {len(rounds)} rounds: {last['cause']} [{evidence(last)}]"
            )
    if failed := [one for one in rounds if one["replicas"][0]["error"]]:
        why = failed[0]["replicas"][0]["error"]
        problems.append(f"{len(failed)} scrapes failed: {why}")
    for name, least in (("kv_used_ratio", LEAST_HELD), ("running", LEAST_RUNNING)):
        mean = spread(rounds, name)[1]
        if mean < least:
            problems.append(f"the traffic was too light: {name} was {mean:.3g} on average")
    return problems


def silent(rounds: Sequence[Round]) -> dict[str, str]:
    """The rules that never could be evaluated, though they can speak here; why not."""
    return {
        rule: found.why
        for rule, found in heard(rounds).items()
        if rule not in UNSPOKEN and not found.states["clear"] + found.states["fired"]
    }
