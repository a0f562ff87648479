"""The flags that say where a model will run, shared by the verbs that need them.

Holds parsing only: vLLM's own names and number forms, with ullage's short aliases. What follows
from a deployment is `planning/`; which GPUs are known is `costs/hardware.py`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from ullage.costs.deployment import Deployment, Parallel
from ullage.costs.hardware import Gpus, parse_gpus
from ullage.launch.values import parse_integer

MAX_INTEGER = 2**63 - 1
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
AUTO = -1
"""What vLLM writes for `--max-model-len auto`: the longest that the KV memory holds."""


def add_model_argument(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """The positional MODEL; None without it where it is `optional`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if optional else None,
        help="a directory, a JSON file holding a configuration, a GGUF or a safetensors file, "
        "or a hub id (ORG/NAME[@revision]), of which only headers are read",
    )


def located(model: str) -> tuple[Path, bool]:
    """Where MODEL lies, and whether only its headers do. Raises what `anatomy.hub.locate` does."""
    if os.path.lexists(model):
        return Path(model), False
    from ullage.anatomy.hub.locate import locate  # only a model that is no path costs this

    found = locate(model)
    return found.path, found.headers_only


def add_deployment_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine, hardware, parallelism, memory and scheduling flags to a verb's parser."""
    engine = parser.add_argument_group("engine")
    engine.add_argument("--engine", default="vllm", help="default: vllm")
    engine.add_argument("--engine-version", default="0.32", metavar="X.Y", help="default: 0.32")
    engine.add_argument(
        "--platform", choices=("cuda", "cpu"), default="cuda", help="what the engine runs on"
    )
    engine.add_argument(
        "--gpu", metavar="NAME[:N]", help="N devices of that kind, for example H100-SXM:8"
    )
    engine.add_argument("--dtype", choices=DTYPES, default="auto", help="dtype of weights")

    sizes = parser.add_argument_group("parallel sizes")
    sizes.add_argument("--tensor-parallel-size", "--tp", "-tp", type=_count(), metavar="N")
    sizes.add_argument("--pipeline-parallel-size", "--pp", "-pp", type=_count(), metavar="N")
    sizes.add_argument("--data-parallel-size", "--dp", "-dp", type=_count(), metavar="N")
    sizes.add_argument(
        "--enable-expert-parallel", action=argparse.BooleanOptionalAction, default=False
    )

    memory = parser.add_argument_group("memory")
    memory.add_argument("--kv-cache-dtype", "--kv-dtype", default="auto", metavar="DTYPE")
    memory.add_argument(
        "--kv-cache-memory-bytes",
        "--kv-memory",
        type=_count(),
        metavar="BYTES",
        help="exactly this much for the KV cache of one rank (1G = 2^30, 1g = 10^9)",
    )
    memory.add_argument("--gpu-memory-utilization", type=_fraction, metavar="FRACTION")
    memory.add_argument("--block-size", type=_count(), metavar="TOKENS")
    memory.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)

    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-model-len", type=_length, metavar="TOKENS", help="a number, or auto (-1)"
    )
    limits.add_argument("--max-num-seqs", type=_count(), metavar="N")
    limits.add_argument("--max-num-batched-tokens", type=_count(), metavar="N")
    limits.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction)


def sizes_given(args: argparse.Namespace) -> bool:
    """Whether the user named any parallel size (then none is chosen for them)."""
    return any(
        size is not None
        for size in (
            args.tensor_parallel_size,
            args.pipeline_parallel_size,
            args.data_parallel_size,
        )
    )


def gpus_from(args: argparse.Namespace) -> Gpus | None:
    """The hardware that `--gpu` names, or None without the flag. Raises BadUsage if unknown."""
    return None if args.gpu is None else parse_gpus(args.gpu)


def deployment_from(args: argparse.Namespace) -> Deployment:
    """The Deployment that the flags describe; what was not said stays None."""
    return Deployment(
        engine=args.engine,
        engine_version=args.engine_version,
        platform=args.platform,
        parallel=Parallel(
            tensor=args.tensor_parallel_size or 1,
            pipeline=args.pipeline_parallel_size or 1,
            data=args.data_parallel_size or 1,
            expert=args.enable_expert_parallel,
        ),
        dtype=None if args.dtype == "auto" else args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        enable_prefix_caching=args.enable_prefix_caching,
        async_scheduling=args.async_scheduling,
    )


def _count(least: int = 1) -> Callable[[str], int]:
    def count(text: str) -> int:
        try:
            value = parse_integer(text)
        except (ValueError, OverflowError):
            value = least - 1
        if not least <= value <= MAX_INTEGER:
            raise argparse.ArgumentTypeError(f"{text[:40]!r}; expected a whole number >= {least}")
        return value

    return count


def positive_integer(text: str) -> int:
    """A whole number of at least one, in vLLM's forms, for argparse's `type`."""
    return _count()(text)


def _length(text: str) -> int:
    if text.strip().lower() in ("auto", "-1"):
        return AUTO
    return positive_integer(text)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}; expected a fraction above 0, at most 1")
    return value
