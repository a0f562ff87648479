"""Linear layers: int8 gives the exact sum of the two roundings, and stays close to float32."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ullage.engine.kernels.compiling import available
from ullage.engine.linear import FloatLinear, Int8Linear, Linear
from ullage.engine.linear.int8 import FbgemmLinear, quantized

KERNELS = pytest.mark.skipif(not available(), reason="numba is not installed")
EVERY_INT8 = [pytest.param(Int8Linear, marks=KERNELS), FbgemmLinear]
Make = Callable[..., Linear]


def rounded(rows: np.ndarray) -> np.ndarray:
    """Each row as the nearest of 255 steps of a 127th of its largest magnitude, in float64."""
    scales = np.abs(rows).max(axis=1, keepdims=True) / 127
    return np.asarray(np.rint(rows / np.where(scales == 0, 1, scales)) * scales)


def rounded_by_groups(rows: np.ndarray) -> np.ndarray:
    """The same for every 64 neighbours of a row by themselves."""
    parts = [rounded(rows[:, i : i + 64]) for i in range(0, rows.shape[1], 64)]
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("make", EVERY_INT8)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.filterwarnings("ignore:.*deprecat.*")
def test_int8_is_within_a_few_percent_of_float(make: Make, with_bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 128), torch.randn(7, 128)
    bias = torch.randn(96) if with_bias else None
    exact = FloatLinear(weight, bias)(x)
    close = make(weight, bias)(x)
    assert torch.equal(exact, torch.nn.functional.linear(x, weight, bias))
    error = (close - exact).norm() / exact.norm()
    assert 0 < error < 0.03


@pytest.fixture
def own_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own product of floats, whatever processor the tests run on."""
    from ullage.engine.kernels import product

    monkeypatch.setattr(product, "OUTRUNS_TORCH", True)


SHAPES = {  # outputs, inputs
    "one strip": (64, 128),
    "half a strip": (32, 40),
    "strips and a half": (224, 96),
    "inputs in parts": (96, 1536),
    "an odd number of inputs": (64, 1283),
    "a few inputs": (64, 3),
}


@KERNELS
@pytest.mark.usefixtures("own_floats")
@pytest.mark.parametrize("rows", [64, 65, 127, 128, 200, 333, 1000])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_floats_of_many_rows_are_multiplied_exactly_but_for_rounding(
    rows: int, shape: str, with_bias: bool
) -> None:
    """As close to float64 as torch's own product, to the last row and output."""
    outputs, inputs = SHAPES[shape]
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(outputs, inputs, generator=generator)
    x = torch.randn(rows, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator) if with_bias else None
    found = FloatLinear(weight, bias)(x)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    theirs = torch.nn.functional.linear(x, weight, bias)
    assert found.shape == exact.shape
    # By what was added up, whatever cancelled: rounding alone, and no more of it than torch's.
    added = x.abs() @ weight.abs().T + (0 if bias is None else bias.abs())
    off, theirs_off = ((y - exact).abs() / added for y in (found, theirs))
    assert off.max() <= 1e-6 and off.mean() <= 2 * theirs_off.mean() + 1e-8


@KERNELS
@pytest.mark.usefixtures("own_floats")
def test_bfloat16_of_many_rows_is_multiplied_as_the_floats_it_is() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 128).bfloat16(), torch.randn(100, 128).bfloat16()
    found = FloatLinear(weight)(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, (x.double() @ weight.double().T).bfloat16())


def test_weights_are_widened_in_and_out_of_inference_mode() -> None:
    """What one call leaves for the next can be written by it, whatever mode either is in."""
    torch.manual_seed(0)
    weight, x = torch.randn(640, 640).bfloat16(), torch.randn(8, 640).bfloat16()
    linear = FloatLinear(weight)
    with torch.inference_mode():
        inside = linear(x)
    torch.testing.assert_close(linear(x), inside.clone())


@KERNELS
@pytest.mark.usefixtures("own_floats")
def test_rows_that_lie_apart_and_outputs_of_no_whole_strip() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 128), torch.randn(128, 200).T
    torch.testing.assert_close(FloatLinear(weight)(x), x @ weight.T, atol=1e-4, rtol=1e-5)
    weight = torch.randn(49, 128)
    torch.testing.assert_close(FloatLinear(weight)(x), x @ weight.T, atol=1e-4, rtol=1e-5)


