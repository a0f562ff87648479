"""What DCGM's exporter says of GPUs → each with the place that it is in: host, pod, MIG instance.

Holds the exporter's names, units and labels, what NVML's reasons are called, and what stands for
"not known". Whose a GPU is, is `watch.gpu_places`'; scraping `gpu_pages`', NVML `nvml.py`'s.
Source: DCGM's dcgm_fields.h and dcgm_structs.h, nvml.h, dcgm-exporter's etc/*.csv and
rendermetrics (2.x to 4.9; 4.9 takes DCGM 4.7's names, which are in base units).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from ullage.telemetry.exposition import Labels, Page, page_of
from ullage.telemetry.snapshot import Gpu

NOBODY_ASKED = (
    "nobody was asked: --gpu-metrics URL of a DCGM exporter, or the package nvidia-ml-py for "
    "engines on this machine"
)
NO_SERIES = "Prometheus has no series of a DCGM exporter"
UNSOUGHT = frozenset({NOBODY_ASKED, NO_SERIES})
"""Reasons that are no news to whoever did not ask for GPUs."""
NO_METRIC = "it has no metric of a DCGM exporter that is read here"

Samples = Mapping[str, Mapping[Labels, float]]
"""Name → labels → number, as a Page has them."""

MIB = float(1 << 20)
MHZ = 1e6
INT32_BLANK = float(0x7FFFFFF0)
"""From here on DCGM means: blank, not found, not supported, not permitted. Its 64-bit blanks and
those of floating point (2**47) lie above."""
FP64_BLANK = 2.0**47
"""The same for what is told in bytes and hertz: a real clock can be above 0x7ffffff0 Hz."""


@dataclass(frozen=True, slots=True)
class Field:
    """A metric, and what its number is multiplied by and divided by to be in base units; from
    `blank` on it is not known."""

    metric: str
    factor: float = 1.0
    over: float = 1.0
    blank: float = INT32_BLANK


def _base(metric: str) -> Field:
    return Field(metric, blank=FP64_BLANK)


# The first that a GPU has counts.
FIELDS: Mapping[str, tuple[Field, ...]] = {
    "used_bytes": (_base("DCGM_FI_DEV_FB_USED_BYTES"), Field("DCGM_FI_DEV_FB_USED", MIB)),
    "free_bytes": (_base("DCGM_FI_DEV_FB_FREE_BYTES"), Field("DCGM_FI_DEV_FB_FREE", MIB)),
    "reserved_bytes": (
        _base("DCGM_FI_DEV_FB_RESERVED_BYTES"),
        Field("DCGM_FI_DEV_FB_RESERVED", MIB),
    ),
    "total_bytes": (_base("DCGM_FI_DEV_FB_CAPACITY_BYTES"), Field("DCGM_FI_DEV_FB_TOTAL", MIB)),
    "busy_ratio": (
        Field("DCGM_FI_DEV_GPU_UTIL", over=100.0),
        Field("DCGM_FI_DEV_GPU_UTIL_RATIO"),
        Field("DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO"),
        Field("DCGM_FI_PROF_GR_ENGINE_ACTIVE"),
    ),
    "sm_clock_hz": (_base("DCGM_FI_DEV_SM_CLOCK_HERTZ"), Field("DCGM_FI_DEV_SM_CLOCK", MHZ)),
    "max_sm_clock_hz": (
        _base("DCGM_FI_DEV_SM_MAX_CLOCK_HERTZ"),
        Field("DCGM_FI_DEV_MAX_SM_CLOCK", MHZ),
    ),
    "power_watts": (Field("DCGM_FI_DEV_BOARD_POWER_WATTS"), Field("DCGM_FI_DEV_POWER_USAGE")),
    "temperature_celsius": (Field("DCGM_FI_DEV_GPU_TEMP_CELSIUS"), Field("DCGM_FI_DEV_GPU_TEMP")),
    "reasons": (
        Field("DCGM_FI_DEV_CLOCKS_EVENT_REASONS"),
        Field("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"),
    ),
    "xid_errors": (Field("DCGM_FI_DEV_XID_ERROR"), Field("DCGM_FI_DEV_XID_ERRORS")),
}
METRICS: tuple[str, ...] = tuple(field.metric for fields in FIELDS.values() for field in fields)
OF_THE_WHOLE_GPU = frozenset({"DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL_RATIO"})
"""Not told of MIG instances; where it is, it is not the instance's."""
NEVER_NEGATIVE = frozenset(FIELDS) - {"temperature_celsius"}

