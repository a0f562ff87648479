"""What every engine is given: prompts of real text in exact lengths, rows of a trace, a text.

Token ids throughout, so that all engines run the same tokens. The passages are ours.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path

from ullage.traffic.prompts import PromptSource, make_prompt, passage

REPOSITORY = Path(__file__).parents[2]
TRACE = REPOSITORY.parent / "shared" / "traces" / "azure-2023-conv.csv"


@cache
def encode(model: str, text: str) -> tuple[int, ...]:
    """Token ids of `text` by the model's own tokenizer, no special tokens."""
    from ullage.anatomy import load
    from ullage.engine.text.loading import load_tokenizer

    return tuple(load_tokenizer(load(Path(model))).encode(text, False))


def prompt_ids(model: str, num_tokens: int, count: int) -> list[list[int]]:
    """`count` prompts of `num_tokens` tokens; no two share a beginning."""
    source = PromptSource(ids=encode(model, passage()))
    return [_ids(make_prompt(source, num_tokens, seed=seed)) for seed in range(count)]


def _ids(prompt: Sequence[int] | str) -> list[int]:
    assert not isinstance(prompt, str)
    return list(prompt)


def windows(model: str, num_tokens: int, count: int) -> list[list[int]]:
    """`count` pieces of running text of `num_tokens` tokens each: this repository's documents."""
    ids = encode(model, "\n\n".join(path.read_text() for path in _documents()))
    assert len(ids) >= num_tokens * count, "the documents are too short"
    return [list(ids[n * num_tokens : (n + 1) * num_tokens]) for n in range(count)]


def trace_rows(model: str, count: int, divisor: float, most: int) -> list[tuple[list[int], int]]:
    """The first rows of the Azure conversation trace, both lengths divided, prompts cut at `most`.

    Prompts share no beginnings: the trace tells none.
    """
    source = PromptSource(ids=encode(model, passage()))
    table = csv.DictReader(TRACE.read_text().splitlines())
    rows = []
    for seed, record in enumerate(islice(table, count)):
        prompt = max(4, min(most, round(int(record["ContextTokens"]) / divisor)))
        answer = max(2, min(most, round(int(record["GeneratedTokens"]) / divisor)))
        rows.append((_ids(make_prompt(source, prompt, seed=10_000 + seed)), answer))
    assert len(rows) == count, f"{TRACE} has {len(rows)} rows"
    return rows


def _documents() -> list[Path]:
    return [REPOSITORY / "docs" / name for name in ("design.md", "audit.md", "adapters.md")]
