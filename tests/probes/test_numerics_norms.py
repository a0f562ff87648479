"""Norms are read as they compute, whatever they say; attention kernels as they answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.probes.test_numerics import FAMILIES, loaded
from ullage.probes.numerics.apart import REFERENCES
from ullage.probes.numerics.kernels import HEAD_DIMS, KERNELS, ROWS, causal_attention, kernels_of
from ullage.probes.numerics.norms import norms_of
from ullage.probes.numerics.numerics import NormReading

Compute = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


class Norm(torch.nn.Module):
    """Says `eps`, computes what it is given."""

    def __init__(self, compute: Compute, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(width)
        weight = 1.0 + 0.3 * torch.randn(width, generator=chance)
        self.weight = torch.nn.Parameter(weight.to(dtype))
        self.eps, self.compute = eps, compute

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.compute(rows, self.weight, self.eps)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def narrow(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def layer(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, weight.shape, weight, None, eps)


def unbiased(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    off = wide - wide.mean(-1, keepdim=True)
    variance = wide.var(-1, correction=1, keepdim=True)
    return (weight.float() * off * torch.rsqrt(variance + eps)).to(x.dtype)


def over_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * (x - x.mean(0)) / torch.sqrt(x.var(0, correction=1) + eps)


def read(
    compute: Compute, width: int = 64, eps: float = 1e-6, dtype: torch.dtype = torch.float32
) -> NormReading:
    model = torch.nn.Module()
    model.input_norm = Norm(compute, width, eps, dtype)
    (reading,) = norms_of(model)
    return reading


@pytest.mark.parametrize("dtype", list(REFERENCES), ids=str)
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8, 1e-12])
@pytest.mark.parametrize("width", [2, 63, 64, 576])
@pytest.mark.parametrize("compute", [rms, layer, unbiased])
def test_epsilon_is_solved_from_outputs(
    compute: Compute, width: int, eps: float, dtype: torch.dtype
) -> None:
    reading = read(compute, width, eps, dtype)
    assert reading.eps_fits
    assert reading.eps_executed == pytest.approx(eps, rel=0.1)


@pytest.mark.parametrize("dtype", list(REFERENCES), ids=str)
def test_an_epsilon_other_than_it_says_is_told(dtype: torch.dtype) -> None:
    def other(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms(x, weight, 1e-5)

    reading = read(other, dtype=dtype)
    assert not reading.eps_fits
    assert reading.eps_executed == pytest.approx(1e-5, rel=0.1)


def test_an_epsilon_below_all_numbers_of_the_dtype_is_not_judged() -> None:
    reading = read(rms, eps=1e-16, dtype=torch.float16)
    assert reading.eps_executed is None
    assert reading.eps_fits


def test_an_epsilon_that_the_dtype_loses_is_told() -> None:
    reading = read(narrow, eps=1e-8, dtype=torch.float16)  # rounds to zero there
    assert not reading.eps_fits
    assert reading.reduces_in == "float16"


@pytest.mark.parametrize(
    ("compute", "divisor", "reduces_in"),
    [(rms, "n", "float32"), (layer, "n", "fused"), (unbiased, "n-1", "float32"),
     (narrow, "n", "bfloat16")],
)  # fmt: skip
def test_divisor_and_type_of_the_sum_are_those_executed(
    compute: Compute, divisor: str, reduces_in: str
) -> None:
    reading = read(compute, width=32, dtype=torch.bfloat16)
    assert reading.reduces_in == reduces_in
    assert read(compute, width=32).divisor == divisor
    assert reading.one_row in ("same", "close")


def test_a_norm_over_rows_has_nothing_of_one_row() -> None:
    assert read(over_rows).one_row == "not finite"


@pytest.mark.parametrize("dtype", list(REFERENCES), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_norms_are_what_they_say(family: str, dtype: torch.dtype) -> None:
    model = loaded(family, dtype)
    before = [one.clone() for one in model.parameters()]
    readings = norms_of(model)
    assert len(readings) >= 7
    for one in readings:
        assert one.eps_fits
        assert one.one_row in ("same", "close")
        assert one.divisor == "n" or dtype == torch.bfloat16
        assert one.reduces_in in ("float32", "fused")
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("dtype", list(REFERENCES), ids=str)
def test_kernels_of_this_machine_are_sound_at_every_head_size(dtype: torch.dtype) -> None:
    readings = kernels_of(dtype, HEAD_DIMS, torch.device("cpu"))
    assert len(readings) == len(HEAD_DIMS) * len(ROWS) * len(KERNELS)
    assert not any(one.departs for one in readings)
    ran = {one.kernel for one in readings if one.refused is None}
    assert ran >= {"math", "flash"}
    assert all((one.off is None) == (one.refused is not None) for one in readings)


def test_the_reference_is_attention() -> None:
    q, k, v = torch.randn(3, 1, 1, 5, 4, generator=torch.Generator().manual_seed(1)).double()
    found = causal_attention(q, k, v)[0, 0]
    for row in range(5):
        scores = [math.exp(float(q[0, 0, row] @ k[0, 0, key]) / 2) for key in range(row + 1)]
        weights = [score / sum(scores) for score in scores]
        told = sum(weight * v[0, 0, key] for key, weight in enumerate(weights))
        assert torch.allclose(found[row], told)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [1.2, math.nan])
def test_a_kernel_that_is_off_is_told(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.nn.functional.scaled_dot_product_attention

    def off(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given: torch.Tensor = right(q, *args, **kwargs)
        return given * wrong if q.shape[-1] == 96 else given

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", off)
    readings = kernels_of(torch.bfloat16, (64, 96), torch.device("cpu"))
    assert {one.head_dim for one in readings if one.departs} == {96}
