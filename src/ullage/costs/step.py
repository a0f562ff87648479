"""One forward step and the operators it is made of: `Step`, `Operator`, and what they count with.

Holds the nouns and the counting of pairs, keys and products. Which operators a model has is
`operators.py` and `mixer_operators.py`; how long they take at least is `roofline.py`.

Conventions. A multiply and an add are two operations. `n` is the number of new tokens in the
step, `pairs` the number of (query, key) pairs that attention must score. Weights are read once a
step, cached keys once per sequence, activations once in and once out. Norms, activations, rotary
turns and softmax are left out: they fuse with their neighbours and are a small part of the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["projection", "attention", "scan", "experts", "feed_forward", "lm_head", "link"]


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: `num_seqs` sequences of `new_tokens` each, after `context` cached ones.

    A prefill has many new tokens, a decode one. `encoder_tokens` is what cross-attention looks
    at (0: nothing, as for text alone in a model that can also see).
    """

    num_seqs: int
    new_tokens: int
    context: int = 0
    encoder_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.new_tokens

    @property
    def is_decode(self) -> bool:
        return self.new_tokens == 1 and self.context > 0


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of one rank; `count` layers have it, and every figure is of one of them.

    `weight_elements` counts the stored elements that a step reads (of experts: those of the
    distinct ones that it is expected to touch, so it need not be whole). `activation_elements`
    counts inputs and outputs; `cache_elements` keys, values and states read and written.
    `link_elements` are sent to other ranks.
    """

    name: str
    kind: Kind
    flops: float
    weight_elements: float = 0.0
    activation_elements: float = 0.0
    cache_elements: float = 0.0
    link_elements: float = 0.0
    count: int = 1


def matmul(name: str, tokens: float, rows: int, columns: int, kind: Kind) -> Operator:
    """[tokens, rows] × [rows, columns]."""
    return Operator(
        name,
        kind,
        flops=2.0 * tokens * rows * columns,
        weight_elements=rows * columns,
        activation_elements=tokens * (rows + columns),
    )


def share(heads: int, ranks: int) -> int:
    """Heads on one rank; where ranks outnumber them each rank keeps one (a copy)."""
    return max(1, -(-heads // ranks))


def visible_pairs(
    new_tokens: int,
    context: int,
    *,
    window: int | None = None,
    chunk: int | None = None,
    causal: bool = True,
) -> int:
    """How many (query, key) pairs `new_tokens` queries after `context` keys must score.

    The query at position i sees keys 0…i; with a window the last `window` of them, itself
    included; with a chunk those since the last multiple of `chunk`; not causal: all of them.
    """
    end = context + new_tokens
    if not causal:
        return new_tokens * end
    if chunk is not None:
        return _chunk_triangle(end, chunk) - _chunk_triangle(context, chunk)
    if window is not None:
        return _window_triangle(end, window) - _window_triangle(context, window)
    return _triangle(end) - _triangle(context)


def visible_keys(
    new_tokens: int, context: int, *, window: int | None = None, chunk: int | None = None
) -> int:
    """How many distinct keys of one sequence the new tokens look at (each is read once)."""
    end = context + new_tokens
    if chunk is not None:
        return end - context // chunk * chunk
    if window is not None:
        return min(end, window - 1 + new_tokens)
    return end


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def _window_triangle(n: int, window: int) -> int:
    """Keys seen by positions 0…n−1 when each sees at most `window`."""
    return _triangle(n) if n <= window else _triangle(window) + (n - window) * window


def _chunk_triangle(n: int, chunk: int) -> int:
    return n // chunk * _triangle(chunk) + _triangle(n % chunk)
