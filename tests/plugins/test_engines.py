"""Answers of several engine cores made one: sums, agreement, and None where one cannot tell."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ullage_vllm import engines

from tests.plugins.vllm_core import Client, Request, core_of
from ullage.engine import reports


def test_two_engines_are_added() -> None:
    cores = [core_of(65), core_of(33)]
    for core, tokens in zip(cores, (40, 8), strict=True):
        core.scheduler.add(request := Request("r", 0.0))
        core.scheduler.compute(request, tokens)
    found = engines.together([core.ullage_report() for core in cores])
    assert (found["num_blocks"], found["used_blocks"], found["free_blocks"]) == (96, 4, 92)
    assert (found["total_bytes"], found["used_bytes"]) == (96 * 4096, 4 * 4096)
    assert found["page_utilization_ratio"] == 48 / 64
    assert [holder["engine"] for holder in found["holders"]] == [0, 1]
    assert found["block_size"] == 16


def test_what_one_cannot_tell_nobody_tells() -> None:
    cores = [core_of(65), core_of(65)]
    cores[1].scheduler.kv_cache_config.kv_cache_tensors = []
    found = engines.together([core.ullage_report() for core in cores])
    for name in ("bytes_per_block", "total_bytes", "used_bytes", "growth_bytes_per_s"):
        assert found[name] is None
    assert (found["num_blocks"], found["seconds_to_full"]) == (128, None)


@given(
    st.lists(st.lists(st.floats(0, 100), max_size=8), min_size=1, max_size=4),
    st.floats(0, 100, exclude_min=True),
)
def test_the_oldest_are_as_many_as_the_embedded_engine_would_end(
    arrivals: list[list[float]], percent: float
) -> None:
    counts = engines.oldest(arrivals, percent)
    everyone = [
        SimpleNamespace(arrival=(one, at)) for at, came in enumerate(arrivals) for one in came
    ]
    expected = reports.oldest(everyone, percent)  # type: ignore[arg-type]
    assert counts == [sum(one.arrival[1] == at for one in expected) for at in range(len(arrivals))]


@pytest.mark.parametrize(
    ("slots", "expected"),
    [([(3, 4)], 0.75), ([(3, 4), (1, 4)], 0.5), ([None, (1, 2)], 0.5), ([None], None), ([], None)],
)
def test_page_utilization_of_all(slots: list, expected: float | None) -> None:
    assert engines.page_utilization(slots) == expected


def test_seconds_to_full_are_those_of_the_growth_of_all() -> None:
    reports_ = [core_of(65).ullage_report() for _ in range(2)]
    reports_[0]["growth_blocks_per_s"], reports_[1]["growth_blocks_per_s"] = 3.0, -1.0
    found = engines.together(reports_)
    assert math.isclose(found["seconds_to_full"], 64.0)
    reports_[0]["growth_blocks_per_s"] = 1.0
    assert engines.together(reports_)["seconds_to_full"] is None


@pytest.mark.parametrize(
    "name", ["engine_ranks_managed", "core_engines", "client_index", "client_count"]
)
def test_a_client_of_another_shape_is_named(name: str) -> None:
    core = SimpleNamespace(
        **dict.fromkeys(("engine_ranks_managed", "core_engines", "client_index", "client_count")),
        _call_utility_async=print,
    )
    assert engines.lacking(SimpleNamespace(engine_core=core)) == []
    delattr(core, name)
    assert engines.lacking(SimpleNamespace(engine_core=core)) == [f"engine_core.{name}"]
    assert engines.lacking(SimpleNamespace(engine_core=Client([]))) == []
    assert len(engines.lacking(SimpleNamespace())) == 5


def test_an_engine_that_came_or_went_between_two_calls_is_no_answer() -> None:
    client = Client([core_of(), core_of()])
    asked = engines.Engines(SimpleNamespace(engine_core=client))
    with pytest.raises(engines.NoAnswer, match="has 2 engine cores now, and had 3"):
        asyncio.run(asked.ask_each("ullage_cancel_oldest", [(1, False)] * 3))
    assert client.calls == []
