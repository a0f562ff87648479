"""Rules about what surrounds the server: devices, shared memory, grace, probes, the open port.

Holds the verdicts on what manifests and container flags say; reading them is `launch/`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ullage.audit.launch_flags import NO_LAUNCH, flag_fact, source_of
from ullage.audit.launch_limits import devices_of
from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject
from ullage.findings.finding import Evidence, Severity

if TYPE_CHECKING:
    from ullage.launch.launch import Launch

MIB = 2**20
RUNTIME_SHM_BYTES = 64 * MIB
"""What container runtimes give /dev/shm when nobody asks (docker's --shm-size; containerd)."""

SEGMENT_BYTES = 240 * MIB
"""The largest segment that vLLM 0.32 checks for at start with more than one rank: the queue of a
worker's answers, 10 chunks of 24 MiB (distributed/device_communicators/shm_broadcast.py)."""

READY_S = 600
"""How long vLLM itself waits for its engine (vllm/envs.py, VLLM_ENGINE_READY_TIMEOUT_S)."""

SLOW_DISK_BYTES_PER_S = 100e6
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _elsewhere(launch: Launch) -> str:
    """Why the ranks of this command need not be on this machine, "" when they are."""
    if launch.host.pods != 1:
        return "how several pods share the ranks"
    if launch.kind == "ray":
        return "the machines that Ray gives the ranks"
    for name in ("--nnodes", "--data-parallel-size-local", "--prefill-context-parallel-size"):
        if launch.given(name) is not None:
            return f"how {name} spreads the ranks"
    backend = launch.given("--distributed-executor-backend")
    if backend is not None and backend.values != ("mp",):
        return "the machines of --distributed-executor-backend"
    return f"the flags in {launch.absent_unknown[0]}" if launch.absent_unknown else ""


def _devices(subject: Subject) -> Verdict:
    launch = subject.launch
    if launch is None:
        return NO_LAUNCH
    if away := _elsewhere(launch):
        return NotEvaluable((away,))
    sizes = subject.deployment.parallel
    ranks = sizes.tensor * sizes.pipeline * sizes.data
    named = devices_of(launch)
    devices = launch.host.gpus if launch.host.gpus is not None else len(named or ()) or None
    facts = (
        Evidence("ranks", ranks, "ranks", source_of(launch, launch.line)),
        Evidence("devices", devices, "devices", source_of(launch, launch.line)),
    )
    if devices is None:
        return NotEvaluable(("the number of devices that the file gives the server",))
    if devices == ranks:
        return Clear(facts)
    if devices < ranks:
        return Fired(
            f"The flags ask for {ranks} ranks (tensor {sizes.tensor} × pipeline {sizes.pipeline} × "
            f"data {sizes.data}) and the server is given {devices} "
            f"device{'s' if devices != 1 else ''}: it stops at start.",
            f"Give it {ranks} devices, or sizes whose product is {devices}.",
            facts,
        )
    return Fired(
        f"The server is given {devices} devices and uses {ranks}: {devices - ranks} are paid for "
        "and idle.",
        f"Give it {ranks}, or raise --tensor-parallel-size or --data-parallel-size.",
        facts,
        Severity.warning,
    )


def _shared_memory(subject: Subject) -> Verdict:
    launch = subject.launch
    if launch is None:
        return NO_LAUNCH
    if launch.engine != "vllm":
        return NotEvaluable((f"the shared memory that {launch.engine} needs",))
    if missing := subject.missing_engine_rules():
        return NotEvaluable(missing)
    if away := _elsewhere(launch):
        return NotEvaluable((away,))
    sizes, host = subject.deployment.parallel, launch.host
    ranks = sizes.tensor * sizes.pipeline
    size = RUNTIME_SHM_BYTES if host.shm == "default" else host.shm_bytes
    facts = (
        Evidence("ranks of one replica", ranks, "ranks", source_of(launch, launch.line)),
        Evidence("/dev/shm", host.shm if size is None else size, "" if size is None else "bytes",
                 source_of(launch, launch.line)),
    )  # fmt: skip
    if ranks == 1:
        return Clear(facts)
    if host.shm == "unknown" or (host.shm == "limited" and size is None):
        return NotEvaluable(("the size of /dev/shm",))
    if size is None or size > SEGMENT_BYTES:
        return Clear(facts)
    way = {
        "kubernetes": "Mount an emptyDir with medium Memory at /dev/shm",
        "helm": "Mount a memory volume at /dev/shm through the chart's values",
    }.get(launch.kind, "Pass --ipc=host, or --shm-size 1g (compose: ipc, shm_size)")
    return Fired(
        f"The {ranks} ranks talk through /dev/shm, which holds {size / MIB:,.0f} MiB; vLLM 0.32 "
        f"asks for a segment of {SEGMENT_BYTES // MIB} MiB for every rank and stops when it is "
        "not free.",
        f"{way}; {ranks} ranks use up to {160 + ranks * 240:,} MiB, and NCCL a little more.",
        facts,
    )


def _grace(subject: Subject) -> Verdict:
    launch = subject.launch
    if launch is None:
        return NO_LAUNCH
    if launch.engine != "vllm":
        return NotEvaluable(("how long requests take (SGLang waits for all that are running)",))
    if missing := subject.missing_engine_rules():
        return NotEvaluable(missing)
    if launch.kind in ("command", "dockerfile", "ray"):
        return NotEvaluable(("who stops the server, and with what grace",))
    given = launch.given("--shutdown-timeout")
    if given is None and launch.absent_unknown:
        return NotEvaluable((f"--shutdown-timeout (perhaps in {launch.absent_unknown[0]})",))
    if given is not None and (given.open or given.trouble or not given.values[0].isdecimal()):
        return NotEvaluable(("the value of --shutdown-timeout",))
    timeout = 0 if given is None else int(given.values[0][:9])
    grace, pre_stop = launch.host.grace_s, launch.host.pre_stop_s
    facts = (
        flag_fact(launch, given, "--shutdown-timeout", str(timeout)),
        Evidence("grace", grace, "s", source_of(launch, launch.line)),
        Evidence("preStop", pre_stop, "s", source_of(launch, launch.line)),
    )
    if timeout == 0:
        return Fired(
            "vLLM's --shutdown-timeout is 0: on SIGTERM it aborts the requests in flight, at every "
            "rollout and every move of the pod"
            + (f", whatever the grace of {grace:g} s." if grace else "."),
            "Pass --shutdown-timeout with the seconds that a request may take, and a grace period "
            "above it and the preStop hook together.",
            facts,
            Severity.info if pre_stop else None,
        )
    if grace is None:
        return NotEvaluable(("the grace period (terminationGracePeriodSeconds)",))
    if pre_stop is None:
        return NotEvaluable(("how long the preStop hook takes",))
    if grace > timeout + pre_stop:
        return Clear(facts)
    return Fired(
        f"The orchestrator kills the server {grace:g} s after it asked, and the preStop hook "
        f"({pre_stop:g} s) with --shutdown-timeout {timeout} need more: the drain is cut off.",
        f"Set the grace period (terminationGracePeriodSeconds, stop_grace_period) above "
        f"{timeout + pre_stop:g} s.",
        facts,
    )


def _slow_start(subject: Subject) -> Verdict:
    launch = subject.launch
    if launch is None:
        return NO_LAUNCH
    host = launch.host
    probes = [p for p in (host.startup, host.liveness) if p is not None]
    if not probes:
        if not host.probes_known:
            return NotEvaluable(("livenessProbe and startupProbe",))
        return Clear(
            (Evidence("probes that restart it", "none", "", source_of(launch, launch.line)),)
        )
    if host.startup is None and not host.probes_known:
        return NotEvaluable(("startupProbe",))
    if launch.engine != "vllm":
        return NotEvaluable((f"how long {launch.engine} takes to start",))
    waits = launch.variable("VLLM_ENGINE_READY_TIMEOUT_S") or ""
    ready = int(waits[:9]) if waits.isdecimal() else READY_S
    decisive = host.startup or probes[0]
    kind = "startupProbe" if host.startup is not None else "livenessProbe"
    patience = decisive.patience_s
    checkpoint = subject.model.checkpoint
    weights = checkpoint.num_bytes if checkpoint is not None and checkpoint.has_headers else None
    facts: tuple[Evidence, ...] = (
        Evidence(f"patience of the {kind}", patience, "s", source_of(launch, decisive.line)),
        Evidence("vLLM waits for its engine", ready, "s", "vllm 0.32: envs.py"),
    )
    if weights is not None:
        facts = (*facts, Evidence("weights to read", weights, "bytes", "header: tensor sizes"))
    if patience >= ready:
        return Clear(facts)
    rate = ""
    mild = False
    if weights is not None:
        needed = weights / max(patience, 1.0)
        mild = needed < SLOW_DISK_BYTES_PER_S
        rate = f"; the weights alone would have to be read at {needed / 1e9:.2f} GB/s"
    return Fired(
        f"The {kind} gives up {patience:g} s after the container starts, and vLLM itself waits "
        f"{ready} s for its engine (loading, compiling, capturing graphs){rate}: a slow start is "
        "killed and begins again, for ever.",
        f"Add a startupProbe on /health with periodSeconds × failureThreshold of at least {ready} "
        "s; it holds the liveness probe back until the server answers.",
        facts,
        Severity.info if mild else None,
    )


def _open_port(subject: Subject) -> Verdict:
    launch = subject.launch
    if launch is None:
        return NO_LAUNCH
    if launch.headless or launch.given("--uds") is not None:
        return Clear((Evidence("port", "none", "", source_of(launch, launch.line)),))
    host, key = launch.given("--host"), launch.given("--api-key")
    address = "127.0.0.1" if launch.engine == "sglang" else "0.0.0.0"
    if host is not None:
        if host.open or not host.values:
            return NotEvaluable((f"the value of --host ({host.open or 'none is given'})",))
        address = host.values[0]
    elif launch.absent_unknown:
        return NotEvaluable((f"--host (perhaps in {launch.absent_unknown[0]})",))
    environment = launch.engine == "vllm" and launch.names_variable("VLLM_API_KEY")
    facts = (
        Evidence("--host", address, "", "default" if host is None else f"flag: {host.spelling}"),
        Evidence("--api-key", "given" if key is not None or environment else "not given", "",
                 source_of(launch, launch.line)),
    )  # fmt: skip
    if address in LOOPBACK or key is not None or environment or launch.host.exposed is False:
        return Clear(facts)
    if launch.absent_unknown:
        return NotEvaluable((f"--api-key (perhaps in {launch.absent_unknown[0]})",))
    if launch.names_variable("*") and launch.engine == "vllm":
        return NotEvaluable(("VLLM_API_KEY (perhaps in envFrom or env_file)",))
    inside = launch.kind in ("kubernetes", "helm", "dockerfile") and not launch.host.exposed
    return Fired(
        f"The server listens on {address} without --api-key: whoever reaches the port can use the "
        "model, and see what /metrics says.",
        "Bind to 127.0.0.1 behind a proxy that authenticates, or pass --api-key"
        + (" (VLLM_API_KEY from a secret)." if launch.engine == "vllm" else "."),
        facts,
        Severity.info if inside else None,
    )


RULES = (
    Rule(
        id="A173",
        title="Devices given against ranks asked for",
        severity=Severity.error,
        category="deployment",
        why="Each rank takes a device of its own. Too few and the server stops at start, too many "
        "and they idle.",
        fix="Make nvidia.com/gpu (or the visible devices) the product of the parallel sizes.",
        source="vllm 0.32: config/parallel.py; Kubernetes device plugins",
        example="--tensor-parallel-size 8 in a container with nvidia.com/gpu: 4",
        check=_devices,
    ),
    Rule(
        id="A174",
        title="Shared memory for several ranks",
        severity=Severity.error,
        category="deployment",
        why="Ranks of one machine exchange work through /dev/shm. A container has 64 MiB of it "
        "unless told otherwise, which is less than one of vLLM's queues.",
        fix="Mount a memory volume at /dev/shm, or run with --ipc=host or --shm-size.",
        source="vllm 0.32: distributed/device_communicators/shm_broadcast.py, "
        "check_shm_free_space; v1/executor/multiproc_executor.py",
        example="--tensor-parallel-size 2 in a pod without a /dev/shm volume",
        check=_shared_memory,
    ),
    Rule(
        id="A175",
        title="Time to finish before the end",
        severity=Severity.warning,
        category="deployment",
        why="A pod is asked to end at every rollout. Requests in flight survive only if the server "
        "drains and the orchestrator lets it.",
        fix="--shutdown-timeout of the longest request, and a longer grace period.",
        source="vllm 0.32: config/vllm.py, shutdown_timeout (default 0); v1/engine/core.py; "
        "Kubernetes terminationGracePeriodSeconds (default 30)",
        example="a Deployment without --shutdown-timeout",
        check=_grace,
    ),
    Rule(
        id="A176",
        title="Probes against a slow start",
        severity=Severity.warning,
        category="deployment",
        why="A liveness probe that gives up while weights load or graphs are captured restarts the "
        "server for ever.",
        fix="Use a startupProbe with the patience of a slow start.",
        source="vllm 0.32: envs.py, VLLM_ENGINE_READY_TIMEOUT_S (600); Kubernetes probes",
        example="livenessProbe with initialDelaySeconds 15 and no startupProbe",
        check=_slow_start,
    ),
    Rule(
        id="A177",
        title="Key for an open port",
        severity=Severity.warning,
        category="deployment",
        why="vLLM listens on every address unless --host says otherwise, and asks for no key "
        "unless it has one.",
        fix="Bind to loopback, or set a key.",
        source="vllm 0.32: entrypoints/launchers/launcher.py; "
        "entrypoints/serve/middleware/register.py; sglang 0.5.23: fields/serving.py",
        example="vllm serve MODEL on a machine with a public address",
        check=_open_port,
    ),
)
