"""Int8 weights, one scale per output channel; activations quantised per row as they come.

Two ways to the product: kernels of our own, which hold the weights once and as they are, and
FBGEMM where numba is missing.
"""

from __future__ import annotations

import warnings

import torch

from ullage.engine.kernels.compiling import available
from ullage.engine.linear.protocol import Linear

_WIDTH_MULTIPLE = 32
# Of a large matrix (a vocabulary's) only a part is held a second time in float32.
_ELEMENTS_AT_A_TIME = 1 << 22


def quantized(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [out, in] from −127 to 127, and float32 scales [out] whose product with it is nearest.

    A channel of zeros has the scale 0. NaN and Inf give a scale that is no number either.
    """
    whole_OI = torch.empty(weight_OI.shape, dtype=torch.int8)
    scales_O = torch.empty(weight_OI.shape[0])
    num_rows = max(1, _ELEMENTS_AT_A_TIME // max(1, weight_OI.shape[1]))
    for rows in (slice(r, r + num_rows) for r in range(0, weight_OI.shape[0], num_rows)):
        part_OI = weight_OI[rows]
        largest_O = part_OI.abs().amax(dim=1)
        factors_O = torch.where(largest_O > 0, 127 / largest_O, 0.0)
        rounded_OI = (part_OI * factors_O[:, None]).round_().nan_to_num_(0.0, 0.0, 0.0)
        whole_OI[rows] = rounded_OI.to(torch.int8)
        scales_O[rows] = largest_O / 127
    return whole_OI, scales_O


class Int8Linear:
    """Both factors from −127 to 127, sums in 32 bits: exact but for the two roundings.

    Widths that are no multiple of 32 are filled up with zeros.
    """

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        self.in_features = weight_OI.shape[1]
        short = -self.in_features % _WIDTH_MULTIPLE
        whole_OI, self.scales_O = quantized(weight_OI)
        self.weight_OI = torch.nn.functional.pad(whole_OI, (0, short)) if short else whole_OI
        self.bias_O = bias_O

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        held = (self.weight_OI, self.scales_O)
        return held if self.bias_O is None else (*held, self.bias_O)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        from ullage.engine.kernels.product import int8_product

        x_TI = x_TI.contiguous()
        y_TO = torch.empty(x_TI.shape[0], self.weight_OI.shape[0])
        int8_product(
            x_TI.numpy(),
            self.weight_OI.numpy(),
            self.scales_O.numpy(),
            None if self.bias_O is None else self.bias_O.numpy(),
            y_TO.numpy(),
        )
        return y_TO


class FbgemmLinear:
    """FBGEMM's dynamic product, its weights packed unseen.

    `reduce_range` keeps the activation in 7 bits: without VNNI the kernel adds pairs of products
    in 16 bits, which overflow with 8.
    """

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        scales_O = (weight_OI.abs().amax(dim=1).double() / 127).clamp_min(1e-12)
        zeros_O = torch.zeros_like(scales_O, dtype=torch.int64)
        with warnings.catch_warnings():
            # Announced for removal, but the only fast int8 product on AVX2 in torch so far.
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
            packed = torch.quantize_per_channel(weight_OI, scales_O, zeros_O, 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(packed, bias_O)

    @property
    def tensors(self) -> None:
        return None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        y_TO: torch.Tensor = torch.ops.quantized.linear_dynamic(x_TI, self._packed, True)
        return y_TO


def int8_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> Linear:
    """The kernels' way where there are kernels."""
    return (Int8Linear if available() else FbgemmLinear)(weight_OI, bias_O)
