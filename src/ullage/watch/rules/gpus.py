"""Rules about the devices under a replica: W018 clocks held down, W019 Xid errors.

Holds what the driver's reasons and codes mean. They come from DCGM's exporter or NVML.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.findings.answer import Answer, Clear, Fired
from ullage.findings.finding import Evidence, Severity
from ullage.telemetry.gpus import NOBODY_ASKED
from ullage.telemetry.snapshot import Gpu, Snapshot
from ullage.watch.rule import Rule, Subject
from ullage.watch.rules.facts import Lacking, answer_of, answering, percent, tidy

HARMFUL = ("thermal", "brake", "hw_slowdown")
"""Parts of the names of reasons that mean heat or a failing supply. A power cap, application
clocks and idleness are how these devices are meant to run."""
AMBIGUOUS = "hw_slowdown"
"""The driver says it in a change of clocks, too (nvml.h), as of a device that comes to rest. Heat
and the power brake have reasons of their own beside it."""
BUSY = 0.5
SLOW = 0.5
"""Of the highest clock, while busy: no power limit that is sold holds a device lower."""


def _gpus_of(now: Snapshot) -> tuple[Gpu, ...]:
    if not now.gpus:
        raise Lacking(f"GPU metrics ({now.absent.get('gpus', NOBODY_ASKED)})")
    return now.gpus


def _called(gpu: Gpu) -> str:
    return f"GPU {gpu.index}" + (f" ({gpu.name})" if gpu.name else "")


@answering
def _clocks(subject: Subject) -> Answer:
    gpus = _gpus_of(answer_of(subject))
    facts: list[Evidence] = []
    told: list[str] = []
    for gpu in gpus:
        clock = _clock_ratio(gpu)
        because = gpu.throttled_because or ()
        reasons = tuple(r for r in because if any(h in r.lower() for h in HARMFUL))
        if reasons == (AMBIGUOUS,) and (gpu.busy_ratio is None or gpu.busy_ratio < BUSY):
            reasons = ()
        if gpu.throttled_because is not None:
            facts.append(Evidence(f"{_called(gpu)} held down by", ", ".join(because) or "nothing",
                                  "", "driver"))  # fmt: skip
        if clock is not None:
            facts.append(Evidence(f"{_called(gpu)} clock", tidy(clock), "of the highest", "driver"))
        if gpu.temperature_celsius is not None and reasons:
            facts.append(Evidence(f"{_called(gpu)} temperature", tidy(gpu.temperature_celsius),
                                  "°C", "driver"))  # fmt: skip
        idle = gpu.busy_ratio is not None and gpu.busy_ratio < BUSY
        if reasons:
            at = f" at {percent(clock)} of its clock" if clock is not None else ""
            told.append(f"{_called(gpu)} is held down by {', '.join(reasons)}{at}.")
        elif clock is not None and clock < SLOW and gpu.busy_ratio is not None and not idle:
            told.append(f"{_called(gpu)} is busy and runs at {percent(clock)} of its clock.")
    if told:
        return Fired(
            f"{' '.join(told)} Every token of this replica is late by as much, and with tensor "
            "parallelism the slowest device sets the pace.",
            "Look at air flow, power cables and the neighbours (nvidia-smi -q -d PERFORMANCE); "
            "drain the replica until it is mended.",
            tuple(facts),
        )
    if not facts:
        raise Lacking("clocks, or the reasons for which they are held down")
    return Clear(tuple(facts))


def _clock_ratio(gpu: Gpu) -> float | None:
    if gpu.sm_clock_hz is None or not gpu.max_sm_clock_hz:
        return None
    return gpu.sm_clock_hz / gpu.max_sm_clock_hz


# NVIDIA's Xid catalogue: those after which the device or its link must not be trusted.
FATAL_XIDS: Mapping[int, str] = {
    48: "an uncorrectable memory error",
    64: "a memory row that could not be remapped",
    74: "an NVLink error",
    79: "the device fell off the bus",
    92: "too many corrected memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the device's own processor does not answer",
    120: "the device's own processor failed",
}


@answering
def _xids(subject: Subject) -> Answer:
    now = answer_of(subject)
    known = [gpu for gpu in _gpus_of(now) if gpu.xid_errors is not None]
    if not known:
        raise Lacking("Xid errors (DCGM_FI_DEV_XID_ERRORS)")
    facts = tuple(
        Evidence(f"{_called(gpu)} last Xid", tidy(gpu.xid_errors or 0.0), "", "driver")
        for gpu in known
    )
    fatal = [gpu for gpu in known if int(gpu.xid_errors or 0) in FATAL_XIDS]
    begun_s = now.identity.started_s
    # DCGM tells the last code for ever. An engine that began after it runs on what was mended.
    fresh = [
        gpu for gpu in fatal if gpu.xid_s is not None and (begun_s is None or begun_s <= gpu.xid_s)
    ]
    if fresh:
        told = " ".join(f"{_called(gpu)}: {_meaning(gpu)}." for gpu in fresh)
        return Fired(
            f"{told} What it computes, and what hangs on it, cannot be trusted.",
            "Drain the replica, reset or replace the device, and keep the driver's log (dmesg).",
            facts,
        )
    undated = next((gpu for gpu in fatal if gpu.xid_s is None), None)
    if undated is not None:
        raise Lacking(
            f"the time of {_called(undated)}'s {_meaning(undated)}, which was there when watching "
            "began: DCGM tells the last code for ever, mended or not"
        )
    return Clear(facts)


def _meaning(gpu: Gpu) -> str:
    code = int(gpu.xid_errors or 0)
    return f"Xid {code}, {FATAL_XIDS[code]}"


RULES = (
    Rule(
        id="W018",
        title="GPU clocks",
        severity=Severity.warning,
        category="devices",
        why="A device that is hot or short of power computes at a fraction of its speed and says "
        "so nowhere in the engine's metrics.",
        fix="Cooling and supply; then see who shares the device.",
        source="NVML's clocks event reasons; DCGM_FI_DEV_CLOCKS_EVENT_REASONS and _SM_CLOCK",
        example="throttled_because: hw_thermal_slowdown",
        check=_clocks,
    ),
    Rule(
        id="W019",
        title="GPU errors",
        severity=Severity.error,
        category="devices",
        why="After some Xid errors kernels fail, hang or compute wrong numbers; the engine sees it "
        "late or never. Codes that an application causes itself (13, 31, 43, 45) do not count. "
        "DCGM tells the last code for ever: only one that came while watching is news, until the "
        "engine begins anew; of one that was there before it is not known whether it was mended.",
        fix="Drain, reset, replace.",
        source="NVIDIA's Xid catalogue; DCGM_FI_DEV_XID_ERRORS holds the last code",
        example="DCGM_FI_DEV_XID_ERRORS 79 after 0",
        check=_xids,
    ),
)
