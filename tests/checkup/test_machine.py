"""Measuring this machine: plausible, ordered, quick."""

from __future__ import annotations

import time

import pytest
import torch

from ullage.checkup import machine as machine_module
from ullage.checkup.machine import measure_machine, total_bytes, usable_cores


def test_limits_are_measured_within_the_budget_and_threads_are_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_module, "BUDGET_S", 0.4)
    before = torch.get_num_threads()
    begin = time.perf_counter()
    machine = measure_machine()
    # A busy machine is slow; what must not happen is a measurement without an end.
    assert time.perf_counter() - begin < 30
    assert torch.get_num_threads() == before
    assert machine.num_cores == usable_cores() >= 1
    assert machine.memory_bytes == total_bytes()
    assert machine.cpu
    for rate in (
        machine.read_one_thread,
        machine.read_all_threads,
        machine.gemm_one_thread,
        machine.gemm_all_threads,
    ):
        assert 0 < rate.low <= rate.median <= rate.high
        assert rate.num_runs >= 3
    # From the slowest board to the fastest server.
    assert 1e8 < machine.read_all_threads.median < 1e13
    assert 1e8 < machine.gemm_all_threads.median < 1e15
    assert machine.gemm_all_threads.num_threads == machine.num_cores
