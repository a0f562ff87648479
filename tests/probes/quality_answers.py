"""Answers for the tests of the quality watch: readings of healthy traffic, and of a sick model."""

from __future__ import annotations

import json
import random
from pathlib import Path

from ullage.probes.quality.answer import AnswerReading, Cycle


def reading(
    num_tokens: int = 120,
    *,
    at_limit: bool = False,
    cycle: Cycle | None = None,
    repetition: float | None = 0.1,
    confidence: float | None = 0.6,
    prompt_script: str = "latin",
    switched: bool | None = False,
    mixed: bool = False,
    temperature: float = 0.7,
) -> AnswerReading:
    return AnswerReading(
        num_tokens,
        at_limit,
        cycle,
        repetition if num_tokens >= 32 else None,
        confidence,
        max(1, num_tokens // 8),
        prompt_script,
        "latin",
        switched,
        mixed,
        temperature,
    )


# Of each kind of traffic: lengths, share cut at the limit, repetition, confidence, share that ends
# in a loop, share in another script. About what SmolLM2-135M was seen to do at a temperature of 0.7
# (docs/probes.md).
KINDS = {
    "chat": ((28, 250), 0.5, (0.0, 0.3), (0.46, 0.73), 0.08, 0.0),
    "code": ((37, 250), 0.4, (0.0, 0.5), (0.55, 0.87), 0.09, 0.0),
    "tables": ((17, 250), 0.5, (0.1, 0.7), (0.60, 0.94), 0.05, 0.0),
    "french": ((7, 120), 0.3, (0.0, 0.5), (0.17, 0.72), 0.15, 0.0),
    "chinese": ((80, 250), 0.5, (0.1, 0.8), (0.45, 0.82), 0.2, 0.3),
    "long prompts": ((7, 250), 0.5, (0.0, 0.6), (0.36, 0.80), 0.15, 0.0),
    "short answers": ((3, 40), 0.05, (0.0, 0.1), (0.23, 0.83), 0.0, 0.0),
}


def healthy(draw: random.Random, kind: str | None = None) -> AnswerReading:
    """One answer of a kind, by default of any."""
    lengths, cut, repetition, confidence, loops, strays = KINDS[kind or draw.choice(list(KINDS))]
    loop = draw.random() < loops
    return reading(
        draw.randint(*lengths),
        at_limit=loop or draw.random() < cut,
        cycle=Cycle(11, 55) if loop else None,
        repetition=draw.uniform(*repetition),
        confidence=draw.uniform(*confidence),
        prompt_script="cjk" if kind == "chinese" else "latin",
        switched=draw.random() < strays,
        temperature=draw.choice((0.7, 0.7, 0.0)),
    )


RECORDED = Path(__file__).parent / "fixtures" / "quality_smollm2"


def recorded(way: str) -> list[tuple[str, AnswerReading]]:
    """Kind and reading of the answers that benchmarks/probes/quality_faults.py recorded."""
    found = []
    for row in json.loads((RECORDED / f"{way}.json").read_text()):
        cycle = row.pop("cycle")
        kind = row.pop("kind")
        found.append((kind, AnswerReading(cycle=Cycle(**cycle) if cycle else None, **row)))
    return found
