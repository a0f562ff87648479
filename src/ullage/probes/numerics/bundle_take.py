"""A bundle of one run: the trace's marks, checksums of the parameters, and where it ran.

Holds the taking. What a bundle has is `bundle`, the tracing `trace`.
"""

from __future__ import annotations

import platform
from typing import Any

import torch

from ullage.probes.numerics.bundle import Bundle
from ullage.probes.numerics.trace import Traced, digest_of


def bundle_of(
    model: Any, token_ids: tuple[int, ...], traced: Traced, *, source: str, backward: bool
) -> Bundle:
    """`traced` was taken of `model` over `token_ids` with marks."""
    parameters = tuple((name, digest_of(one)) for name, one in model.named_parameters())
    return Bundle(
        source=source,
        dtype=str(model.dtype).removeprefix("torch."),
        token_ids=token_ids,
        backward=backward,
        environment=environment(model),
        parameters=parameters,
        operators=tuple(traced.operators),
        tensors=traced.tensors,
    )


def environment(model: Any) -> tuple[tuple[str, str], ...]:
    """What decides which kernels run: versions, device, switches."""
    import transformers

    on_cuda = model.device.type == "cuda"
    device = torch.cuda.get_device_name(model.device) if on_cuda else platform.machine()
    cuda: Any = torch.backends.cuda
    libraries: Any = torch.backends.cudnn
    cudnn = libraries.version() if on_cuda else None
    held: dict[str, object] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": f"{model.device.type} {device}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "threads": torch.get_num_threads(),
        "attention": model.config._attn_implementation,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "sdpa_flash": cuda.flash_sdp_enabled(),
        "sdpa_efficient": cuda.mem_efficient_sdp_enabled(),
        "sdpa_math": cuda.math_sdp_enabled(),
    }
    return tuple((name, str(value)) for name, value in held.items())
