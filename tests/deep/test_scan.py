"""What the scan says of a tensor is what plain loops and torch say of the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from math import isinf, isnan
from pathlib import Path

import numpy as np
import pytest
from deep_models import write_tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ullage.deep
from ullage.anatomy.checkpoint import CheckpointIndex
from ullage.anatomy.files.index import read_checkpoint
from ullage.deep import scan as scan_module
from ullage.deep import windows as windows_module
from ullage.deep.formats import FLOATS, decode, decode_one
from ullage.deep.names import is_scale
from ullage.deep.readings import DeepScan, TensorReading
from ullage.deep.scan import scan_checkpoint
from ullage.deep.sums import TensorSum
from ullage.errors import MalformedCheckpoint

torch = pytest.importorskip("torch")

TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
WITHOUT_FIXTURES = (HealthCheck.function_scoped_fixture,)


def scanned(file: Path, jobs: int = 2) -> DeepScan:
    index = read_checkpoint(file)
    assert index is not None
    return scan_checkpoint(index, jobs=jobs)


def one(tmp_path: Path, dtype: str, shape: tuple[int, ...], raw: bytes) -> TensorReading:
    # A first tensor of odd size puts the second one at an odd byte.
    tensors = {"before": ("U8", (3,), b"abc"), "t": (dtype, shape, raw)}
    return scanned(write_tensors(tmp_path / "m.safetensors", tensors)).tensors[1]


def values_of(dtype: str, raw: bytes) -> list[float]:
    """The elements as torch decodes them."""
    return torch.frombuffer(bytearray(raw), dtype=TORCH[dtype]).to(torch.float64).tolist()


def sum64_by_hand(raw: bytes, row_bytes: int) -> int:
    """The checksum as `sum64.py` defines it, with Python's integers."""
    wrap = 2**64 - 1

    def factor(number: int) -> int:
        mixed = (number + 1) * 0x9E3779B97F4A7C15 & wrap
        mixed ^= mixed >> 32
        mixed = mixed * 0xBF58476D1CE4E5B9 & wrap
        return (mixed ^ mixed >> 29) | 1

    total = 0
    for number, start in enumerate(range(0, len(raw), row_bytes)):
        row = raw[start : start + row_bytes]
        words = (row[n : n + 8] for n in range(0, len(row), 8))
        of_row = sum(int.from_bytes(w, "little") * factor(n) for n, w in enumerate(words)) & wrap
        total += (of_row ^ of_row >> 32) * factor(number)
    return total & wrap


def check_floats(found: TensorReading, raw: bytes, columns: int) -> None:
    values = values_of(found.dtype, raw)
    finite = [v for v in values if not isnan(v) and not isinf(v)]
    assert found.num_nan == sum(map(isnan, values))
    assert found.num_inf == sum(map(isinf, values))
    bad = [n for n, v in enumerate(values) if isnan(v) or isinf(v)]
    assert found.first_bad == (bad[0] if bad else None)
    assert found.largest == max(map(abs, finite), default=0.0)
    if found.dtype != "F8_E8M0":
        assert found.all_zero == all(v == 0 for v in values)
    size = len(raw) // len(values)
    if found.rows is not None:
        rows = [raw[n : n + columns * size] for n in range(0, len(raw), columns * size)]
        zero = [
            all(v == 0 for v in values[n * columns : (n + 1) * columns]) for n in range(len(rows))
        ]
        if found.dtype == "F8_E8M0":
            zero = [False] * len(rows)
        assert found.rows.zero == sum(zero)
        others = [row for row, is_zero in zip(rows, zero, strict=True) if not is_zero]
        assert found.rows.duplicates == len(others) - len(set(others))
        assert found.sum64 == sum64_by_hand(raw, columns * size)
    if found.channels is not None:
        sizes = [
            max(
                (abs(v) for v in values[c::columns] if not isnan(v) and not isinf(v)),
                default=0.0,
            )
            for c in range(columns)
        ]
        assert found.channels.largest == max(sizes) == sizes[found.channels.channel]
        assert found.channels.median == pytest.approx(float(np.median(sizes)))


