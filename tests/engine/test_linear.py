"""Linear layers: int8 stays close to float32 and knows where it cannot."""

from __future__ import annotations

import pytest
import torch

from ullage.engine.linear import FloatLinear, Int8Linear


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.filterwarnings("ignore:.*deprecat.*")
def test_int8_is_within_a_few_percent_of_float(with_bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 128), torch.randn(7, 128)
    bias = torch.randn(96) if with_bias else None
    exact = FloatLinear(weight, bias)(x)
    close = Int8Linear(weight, bias)(x)
    assert torch.equal(exact, torch.nn.functional.linear(x, weight, bias))
    error = (close - exact).norm() / exact.norm()
    assert 0 < error < 0.03


@pytest.mark.filterwarnings("ignore:.*deprecat.*")
def test_a_row_of_zeros_stays_zero() -> None:
    weight = torch.randn(4, 32)
    weight[2] = 0
    y = Int8Linear(weight)(torch.randn(3, 32))
    assert torch.equal(y[:, 2], torch.zeros(3))
