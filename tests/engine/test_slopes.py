"""ALiBi's slopes are those of transformers for every count of heads."""

from __future__ import annotations

import pytest
import torch

from ullage.engine.positions.slopes import bloom_slopes, mpt_slopes

COUNTS = (*range(1, 18), 24, 32, 40, 71, 112)


@pytest.mark.parametrize("num_heads", COUNTS)
def test_bloom(num_heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs_HS = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0]
    torch.testing.assert_close(torch.tensor(bloom_slopes(num_heads)), theirs_HS[:, 1])


@pytest.mark.parametrize("num_heads", COUNTS)
def test_mpt(num_heads: int) -> None:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    theirs_HS = build_mpt_alibi_tensor(num_heads, 2, 8).reshape(num_heads, 2)
    steps_H = theirs_HS[:, 1] - theirs_HS[:, 0]
    torch.testing.assert_close(torch.tensor(mpt_slopes(num_heads)), steps_H)
