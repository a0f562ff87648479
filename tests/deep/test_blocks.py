"""Packed GGUF blocks: scales lie where gguf reads them, and faults in them are found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ullage.anatomy.checkpoint import CheckpointIndex, TensorEntry
from ullage.anatomy.gguf.types import GGML_BLOCKS, GGML_TYPES
from ullage.deep.formats import BLOCKS, FLOATS
from ullage.deep.readings import TensorReading
from ullage.deep.scan import scan_checkpoint

gguf = pytest.importorskip("gguf")
NUMBERS = {name: number for number, (name, _, _) in GGML_TYPES.items()}
BY_GGUF = sorted(name for name in BLOCKS if name != "Q8_K")  # which gguf does not decode


def read(tmp_path: Path, dtype: str, blocks: np.ndarray, rows: int = 2) -> TensorReading:
    """The reading of raw `blocks` [number, bytes] as a tensor of `rows` rows."""
    file = tmp_path / "blocks"
    file.write_bytes(blocks.tobytes())
    elements = len(blocks) * GGML_BLOCKS[dtype][0] // rows
    tensor = TensorEntry("t.weight", dtype, (rows, elements), str(file), 0, blocks.nbytes)
    return scan_checkpoint(CheckpointIndex("gguf", (tensor,), (str(file),))).tensors[0]


def some_blocks(dtype: str, number: int = 8) -> np.ndarray:
    """Random blocks whose scales are 1.0 or, as powers of two, 2^0."""
    blocks = np.random.default_rng(11).integers(0, 256, (number, GGML_BLOCKS[dtype][1]), np.uint8)
    kind = BLOCKS[dtype].scale_dtype
    one = {"F16": b"\x00\x3c", "F32": b"\x00\x00\x80\x3f", "F8_E8M0": b"\x7f"}[kind]
    for offset in BLOCKS[dtype].scales:
        blocks[:, offset : offset + len(one)] = np.frombuffer(one, np.uint8)
    return blocks


def dequantised(dtype: str, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(NUMBERS[dtype]))


@pytest.mark.parametrize("dtype", sorted(BLOCKS))
def test_sound_blocks_are_clear(tmp_path: Path, dtype: str) -> None:
    found = read(tmp_path, dtype, some_blocks(dtype))
    assert found.blocks.not_finite == found.blocks.zero == 0
    assert found.blocks.count == 8 * len(BLOCKS[dtype].scales)
    assert found.rows.zero == found.rows.duplicates == 0


@pytest.mark.parametrize("dtype", BY_GGUF)
def test_no_value_is_beyond_the_bound(tmp_path: Path, dtype: str) -> None:
    blocks = some_blocks(dtype, 64)
    blocks[:8, BLOCKS[dtype].packed[0] : BLOCKS[dtype].packed[1]] = 0xFF
    found = read(tmp_path, dtype, blocks)
    assert np.abs(dequantised(dtype, blocks)).max() <= found.blocks.bound


@pytest.mark.parametrize("dtype", BY_GGUF)
def test_zero_scales_make_the_block_zero_in_gguf_too(tmp_path: Path, dtype: str) -> None:
    if not FLOATS[BLOCKS[dtype].scale_dtype].signed:
        pytest.skip("a power of two is never zero")
    blocks = some_blocks(dtype)
    for offset in BLOCKS[dtype].scales:
        blocks[3, offset : offset + 2] = 0
    assert not dequantised(dtype, blocks)[3].any()
    found = read(tmp_path, dtype, blocks)
    assert found.blocks.zero == found.blocks.zero_but_packed == 1
    assert found.all_zero is False and found.rows.zero == 0


@pytest.mark.parametrize("dtype", BY_GGUF)
@pytest.mark.parametrize("pattern", [0x7E00, 0xFC00, 0x7C00])
def test_a_scale_that_is_not_finite_spoils_the_block_in_gguf_too(
    tmp_path: Path, dtype: str, pattern: int
) -> None:
    if BLOCKS[dtype].scale_dtype != "F16":
        pytest.skip("its scales are no float16")
    for offset in BLOCKS[dtype].scales:
        blocks = some_blocks(dtype)
        blocks[5, offset : offset + 2] = np.frombuffer(np.uint16(pattern).tobytes(), np.uint8)
        assert not np.isfinite(dequantised(dtype, blocks)[5]).all()
        assert read(tmp_path, dtype, blocks).blocks.not_finite == 1


def test_what_a_quantiser_makes_of_zeros_has_not_lost_anything(tmp_path: Path) -> None:
    for dtype in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        values = np.random.default_rng(2).standard_normal((4, 64)).astype(np.float32)
        values[1] = 0
        blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType(NUMBERS[dtype]))
        found = read(tmp_path, dtype, blocks.reshape(-1, GGML_BLOCKS[dtype][1]), rows=4)
        assert found.blocks.zero == 2 and found.blocks.zero_but_packed == 0, dtype
        assert found.rows.zero == 1


def test_a_type_that_is_not_understood_is_only_summed(tmp_path: Path) -> None:
    blocks = np.random.default_rng(2).integers(0, 256, (8, GGML_BLOCKS["IQ1_M"][1]), np.uint8)
    found = read(tmp_path, "IQ1_M", blocks)
    assert found.reading == "bytes" and found.blocks is None and found.all_zero is None
