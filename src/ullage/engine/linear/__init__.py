"""Matrix products by the kind of weight: what is held, and what multiplies it.

Each object holds one (perhaps fused) weight and is called with [tokens, in] → [tokens, out].
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.engine.kernels.compiling import available
from ullage.engine.linear.floats import FloatLinear
from ullage.engine.linear.int8 import Int8Linear, int8_linear
from ullage.engine.linear.protocol import Linear, LinearFactory

LINEARS: Mapping[str, LinearFactory] = {"none": FloatLinear, "int8": int8_linear}

__all__ = ["LINEARS", "FloatLinear", "Int8Linear", "Linear", "LinearFactory", "available"]
