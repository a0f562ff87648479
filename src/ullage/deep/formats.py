"""Bit patterns of stored floats and the places of scales in GGUF blocks: tables, and decoding.

A float's sign apart, its pattern grows with its magnitude, so the largest pattern is the largest
value and one comparison finds NaN and Inf. Sources: IEEE 754; OCP 8-bit and MX formats; ggml's
block structures as `gguf` 0.19 reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from struct import pack, unpack

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """`mask` takes the sign away; masked patterns above `inf` are NaN, equal to it Inf.

    `has_inf` False: the pattern `inf` is NaN as well. `nan_pattern` is the unmasked pattern of the
    only NaN of the FNUZ formats (the others' NaN are told by `inf`). `zero` is False for E8M0.
    """

    unsigned: str
    mask: int
    inf: int
    has_inf: bool = True
    nan_pattern: int | None = None
    signed: bool = True


FLOATS = {
    "F64": FloatFormat("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "F32": FloatFormat("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "BF16": FloatFormat("<u2", 0x7FFF, 0x7F80),
    "F16": FloatFormat("<u2", 0x7FFF, 0x7C00),
    "F8_E5M2": FloatFormat("u1", 0x7F, 0x7C),
    "F8_E4M3": FloatFormat("u1", 0x7F, 0x7F, has_inf=False),
    "F8_E5M2FNUZ": FloatFormat("u1", 0x7F, 0x80, has_inf=False, nan_pattern=0x80),
    "F8_E4M3FNUZ": FloatFormat("u1", 0x7F, 0x80, has_inf=False, nan_pattern=0x80),
    "F8_E8M0": FloatFormat("u1", 0xFF, 0xFF, has_inf=False, signed=False),
}

INTEGERS = {"BOOL": 1, "I8": 1, "U8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}
"""Bytes of one element."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`scales` are the byte offsets in the block of what multiplies or shifts its values.

    `packed` is the (first, last + 1) byte of the packed values. When all scales are zero the block
    is zero whatever is packed. No value is larger than `reach` × the largest scale of the block.
    """

    scale_dtype: str
    scales: tuple[int, ...]
    packed: tuple[int, int]
    reach: int


BLOCKS = {
    "Q4_0": BlockFormat("F16", (0,), (2, 18), 8),
    "Q4_1": BlockFormat("F16", (0, 2), (4, 20), 16),
    "Q5_0": BlockFormat("F16", (0,), (6, 22), 16),
    "Q5_1": BlockFormat("F16", (0, 2), (8, 24), 32),
    "Q8_0": BlockFormat("F16", (0,), (2, 34), 128),
    "Q2_K": BlockFormat("F16", (80, 82), (16, 80), 60),
    "Q3_K": BlockFormat("F16", (108,), (32, 96), 128),
    "Q4_K": BlockFormat("F16", (0, 2), (16, 144), 1008),
    "Q5_K": BlockFormat("F16", (0, 2), (48, 176), 2016),
    "Q6_K": BlockFormat("F16", (208,), (0, 128), 4096),
    "Q8_K": BlockFormat("F32", (0,), (4, 260), 128),
    "IQ4_NL": BlockFormat("F16", (0,), (2, 18), 127),
    "IQ4_XS": BlockFormat("F16", (0,), (8, 136), 4064),
    "MXFP4": BlockFormat("F8_E8M0", (0,), (1, 17), 6),
}


@cache
def _table(dtype: str) -> npt.NDArray[np.float64]:
    """The value of each of the 256 patterns of an 8-bit format, as if none were NaN or Inf."""
    pattern = np.arange(256)
    if dtype == "F8_E8M0":
        return np.asarray(np.exp2(pattern - 127.0))
    exponent_bits = 4 if "E4M3" in dtype else 5
    fraction_bits = 7 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - (0 if dtype.endswith("FNUZ") else 1)
    exponent = (pattern & 0x7F) >> fraction_bits
    fraction = (pattern & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    size = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * np.exp2(exponent - bias)
    )
    return np.asarray(np.where(pattern >= 128, -size, size))


def decode(dtype: str, patterns: Array) -> npt.NDArray[np.float64]:
    """The values of bit patterns of a format of FLOATS. 8-bit NaN become numbers."""
    wide: npt.NDArray[np.float64]
    with np.errstate(invalid="ignore"):
        if dtype == "F64":
            wide = patterns.astype("<u8").view("<f8").astype(np.float64)
        elif dtype == "F32":
            wide = patterns.astype("<u4").view("<f4").astype(np.float64)
        elif dtype == "BF16":
            wide = (patterns.astype("<u4") << np.uint32(16)).view("<f4").astype(np.float64)
        elif dtype == "F16":
            wide = patterns.astype("<u2").view("<f2").astype(np.float64)
        else:
            wide = _table(dtype)[patterns.astype(np.intp)]
    return wide


_WIDE = {
    "F64": ("<Q", "<d", 0),
    "F32": ("<I", "<f", 0),
    "BF16": ("<I", "<f", 16),
    "F16": ("<H", "<e", 0),
}


def decode_one(dtype: str, pattern: int) -> float:
    """The value of one finite bit pattern, without the cost of an array."""
    if dtype not in _WIDE:
        return float(_table(dtype)[pattern])
    whole, real, shift = _WIDE[dtype]
    value: float = unpack(real, pack(whole, pattern << shift))[0]
    return value
