"""What an attention path is: prepared once per step, called once per layer.

Holds the protocol and the arithmetic of rules (who sees what, how scores are bent) in torch.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ullage.engine.batch import Batch, Span
from ullage.engine.rule import AttentionRule


class AttentionStep(Protocol):
    """One step's attention: masks and indices are ready, each layer only computes."""

    def __call__(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """[tokens, heads, head_dim] of what each row sees; this step's K and V are in the cache."""


class AttentionPath(Protocol):
    """A way to compute attention over a KV cache."""

    def prepare(self, batch: Batch) -> AttentionStep:
        """Everything that all layers of one step share."""

    def watches(self, batch: Batch) -> bool:
        """Whether the step must run through this path, for somebody reads along (see `probes`)."""


def first_visible(span: Span, window: int | None) -> int:
    """The first position that any row of `span` sees: what lies before may have been freed."""
    return 0 if window is None else max(span.start - window + 1, 0)


def hidden(rows: torch.Tensor, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """bool, of the shape that the two broadcast to: what a row at position t must not see."""
    unseen = positions > rows
    return unseen if window is None else unseen | (positions <= rows - window)
