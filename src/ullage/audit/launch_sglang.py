"""What rules about limits say of SGLang: captured batch sizes and the static share of memory.

Holds SGLang 0.5.23's own numbers; the rules that ask are `launch_limits.py`'s.
"""

from __future__ import annotations

import math

from ullage.audit.launch_flags import flag_fact, missing_table, source_of
from ullage.audit.rule import Clear, Fired, NotEvaluable, Verdict
from ullage.audit.subject import Subject
from ullage.findings.finding import Evidence, Severity
from ullage.launch.launch import Launch

MIB = 2**20
SOURCE = "sglang 0.5.23: arg_groups/memory_hook.py"

LARGEST_CAPTURED = (
    (20 << 10, 8, 8),
    (35 << 10, 48, 160),
    (60 << 10, 32, 160),
    (160 << 10, 256, 512),
)
"""Device memory below this many MiB → largest captured decode batch with fewer than 4
tensor-parallel ranks, and with more. Bigger devices: 512 (handle_gpu_memory_settings)."""
LARGEST_DEVICE_CAPTURES = 512

LEAST_RESERVE_MIB = 1536
RESERVE_PER_RANK_MIB = 128
"""What SGLang leaves for everything else where it chooses the share itself and sizes the KV cache
after capture, the smallest reserve that it ever takes (same function)."""

OFF = ("--disable-cuda-graph", "--disable-decode-cuda-graph")


def captured(subject: Subject, launch: Launch) -> Verdict:
    """--max-running-requests against the largest decode batch that is captured."""
    if missing := missing_table(subject, launch):
        return NotEvaluable(missing)
    for name in (*OFF, "--cuda-graph-backend-decode"):
        given = launch.given(name)
        if given is not None and (name in OFF or given.values == ("disabled",)):
            return Fired(
                f"{name} captures no decode graphs: every decode step launches its kernels one by "
                "one, which is what small batches wait for.",
                f"Drop {name} unless start-up time or memory matters more than decode speed.",
                (flag_fact(launch, given, name),),
                Severity.info,
            )
    if launch.absent_unknown:
        return NotEvaluable((f"the flags in {launch.absent_unknown[0]}",))
    for name in ("--cuda-graph-config", "--attn-dp-size", "--enable-dp-attention"):
        if launch.given(name) is not None:
            return NotEvaluable((f"the batch sizes that {name} leads to",))
    requests = subject.deployment.max_num_seqs
    if requests is None:
        return NotEvaluable(("--max-running-requests",))
    listed = launch.given("--cuda-graph-bs-decode")
    ceiling = launch.given("--cuda-graph-max-bs-decode")
    facts: tuple[Evidence, ...] = (
        Evidence("max_running_requests", requests, "requests", "flag: --max-running-requests"),
    )
    given = listed or ceiling
    if given is not None:
        if given.open or not given.values or not all(v.isdecimal() for v in given.values):
            return NotEvaluable((f"the value of {given.spelling}",))
        largest = max(int(value[:9]) for value in given.values)
        source = f"flag: {given.spelling}"
    elif subject.gpus is None:
        return NotEvaluable(("the device's memory (--gpu), by which SGLang chooses batch sizes",))
    elif subject.spec.towers:
        return NotEvaluable(("the batch sizes that SGLang captures for models with an encoder",))
    else:
        memory_mib = subject.gpus.hardware.memory_bytes // MIB
        largest = _by_device(memory_mib, subject.deployment.parallel.tensor)
        source = SOURCE
    facts = (*facts, Evidence("largest captured batch", largest, "requests", source))
    if largest >= requests:
        return Clear(facts)
    return Fired(
        f"Batches of up to {requests:,} requests are admitted and the largest captured one is "
        f"{largest:,}: above it SGLang runs without graphs, and decode slows down just when the "
        "server is fullest.",
        f"Pass --cuda-graph-max-bs-decode {requests}, or lower --max-running-requests to "
        f"{largest}.",
        facts,
    )


def _by_device(memory_mib: int, ranks: int) -> int:
    for below, few, many in LARGEST_CAPTURED:
        if memory_mib < below:
            return few if ranks < 4 else many
    return LARGEST_DEVICE_CAPTURES


def static_share(subject: Subject, launch: Launch) -> Verdict:
    """--mem-fraction-static against what SGLang would leave at the least."""
    if missing := missing_table(subject, launch):
        return NotEvaluable(missing)
    given = launch.given("--mem-fraction-static")
    if given is None and launch.absent_unknown:
        return NotEvaluable((f"--mem-fraction-static (perhaps in {launch.absent_unknown[0]})",))
    facts: tuple[Evidence, ...] = (flag_fact(launch, given, "--mem-fraction-static"),)
    if given is None:
        return Clear(facts)  # SGLang chooses by the device, the graphs and the chunks
    try:
        fraction = float(given.values[0])
    except (ValueError, IndexError):
        return NotEvaluable((f"the value of --mem-fraction-static ({given.open or 'no number'})",))
    if subject.gpus is None:
        return NotEvaluable(("the device's memory (--gpu)",))
    sizes = subject.deployment.parallel
    device = subject.gpus.hardware
    least = LEAST_RESERVE_MIB + RESERVE_PER_RANK_MIB * sizes.tensor * sizes.pipeline
    left = device.memory_bytes * (1 - fraction) / MIB
    facts = (
        *facts,
        Evidence("device memory", device.memory_bytes, "bytes", device.source("memory_bytes")),
        Evidence("least that SGLang leaves", least * MIB, "bytes", SOURCE),
        Evidence("command", launch.name, "", source_of(launch, launch.line)),
    )
    if left >= least:
        return Clear(facts)
    return Fired(
        f"--mem-fraction-static {fraction:g} gives weights and KV all but {left / 1024:.2f} GiB of "
        f"{device.name}; where SGLang chooses, it leaves {least / 1024:.2f} GiB or more for "
        "activations and graphs.",
        "Drop --mem-fraction-static, or pass at most "
        f"{(1000 - math.ceil(1000 * least * MIB / device.memory_bytes)) / 1000:g}.",
        facts,
    )
