"""Measuring this machine: plausible, ordered, quick."""

from __future__ import annotations

import time

import pytest
import torch

from ullage.checkup import machine as machine_module
from ullage.checkup.gather import this_machine
from ullage.checkup.machine import Machine, Rate, measure_machine, total_bytes, usable_cores
from ullage.checkup.subject_parts import machine_part


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


def test_a_limit_is_the_best_run_over_all_thread_counts_and_the_median_stands_beside() -> None:
    """All threads of a busy machine may read slower than one: 10.7 against 15.2 GB/s was seen."""
    machine = Machine(
        cpu="any",
        num_cores=2,
        memory_bytes=1 << 34,
        read_one_thread=Rate(median=14e9, low=9e9, high=15.2e9, num_runs=9, num_threads=1),
        read_all_threads=Rate(median=10.2e9, low=5e9, high=10.7e9, num_runs=9, num_threads=2),
        gemm_one_thread=Rate(median=40e9, low=20e9, high=50e9, num_runs=9, num_threads=1),
        gemm_all_threads=Rate(median=45e9, low=20e9, high=90e9, num_runs=9, num_threads=2),
        wall_s=1.0,
    )
    hardware = this_machine(machine)
    assert hardware is not None
    assert hardware.bandwidth_bytes_per_s == 15.2e9
    assert hardware.flops_per_s("float32") == 90e9
    assert "best run" in hardware.source("bandwidth")
    assert (machine.read.median, machine.gemm.median) == (14e9, 45e9)
    rows = {row["name"]: row["figure"] for row in machine_part(machine)["figures"]}
    assert rows["memory read, 1 thread"]["value"] == 15.2e9
    assert "median 14.0 GB/s" in rows["memory read, 1 thread"]["note"]
