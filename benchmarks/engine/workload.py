"""What every engine is given: prompts of real text in exact lengths, rows of a trace, a text.

Token ids throughout, so that all engines run the same tokens. The passages are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ullage.checkup.prompts import PromptSource, make_prompt, passage


@cache
def encode(model: str, text: str) -> tuple[int, ...]:
    """Token ids of `text` by the model's own tokenizer, no special tokens."""
    from ullage.anatomy import load
    from ullage.engine.tokenizer_loading import load_tokenizer

    return tuple(load_tokenizer(load(Path(model))).encode(text, False))


def prompt_ids(model: str, num_tokens: int, count: int) -> list[list[int]]:
    """`count` prompts of `num_tokens` tokens; no two share a beginning."""
    source = PromptSource(ids=encode(model, passage()))
    return [_ids(make_prompt(source, num_tokens, seed=seed)) for seed in range(count)]


def _ids(prompt: Sequence[int] | str) -> list[int]:
    assert not isinstance(prompt, str)
    return list(prompt)
