"""What the soak sends: requests with lengths and prefixes of a real trace, and how each behaves.

Pure and seeded. Sending and judging is `soak_client.py`; the server's flags are `soak.py`'s.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

MOONCAKE_BLOCK = 512  # tokens behind one hash id of the Mooncake trace
# Ids of a byte-level tokenizer's bytes, and far from the control tokens of any other.
LOWEST_ID, HIGHEST_ID = 10, 250
SHARES = {
    "chat": 0.15,
    "stream": 0.6,
    "choices": 0.1,
    "prompts": 0.04,
    "adapter": 0.4,
    "sampled": 0.3,
    "logprobs": 0.05,
    "deadline": 0.08,
    "too_long": 0.02,
}
# How a client goes away before its answer is whole; the rest stay.
LEAVING = (("half_body", 0.02), ("at_once", 0.05), ("early", 0.05), ("mid_stream", 0.06))


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace. `blocks` are hash ids of the prompt's beginnings, if it tells."""

    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """What was done to the trace's lengths, and what the server allows."""

    prompt_divisor: float
    output_divisor: float
    most_prompt: int
    most_output: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: where it goes, its body, what would be a whole answer, how its client leaves.

    `leaves` None: the client waits for the end. `leaves_after_s` is how long it waits before.
    """

    number: int
    path: str
    body: dict[str, Any]
    num_choices: int
    max_tokens: int
    refusable: bool = False
    leaves: str | None = None
    leaves_after_s: float = 0.0
    features: frozenset[str] = field(default_factory=frozenset)

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


def read_trace(path: Path) -> list[Row]:
    """Rows of an Azure CSV or a Mooncake JSON-lines file, in their order."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        records = [json.loads(line) for line in text.splitlines()]
        return [Row(r["input_length"], r["output_length"], tuple(r["hash_ids"])) for r in records]
    table = csv.DictReader(text.splitlines())
    return [Row(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in table]


def make_asks(
    rows: Sequence[Row],
    count: int,
    limits: Limits,
    adapters: Sequence[str],
    seed: int = 0,
) -> Iterator[Ask]:
    """`count` requests; the trace starts again when it ends. Same arguments, same requests."""
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    for number, row in enumerate(islice(cycle(rows), count)):
        yield _ask(number, row, limits, adapters, draw)


def _ask(
    number: int, row: Row, limits: Limits, adapters: Sequence[str], draw: random.Random
) -> Ask:
    has = {name: draw.random() < share for name, share in SHARES.items()}
    output = _scaled(row.output_tokens, limits.output_divisor, limits.most_output)
    body: dict[str, Any] = {"max_tokens": output, "ignore_eos": True}
    features = {name for name in ("chat", "stream") if has[name]}
    prompt = _prompt(row, limits, draw)
    if has["too_long"]:
        features.add("too_long")
        body["max_tokens"] = limits.max_model_len
    if has["chat"] and not has["too_long"]:
        # Each character is a token or less; the template adds a few.
        text = "".join(chr(97 + token % 26) for token in prompt)
        body["messages"] = [{"role": "user", "content": text}]
    else:
        has["chat"] = False
        features.discard("chat")
        body["prompt"] = prompt
    num_prompts = 1
    if has["prompts"] and not has["chat"]:
        features.add("prompts")
        num_prompts = 2
        body["prompt"] = [prompt, prompt[::-1]]
    num_choices = draw.choice((2, 3, 4)) if has["choices"] else 1
    if num_choices > 1:
        features.add("choices")
        body["n"] = num_choices
    if has["adapter"] and adapters:
        features.add("adapter")
        body["model"] = draw.choice(list(adapters))
    if has["stream"]:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    if has["sampled"]:
        features.add("sampled")
        body |= {"temperature": 0.8, "top_p": 0.95, "seed": number, "presence_penalty": 0.5}
    else:
        body["temperature"] = 0
    if has["logprobs"]:
        features.add("logprobs")
        body |= {"logprobs": True, "top_logprobs": 2} if has["chat"] else {"logprobs": 2}
    if has["deadline"]:
        features.add("deadline")
        body["deadline_seconds"] = draw.uniform(0.02, 1.0)
    leaves = _leaves(draw, has["stream"])
    return Ask(
        number,
        "/v1/chat/completions" if has["chat"] else "/v1/completions",
        body,
        num_prompts * num_choices,
        body["max_tokens"],
        refusable=has["too_long"],
        leaves=leaves,
        leaves_after_s=draw.uniform(0.0, 0.2),
        features=frozenset(features),
    )


def _prompt(row: Row, limits: Limits, draw: random.Random) -> list[int]:
    """Token ids: where the trace names its blocks, equal blocks get equal tokens."""
    length = _scaled(row.prompt_tokens, limits.prompt_divisor, limits.most_prompt)
    block = max(1, round(MOONCAKE_BLOCK / limits.prompt_divisor))
    tokens: list[int] = []
    for number in row.blocks[: length // block]:
        # Whole blocks are shared; the rest of a prompt is its own.
        tokens += _run(random.Random(number), block)  # noqa: S311 - repeatable
    return tokens[:length] + _run(draw, length - len(tokens[:length]))


def _run(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(count)]


def _scaled(tokens: int, divisor: float, most: int) -> int:
    return max(1, min(most, round(tokens / divisor)))


def _leaves(draw: random.Random, stream: bool) -> str | None:
    at = draw.random()
    for way, share in LEAVING:
        if at < share:
            return way if stream or way != "mid_stream" else None
        at -= share
    return None
