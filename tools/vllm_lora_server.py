"""Starts real vLLM API servers (CPU), one after the other, for tests/adapters/live.

Run with the Python of vLLM's own environment (tools/vllm_setup.sh). Reads one JSON line per command
on stdin: {"arguments": [...], "log": path} starts a server in a child, {} stops it; answers each
with one JSON line on stdout once it is done. Ends, and its server with it, at the end of stdin.

What a server does is vLLM's own, untouched: `vllm.entrypoints.launchers.api_server.entry.main`.
Only the way there is short: imported once for all servers, and its processes fork where vLLM 0.32
spawns on CPUs (three imports of 12 s for each start).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

from vllm_oracle import prepare

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
# Ranks of prompt tokens are compiled otherwise: 12 s at the first request of every server.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"  # where vLLM names each module that it adapts


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM prints on stdout; answers alone belong there
    prepare()
    fork_instead_of_spawning()
    experts_without_triton()
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.v1.engine.core  # each imported once, for all servers
    import vllm.v1.worker.cpu_worker  # noqa: F401

    answer(answers, {"ready": True})
    server = None
    for line in sys.stdin:
        command = json.loads(line)
        if server is not None:
            stop(server)
            server = None
        if command:
            server = start(command["arguments"], Path(command["log"]))
        answer(answers, {"pid": server})
    if server is not None:
        stop(server)


def answer(answers: int, value: dict) -> None:
    os.write(answers, (json.dumps(value) + "\n").encode())


def fork_instead_of_spawning() -> None:
    import multiprocessing

    import vllm.utils.system_utils as system
    from vllm.v1.engine import core_client, utils
    from vllm.v1.executor import multiproc_executor

    for module in (system, core_client, utils, multiproc_executor):
        if hasattr(module, "get_mp_context"):
            module.get_mp_context = lambda: multiprocessing.get_context("fork")


def experts_without_triton() -> None:
    """vLLM's only experts with LoRA are a Triton kernel, which no CPU runs: a loop stands in.

    It reads the buffers that vLLM filled from the adapter, so that names, slices and scales are
    vLLM's; only the arithmetic of one layer is not.
    """
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    TritonExperts.apply = _apply_experts


def _apply_experts(
    self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *_, **__
) -> None:
    """Gated SiLU experts, one token and expert at a time, each with its adapter's slot."""
    import torch

    assert activation.value == "silu", activation
    lora = self._lora_context
    slots = lora.punica_wrapper.token_lora_indices if lora is not None else None
    for token, x in enumerate(hidden_states):
        slot = -1 if slots is None else int(slots[token])
        sum_of_experts = torch.zeros_like(x)
        for weight, expert in zip(topk_weights[token], topk_ids[token], strict=True):
            wide = w1[expert] @ x
            if slot >= 0:
                wide += _delta(lora.w13_lora_a_stacked, lora.w13_lora_b_stacked, slot, expert, x)
            gate, up = wide.chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            narrow = w2[expert] @ inner
            if slot >= 0:
                narrow += _delta(
                    lora.w2_lora_a_stacked, lora.w2_lora_b_stacked, slot, expert, inner
                )
            sum_of_experts += weight * narrow
        output[token] = sum_of_experts


def _delta(a_slices, b_slices, slot: int, expert, x):
    """B·A·x of each slice of the fused matrix, one after the other."""
    import torch

    pairs = zip(a_slices, b_slices, strict=True)
    return torch.cat([b[slot, expert] @ (a[slot, expert] @ x) for a, b in pairs])


def start(arguments: list[str], log: Path) -> int:
    """Fork a server whose processes share a new session; the child's id."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    end_with_the_launcher()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(written, 1)
    os.dup2(written, 2)
    sys.argv = ["api_server", *arguments]
    status = 0
    try:
        from vllm.entrypoints.launchers.api_server.entry import main as serve

        serve()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def end_with_the_launcher() -> None:
    """Have Linux end this process when the launcher is killed and cannot do it itself."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def stop(child: int) -> None:
    """End the server's whole session, kindly first."""
    for sign, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(child, sign)
        except ProcessLookupError:
            break
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            if os.waitpid(child, os.WNOHANG)[0] == child:
                break
            time.sleep(0.05)
        else:
            continue
        break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # whoever of its session outlived it


if __name__ == "__main__":
    main()
