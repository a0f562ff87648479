"""ALiBi's slopes: how much each head's scores fall per token of distance.

Two orders of the same idea, for head counts that are no power of two. Facts: transformers 5.24,
modeling_bloom.py and modeling_mpt.py.
"""

from __future__ import annotations

import math

# Every model that was released keeps the paper's: the steepest head falls by half per 8 / heads.
ALIBI_BIAS_MAX = 8


def bloom_slopes(num_heads: int) -> tuple[float, ...]:
    """Powers of 2^(−8/n) for the largest power of two n, then every second one of 2n's."""
    count = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-ALIBI_BIAS_MAX * (i + 1) / count) for i in range(count)]
    more = [2.0 ** (-ALIBI_BIAS_MAX * (2 * i + 1) / (2 * count)) for i in range(num_heads - count)]
    return tuple(first + more)


def mpt_slopes(num_heads: int) -> tuple[float, ...]:
    """The slopes of the next power of two, every second one first, cut to num_heads."""
    count = 1 << math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-ALIBI_BIAS_MAX * (i + 1) / count) for i in range(count)]
    if count != num_heads:
        slopes = slopes[1::2] + slopes[::2]
    return tuple(slopes[:num_heads])
