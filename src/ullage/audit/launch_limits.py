"""Rules about the scheduler's limits on a command line: batches, prompts, captured graphs.

Holds the verdicts on flags that contradict each other; memory is `fit.py`'s.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ullage.audit.launch_flags import NO_LAUNCH, flag_fact, source_of
from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject
from ullage.findings.finding import Evidence, Severity

if TYPE_CHECKING:
    from ullage.launch.launch import Launch

LARGEST_CAPTURED = (512, 1024)
"""vLLM's default ceiling of captured batch sizes: 1024 on data-centre Blackwell, 512 elsewhere
(vllm/config/vllm.py, _set_cudagraph_sizes)."""


def _limits(subject: Subject) -> Verdict:
    launch = subject.launch
    if launch is None:
        return NO_LAUNCH
    if missing := subject.missing_engine_rules():
        return NotEvaluable(missing)
    tokens = subject.deployment.max_num_batched_tokens
    requests = subject.deployment.max_num_seqs
    facts: tuple[Evidence, ...] = (
        subject.flag("--max-num-batched-tokens", tokens, "tokens"),
        subject.flag("--max-num-seqs", requests, "requests"),
    )
    if tokens is None:
        return Clear(facts)  # vLLM's own choice respects both limits
    if requests is not None and tokens < requests:
        return Fired(
            f"--max-num-batched-tokens {tokens:,} is below --max-num-seqs {requests:,}, and every "
            "running request needs a token of each step: vLLM 0.32 refuses to start.",
            f"Pass --max-num-batched-tokens of {requests:,} or more (8192 is usual).",
            facts,
        )
    chunked = launch.given("--enable-chunked-prefill")
    facts = (*facts, flag_fact(launch, chunked, "--enable-chunked-prefill"))
    if chunked is None and launch.absent_unknown:
        return NotEvaluable((f"--enable-chunked-prefill (perhaps in {launch.absent_unknown[0]})",))
    if chunked is None or chunked.values != ("false",):
        return Clear(facts)
    length = subject.served_length
    if length is None or subject.deployment.max_model_len == -1:
        return NotEvaluable(("the length that is served (--max-model-len)",))
    facts = (*facts, Evidence("longest request", length, "tokens", subject.length_source()))
    if tokens >= length:
        return Clear(facts)
    return Fired(
        f"Chunked prefill is off, so a prompt must fit one step, and --max-num-batched-tokens "
        f"{tokens:,} is below the {length:,} tokens that are served: vLLM 0.32 refuses to start.",
        f"Drop --no-enable-chunked-prefill, or pass --max-num-batched-tokens {length}, or lower "
        f"--max-model-len to {tokens}.",
        facts,
    )


def _captured(subject: Subject) -> Verdict:
    launch = subject.launch
    if launch is None:
        return NO_LAUNCH
    if launch.engine == "sglang":
        from ullage.audit.launch_sglang import captured

        return captured(subject, launch)
    if missing := subject.missing_engine_rules():
        return NotEvaluable(missing)
    if subject.deployment.platform == "cpu":
        return Clear((subject.platform_fact(),))
    eager = launch.given("--enforce-eager")
    if eager is not None and eager.values == ("true",):
        return Fired(
            "--enforce-eager captures no graphs: every decode step launches its kernels one by "
            "one, which is what small batches wait for.",
            "Drop --enforce-eager unless start-up time or memory matters more than decode speed.",
            (flag_fact(launch, eager, "--enforce-eager"),),
            Severity.info,
        )
    for name in ("--speculative-config", "--config", "--optimization-level", "--performance-mode"):
        if launch.given(name) is not None:
            return NotEvaluable((f"the sizes that {name} leads to",))
    if launch.absent_unknown:
        return NotEvaluable((f"the flags in {launch.absent_unknown[0]}",))
    requests = subject.deployment.max_num_seqs
    if requests is None:
        return NotEvaluable(("--max-num-seqs",))
    largest, why, problem = _largest(launch)
    if problem:
        return NotEvaluable((problem,))
    facts: tuple[Evidence, ...] = (subject.flag("--max-num-seqs", requests, "requests"),)
    if largest is None:
        low, high = (min(2 * requests, ceiling) for ceiling in LARGEST_CAPTURED)
        facts = (*facts, Evidence("largest captured batch, by default", low, "tokens",
                                  "vllm 0.32: config/vllm.py"))  # fmt: skip
        if low < requests <= high:
            return NotEvaluable(("the device's generation (Blackwell captures up to 1,024)",))
        largest = high if requests > high else low
    else:
        facts = (*facts, Evidence("largest captured batch", largest, "tokens", why))
    if largest >= requests:
        return Clear(facts)
    return Fired(
        f"Batches of up to {requests:,} requests are admitted and the largest captured one is "
        f"{largest:,}: above it vLLM runs without graphs, and decode slows down just when the "
        "server is fullest.",
        f"Raise --max-cudagraph-capture-size (or the list of sizes) to {requests}, or lower "
        f"--max-num-seqs to {largest}.",
        facts,
    )


def _largest(launch: Launch) -> tuple[int | None, str, str]:
    """(the largest size that the flags name, its source, what keeps it unknown)."""
    listed = launch.given("--cudagraph-capture-sizes")
    ceiling = launch.given("--max-cudagraph-capture-size")
    whole = launch.given("--compilation-config")
    for flag in launch.flags:
        if flag.name == "--compilation-config.":
            return None, "", f"the sizes that {flag.spelling} leads to"
    for given in (listed, ceiling, whole):
        if given is not None and (given.open or given.trouble):
            return None, "", f"the value of {given.spelling} ({given.open or given.trouble})"
    if listed is not None and all(v.isascii() and v.isdecimal() for v in listed.values):
        return max(int(v[:9]) for v in listed.values), f"flag: {listed.spelling}", ""
    if ceiling is not None and ceiling.values[0].isdecimal():
        return int(ceiling.values[0][:9]), f"flag: {ceiling.spelling}", ""
    if whole is None:
        return None, "", ""
    try:
        config = json.loads(whole.values[0])
    except (ValueError, RecursionError):
        return None, "", f"what {whole.spelling} says (it is no JSON)"
    if not isinstance(config, dict):
        return None, "", f"what {whole.spelling} says (it is no object)"
    if config.get("cudagraph_mode") is not None or config.get("mode") is not None:
        return None, "", f"the sizes that {whole.spelling} leads to"
    sizes, largest = config.get("cudagraph_capture_sizes"), config.get("max_cudagraph_capture_size")
    if isinstance(sizes, list) and sizes and all(type(size) is int for size in sizes):
        return max(sizes), f"flag: {whole.spelling}", ""
    if type(largest) is int:
        return largest, f"flag: {whole.spelling}", ""
    return None, "", ""


def _share(subject: Subject) -> Verdict:
    launch = subject.launch
    if launch is None:
        return NO_LAUNCH
    if launch.engine == "sglang":
        from ullage.audit.launch_sglang import static_share

        return static_share(subject, launch)
    share = subject.deployment.gpu_memory_utilization
    facts: tuple[Evidence, ...] = (subject.flag("--gpu-memory-utilization", share),)
    if subject.deployment.platform == "cpu":
        return Clear((*facts, subject.platform_fact()))
    left = ""
    if subject.gpus is not None:
        device = subject.gpus.hardware
        facts = (*facts, Evidence("device memory", device.memory_bytes, "bytes",
                                  device.source("memory_bytes")))  # fmt: skip
        if share is not None:
            left = f", {device.memory_bytes * (1 - share) / 2**30:.2f} GiB on {device.name},"
    if share is None or share <= LARGEST_SHARE:
        return Clear(facts)
    return Fired(
        f"--gpu-memory-utilization {share:g} leaves {100 * (1 - share):.3g}% of the device{left} "
        "for the driver's context, communication buffers and whatever else runs there; vLLM "
        "refuses to start when less than its share is free, and later allocations fail under load.",
        f"Pass at most {LARGEST_SHARE}, and look at the ledger of `ullage size` for what it costs.",
        facts,
    )


LARGEST_SHARE = 0.95
"""vLLM 0.32's own default is 0.92: what CUDA contexts and NCCL take lies outside the share
(vllm/v1/worker/utils.py, request_memory compares the share with what is free at start)."""


def _same_devices(subject: Subject) -> Verdict:
    launch = subject.launch
    if launch is None:
        return NO_LAUNCH
    here = source_of(launch, launch.line)
    beside = [other for other in launch.neighbours if _runs_beside(launch, other)]
    facts: tuple[Evidence, ...] = (Evidence("servers beside it", len(beside), "", here),)
    if launch.kind in ("kubernetes", "helm", "ray") or not beside:
        return Clear(facts)  # each container, and each of Ray's engines, has devices of its own
    mine = devices_of(launch)
    total, sharing = _share_of(launch), []
    for other in beside:
        theirs = devices_of(other)
        if mine is None or theirs is None:
            return NotEvaluable((f"the devices of {launch.name} and {other.name}",))
        if not mine or not theirs or set(mine) & set(theirs):
            sharing.append(other)
    for other in sharing:
        share = _share_of(other)
        if share is None or total is None:
            return NotEvaluable((f"--gpu-memory-utilization of {launch.name} and {other.name}",))
        total += share
    facts = (*facts, *(Evidence("shares its devices with", o.name, "", source_of(o, o.line))
                       for o in sharing))  # fmt: skip
    if total is None or total <= 1 or not sharing:
        return Clear(facts)
    names = ", ".join(other.name for other in sharing)
    return Fired(
        f"{launch.name} and {names} use the same devices and together ask for {total:.2f} of their "
        "memory: whichever starts last finds less free than its share and stops.",
        "Give each devices of its own (CUDA_VISIBLE_DEVICES, device_ids), or shares "
        "(--gpu-memory-utilization) that add up to less than 1.",
        facts,
    )


def _runs_beside(launch: Launch, other: Launch) -> bool:
    if launch.kind == "command":
        first = launch if launch.line < other.line else other
        return first.background
    return True


def devices_of(launch: Launch) -> tuple[str, ...] | None:
    """The devices named; empty means all of the machine; None where it is not known."""
    if launch.host.gpu_ids is not None:
        return launch.host.gpu_ids
    visible = launch.variable("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip())
    if launch.names_variable("CUDA_VISIBLE_DEVICES") or launch.names_variable("*"):
        return None
    return None if launch.host.gpus_said and launch.kind != "command" else ()


def _share_of(launch: Launch) -> float | None:
    given = launch.given("--gpu-memory-utilization")
    if launch.engine != "vllm" or launch.absent_unknown or (given is not None and given.open):
        return None
    if given is None:
        return 0.92  # vllm 0.32: config/cache.py
    try:
        return float(given.values[0])
    except (ValueError, IndexError):
        return None


RULES = (
    Rule(
        id="A164",
        title="Tokens of one step against prompts and requests",
        severity=Severity.error,
        category="deployment",
        why="Each step computes at most --max-num-batched-tokens. Every running request needs one "
        "of them, and a whole prompt must fit when chunked prefill is off; vLLM checks both.",
        fix="Leave chunked prefill on, and the budget above --max-num-seqs.",
        source="vllm 0.32: config/scheduler.py, verify_max_model_len",
        example="--no-enable-chunked-prefill --max-num-batched-tokens 2048 --max-model-len 8192",
        check=_limits,
    ),
    Rule(
        id="A165",
        title="Captured batch sizes against --max-num-seqs",
        severity=Severity.warning,
        category="deployment",
        why="Decode replays a captured graph only up to the largest captured batch; bigger batches "
        "launch their kernels one by one.",
        fix="Capture up to --max-num-seqs, or admit no more than was captured.",
        source="vllm 0.32: config/vllm.py, _set_cudagraph_sizes; sglang 0.5.23: "
        "arg_groups/memory_hook.py",
        example="--max-num-seqs 256 --cudagraph-capture-sizes 1 2 4 8",
        check=_captured,
    ),
    Rule(
        id="A171",
        title="Share of the device's memory",
        severity=Severity.warning,
        category="deployment",
        why="What lies outside vLLM's share (the driver's context, communication buffers, other "
        "processes) needs room too.",
        fix="Stay near vLLM's default of 0.92; leave SGLang's share to SGLang.",
        source="vllm 0.32: config/cache.py; v1/worker/utils.py, request_memory; sglang 0.5.23: "
        "arg_groups/memory_hook.py",
        example="--gpu-memory-utilization 0.99",
        check=_share,
    ),
    Rule(
        id="A172",
        title="Servers that share a device",
        severity=Severity.error,
        category="deployment",
        why="Each server takes its share of the whole device. Shares that add up to more than one "
        "cannot all start.",
        fix="Give each its own devices, or smaller shares.",
        source="vllm 0.32: v1/worker/utils.py, request_memory",
        example="two vllm serve commands started with & on the same GPU",
        check=_same_devices,
    ),
)
