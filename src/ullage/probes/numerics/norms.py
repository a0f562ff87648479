"""Norms as they are really executed: epsilon, divisor of the variance, type of the sum, one row.

Holds the inputs that tell and what is solved from the outputs. Bounds of outputs: `apart`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ullage.probes.numerics.bundle_compare import HALF_STEPS
from ullage.probes.numerics.numerics import NormReading, Place
from ullage.probes.numerics.places import place_of

_SUMS = ("mean", "sum", "var", "var_mean", "linalg_vector_norm", "norm", "rms", "dot", "mm", "bmm")
_EPS_NAMES = ("eps", "variance_epsilon", "epsilon", "norm_eps")
_ROWS = 5
# Of epsilon: how far the one that is seen may be from the one that is told.
EPS_TOLERANCE = 0.1
_LARGE = 64.0


def norms_of(model: Any) -> tuple[NormReading, ...]:
    """Of every norm of the model that takes a row alone; nothing of the model is changed."""
    found = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of variances of one row: told in `one_row`
        for path, module in model.named_modules():
            place = place_of(path, module)
            width = _width(module)
            if place.kind == "norm" and width and not any(module.children()):
                found.append(_reading(place, module, width))
    return tuple(found)


def _width(module: Any) -> int:
    """How many channels; 0 where nothing says."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.ndim == 1:
        return int(weight.shape[0])
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if isinstance(shape, (tuple, list)) and len(shape) == 1 else 0


def _reading(place: Place, module: Any, width: int) -> NormReading:
    weight = getattr(module, "weight", None)
    dtype = torch.float32 if weight is None else weight.dtype
    configured = next(
        (float(held) for name in _EPS_NAMES if (held := getattr(module, name, None)) is not None),
        None,
    )
    operators = _Operators()
    signs_1W = torch.ones(1, width, dtype=torch.float64)
    signs_1W[:, 1::2] = -1.0  # a mean of zero, whether it is taken off or not
    signs_1W = signs_1W[:, : width - width % 2] if width % 2 else signs_1W
    if width % 2:  # the middle channel keeps the mean at zero
        signs_1W = torch.cat((signs_1W, torch.zeros(1, 1, dtype=torch.float64)), 1)
    rows_RW = torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(7))
    device = None if weight is None else weight.device
    rows_RW = rows_RW.to(device=device, dtype=dtype)
    with operators:
        module(rows_RW)
    signs_1W = signs_1W.to(device)
    divisor = _divisor(module, signs_1W, dtype)
    amplitude = _amplitude(dtype, configured)
    executed = _eps(module, signs_1W, dtype, amplitude)
    if executed is not None and divisor == "n-1":
        executed *= width / (width - 1)  # the variance of the signs is that much larger
    return NormReading(
        place,
        configured,
        executed,
        divisor,
        operators.reduces_in,
        tuple(operators.names),
        _one_row(module, rows_RW),
        configured is None or amplitude == 0.0 or _fits(configured, executed),
    )


def _fits(configured: float, executed: float | None) -> bool:
    if configured == 0.0 or executed is None:
        return configured == 0.0 and executed is None
    return abs(executed - configured) <= EPS_TOLERANCE * configured


def _scale(module: Any, amplitude: float, signs_1W: torch.Tensor, dtype: torch.dtype) -> Any:
    """What the norm multiplies each channel's sign with, without its bias, in float64."""
    zeros = torch.zeros_like(signs_1W, dtype=dtype)
    moved = module((amplitude * signs_1W).to(dtype)).double() - module(zeros).double()
    return (moved * signs_1W)[signs_1W != 0]


def _amplitude(dtype: torch.dtype, configured: float | None) -> float:
    """√ε as it really enters; 0 where the dtype has nothing so small, and cannot show it."""
    return float(torch.tensor(math.sqrt(configured) if configured else 1e-3, dtype=dtype).double())


def _eps(module: Any, signs_1W: torch.Tensor, dtype: torch.dtype, amplitude: float) -> float | None:
    """From y(a)/y(∞) = a/√(a² + ε), at an amplitude near √ε, where it shows most.

    The variance of the signs is that of the channels that have one.
    """
    share = float((signs_1W != 0).double().mean())
    full = _scale(module, _LARGE, signs_1W, dtype)
    if amplitude == 0.0:
        return None
    small = _scale(module, amplitude, signs_1W, dtype)
    clear = full.abs() > 0.05 * full.abs().max()
    if not bool(clear.any()) or not bool(small.isfinite().all()):
        return None
    ratio = float((small[clear] / full[clear]).median())
    if not 0.0 < ratio < 1.0 - 4 * HALF_STEPS[str(dtype).removeprefix("torch.")]:
        return None
    return float(amplitude**2 * share * (1.0 / ratio**2 - 1.0))


def _divisor(module: Any, signs_1W: torch.Tensor, dtype: torch.dtype) -> Literal["n", "n-1"] | None:
    """Whether ±1 comes out as the weight, or as √((n−1)/n) of it."""
    weight = getattr(module, "weight", None)
    if weight is None:
        return None
    full = _scale(module, _LARGE, signs_1W, dtype)
    held = weight.double()[signs_1W[0] != 0]
    width, share = signs_1W.shape[1], float((signs_1W != 0).double().mean())
    fits: dict[Literal["n", "n-1"], float] = {}
    divisors: Mapping[Literal["n", "n-1"], float] = {
        "n": 1.0,
        "n-1": math.sqrt((width - 1) / width),
    }
    for name, factor in divisors.items():
        for told in (held, 1.0 + held):  # Gemma keeps its weights less one
            off = float((full * math.sqrt(share) / factor - told).norm() / told.norm())
            fits[name] = min(off, fits.get(name, math.inf))
    best = min(fits, key=lambda name: fits[name])
    other = fits["n" if best == "n-1" else "n-1"]
    close = fits[best] < 4 * HALF_STEPS[str(dtype).removeprefix("torch.")] + 1e-6
    return best if close and fits[best] < 0.5 * other else None


def _one_row(module: Any, rows_RW: torch.Tensor) -> Literal["same", "close", "other", "not finite"]:
    """A variance over rows, unbiased, is 0 ÷ 0 of a single one."""
    among, alone = module(rows_RW)[:1], module(rows_RW[:1])
    if not alone.isfinite().all():
        return "not finite"
    if torch.equal(among, alone):
        return "same"
    close = (among - alone).double().norm() <= 16 * _half(rows_RW) * among.double().norm()
    return "close" if bool(close) else "other"


def _half(tensor: torch.Tensor) -> float:
    return HALF_STEPS[str(tensor.dtype).removeprefix("torch.")]


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a norm runs, and in which type its sums are taken."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.sums: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        self.names.append(name)
        output = func(*args, **(kwargs or {}))
        if name in _SUMS:
            results = output if isinstance(output, tuple) else (output,)
            self.sums += [str(one.dtype).removeprefix("torch.") for one in _floating(results)]
        return output

    @property
    def reduces_in(self) -> str:
        return ", ".join(sorted(set(self.sums))) if self.sums else "fused"


def _floating(values: Any) -> Iterator[torch.Tensor]:
    return (one for one in values if isinstance(one, torch.Tensor) and one.is_floating_point())
