"""Gathering the evidence of a checkup: audit, the machine's limits, the engine, the run.

Holds the order of things and what each failure leaves: a run that cannot be made leaves the audit
standing, with the reason. Nothing is concluded or written here; that is `document.py`.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ullage import __version__
from ullage.anatomy import Model, load
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.audit import audit, subject_of
from ullage.checkup.comparison import Serving
from ullage.checkup.machine import Machine, available_bytes, measure_machine
from ullage.checkup.measure import Measurements, Plan, Progress, RunFailed, measure
from ullage.checkup.memory import deployed
from ullage.checkup.metrics import Series, look_once
from ullage.costs.deployment import Deployment
from ullage.costs.hardware import Gpus, HardwareSpec, measured_machine
from ullage.costs.kv import compute_dtype, kv_bytes_per_token
from ullage.costs.weights import weight_bytes
from ullage.errors import BadUsage, Unreachable
from ullage.findings.finding import Finding, Severity
from ullage.planning.ledger import Ledger, build_ledger
from ullage.traffic.embedded import EngineDidNotStart, embedded_engine, private_bytes
from ullage.traffic.load import Target, served_model

# The embedded engine computes and caches in float32 whatever the checkpoint is stored in.
EMBEDDED_DTYPE = "float32"
EMBEDDED_MAX_MODEL_LEN = 1024
# Room for so many sequences of max_model_len: enough to run, little enough to see it fill.
EMBEDDED_KV_SEQUENCES = 2


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for. `engine_url` None: the embedded engine, started for the occasion."""

    model: str
    deployment: Deployment
    gpus: Gpus | None
    engine_url: str | None = None
    api_key: str | None = None
    num_requests: int = 32
    duration_s: float = 45.0
    max_model_len: int | None = None
    kv_cache_memory_bytes: int | None = None
    max_num_seqs: int | None = None
    server_is_here: bool = False

    @property
    def on_this_machine(self) -> bool:
        """Whether this machine's limits are the engine's limits."""
        return self.engine_url is None or self.server_is_here


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The engine that was measured. `idle` is its metrics when ready; `load_s` None if not ours."""

    description: str
    url: str
    embedded: bool
    flags: tuple[str, ...]
    load_s: float | None
    idle: Series
    private_bytes: int | None
    available_bytes: int | None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that a checkup gathered, before anything is concluded or shown.

    `findings` judge the model for `audited_for`; `refusals` are the errors that fire for
    `options.deployment`, the one that memory is planned for.
    """

    options: Options
    model: Model
    findings: tuple[Finding, ...]
    audited_for: Deployment
    refusals: tuple[Finding, ...]
    machine: Machine | None
    engine: EngineFacts | None
    serving: Serving
    ledger: Ledger | None
    ledger_choice: str
    no_ledger: str
    seen: Measurements | None
    not_run: str | None
    wall_s: float


def gather(options: Options, progress: Progress) -> Evidence:
    """Audit the model, measure this machine, run the engine.

    Raises:
        BadInput: the model cannot be read or priced; nothing is worth reporting then.
    """
    begin = time.perf_counter()
    progress("reading the model")
    model = load(options.model)
    machine, engine, seen, reason = None, None, None, _nothing_to_run(options, model)
    if reason is None and options.on_this_machine:
        progress("measuring this machine")
        machine = measure_machine()
    gpus = _devices(options, machine)
    ledger, choice, no_ledger = _ledger(options, model, gpus)
    judged = _audited(options) if ledger is None else ledger.deployment
    subject = subject_of(model, judged, gpus=gpus, ledger=ledger, no_ledger=no_ledger)
    findings = audit(subject)
    planned = audit(subject_of(model, options.deployment, no_ledger=no_ledger))
    if reason is None:
        try:
            engine, seen = _run(options, model, progress)
        except (EngineDidNotStart, RunFailed, Unreachable) as error:
            reason = str(error)
    return Evidence(
        options=options,
        model=model,
        findings=findings,
        audited_for=judged,
        refusals=tuple(f for f in planned if f.state == "fired" and f.severity == Severity.error),
        machine=machine,
        engine=engine,
        serving=_serving(options, model, machine),
        ledger=ledger,
        ledger_choice=choice,
        no_ledger=no_ledger,
        seen=seen,
        not_run=reason,
        wall_s=time.perf_counter() - begin,
    )


def _nothing_to_run(options: Options, model: Model) -> str | None:
    """Why the embedded engine need not be started at all, or None."""
    if options.engine_url is None and model.checkpoint is None:
        return "there are no weights beside the configuration"
    return None


def _audited(options: Options) -> Deployment:
    """What the model is judged for: the engine that will run it, unless a GPU or a URL is named."""
    if options.engine_url is not None or options.gpus is not None:
        return _placed(options)
    return Deployment(
        engine="ullage",
        engine_version=__version__,
        platform="cpu",
        dtype=EMBEDDED_DTYPE,
        max_model_len=options.max_model_len,
    )


