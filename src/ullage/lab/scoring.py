"""How well a variant answers: perplexity, and how often its first choice is the reference's.

Holds the arithmetic on logits; which logits they are is each experiment's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Score:
    """Over all scored tokens: mean negative log-likelihood (nats), each token's, the first choices.

    `nll` float64 [tokens], `choices` int64 [tokens], in the same order for every variant.
    """

    nll: torch.Tensor
    choices: torch.Tensor

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.nll.mean()))

    def agreement(self, reference: Score) -> float:
        """The share of tokens where both choose the same next token."""
        return float((self.choices == reference.choices).double().mean())

    def change(self, reference: Score) -> tuple[float, float]:
        """Perplexity against the reference's, as a ratio − 1, and its standard error.

        The tokens are the same, so the error is that of the mean difference of their losses.
        """
        difference = self.nll - reference.nll
        mean = float(difference.mean())
        error = float(difference.std()) / math.sqrt(len(difference)) if len(difference) > 1 else 0.0
        return math.exp(mean) - 1, math.exp(mean) * error


def score(pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Score:
    """From pairs (logits float32 [tokens, vocab], the token ids that came next int64 [tokens])."""
    losses, choices = [], []
    for logits_TV, next_T in pieces:
        losses.append(F.cross_entropy(logits_TV, next_T, reduction="none").double())
        choices.append(logits_TV.argmax(dim=1))
    return Score(torch.cat(losses), torch.cat(choices))
