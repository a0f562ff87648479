"""Healthy traffic fires nothing: real traces at several speeds, in any order of their minutes."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.watch.rules.scenarios import Replica, Seen, fleet, one, steady, watch
from tests.watch.rules.simulator import Engine, Machine, Request
from ullage.findings.finding import Finding
from ullage.traffic.trace import recorded_rows

TRACES = Path(__file__).parents[4] / "shared" / "traces"
NO_TRACES = "the public traces are not beside the repository"
Row = tuple[float, int, int]


def azure(name: str) -> Iterator[Row]:
    with (TRACES / name).open() as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    for time_s, row in zip(times, rows, strict=True):
        yield time_s - times[0], int(row["ContextTokens"]), int(row["GeneratedTokens"])


def mooncake() -> Iterator[Row]:
    for line in (TRACES / "mooncake-conversation.jsonl").read_text().splitlines():
        row = json.loads(line)
        yield row["timestamp"] / 1000, row["input_length"], row["output_length"]


def servegen() -> Iterator[Row]:
    with (TRACES / "servegen-mid-2days.csv").open() as file:
        for row in csv.DictReader(file):
            yield float(row["arrived_at_s"]), int(row["input_tokens"]), int(row["output_tokens"])


@cache
def rows_of(trace: str) -> tuple[Row, ...]:
    if trace == "shipped":
        return tuple((r.arrival_s, r.prompt_tokens, r.output_tokens) for r in recorded_rows())
    if trace == "mooncake":
        return tuple(mooncake())[::3]  # a third of it is what one such replica can take
    if trace == "servegen":
        return tuple(servegen())
    return tuple(azure(f"azure-2023-{trace}.csv"))


def in_blocks(rows: tuple[Row, ...], seconds: float) -> list[list[Row]]:
    """The rows in blocks of so many seconds, their times counted from the block's begin."""
    blocks: dict[int, list[Row]] = {}
    for time_s, prompt, answer in rows:
        number = int(time_s // seconds)
        blocks.setdefault(number, []).append((time_s - number * seconds, prompt, answer))
    return [blocks.get(number, []) for number in range(max(blocks) + 1)]


def shuffled(rows: tuple[Row, ...], seconds: float, seed: int, until_s: float) -> Iterator[Request]:
    """Blocks of the trace drawn at random: bursts stay bursts, and their order means nothing."""
    rng = random.Random(seed)  # noqa: S311
    blocks = in_blocks(rows, seconds)
    for number in range(int(until_s // seconds)):
        for time_s, prompt, answer in rng.choice(blocks):
            yield Request(number * seconds + time_s, prompt, answer, ends=rng.choice(ENDINGS))


# As mixed traffic ends: mostly by itself, one in ten at its limit, the odd one given up.
ENDINGS = ("stop",) * 17 + ("length",) * 2 + ("abort",)
LARGE = Machine(pool_tokens=1_500_000)


def fired(seen: Seen) -> list[tuple[float, Finding]]:
    """Every finding of every round that fired, an incident or not."""
    return [(t, j.finding) for t, found in seen.judged for j in found if j.finding.state == "fired"]


def told(seen: Seen) -> list[tuple[float, str, str]]:
    return [(time_s, finding.id, finding.cause) for time_s, finding in fired(seen)]


def replica(requests: Iterator[Request], machine: Machine = LARGE, **engine: object) -> Replica:
    return Replica(Engine(machine=machine, hit_ratio=0.3, **engine), (requests,))


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10**6), seconds=st.sampled_from((5.0, 10.0)))
def test_the_trace_that_ships_in_any_order_fires_nothing(seed: int, seconds: float):
    requests = shuffled(rows_of("shipped"), seconds, seed, 1500.0)
    assert told(watch([replica(requests)], 1500.0, 15.0)) == []


@pytest.mark.skipif(not TRACES.is_dir(), reason=NO_TRACES)
@pytest.mark.parametrize("trace", ["code", pytest.param("mooncake", marks=pytest.mark.slow)])
def test_an_hour_of_a_real_trace_fires_nothing(trace: str):
    requests = (Request(*row) for row in rows_of(trace) if row[0] < 3600.0)
    seen = watch([replica(requests)], 3600.0, 15.0)
    assert told(seen) == []
    evaluated = {
        j.finding.id for _, found in seen.judged for j in found if j.finding.state == "clear"
    }
    assert len(evaluated) >= 19, sorted(evaluated)  # it is not silent for want of evidence


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason=NO_TRACES)
@pytest.mark.parametrize(("seconds", "seed"), [(30.0, 1), (30.0, 2), (120.0, 3)])
@pytest.mark.parametrize("trace", ["code", "conv", "mooncake", "servegen"])
def test_hours_of_real_traces_in_any_order_fire_nothing(trace: str, seconds: float, seed: int):
    hours = 1 if trace == "conv" else 3
    requests = shuffled(rows_of(trace), seconds, seed, hours * 3600.0)
    assert told(watch([replica(requests)], hours * 3600.0, 5.0)) == []


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason=NO_TRACES)
@pytest.mark.parametrize("trace", ["code", "conv", "mooncake", "servegen"])
def test_real_traces_as_recorded_fire_nothing(trace: str):
    rows = rows_of(trace)
    end_s = min(rows[-1][0], 12 * 3600.0)
    requests = (Request(*row) for row in rows if row[0] < end_s)
    assert told(watch([replica(requests)], end_s, 5.0)) == []


def test_a_slow_machine_with_rare_long_prompts_fires_nothing():
    """Idle for minutes, then a prompt of a minute: no engine is stuck. As vLLM on two cores."""
    machine = Machine(step_s=0.1, per_prompt_token_s=0.004, pool_tokens=200_000)
    requests = steady(3, per_s=0.008, until_s=10_800.0, prompt=4000, answer=60)
    assert told(watch(one(requests, machine=machine), 10_800.0, 10.0)) == []


def test_a_pool_that_is_half_held_and_breathes_is_not_called_filling():
    machine = Machine(step_s=0.03, pool_tokens=45_000, max_model_len=32_768)
    requests = steady(6, per_s=1.0, until_s=3600.0, answer=500)
    seen = watch(one(requests, machine=machine), 3600.0, 10.0)
    held = [j.finding.evidence[0].value for _, found in seen.judged for j in found
            if j.finding.id == "W001" and j.finding.evidence]  # fmt: skip
    assert 0.4 < sum(held) / len(held) < 0.7
    assert [text for _, _, text in told(seen) if "it is full in" in text] == []


def test_an_idle_replica_fires_nothing():
    assert told(watch(one(iter(())), 3600.0, 10.0)) == []


def test_a_fleet_that_shares_its_load_by_chance_fires_nothing():
    replicas = [
        replace(r, traffic=(steady(50 + n, 2.0, 900.0),)) for n, r in enumerate(fleet(2, 2, 2))
    ]
    for r in replicas:
        r.engine.machine = LARGE
    assert told(watch(replicas, 900.0, 10.0)) == []


def test_a_load_test_whose_answers_all_end_by_length_fires_nothing():
    requests = steady(4, per_s=2.0, until_s=2400.0, ends="length", max_tokens=256)
    assert told(watch(one(requests), 2400.0, 10.0)) == []


def test_a_burst_that_drains_is_no_incident():
    """Sixty requests at once on sixteen seats: they wait for some seconds, and that is all."""
    burst = [Request(1000.0 + 0.01 * n, 500, 100) for n in range(60)]
    machine = Machine(max_num_seqs=16)
    seen = watch(one(steady(5, until_s=1800.0), iter(burst), machine=machine), 1800.0, 5.0)
    assert seen.incidents == ()
