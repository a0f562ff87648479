"""Compiled loops against numpy: products of floats, norms, rotation, storage, and their threads."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as some

from ullage.engine.kernels.compiling import aligned, available
from ullage.engine.kv.codecs import STORAGE, encode
from ullage.engine.kv_formats import KV_FORMATS

if not available():
    pytest.skip("numba is not installed", allow_module_level=True)

from ullage.engine.kernels import elementwise, matmul
from ullage.engine.kernels.compiling import cache_dirs, compiled, note
from ullage.engine.kernels.entropy import highest
from ullage.engine.kernels.llvm import CACHE_LINE, asks_of_round
from ullage.engine.kernels.outer import COLUMNS, ROWS, multiply
from ullage.engine.kernels.storing import store
from ullage.engine.kernels.team import Team, enter, finish, leave, take, wait

FLOATS = st.floats(-1e4, 1e4, width=32)
NO_SCALES = np.zeros(0, np.float32)


def bfloat16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().view(torch.uint16).numpy()


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", [matmul.KIND_FLOAT32, matmul.KIND_BFLOAT16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_tile_of_float_products_is_numpys(rows: int, kind: int, with_bias: bool) -> None:
    """Outputs 3 … 9, an odd number, of a matrix 96 wide."""
    rng = np.random.default_rng(rows)
    weight = rng.standard_normal((12, 96)).astype(np.float32)
    x = rng.standard_normal((rows, 96)).astype(np.float32)
    bias = rng.standard_normal(12).astype(np.float32) if with_bias else NO_SCALES
    held = weight
    if kind == matmul.KIND_BFLOAT16:
        held = bfloat16(weight)
        weight = torch.from_numpy(weight).bfloat16().float().numpy()
    out = np.full((rows, 64), 7.0, np.float32)
    matmul.tile(
        kind, held.ctypes.data, NO_SCALES, bias, 96, 3, 10, x.ctypes.data, 0, rows, out, 0, 0
    )  # fmt: skip
    expected = x.astype(np.float64) @ weight[3:10].T.astype(np.float64)
    if with_bias:
        expected += bias[3:10]
    np.testing.assert_allclose(out[:, :7], expected, atol=1e-4)
    assert (out[:, 7:] == 7.0).all()


@pytest.mark.parametrize("kind", [matmul.KIND_FLOAT32, matmul.KIND_BFLOAT16])
@pytest.mark.parametrize("size", [32, 768, 800, 1536, 1568])
def test_rows_of_any_width_are_numpys(size: int, kind: int) -> None:
    """Wider ones are taken in parts, whose sums are added to what the part before left."""
    rng = np.random.default_rng(size)
    weight = rng.standard_normal((7, size)).astype(np.float32)
    x = rng.standard_normal((4, size)).astype(np.float32)
    held = weight
    if kind == matmul.KIND_BFLOAT16:
        held = bfloat16(weight)
        weight = torch.from_numpy(weight).bfloat16().float().numpy()
    out = np.full((4, 64), np.nan, np.float32)
    matmul.tile(
        kind, held.ctypes.data, NO_SCALES, NO_SCALES, size, 0, 7, x.ctypes.data, 0, 4, out, 0, 0
    )  # fmt: skip
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    np.testing.assert_allclose(out[:, :7], expected, atol=1e-3)


@pytest.mark.parametrize("kind", [matmul.KIND_FLOAT32, matmul.KIND_BFLOAT16, matmul.KIND_INT8])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 9, 16, 31, 64])
def test_all_passes_over_a_tile_together_fetch_the_next(rows: int, kind: int) -> None:
    """Where the last pass ends is a tile further on, and not much more than that."""
    size, outputs = 96, 7
    held = np.zeros((outputs, size * 4), np.int8)
    x = np.zeros((8, size), np.float32)
    scales = np.zeros((8, 2), np.float32)
    out = np.zeros((8, 64), np.float32)
    ahead, row, share = 0, 0, matmul.share_ahead(kind, rows)
    while row < rows:
        block = matmul.rows_at_once(rows - row)
        ahead = matmul.tile(
            kind, held.ctypes.data, np.ones(outputs, np.float32), NO_SCALES, size, 0, outputs,
            x.ctypes.data, scales.ctypes.data, block, out, ahead, share,
        )  # fmt: skip
        row += block
    wanted = outputs * matmul.weight_bytes(kind, size)
    assert 0.98 * wanted <= ahead <= 1.35 * wanted


@pytest.mark.parametrize("round_bytes", [16, 32, 64, 96, 128, 192, 512])
def test_a_round_leaves_out_no_line_of_what_it_fetches(round_bytes: int) -> None:
    asks, times, by = asks_of_round(round_bytes)
    assert asks * CACHE_LINE * times == round_bytes * by
    assert times <= by


def test_e_to_the_x_is_within_two_units_in_the_last_place() -> None:
    for x in np.linspace(-87, 88, 5001, dtype=np.float32):
        assert elementwise.exp(x) == pytest.approx(np.exp(np.float64(x)), rel=2.5e-7)
    assert elementwise.exp(np.float32(-1000)) < 2e-38
    assert np.isfinite(elementwise.exp(np.float32(1000)))


@settings(deadline=None)
@given(some.arrays(np.float32, st.integers(1, 70), elements=FLOATS), st.data())
def test_rms_norm_and_silu_are_numpys(x: np.ndarray, data: st.DataObject) -> None:
    weight = data.draw(some.arrays(np.float32, x.shape, elements=st.floats(-4, 4, width=32)))
    out = np.empty_like(x)
    elementwise.rms_norm(x, weight, np.float32(1e-5), out)
    wide = x.astype(np.float64)
    expected = wide * weight / np.sqrt(np.mean(wide**2) + 1e-5)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    elementwise.silu_times(x, weight, out)
    sigmoid = 1 / (1 + np.exp(-np.clip(wide, -80, 80)))
    np.testing.assert_allclose(out, wide * sigmoid * weight, rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_stays_so() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones(70, np.float32)
        x[3] = bad
        out, ones = np.empty_like(x), np.ones_like(x)
        elementwise.rms_norm(x, ones, np.float32(1e-5), out)
        assert not np.isfinite(out[3])
        whole, scales = np.empty(70, np.int16), np.empty(2, np.float32)
        elementwise.quantize(x, whole, scales)
        assert np.isnan(scales[0])
        assert scales[1] == np.float32(1) / np.float32(127)
    out = np.empty(1, np.float32)
    elementwise.silu_times(np.full(1, np.nan, np.float32), np.ones(1, np.float32), out)
    assert np.isnan(out[0])


def _stored(x_D: Any, numbers: Any, scales: Any) -> None:
    store(x_D, numbers, scales, 1, 2, 0)


put: Callable[..., None] = compiled(_stored)


@pytest.mark.parametrize("name", sorted(KV_FORMATS))
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_compiled_storage_is_bit_for_bit_that_of_torch(name: str, data: st.DataObject) -> None:
    """Whatever the row: zeros, denormals, one huge number, NaN and Inf."""
    numbers = st.one_of(FLOATS, st.floats(width=32), st.sampled_from([0.0, 1e-40, 3e38]))
    x = data.draw(some.arrays(np.float32, 16, elements=numbers))
    stored = KV_FORMATS[name]
    with np.errstate(all="ignore"):
        expected, scales = encode(torch.from_numpy(x), stored)
    width = expected.shape[-1]
    seen = np.uint16 if STORAGE[name] is torch.bfloat16 else expected.numpy().dtype
    held = np.zeros((2, 4, 1, width), seen)
    held_scales = np.zeros((2, 4, 1), np.uint16)
    put(x, held, held_scales)
    if STORAGE[name] is torch.bfloat16:
        found = torch.from_numpy(held[1, 2, 0]).view(torch.bfloat16)
        torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)
    else:
        np.testing.assert_array_equal(held[1, 2, 0], expected.numpy())
    if scales is not None:
        found = torch.from_numpy(held_scales[1, 2]).view(torch.bfloat16)[0]
        torch.testing.assert_close(found, scales, atol=0, rtol=0, equal_nan=True)
    held[1, 2] = 0
    assert not held.any(), "a neighbour was written to"


def _count(counters: Any, epoch: int, phases: int, pieces: int, done: Any) -> None:
    """Each piece of each phase adds what the phase before has left in its neighbour."""
    if not enter(counters, epoch):
        return
    for phase in range(phases):
        while True:
            piece = take(counters, phase)
            if piece >= pieces:
                break
            before = 1 if phase == 0 else done[phase - 1, (piece + 1) % pieces]
            done[phase, piece] += before
            finish(counters, phase)
        wait(counters, phase, pieces)
    leave(counters)


count = compiled(_count)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_every_piece_is_done_once_and_after_the_phase_before(num_threads: int) -> None:
    team = Team(num_threads)
    for _ in range(200):
        done = np.zeros((50, 7), np.int64)
        team.run(count, 50, 50, 7, done)
        assert (done == 1).all()


def test_threads_that_never_come_are_not_waited_for() -> None:
    team = Team(2)
    team._jobs.clear()
    done = np.zeros((5, 3), np.int64)
    team.run(count, 5, 5, 3, done)
    assert (done == 1).all()


def test_two_callers_at_once_both_get_their_work_done() -> None:
    team = Team(2)
    wrong: list[int] = []

    def call() -> None:
        for _ in range(50):
            done = np.zeros((20, 5), np.int64)
            team.run(count, 20, 20, 5, done)
            wrong.extend(done[done != 1].tolist())

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_an_idle_team_uses_no_processor() -> None:
    team = Team(2)
    done = np.zeros((5, 3), np.int64)
    team.run(count, 5, 5, 3, done)
    started = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - started < 0.1


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_aligned_arrays_begin_at_a_cache_line(size: int) -> None:
    array = aligned(size, np.int16)
    assert (array.size, array.dtype, array.ctypes.data % 64) == (size, np.int16, 0)


def test_machine_code_is_kept_by_the_state_of_all_sources(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    state = next(cache_dirs()).name
    assert next(cache_dirs()) == tmp_path / state
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = cache_dirs()
    assert first == tmp_path / "ullage" / "kernels" / state
    assert second.name.endswith(state)
    # A user without a home, as containers have them.
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", _homeless)
    assert list(cache_dirs()) == [second]


def _homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_first_start_says_that_it_compiles_and_where_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    first = note()
    assert first is not None
    assert str(tmp_path) in first
    assert compiled(lambda x: x + x)(2) == 4
    assert note() is None
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "no folder"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/proc/none")
    (tmp_path / "no folder").write_text("")
    assert "at every start" in (note() or "")


def test_machine_code_is_never_taken_from_a_folder_that_others_may_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    own, shared = cache_dirs()
    own.mkdir()
    own.chmod(0o777)
    assert str(shared) in (note() or "")


def test_a_folder_that_cannot_be_written_costs_time_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ullage.engine.kernels.compiling._writable", lambda: None)
    twice = compiled(lambda x: x + x)
    assert twice(2) == 4


def test_two_processes_never_write_machine_code_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """numba numbers files by its index; two that number at once give one the other's code."""
    from numba.core.caching import IndexDataCacheFile

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    saved: list[str] = []
    save = IndexDataCacheFile.save

    def is_free() -> bool:
        """Whether another process could compile now."""
        with (next(cache_dirs()) / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def watched(self: Any, *entry: Any) -> None:
        assert not is_free()
        save(self, *entry)
        saved.append(self._index_path)

    monkeypatch.setattr(IndexDataCacheFile, "save", watched)

    def inner(x: Any) -> Any:
        return x + x

    inner = compiled(inner)

    def outer(x: Any) -> Any:
        return inner(x) + x

    outer = compiled(outer)
    assert (outer(1), outer(0.5)) == (3, 1.5)
    assert len(saved) == 4
    assert is_free()


def test_a_forked_process_works_on_without_the_threads_that_it_lost() -> None:
    """Whatever those were at when it was forked off: counted in, or at work for another caller."""

    def work(counters: Any, epoch: int, done: list[int]) -> None:
        if not enter(counters, epoch):
            return
        for phase in range(2):
            while take(counters, phase) < 3:
                done.append(phase)
                finish(counters, phase)
            wait(counters, phase, 3)
        leave(counters)

    team = Team(3)
    team.run(work, 2, [])
    enter(team._counters, team._epoch)
    team._busy.acquire()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends it where it would hang
        done: list[int] = []
        for _ in range(5):
            team.run(work, 2, done)
        kept = sum(jobs.qsize() for jobs in team._jobs)
        is_free = team._busy.acquire(blocking=False)
        os._exit(0 if done == [0, 0, 0, 1, 1, 1] * 5 and kept == 0 and is_free else 1)
    leave(team._counters)
    team._busy.release()
    assert os.waitpid(child, 0)[1] == 0


# --- sums of outer products ----------------------------------------------------------------------


@pytest.mark.parametrize("adds", [0, 1])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 7])
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (7, COLUMNS), (64, COLUMNS + 1), (129, 200)])
def test_a_small_product_is_numpys(rows: int, depth: int, width: int, adds: int) -> None:
    """Rows may be wider than what is multiplied; what lies behind and below is not touched."""
    draw = np.random.default_rng(rows + depth)
    room = -(-width // COLUMNS) * COLUMNS
    a = draw.standard_normal((rows, depth + 3)).astype(np.float32)
    b = draw.standard_normal((depth, room + 5)).astype(np.float32)
    out = draw.standard_normal((rows + 1, room + 2)).astype(np.float32)
    before = out.copy()
    multiply(
        a.ctypes.data, depth + 3, b.ctypes.data, room + 5, rows, depth, width, out.ctypes.data,
        room + 2, adds,
    )  # fmt: skip
    wanted = a[:, :depth].astype(np.float64) @ b[:, :width] + adds * before[:rows, :width]
    np.testing.assert_allclose(out[:rows, :width], wanted, atol=1e-4)
    assert (out[rows] == before[rows]).all() and (out[:, room:] == before[:, room:]).all()


@pytest.mark.parametrize("place", [0, 5, 31, 32, 99])
def test_the_highest_of_many_is_found_and_nan_is_never_passed_over(place: int) -> None:
    values = np.linspace(-9, -5, 100).astype(np.float32)
    values[place] = 7
    assert highest(values) == 7
    values[place] = np.nan
    assert np.isnan(highest(values))
    assert highest(values[:0]) == -np.inf