def _placed(options: Options) -> Deployment:
    """The deployment on the platform of the named device: this machine serves from its CPU."""
    if options.server_is_here:
        return replace(options.deployment, platform="cpu")
    return options.deployment


def _devices(options: Options, machine: Machine | None) -> Gpus | None:
    """What --gpu names: of the catalogue, or this machine as measured."""
    if not options.server_is_here:
        return options.gpus
    here = this_machine(machine)
    return None if here is None else Gpus(here)


def _ledger(options: Options, model: Model, gpus: Gpus | None) -> tuple[Ledger | None, str, str]:
    """The ledger on the named device, how its ranks were chosen, or why there is none."""
    if gpus is None:
        if options.server_is_here:
            return None, "", "the memory of this machine could not be read"
        return None, "", "no device is named: give --gpu NAME[:N]"
    try:
        deployment, choice = deployed(model.anatomy, _placed(options), gpus)
        return build_ledger(model.anatomy, deployment, gpus), choice, ""
    except BadUsage as error:
        return None, "", str(error)


def _run(options: Options, model: Model, progress: Progress) -> tuple[EngineFacts, Measurements]:
    spec = model.anatomy.spec
    longest = spec.max_positions or EMBEDDED_MAX_MODEL_LEN  # 0 where nothing names one
    limit = options.max_model_len or min(longest, EMBEDDED_MAX_MODEL_LEN)
    with ExitStack() as stack:
        if options.engine_url is not None:
            flags: tuple[str, ...] = ()
            url, load_s, pid = options.engine_url, None, None
        else:
            progress("starting the embedded engine")
            flags = embedded_flags(options, model, limit)
            engine = stack.enter_context(embedded_engine(options.model, flags))
            url, load_s, pid = engine.url, engine.load_s, engine.pid
        name, served_length = asyncio.run(served_model(url, options.api_key))
        target = Target(url, name, options.api_key)
        facts = EngineFacts(
            description=_description(options, name),
            url=url,
            embedded=pid is not None,
            flags=flags,
            load_s=load_s,
            idle=asyncio.run(look_once(target)),
            private_bytes=None if pid is None else private_bytes(pid),
            available_bytes=available_bytes(),
            max_model_len=served_length,
        )
        cache = facts.idle.cache
        plan = Plan(
            num_requests=options.num_requests,
            duration_s=options.duration_s,
            max_model_len=served_length or limit,
            vocab_size=spec.vocab_size,
            max_num_seqs=options.max_num_seqs,
            block_size=None if cache is None else cache.block_size,
        )
        return facts, asyncio.run(measure(target, plan, progress))


def embedded_flags(options: Options, model: Model, max_model_len: int) -> tuple[str, ...]:
    """The flags of `ullage serve` for this checkup, every limit written out."""
    each = kv_bytes_per_token(
        model.anatomy.spec, kv_cache_dtype=EMBEDDED_DTYPE, dtype=EMBEDDED_DTYPE
    )
    # One block more per sequence, so that a last block begun does not cost a whole sequence.
    room = EMBEDDED_KV_SEQUENCES * (max_model_len + 16) * max(each, 1)
    flags = [
        "--max-model-len",
        str(max_model_len),
        "--kv-cache-memory-bytes",
        str(options.kv_cache_memory_bytes or room),
    ]
    if options.max_num_seqs is not None:
        flags += ["--max-num-seqs", str(options.max_num_seqs)]
    return tuple(flags)


def _description(options: Options, served_name: str) -> str:
    if options.engine_url is None:
        return "the embedded engine on this machine"
    return f"the server at {options.engine_url} (serving {served_name})"


def _serving(options: Options, model: Model, machine: Machine | None) -> Serving:
    """How the engine computes and on what: known for the embedded one, asked for by flags else."""
    if options.engine_url is None:
        return Serving(EMBEDDED_DTYPE, EMBEDDED_DTYPE, 4.0, this_machine(machine))
    dtype = options.deployment.dtype or compute_dtype(model.anatomy.spec.dtype)
    dtype = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    kv = options.deployment.kv_cache_dtype
    hardware = None if options.gpus is None else options.gpus.hardware
    if options.server_is_here:
        hardware = this_machine(machine)
    served = replace(model.anatomy.spec, dtype=dtype)
    elements = sum(t.num_elements for t in expected_tensors(served) if t.stack != "mtp")
    per_element = weight_bytes(served, options.deployment.parallel).total / max(1, elements)
    return Serving(dtype, dtype if kv == "auto" else kv, per_element, hardware)


def this_machine(machine: Machine | None) -> HardwareSpec | None:
    """The measured machine as a HardwareSpec, or None where it was not measured."""
    if machine is None or machine.memory_bytes is None:
        return None
    return measured_machine(
        "this machine",
        memory_bytes=machine.memory_bytes,
        bandwidth_bytes_per_s=machine.read.high,
        flops=(("float32", machine.gemm.high),),
        method="PyTorch sum of 512 MiB and float32 GEMM, the best run over 1 and all threads",
    )
