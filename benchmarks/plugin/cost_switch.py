"""Loaded into the vLLM server that cost.py measures: takes the plugin out of it and puts it back.

Out means that vLLM calls nothing of the plugin's: the scheduler's own two methods, no question to
the engine core each second, no middleware around the application, no series in /metrics. Belongs
to the benchmark; cost.py makes it known to vLLM as a plugin of its own.
"""

from __future__ import annotations

import time
from typing import Any

NAP_S = 0.0003
WRAPPED = ("_preempt_request", "_update_after_schedule")
"""What the plugin lays over a scheduler's methods."""


def general() -> None:
    """`vllm.general_plugins`: the switch of an engine core, called between two steps."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.v1.engine.core import EngineCore

    EngineCore.cost_switch = _switch_engine_core
    # Engine core and worker wait for each other in a loop without rest: a second of waiting costs
    # a second of CPU, so that CPU time says how long things took and not what they cost. (The
    # notice by which they could wake each other is lost now and then: vLLM looks again after 1 s.)
    SpinCondition.wait = _nap
    shm_broadcast.SPINLOOP_EXT_ENABLED = False


def _nap(self: Any, timeout_ms: int | None = None) -> None:  # noqa: ARG001
    time.sleep(NAP_S)


def _switch_engine_core(self: Any, on: bool) -> list[str]:
    """The methods that are the plugin's from here on."""
    of_scheduler = vars(self.scheduler)
    if not hasattr(self, "_cost_kept"):
        self._cost_kept = {name: of_scheduler[name] for name in WRAPPED}
    for name in WRAPPED:
        if on:
            of_scheduler[name] = self._cost_kept[name]
        else:
            of_scheduler.pop(name, None)
    return [name for name in WRAPPED if name in of_scheduler]


class Endpoint:
    """`vllm.endpoint_plugins`: POST /cost_switch?on=true switches both processes."""

    name = "cost_switch"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        self._app = app
        self._around: tuple[Any, Any] | None = None
        app.add_route("/cost_switch", self._answer, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:  # noqa: ARG002
        self._core = engine_client.engine_core

    async def _answer(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        on = request.query_params["on"] == "true"
        wrapped = await self._core._call_utility_async(
            "cost_switch", on, engine=self._core.core_engines[0]
        )
        if self._around is None:
            self._around = _around_the_middleware(self._app.middleware_stack)
            self._watching = self._around[1]._holder._watching.get_coro().cr_frame.f_locals["self"]
        outer, middleware = self._around
        outer.app = middleware if on else middleware._app
        _switch_rounds(self._watching, on)
        _switch_series(on)
        return JSONResponse({"wrapped": wrapped})


def _around_the_middleware(outermost: Any) -> tuple[Any, Any]:
    """(What calls the plugin's middleware, that middleware)."""
    from ullage_vllm.routes import Middleware

    outer = outermost
    while not isinstance(outer.app, Middleware):
        outer = outer.app
    return outer, outer.app


def _switch_rounds(watching: Any, on: bool) -> None:
    async def idle() -> None: ...

    if on:
        vars(watching).pop("round", None)
    else:
        watching.round = idle


def _switch_series(on: bool) -> None:
    import prometheus_client
    from ullage_vllm.metrics import _made

    registry = prometheus_client.REGISTRY
    for series in _made.values():
        known = series in registry._collector_to_names
        if on and not known:
            registry.register(series)
        elif known and not on:
            registry.unregister(series)