@settings(max_examples=150, deadline=None, suppress_health_check=WITHOUT_FIXTURES)
@given(data=st.data(), dtype=st.sampled_from(sorted(FLOATS)))
def test_any_floats_are_read_as_torch_reads_them(tmp_path: Path, data, dtype: str) -> None:
    rows = data.draw(st.integers(1, 6))
    columns = data.draw(st.sampled_from([1, 3, 16, 17, 33]))
    size = np.dtype(FLOATS[dtype].unsigned).itemsize
    # Whole rows are drawn out of few, so that some repeat; any bit pattern may come.
    pool = data.draw(
        st.lists(
            st.one_of(
                st.binary(min_size=columns * size, max_size=columns * size),
                st.just(bytes(columns * size)),
                st.just(b"\x00" * (columns * size - 1) + b"\x80"),
            ),
            min_size=1,
            max_size=3,
        )
    )
    raw = b"".join(data.draw(st.sampled_from(pool)) for _ in range(rows))
    check_floats(one(tmp_path, dtype, (rows, columns), raw), raw, columns)


@pytest.mark.parametrize("dtype", [d for d in FLOATS if FLOATS[d].unsigned in ("u1", "<u2")])
def test_every_pattern_of_a_short_format_is_read_as_torch_reads_it(tmp_path: Path, dtype) -> None:
    unsigned = np.dtype(FLOATS[dtype].unsigned)
    for number in range(0, 256**unsigned.itemsize, max(1, 256**unsigned.itemsize // 512)):
        raw = np.array([number], unsigned).tobytes()
        patterns = np.frombuffer(raw, unsigned)
        value = values_of(dtype, raw)[0]
        if isnan(value) or isinf(value):
            continue
        assert decode(dtype, patterns)[0] == decode_one(dtype, number) == value
    raw = np.arange(256**unsigned.itemsize, dtype=unsigned).tobytes()
    check_floats(one(tmp_path, dtype, (len(raw) // unsigned.itemsize // 16, 16), raw), raw, 16)


@pytest.mark.parametrize("chunk_bytes", [64, 4096])
def test_chunks_change_nothing(tmp_path: Path, monkeypatch, chunk_bytes: int) -> None:
    rng = np.random.default_rng(3)
    matrix = rng.integers(0, 0x7F00, (300, 20), np.uint16)
    matrix[[7, 250]] = matrix[3]
    matrix[260, 4] = 0x7F80
    vector = rng.standard_normal(5000).astype(np.float32)
    file = write_tensors(
        tmp_path / "m.safetensors",
        {
            "odd": ("U8", (5,), b"\1\2\3\4\5"),
            "matrix": ("BF16", (300, 20), matrix.tobytes()),
            "none": ("F32", (0, 4), b""),
            "vector.weight": ("F32", (5000,), vector.tobytes()),
            "scalar": ("F32", (), b"\0\0\0\0"),
        },
    )
    usual = scanned(file, jobs=1)
    monkeypatch.setattr(windows_module, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(windows_module, "WINDOW_BYTES", chunk_bytes * 3)
    cut = scanned(file, jobs=3)
    assert cut.tensors == usual.tensors
    assert usual.tensors[1].rows.duplicates == 2 and usual.tensors[1].first_bad == 260 * 20 + 4
    found = usual.tensors[3].vector
    assert (found.negative, found.zero) == (int((vector < 0).sum()), 0)
    assert (found.least, found.greatest) == (vector.min(), vector.max())
    assert found.mean == pytest.approx(vector.mean(dtype=np.float64))
    assert found.rms == pytest.approx(np.sqrt(np.square(vector, dtype=np.float64).mean()))
    assert usual.tensors[4].all_zero is True
    assert usual.tensors[3].sum64 == sum64_by_hand(vector.tobytes(), 4096)


def test_a_row_longer_than_a_chunk_is_cut(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(windows_module, "MAX_ROW_BYTES", 8192)
    monkeypatch.setattr(windows_module, "CHUNK_BYTES", 4096)
    values = np.random.default_rng(5).standard_normal((2, 10_000)).astype(np.float32)
    values[1, 9_000] = np.nan
    file = write_tensors(tmp_path / "m.safetensors", {"t": ("F32", (2, 10_000), values.tobytes())})
    found = scanned(file).tensors[0]
    assert found.rows is None and found.first_bad == 19_000 and found.num_nan == 1
    assert found.largest == np.nanmax(np.abs(values))
    assert found.sum64 == sum64_by_hand(values.tobytes(), 4096)


@settings(max_examples=40, deadline=None, suppress_health_check=WITHOUT_FIXTURES)
@given(data=st.data())
def test_equal_layers_are_found_and_constants_are_not(tmp_path: Path, data) -> None:
    pool = [bytes(range(64)), bytes(range(1, 65)), b"\x80\x3f" * 32, bytes(64)]
    layers = data.draw(st.lists(st.sampled_from(pool), min_size=2, max_size=6))
    tensors = {f"m.layers.{n}.w": ("BF16", (2, 16), raw) for n, raw in enumerate(layers)}
    found = scanned(write_tensors(tmp_path / "m.safetensors", tensors)).same_across_layers
    expected = []
    for raw in pool[:2]:
        names = tuple(f"m.layers.{n}.w" for n, other in enumerate(layers) if other == raw)
        expected += [names] if len(names) > 1 else []
    assert sorted(found) == sorted(expected)


@settings(max_examples=60, deadline=None, suppress_health_check=WITHOUT_FIXTURES)
@given(data=st.data())
def test_machine_code_and_numpy_say_the_same(tmp_path: Path, data) -> None:
    pytest.importorskip("numba")
    tensors = {}
    for number in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(
            st.sampled_from(
                ["F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "I32"]
            )
        )
        size = {"F64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2}.get(dtype, 1)
        rows, columns = (
            data.draw(st.integers(1, 9)),
            data.draw(st.sampled_from([1, 15, 16, 24, 64])),
        )
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        array = rng.integers(0, 256, (rows, columns * size), np.uint8)
        if data.draw(st.booleans()):  # few bits below the exponent: nothing but finite numbers
            array &= 0x33
        if data.draw(st.booleans()):
            array[rng.integers(rows)] = 0
        if data.draw(st.booleans()):
            array[rng.integers(rows)] = array[0]
        name = data.draw(st.sampled_from(["w.weight", "w.weight_scale"]))
        tensors[f"t{number}.{name}"] = (dtype, (rows, columns), array.tobytes())
    index = read_checkpoint(write_tensors(tmp_path / "m.safetensors", tensors))
    fast = scan_checkpoint(index, jobs=2, compiled=True)
    assert fast.compiled
    assert fast.tensors == scan_checkpoint(index, jobs=2, compiled=False).tensors


def test_without_numba_numpy_looks(tmp_path: Path, monkeypatch) -> None:
    raw = np.random.default_rng(3).standard_normal((64, 64)).astype(np.float32).tobytes()
    index = read_checkpoint(
        write_tensors(tmp_path / "m.safetensors", {"t": ("F32", (64, 64), raw)})
    )
    usual = scan_checkpoint(index, compiled=False)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "ullage.deep.kernels", raising=False)
        patch.delattr(ullage.deep, "kernels", raising=False)
        patch.setitem(sys.modules, "numba", None)
        found = scan_checkpoint(index, compiled=True)
    assert not found.compiled and found.tensors == usual.tensors


@pytest.mark.parametrize(
    ("before", "environment"),
    [
        ("import numba.core.caching as c; c.CacheImpl._locator_classes = [];", {}),
        ("", {"NUMBA_DISABLE_JIT": "1"}),
    ],
)
def test_where_numba_can_keep_nothing_numpy_looks(tmp_path: Path, before, environment) -> None:
    pytest.importorskip("numba")
    file = write_tensors(tmp_path / "m.safetensors", {"t": ("F32", (64, 64), bytes(64 * 64 * 4))})
    script = before + (
        "import sys; from pathlib import Path;"
        "from ullage.anatomy.files.index import read_checkpoint;"
        "from ullage.deep.scan import scan_checkpoint;"
        "print(scan_checkpoint(read_checkpoint(Path(sys.argv[1])), compiled=True).compiled)"
    )
    command = [sys.executable, "-c", script, str(file)]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(("num_bytes", "expected"), [(1 << 30, False), (8 << 30, True)])
def test_size_decides_who_looks(monkeypatch, num_bytes: int, expected: bool) -> None:
    asked = []
    monkeypatch.setattr(scan_module, "_machine_code", lambda index: asked.append(index))
    monkeypatch.setattr(CheckpointIndex, "num_bytes", property(lambda self: num_bytes))
    scan_checkpoint(CheckpointIndex("safetensors", (), ()))
    assert bool(asked) is expected


def test_shards_are_read_by_all_threads(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for number in range(5):
        raw = rng.standard_normal((50, 40)).astype(np.float32).tobytes()
        write_tensors(
            tmp_path / f"model-{number}.safetensors", {f"t.{number}.w": ("F32", (50, 40), raw)}
        )
    alone, together = scanned(tmp_path, jobs=1), scanned(tmp_path, jobs=4)
    assert alone.tensors == together.tensors and len(alone.tensors) == 5
    assert together.jobs == 4
    assert not [t for t in threading.enumerate() if t.name.startswith("ullage-deep")]


def test_a_file_that_shrinks_is_one_sentence(tmp_path: Path) -> None:
    file = write_tensors(tmp_path / "m.safetensors", {"t": ("F32", (64, 64), bytes(64 * 64 * 4))})
    index = read_checkpoint(file)
    with file.open("r+b") as stream:
        stream.truncate(200)
    with pytest.raises(MalformedCheckpoint, match="shrank"):
        scan_checkpoint(index)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_fault_in_one_shard_ends_all_threads(tmp_path: Path, monkeypatch, jobs, compiled) -> None:
    monkeypatch.setattr(windows_module, "WINDOW_BYTES", 4096)
    monkeypatch.setattr(windows_module, "CHUNK_BYTES", 4096)
    raw = bytes(range(256)) * 1024
    for number in range(6):
        name = f"model-{number}.safetensors"
        write_tensors(tmp_path / name, {f"t.{number}.w": ("F32", (256, 256), raw)})
    index = read_checkpoint(tmp_path)
    with (tmp_path / "model-2.safetensors").open("r+b") as stream:
        stream.truncate(9000)
    with pytest.raises(MalformedCheckpoint, match="shrank"):
        scan_checkpoint(index, jobs=jobs, compiled=compiled)
    monkeypatch.setattr(TensorSum, "add", lambda *_: 1 / 0)  # whoever looks may fail as well
    with pytest.raises((ZeroDivisionError, MalformedCheckpoint)):
        scan_checkpoint(index, jobs=jobs, compiled=compiled)
    assert not [t for t in threading.enumerate() if t.name.startswith("ullage-deep")]


@pytest.mark.timeout(20)
def test_an_interrupt_ends_all_threads(tmp_path: Path, monkeypatch) -> None:
    for number in range(40):
        raw = {f"t.{number}.w": ("U8", (64,), bytes(64))}
        write_tensors(tmp_path / f"model-{number}.safetensors", raw)
    index = read_checkpoint(tmp_path)
    fill = windows_module._fill
    monkeypatch.setattr(windows_module, "_fill", lambda *a: (time.sleep(0.02), fill(*a)))

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan_checkpoint(index, jobs=2, progress=interrupt)
    assert not [t for t in threading.enumerate() if t.name.startswith("ullage-deep")]


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    file = write_tensors(tmp_path / "m.safetensors", {"t": ("U8", (1 << 16,), bytes(1 << 16))})
    seen: list[tuple[int, int]] = []
    index = read_checkpoint(file)
    scan_checkpoint(index, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and all(total == 1 << 16 for _, total in seen)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight_scale", True),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", True),
        ("x.weight_scale_2", True),
        ("x.scales", True),
        ("x.input_scale", True),
        ("model.layers.0.mlp.up_proj.weight", False),
        ("x.upscale", False),
        ("x.scale.weight", False),
    ],
)
def test_scales_are_told_by_name(name: str, expected: bool) -> None:
    assert is_scale(name) is expected