@KERNELS
@pytest.mark.usefixtures("own_floats")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_float_row_that_is_not_finite_spoils_only_itself(bad: float) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 96), torch.randn(100, 96)
    x[41, 7] = bad
    finite = FloatLinear(weight)(x).isfinite()
    assert not finite[41].any() and finite[:41].all() and finite[42:].all()


_OF_MANY_LENGTHS = """
import gc, torch
from ullage.engine.kernels import product
from ullage.engine.linear import FloatLinear
product.OUTRUNS_TORCH = True

def held_mb():
    gc.collect()
    status = open("/proc/self/status").read()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024

linear, x = FloatLinear(torch.randn(512, 512)), torch.randn(1000, 512)
linear(x), linear(x[:64])
before = held_mb()
for rows in range(64, 864, 2):
    linear(x[:rows])
print(held_mb() - before)
"""


@KERNELS
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_prompts_of_400_lengths_leave_no_memory_behind() -> None:
    """A library that keeps a plan for each shape (oneDNN: 1.7 MB) would hold 680 MB of them."""
    done = subprocess.run(
        [sys.executable, "-c", _OF_MANY_LENGTHS], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 16


@pytest.mark.parametrize("make", EVERY_INT8)
@pytest.mark.filterwarnings("ignore:.*deprecat.*")
def test_a_row_of_zeros_stays_zero(make: Make) -> None:
    weight = torch.randn(4, 32)
    weight[2] = 0
    y = make(weight)(torch.randn(3, 32))
    assert torch.equal(y[:, 2], torch.zeros(3))


@KERNELS
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, 40])
@pytest.mark.parametrize("size", [32, 80, 576])
def test_the_kernels_give_the_exact_sum_of_whole_numbers(rows: int, size: int) -> None:
    """Also at widths that are filled up with zeros, and at rows that no block divides."""
    generator = torch.Generator().manual_seed(rows * 1000 + size)
    weight = torch.randn(70, size, generator=generator)
    # Neighbours of unlike magnitude: groups must keep their own scales.
    x = torch.randn(rows, size, generator=generator) * torch.linspace(0.01, 10, size)
    expected = rounded_by_groups(x.double().numpy()) @ rounded(weight.double().numpy()).T
    y = Int8Linear(weight)(x).double().numpy()
    # A number halfway between two whole ones may go either way in float32: one step of one weight.
    step = float(x.abs().max() * weight.abs().max() / 127)
    assert np.abs(y - expected).max() <= 2 * step
    assert np.mean(np.abs(y - expected) <= np.abs(expected) * 1e-5 + 1e-4) > 0.9


@KERNELS
def test_the_greatest_products_do_not_overflow() -> None:
    weight, x = torch.full((3, 4096), -1.0), torch.full((2, 4096), 1.0)
    assert torch.allclose(Int8Linear(weight)(x), torch.full((2, 3), -4096.0))


@KERNELS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_own_row_and_no_other(bad: float) -> None:
    torch.manual_seed(1)
    linear, x = Int8Linear(torch.randn(40, 64)), torch.randn(9, 64)
    clean = linear(x)
    x[4, 17] = bad
    spoilt = linear(x)
    assert spoilt[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(spoilt[others], clean[others])


@KERNELS
def test_a_weight_that_is_not_finite_is_seen() -> None:
    weight = torch.randn(4, 32)
    weight[1, 3], weight[2, 4] = float("nan"), float("inf")
    y = Int8Linear(weight)(torch.randn(2, 32))
    assert y[:, [0, 3]].isfinite().all()
    assert not y[:, [1, 2]].isfinite().any()


@KERNELS
def test_int8_weights_are_held_once_and_counted() -> None:
    weight = torch.randn(48, 64)
    assert sum(t.numel() * t.element_size() for t in Int8Linear(weight).tensors) == 48 * 64 + 48 * 4


def test_a_channel_is_worth_its_largest_weight() -> None:
    whole, scales = quantized(torch.tensor([[0.5, -1.0], [0.0, 0.0]]))
    assert whole.tolist() == [[64, -127], [0, 0]]
    assert scales.tolist() == pytest.approx([1 / 127, 0.0])
