"""From a mask that somebody else made to what rows see: intervals where they are, else row by row.

Holds the translation only, in torch; what is done with a `View` is `entropy`, who hands in masks
`through_transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ullage.engine.rule import AttentionRule
from ullage.probes.attention.entropy import Sight, seen_interval

# Rows of a mask that are looked at together, so that no copy of the whole is made.
_ROWS = 256


@dataclass(frozen=True, slots=True)
class View:
    """Rows (indices into the queries) that one window and one sight describe.

    `positions` are places among the keys; the first token's is `sight.padding`.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    window: int | None
    sight: Sight


def view_without_mask(
    rows_R: torch.Tensor, num_queries: int, num_keys: int, causal: bool, first: int = 0
) -> View:
    """What SDPA shows without a mask: with `causal` query t sees keys up to t, else all."""
    offset = num_keys - 1 if num_queries == 1 else 0
    causal = causal or num_queries == 1
    return View(rows_R, rows_R + offset, None, Sight(causal=causal, padding=min(first, 0)))


def views_of_mask(
    visible_TS: torch.Tensor, rows_R: torch.Tensor, first: int | None = None
) -> Iterator[View]:
    """Views that together show the rows exactly what the mask does, but those that see nothing.

    Among the keys the sequence's first token is number `first`, below 0 where a cache has dropped
    it; None: the first key that any query sees. The last query stands at the last key, unless rows
    see only up to keys before that.
    """
    low_R, high_R, whole_R = _intervals(visible_TS, rows_R)
    sees_R = high_R > low_R
    rows_R, low_R, high_R, whole_R = (x[sees_R] for x in (rows_R, low_R, high_R, whole_R))
    if not len(rows_R):
        return
    num_queries, num_keys = visible_TS.shape
    offset = num_keys - num_queries
    ends_R = high_R - 1 - rows_R
    if int(ends_R[0]) < offset and (ends_R == ends_R[0]).all():
        offset = int(ends_R[0])  # a cache with room behind the last token
    positions_R = rows_R + offset
    if first is None:
        first = int(visible_TS.any(0).to(torch.uint8).argmax())
    if whole_R.all():
        found = _one_sight(positions_R, low_R, high_R, num_keys, first)
        if found is not None:
            yield View(rows_R, positions_R, *found)
            return
    patterns_PS, pattern_R = torch.unique(visible_TS[rows_R], dim=0, return_inverse=True)
    for index, keep_S in enumerate(patterns_PS):
        those = pattern_R == index
        # Of several sequences in one row each has its own first token.
        own = max(first, int(keep_S.to(torch.uint8).argmax()))
        sight = Sight(causal=False, padding=own, keep=keep_S)
        yield View(rows_R[those], positions_R[those], None, sight)


def _intervals(
    visible_TS: torch.Tensor, rows_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row the first key it sees, one past the last, and whether it sees all between."""
    num_keys = visible_TS.shape[1]
    lows, highs, wholes = [], [], []
    for at in range(0, len(rows_R), _ROWS):
        seen_RS = visible_TS[rows_R[at : at + _ROWS]].to(torch.uint8)
        count_R = seen_RS.sum(-1)
        low_R = seen_RS.argmax(-1)
        high_R = torch.where(count_R > 0, num_keys - seen_RS.flip(-1).argmax(-1), low_R)
        lows.append(low_R)
        highs.append(high_R)
        wholes.append(high_R - low_R == count_R)
    return torch.cat(lows), torch.cat(highs), torch.cat(wholes)


def _one_sight(
    positions_R: torch.Tensor,
    low_R: torch.Tensor,
    high_R: torch.Tensor,
    num_keys: int,
    padding: int,
) -> tuple[int | None, Sight] | None:
    """The window and the padding or chunk that show exactly these intervals, if there are such."""
    causal = bool((high_R == positions_R + 1).all())
    width = int(torch.maximum(positions_R - low_R, high_R - 1 - positions_R).max()) + 1
    chunks = (int(start) - padding for start in torch.unique(low_R))
    candidates = (
        (None, Sight(causal=causal, padding=padding)),
        (width, Sight(causal=causal, padding=padding)),
        (None, Sight(causal=causal, padding=padding, chunk=math.gcd(*chunks) or None)),
    )
    for window, sight in candidates:
        low, high = seen_interval(positions_R, AttentionRule(1.0, window), sight)
        if (low == low_R).all() and (high.clamp(max=num_keys) == high_R).all():
            return window, sight
    return None
