"""Methods of vLLM's WorkerBase and EngineCore by which an API process asks the probe.

Holds what they do, and the check of what a worker must look like; the probe itself is `sampling`'s.
Without ULLAGE_VLLM_PROBE it is not imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from ullage_vllm.sampling import MAX_WATCHES, Probe, Watch

# --- methods of WorkerBase; `self` is a worker ---


def ullage_probe(self: Any, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """One of ACTIONS. Answers {"error": …} instead of raising: that could end a worker."""
    try:
        probe = getattr(self, "_ullage_probe", None)
        if probe is None:
            missing = list(lacking(self))
            if missing:
                return {"error": f"this vLLM lacks {', '.join(missing)}"}
            probe = self._ullage_probe = Probe(self, int(arguments.get("every", 0)))
        return {**_ranks(), **ACTIONS[action](probe, **arguments)}
    except Exception as error:
        return {"error": repr(error)}


def _attach(probe: Probe, every: int) -> dict[str, Any]:  # noqa: ARG001
    return probe.state()


def _sample(probe: Probe, every: int) -> dict[str, Any]:
    probe.every = every
    probe.follow()
    return probe.state()


def _report(probe: Probe) -> dict[str, Any]:
    return {**probe.state(), "layers": probe.memory.report(_ranks()["tp_rank"])}


def _summary(probe: Probe) -> dict[str, Any]:
    return {**probe.state(), "entropies": probe.memory.entropies()}


def _watch(probe: Probe, key: str, rows: int, weights: dict[str, int] | None) -> dict[str, Any]:
    if len(probe.watches) >= MAX_WATCHES:
        return {"error": f"{MAX_WATCHES} prompts are being looked at"}
    if not probe.layers:
        return {"error": f"no layer can be read: {'; '.join(probe.refused[:3])}"}
    own = None
    if weights is not None:
        layer = next((one for one in probe.layers if one.number == weights["layer"]), None)
        if layer is not None:
            head = weights["head"] - _ranks()["tp_rank"] * layer.heads
            own = {**weights, "head": head} if 0 <= head < layer.heads else None
    probe.watches[key] = Watch(None, rows, own)
    probe.follow()
    return {}


def _take(probe: Probe, key: str) -> dict[str, Any]:
    """What was read of a watched prompt, which is not watched any more."""
    watch = probe.watches.pop(key, None)
    probe.follow()
    if watch is None or watch.memory is None:
        return {"layers": None}
    return {
        **probe.state(),
        "failure": watch.failure,
        "mistake": watch.mistake,
        "tokens": watch.tokens,
        "rows_read": len(watch.memory),
        "layers": watch.memory.report(_ranks()["tp_rank"]),
        "weights": watch.found_weights,
    }


ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "attach": _attach,
    "sample": _sample,
    "report": _report,
    "summary": _summary,
    "watch": _watch,
    "take": _take,
}


def ask_workers(self: Any, action: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """A method of EngineCore, `ullage_probe`: what each of its workers answers."""
    return list(self.collective_rpc("ullage_probe", args=(action, arguments)))


def add_methods(engine_core: type, worker_base: type) -> None:
    """May be done again."""
    engine_core.ullage_probe = ask_workers  # type: ignore[attr-defined]
    worker_base.ullage_probe = ullage_probe  # type: ignore[attr-defined]


def _ranks() -> dict[str, int]:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return {"tp_rank": get_tp_group().rank_in_group, "pp_rank": get_pp_group().rank_in_group}


def lacking(worker: Any) -> Iterator[str]:
    """What this worker does not have, or has otherwise than it was read."""
    runner = getattr(worker, "model_runner", None)
    if runner is None:
        yield "model_runner"
        return
    wanted: list[tuple[Any, str, tuple[str, ...]]] = [
        (runner, "execute_model", ("scheduler_output",))
    ]
    if hasattr(runner, "cudagraph_dispatcher"):
        if not hasattr(getattr(runner, "input_batch", None), "req_ids"):
            yield "model_runner.input_batch.req_ids"
        names: tuple[str, ...] = (
            *("num_tokens", "uniform_decode", "has_lora", "num_active_loras"),
            *("valid_modes", "invalid_modes"),
        )
        wanted.append((runner.cudagraph_dispatcher, "dispatch", names))
    else:
        wanted.append((runner, "prepare_inputs", ("scheduler_output", "batch_req_state")))
        if getattr(runner, "cudagraph_manager", None) is not None:
            names = ("num_reqs", "num_tokens")
            wanted.append((runner.cudagraph_manager, "dispatch", names))
    for owner, name, parameters in wanted:
        method = getattr(owner, name, None)
        found = tuple(inspect.signature(method).parameters) if callable(method) else ()
        if found[: len(parameters)] != parameters:
            yield f"{type(owner).__name__}.{name}({', '.join(parameters)})"
