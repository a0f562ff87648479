"""benchmarks/plugin: the switch leaves of the plugin nothing that vLLM calls, and puts all back."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ullage_vllm.routes import Middleware

from tests.plugins.vllm_core import Request, core_of

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "plugin"))

import cost_switch


def test_out_the_schedulers_methods_are_its_own_and_in_they_count() -> None:
    core: Any = core_of()
    core.scheduler.add(request := Request("a", 0.0))

    def lost_and_found() -> int:
        """A preemption of 40 tokens and their recomputation, as the plugin counts them."""
        before = core.ullage_statistics()["recomputed_tokens"]
        core.scheduler.compute(request, 40)
        core.scheduler.preempt(request)
        core.scheduler.resume(request)
        core.scheduler.compute(request, 40)
        core.scheduler.preempt(request)
        core.scheduler.resume(request)
        return int(core.ullage_statistics()["recomputed_tokens"] - before)

    assert lost_and_found() == 40
    assert cost_switch._switch_engine_core(core, False) == []
    assert not set(cost_switch.WRAPPED) & vars(core.scheduler).keys()
    assert lost_and_found() == 0
    for _ in range(2):
        assert cost_switch._switch_engine_core(core, True) == list(cost_switch.WRAPPED)
    assert lost_and_found() >= 40


def test_the_middleware_is_found_where_it_stands() -> None:
    inner = SimpleNamespace(app=None)
    middleware = Middleware(inner, SimpleNamespace(site=None))  # type: ignore[arg-type]
    second = SimpleNamespace(app=middleware)
    assert cost_switch._around_the_middleware(SimpleNamespace(app=second)) == (second, middleware)


def test_out_nobody_asks_the_engine() -> None:
    rounds = []

    class Watching:
        async def round(self) -> None:
            rounds.append(1)

    watching = Watching()
    for on, expected in ((False, 0), (True, 1), (True, 2), (False, 2)):
        cost_switch._switch_rounds(watching, on)
        asyncio.run(watching.round())
        assert len(rounds) == expected