# nvml.h. Bit 0x1, gpu_idle, holds nothing down: there is nothing to do.
IDLE_BIT = 0x1
REASONS: Mapping[int, str] = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
MOST_REASON_BITS = 53
"""A float holds no more of them exactly."""

# Labels by what they mean; the first that is there counts. `exported_` stands before those that
# Prometheus' own labels of the target hide; `pod_name` and its like are the exporter's old ones.
LABELS: Mapping[str, tuple[str, ...]] = {
    "index": ("gpu",),
    "device": ("device",),
    "uuid": ("UUID", "uuid", "gpu_uuid"),
    "name": ("modelName", "model_name"),
    "hostname": ("Hostname", "hostname"),  # the exporter's until 4.8.2, and since
    "node": ("node",),
    "instance": ("instance",),
    "cluster": ("cluster",),
    "mig_instance": ("GPU_I_ID",),
    "mig_profile": ("GPU_I_PROFILE",),
    "pod": ("exported_pod", "pod", "pod_name"),
    "namespace": ("exported_namespace", "namespace", "pod_namespace"),
    "job": ("job",),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a GPU is, as its exporter says. Empty: it does not say.

    `hosts` are names and addresses of its machine. `pod` and `namespace` are of the workload that
    has it. `cluster` is Prometheus' label.
    """

    hosts: tuple[str, ...] = ()
    namespace: str = ""
    pod: str = ""
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU in its place."""

    gpu: Gpu
    place: Place


def throttled_because(bits: float | None) -> tuple[str, ...] | None:
    """The reasons that a bitmask stands for, idleness left out; None of what is no bitmask."""
    if bits is None or bits < 0 or not float(bits).is_integer() or bits >= 2**MOST_REASON_BITS:
        return None
    mask = int(bits) & ~IDLE_BIT
    each = (1 << at for at in range(MOST_REASON_BITS))
    return tuple(REASONS.get(bit, f"reason_{bit:#x}") for bit in each if mask & bit)


def devices_on(body: bytes) -> tuple[Device, ...]:
    """Every GPU of an exporter's page, by host and index. It raises nothing."""
    return devices_of(_relevant(body).samples)


_LINES = re.compile(rb"^(?:%b)[{ ][^\n]*\n" % "|".join(METRICS).encode(), re.MULTILINE)


def _relevant(body: bytes) -> Page:
    """Of hundreds of lines per GPU those that are read. One that does not end is cut off."""
    return page_of(b"".join(_LINES.findall(body)))


def devices_of(samples: Samples) -> tuple[Device, ...]:
    """The same of series from anywhere."""
    found: dict[_Key, _Said] = {}
    for field, metrics in FIELDS.items():
        for metric in metrics:
            numbers = samples.get(metric.metric, {})
            if metric.metric == "DCGM_FI_DEV_GPU_UTIL_RATIO" and _is_percent(numbers):
                continue
            for labels, number in numbers.items():
                said = _said_of(labels, found)
                if said is not None and not (said.instance and metric.metric in OF_THE_WHOLE_GPU):
                    said.take(field, metric, number)
    sharing: dict[tuple[str, str], dict[str, float | None]] = {}
    for said in found.values():
        sharing.setdefault(said.gpu, {})[said.pod] = said.used_bytes
    # Where pods share a GPU the exporter can tell what each of them holds; with what is free that
    # adds up to nothing.
    return tuple(
        said.device(shared=len(set(sharing[said.gpu].values())) > 1)
        for _, said in sorted(found.items())
    )


def _is_percent(numbers: Mapping[Labels, float]) -> bool:
    """Headers of DCGM 4.6 gave the percentage (field 203) the name that 4.7's ratio has."""
    return any(1.0 < number < INT32_BLANK for number in numbers.values())


def _known(field: Field, number: float) -> float | None:
    """The number in base units; None of NaN, infinities and what stands for "not known"."""
    if not math.isfinite(number) or number >= field.blank:
        return None
    return number * field.factor / field.over


_Key = tuple[str, ...]
MOST_KEPT = 16_384
"""Sets of labels that are remembered between pages: most metrics of a GPU have the same."""


def _said_of(labels: Labels, found: dict[_Key, _Said]) -> _Said | None:
    """What is said of the GPU that the labels name; None where they name none."""
    key = _key_of(labels)
    if key is None:
        return None
    said = found.get(key)
    if said is None:
        said = found[key] = _Said(dict(zip(LABELS, key, strict=True)))
    return said


@lru_cache(MOST_KEPT)
def _key_of(labels: Labels) -> _Key | None:
    """The labels that tell a GPU in a place from others, in the order of LABELS: what only one
    metric has (err_code, err_msg) does not."""
    all_named = dict(labels)
    named = {
        what: next((all_named[name] for name in names if all_named.get(name)), "")
        for what, names in LABELS.items()
    }
    if not (named["uuid"] or named["index"] or named["device"]):
        return None
    return tuple(named.values())


class _Said:
    """All numbers that were told of one GPU, in one place. Of two that differ neither is known."""

    def __init__(self, named: Mapping[str, str]) -> None:
        self._named = named
        self.instance = named["mig_instance"]
        self.pod = f"{named['namespace']}/{named['pod']}"
        self.gpu = (named["uuid"] or named["index"] or named["device"], self.instance)
        self._numbers: dict[str, dict[str, float | None]] = {}  # by field and metric

    def take(self, field: str, metric: Field, number: float) -> None:
        known = _known(metric, number)
        if known is None or (known < 0 and field in NEVER_NEGATIVE):
            return
        numbers = self._numbers.setdefault(field, {})
        if numbers.setdefault(metric.metric, known) != known:
            numbers[metric.metric] = None

    def _number(self, field: str) -> float | None:
        numbers = self._numbers.get(field, {}).values()
        return next((number for number in numbers if number is not None), None)

    @property
    def used_bytes(self) -> float | None:
        return self._number("used_bytes")

    def device(self, *, shared: bool) -> Device:
        named, known = self._named, {field: self._number(field) for field in FIELDS}
        index = named["index"] or named["device"] or named["uuid"]
        hosts = (named["hostname"], named["node"], host_of(named["instance"]))
        used, total = self._memory(shared)
        busy, xid = known["busy_ratio"], known["xid_errors"]
        gpu = Gpu(
            index=f"{index}/{self.instance}" if self.instance else index,
            name=named["name"],
            used_bytes=used,
            total_bytes=total,
            busy_ratio=None if busy is None or busy > 1 else busy,
            sm_clock_hz=known["sm_clock_hz"],
            max_sm_clock_hz=known["max_sm_clock_hz"],
            # An instance is told the power of the whole GPU.
            power_watts=None if self.instance else known["power_watts"],
            temperature_celsius=known["temperature_celsius"],
            throttled_because=throttled_because(known["reasons"]),
            xid_errors=xid if xid is not None and float(xid).is_integer() else None,
            uuid=named["uuid"],
            mig_profile=named["mig_profile"],
        )
        place = Place(
            tuple(dict.fromkeys(host for host in hosts if host)),
            named["namespace"] if named["pod"] else "",
            named["pod"],
            named["cluster"],
        )
        return Device(gpu, place)

    def _memory(self, shared: bool) -> tuple[float | None, float | None]:
        """(used, total). Without a total it is the sum of its parts; older exporters count what is
        reserved as used and do not tell it apart."""
        used, total, free = map(self._number, ("used_bytes", "total_bytes", "free_bytes"))
        if total is None and used is not None and free is not None and not shared:
            total = used + free + (self._number("reserved_bytes") or 0.0)
        if total is not None and (total <= 0 or (used is not None and used > total)):
            return used, None
        return used, total


def host_of(instance: str) -> str:
    """The host of Prometheus' `instance`, which is mostly `HOST:PORT`."""
    if instance.startswith("["):
        return instance[1:].partition("]")[0]
    host, colon, port = instance.rpartition(":")
    return host if colon and port.isdecimal() and ":" not in host else instance


def at(device: Device, *hosts: str) -> Device:
    """The device with more names of its host."""
    place = device.place
    joined = tuple(dict.fromkeys((*place.hosts, *(host for host in hosts if host))))
    return replace(device, place=replace(place, hosts=joined))


def hosts_on(devices: Iterable[Device]) -> frozenset[str]:
    """Every name of a host that the devices tell."""
    return frozenset(host for device in devices for host in device.place.hosts)
