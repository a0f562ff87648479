"""The two entry points that vLLM loads, and how the plugin is put together inside a server.

Everything happens only with ULLAGE_VLLM=1 on a vLLM that is known; else one warning, and vLLM is
as if this were not installed. What is done then is in the other modules.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from typing import Any

from ullage_vllm import versions

log = logging.getLogger("vllm.ullage")

_warned: set[str] = set()


def general() -> None:
    """`vllm.general_plugins`: called in every process of vLLM, perhaps several times."""
    if versions.asked_for() and _known():
        try:
            from vllm.v1.engine.core import EngineCore

            from ullage_vllm import engine

            engine.add_methods(EngineCore)
            if _probe_every():
                _add_probe(EngineCore)
            _say_if_unnamed()
        except Exception as error:  # it must not stop a server
            _warn(f"steps aside: {error!r}")


def _probe_every() -> int:
    """0 where the probe is off, or its switch says nothing that can be meant."""
    try:
        return versions.probe_every()
    except ValueError as error:
        _warn(f"does not look at attention: {error}")
        return 0


def _add_probe(engine_core: type) -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    from ullage_vllm import worker

    worker.add_methods(engine_core, WorkerBase)


def endpoint() -> Endpoint:
    """`vllm.endpoint_plugins`: called in API processes, where VLLM_PLUGINS names `ullage`."""
    return Endpoint(on=versions.asked_for() and _known())


class Endpoint:
    """vLLM's EndpointPlugin: adds the middleware, and fills `site` once there is an engine."""

    name = "ullage"
    required_tasks = None

    def __init__(self, on: bool) -> None:
        self._on = on
        self.site: Any = None
        self._watching: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None

    def attach_router(self, app: Any) -> None:
        if self._on:
            from ullage_vllm.routes import Middleware

            app.add_middleware(Middleware, holder=self)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:  # noqa: ARG002
        # The render server has no engine.
        if not self._on or engine_client is None:
            return
        try:
            await self._begin(engine_client, args)
        except Exception as error:  # it must not stop a server
            self.site = None
            _warn(f"steps aside: {error!r}")

    async def _begin(self, engine_client: Any, args: Any) -> None:
        from ullage_vllm import engines

        missing = engines.lacking(engine_client)
        if missing:
            _warn(f"steps aside: this vLLM has no {', '.join(missing)}")
            return
        self.site, watching = await _build(engine_client, args)
        self._watching = asyncio.get_running_loop().create_task(watching.run())
        self._watching.add_done_callback(lambda task: _ended(task, watching))
        if _probe_every() and not self.site.missing:
            self._probing = await _begin_probe(engine_client, self.site)


async def _build(client: Any, args: Any) -> tuple[Any, Any]:
    import vllm.envs as envs
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    from ullage_vllm import draining, engines, keys, metrics, routes

    cores = engines.Engines(client)
    core = client.engine_core
    missing = await _attached(cores)
    if missing:
        _warn(missing)
    try:
        folder = draining.shared_folder(core.client_count)
        drain = draining.Draining(folder, core.client_index, core.client_count)
    except RuntimeError as error:
        _warn(f"cannot drain: {error}")
        drain = None
    model = client.vllm_config.model_config.served_model_name
    counted = metrics.cancelled_counter(PrometheusStatLogger._counter_cls)
    by_operator = counted.labels(model, "operator")
    site = routes.Site(
        cores,
        drain,
        keys.Keys(keys.expected(args.api_key, envs.VLLM_API_KEY)),
        by_operator.inc,
        missing,
    )
    # Every API process would count the same engine cores: the first does.
    series = None
    if not missing and client.log_stats and core.client_index == 0:
        series = metrics.Metrics(
            model,
            cores.indexes,
            PrometheusStatLogger._gauge_cls,
            PrometheusStatLogger._counter_cls,
        )
    return site, metrics.Watching(cores, drain or draining.Draining(), series)


async def _begin_probe(client: Any, site: Any) -> asyncio.Task[None] | None:
    """Have every worker look at attention, and its series renewed by the first API process."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.version import __version__ as version

    from ullage_vllm import engines, probe, probe_series, routes

    probing = probe.Probing(client, site.engines, f"vLLM {version}")
    try:
        found = probe.state(await probing.ask("attach", every=_probe_every()))
    except (routes.Refusal, engines.NoAnswer) as error:
        site.no_probe = f"the probe steps aside: {error}"
        _warn(f"does not look at attention: {error}")
        return None
    for sentence in found["not_read"][:3]:
        _warn(f"does not read {sentence}")
    site.probing = probing
    core = client.engine_core
    if not client.log_stats or core.client_index != 0:
        return None
    series = probe_series.ProbeSeries(
        probing,
        client.vllm_config.model_config.served_model_name,
        site.engines.indexes,
        PrometheusStatLogger._gauge_cls,
        PrometheusStatLogger._counter_cls,
    )
    return asyncio.get_running_loop().create_task(series.run())


async def _attached(cores: Any) -> str:
    """Have every engine core watch; why one cannot, or ""."""
    from ullage_vllm.engines import NoAnswer

    try:
        answers = await cores.ask("ullage_attach")
    except NoAnswer as silence:
        return f"the engine cannot be asked: {silence}"
    missing = sorted({path for answer in answers for path in answer})
    return f"steps aside: this vLLM lacks {', '.join(missing)}" if missing else ""


def _known() -> bool:
    from vllm.version import __version__ as version

    objection = versions.objection(version)
    if objection and _is_first():
        _warn(f"steps aside: {objection}")
    return not objection


def _say_if_unnamed() -> None:
    """Asked for, and yet vLLM will load no routes: it wants endpoint plugins named."""
    import vllm.envs as envs

    if envs.VLLM_PLUGINS is None and _is_first():
        _warn(
            f"has {versions.SWITCH}=1, but VLLM_PLUGINS does not name it, so that vLLM loads "
            "neither its routes nor its metrics: set VLLM_PLUGINS=ullage, with your other plugins"
        )


def _is_first() -> bool:
    """Of the processes that the operator started; each loads plugins before its children do."""
    return multiprocessing.parent_process() is None


def _warn(sentence: str) -> None:
    """Once in a process."""
    if sentence not in _warned:
        _warned.add(sentence)
        log.warning("ullage %s", sentence)


def _ended(task: asyncio.Task[None], watching: Any) -> None:
    """It ends with the server only; else its last numbers must not stand there as if they held."""
    if not task.cancelled() and task.exception() is not None:
        watching.forget()
        log.error("ullage stopped counting: %s", task.exception(), exc_info=task.exception())
