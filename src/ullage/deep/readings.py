"""What one pass over a checkpoint's bytes found: `TensorReading` per tensor, `DeepScan` of all.

Holds the data only, without numpy, so that the rules that judge it start fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reading = Literal["floats", "integers", "blocks", "bytes"]
"""floats: every value was looked at. integers: they hold no NaN. blocks: GGUF blocks, of which the
scales were looked at. bytes: the type is not understood here, only the checksum says something."""


@dataclass(frozen=True, slots=True)
class RowReading:
    """Rows are all dimensions but the last. `duplicates` are equal to an earlier row, byte by byte.

    Zero rows are not counted as duplicates. None where rows were not compared: a single row, fewer
    than 16 elements in each, or rows longer than a chunk.
    """

    count: int
    zero: int
    duplicates: int


@dataclass(frozen=True, slots=True)
class VectorReading:
    """A tensor of one dimension: counts of zero and negative elements, finite least and greatest.

    `mean` and `rms` (root of the mean square) are of the finite elements.
    """

    zero: int
    negative: int
    least: float
    greatest: float
    mean: float
    rms: float


@dataclass(frozen=True, slots=True)
class ChannelReading:
    """The input channel (index in the last dimension) with the largest finite magnitude.

    `median` is the median over channels of each one's largest magnitude.
    """

    channel: int
    largest: float
    median: float


@dataclass(frozen=True, slots=True)
class BlockReading:
    """Scales of packed blocks: how many, how many NaN or Inf, and blocks whose scales are zero.

    `zero_but_packed` are blocks with zero scales and packed values that differ within the block:
    numbers that were there before the scale was lost. No value's magnitude is above `bound`.
    """

    count: int
    not_finite: int
    zero: int
    zero_but_packed: int
    bound: float


@dataclass(frozen=True, slots=True)
class TensorReading:
    """One tensor. `sum64` is the checksum of its bytes as they lie in the file (`sum64.py`).

    `num_nan`, `num_inf` and `largest` (finite magnitude) are of the stored floats, `num_zero` of
    scales and vectors only; None where `reading` is not "floats". `first_bad` is the flat index of
    the first NaN or Inf. `all_zero` is None where that cannot be told from the bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    num_bytes: int
    sum64: int
    reading: Reading
    num_nan: int | None = None
    num_inf: int | None = None
    num_zero: int | None = None
    first_bad: int | None = None
    largest: float | None = None
    all_zero: bool | None = None
    rows: RowReading | None = None
    vector: VectorReading | None = None
    channels: ChannelReading | None = None
    blocks: BlockReading | None = None


@dataclass(frozen=True, slots=True)
class DeepScan:
    """All tensors that were read, in file order.

    `same_across_layers` are groups of tensors, alike but for the layer's number, that hold equal
    bytes (constants such as all ones left out). `seconds` is wall time, `jobs` the threads;
    `compiled` tells whether machine code looked at the chunks, or numpy.
    """

    tensors: tuple[TensorReading, ...]
    same_across_layers: tuple[tuple[str, ...], ...]
    num_bytes: int
    seconds: float
    jobs: int
    compiled: bool = False


def deep_document(scan: DeepScan) -> dict[str, object]:
    """The scan as JSON values: what was read, and each tensor's checksum."""
    return {
        "num_bytes": scan.num_bytes,
        "seconds": round(scan.seconds, 3),
        "jobs": scan.jobs,
        "compiled": scan.compiled,
        "checksum": "sum64",
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "num_bytes": tensor.num_bytes,
                "sum64": f"{tensor.sum64:016x}",
                "read_as": tensor.reading,
            }
            for tensor in scan.tensors
        ],
    }
