"""Run in vLLM's environment: what its own two dispatchers answer with the probe in their way.

Prints one JSON line: by runner and graph mode, the mode of a decode step that is not read and of
one that is. No GPU is needed: graphs are chosen on the host.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from ullage_vllm.steps import Step, _first_runner, _second_runner
from vllm.config import CUDAGraphMode

SIZES = [1, 2, 4, 8]


def main() -> None:
    told = {}
    for name in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "FULL", "PIECEWISE", "NONE"):
        told[f"first {name}"] = first(CUDAGraphMode[name])
        told[f"second {name}"] = second(CUDAGraphMode[name])
    print(json.dumps(told))


def first(mode: CUDAGraphMode) -> list[str]:
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    dispatcher: Any = CudagraphDispatcher.__new__(CudagraphDispatcher)
    dispatcher.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=8), lora_config=None
    )
    dispatcher.compilation_config = SimpleNamespace(
        max_cudagraph_capture_size=8, cudagraph_capture_sizes=SIZES, compile_sizes=None
    )
    dispatcher.uniform_decode_query_len, dispatcher.specialize_lora_count = 1, False
    dispatcher.cudagraph_keys = {CUDAGraphMode.PIECEWISE: set(), CUDAGraphMode.FULL: set()}
    dispatcher.initialize_cudagraph_keys(mode, 1)
    read = _first_runner(step(), dispatcher.dispatch)
    asked: Any = {"num_tokens": 3, "uniform_decode": True, "has_lora": False}
    asked |= {"num_active_loras": 0, "valid_modes": None, "invalid_modes": None}
    found = [dispatcher.dispatch(**asked), read(**asked)]
    assert found[1][1].num_tokens >= 3
    return [one[0].name for one in found]


def second(mode: CUDAGraphMode) -> list[str]:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    manager: Any = CudaGraphManager.__new__(CudaGraphManager)
    manager.cudagraph_mode, manager.decode_query_len, manager.max_num_reqs = mode, 1, 8
    manager.varlen_decode, manager.ubatch_runner, manager.lora_capture_cases = False, None, [0]
    manager._lora_dispatch_map, manager._max_lora_case = {}, 0
    manager._candidates, manager._capture_descs = {}, {}
    manager.vllm_config = SimpleNamespace(
        speculative_config=None,
        num_speculative_tokens=0,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    manager.compilation_config = SimpleNamespace(
        cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=8
    )
    manager._init_candidates()
    manager._graphs_captured = True
    read = _second_runner(step(), manager.dispatch)
    found = [one(3, 3, 1, num_active_loras=0, max_query_len=1) for one in (manager.dispatch, read)]
    assert found[1].num_tokens >= 3 and (found[1].num_reqs is None or found[1].num_reqs >= 3)
    return [one.cg_mode.name for one in found]


def step() -> Step:
    return Step(None, None, [], frozenset())


if __name__ == "__main__":
    main()
