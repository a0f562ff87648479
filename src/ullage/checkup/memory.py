"""Where the memory goes: the ledger of this machine, of a named device, and what fits where.

Holds the parts of the document that say it. A ledger's rows are whole bytes and add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MachineReading:
    """Memory of this machine at one instant while the engine was ready and idle, in bytes.

    `engine_private` is the engine's anonymous memory, weights included; `kv_total` is what its KV
    cache may grow to. It is allocated once but touched, and so taken, only as it is used.
    """

    total: int
    available: int
    engine_private: int
    weights: int
    weights_source: str
    kv_total: int
    kv_source: str


def machine_ledger(reading: MachineReading) -> dict[str, Any] | None:
    """This machine's memory as rows that add up, or None when the readings contradict each other.

    Free is what the kernel calls available less what the KV cache may still take.
    """
    rest = reading.engine_private - reading.weights
    others = reading.total - reading.available - reading.engine_private
    free = reading.available - reading.kv_total
    rows = [
        _row("weights", "weights", reading.weights, reading.weights_source),
        _row("KV cache", "kv", reading.kv_total, reading.kv_source, "whole, as it may fill"),
        _row("engine", "engine", rest, "measured", "its private memory less weights, when idle"),
        _row("other programs", "other", others, "measured", "total less available less engine"),
        _row("free", "free", free, "measured", "available less the whole KV cache"),
    ]
    if any(row["bytes"] < 0 for row in rows):
        return None
    return {
        "device": "This machine, embedded engine",
        "rows": rows,
        "total_bytes": reading.total,
        "total_source": "measured: MemTotal of the kernel",
        "caption": caption(free, reading.total, "this machine"),
    }


def caption(free_bytes: int, total_bytes: int, device: str) -> str:
    """What to conclude from a ledger."""
    from ullage.checkup.html.words import byte_size, percent

    return (
        f"Of {byte_size(total_bytes)} on {device}, {byte_size(free_bytes)} "
        f"({percent(free_bytes / total_bytes)}) stay free: that is the ullage."
    )


def _row(name: str, kind: str, num_bytes: int, source: str, note: str = "") -> dict[str, Any]:
    return {"name": name, "kind": kind, "bytes": num_bytes, "source": source, "note": note}
