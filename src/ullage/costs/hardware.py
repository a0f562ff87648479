"""What a model runs on: `HardwareSpec`, the catalogue in `hardware.toml`, and `--gpu` names.

Holds data and its reader. "This machine" is a HardwareSpec too, built from a measurement by
`checkup/machine.py`; what a model takes from a device is `planning/ledger.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ullage.errors import BadUsage

CATALOGUE = Path(__file__).with_name("hardware.toml")
MAX_DEVICES = 100_000

HardwarePlatform = Literal["cuda", "rocm", "cpu"]


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """One device: memory in bytes, bandwidth and links in bytes/s, dense FLOP/s by dtype.

    `memory_bytes` is the total that the driver reports; `memory_bytes_seen` spans the readings
    that other drivers gave. `flops` and `links` are (name, rate) pairs; a link's rate is one
    direction with all its peers together. `sources` pairs a field with where its value is from;
    `compute_capability` is NVIDIA's, None for others. `measured` is true for a machine that was
    measured and not looked up.
    """

    name: str
    device_name: str
    platform: HardwarePlatform
    memory_bytes: int
    memory_bytes_seen: tuple[int, int]
    bandwidth_bytes_per_s: float
    flops: tuple[tuple[str, float], ...]
    links: tuple[tuple[str, float], ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    compute_capability: tuple[int, int] | None = None
    measured: bool = False

    def flops_per_s(self, dtype: str) -> float | None:
        """Dense FLOP/s with operands of this dtype, or None where the device has no such unit."""
        return dict(self.flops).get(dtype)

    def link_bytes_per_s(self) -> float | None:
        """The fastest link between devices of this kind, one direction, or None without any."""
        return max((rate for _, rate in self.links), default=None)

    def source(self, field: str) -> str:
        """Where one field's value comes from; "" when nobody said."""
        return dict(self.sources).get(field, "")


@dataclass(frozen=True, slots=True)
class Gpus:
    """What `--gpu NAME[:N]` says: N devices of one kind; `counted` is whether N was written."""

    hardware: HardwareSpec
    count: int = 1
    counted: bool = False


def catalogue() -> tuple[HardwareSpec, ...]:
    """Every device of `hardware.toml`, in its order."""
    return tuple(_spec(name, row) for name, row in _rows().items())


def find_hardware(name: str) -> HardwareSpec:
    """The device of that name or alias, whatever the case and separators. Raises BadUsage."""
    wanted = _key(name)
    rows = _rows()
    for known, row in rows.items():
        if wanted in {_key(known), _key(row["device_name"]), *map(_key, row["aliases"])}:
            return _spec(known, row)
    raise BadUsage(
        f"{name[:60]!r} is not a device that is known here",
        field="--gpu",
        expected=f"one of {', '.join(rows)}",
    )


def parse_gpus(text: str) -> Gpus:
    """`H100-SXM:8` → eight of them; without `:N` one. Raises BadUsage."""
    name, colon, count_text = text.partition(":")
    if not colon:
        return Gpus(find_hardware(name))
    count = int(count_text) if count_text.isascii() and count_text.isdecimal() else 0
    if not 1 <= count <= MAX_DEVICES or len(count_text) > 6:
        raise BadUsage(
            f"{count_text[:20]!r} is not a number of devices",
            field="--gpu",
            expected=f"NAME:N with N from 1 to {MAX_DEVICES:,}",
        )
    return Gpus(find_hardware(name), count, counted=True)


def measured_machine(
    name: str,
    *,
    memory_bytes: int,
    bandwidth_bytes_per_s: float,
    flops: tuple[tuple[str, float], ...],
    method: str,
    platform: HardwarePlatform = "cpu",
) -> HardwareSpec:
    """A HardwareSpec for a machine that was measured; `method` says how, and sources repeat it."""
    fields = ("memory_bytes", "bandwidth", "flops")
    return HardwareSpec(
        name=name,
        device_name=name,
        platform=platform,
        memory_bytes=memory_bytes,
        memory_bytes_seen=(memory_bytes, memory_bytes),
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        flops=flops,
        sources=tuple((field, f"measured: {method}") for field in fields),
        measured=True,
    )


def _rows() -> dict[str, dict[str, Any]]:
    # Imported here: the other verbs that import this module's types need no TOML reader.
    import tomllib

    with CATALOGUE.open("rb") as file:
        return tomllib.load(file)


def _key(name: str) -> str:
    """Case and separators do not tell devices apart: `NVIDIA H100 80GB HBM3` is `h10080gbhbm3`."""
    letters = "".join(c for c in name.casefold() if c.isalnum())
    return letters.removeprefix("nvidia").removeprefix("amd").removeprefix("instinct")


def _spec(name: str, row: dict[str, Any]) -> HardwareSpec:
    return HardwareSpec(
        name=name,
        device_name=row["device_name"],
        platform=row["platform"],
        memory_bytes=row["memory_bytes"],
        memory_bytes_seen=tuple(row["memory_bytes_seen"]),
        bandwidth_bytes_per_s=row["bandwidth"],
        flops=tuple(row["flops"].items()),
        links=tuple(row["links"].items()),
        sources=tuple(row["source"].items()),
        compute_capability=tuple(row["compute_capability"])
        if "compute_capability" in row
        else None,
    )
