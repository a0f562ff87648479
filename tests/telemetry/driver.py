"""A pynvml that is not there, by the names and shapes of nvidia-ml-py 13, and a /proc beside it.

Holds both; `test_nvml` holds the names to the real library where it is installed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

NOT_SUPPORTED, NO_PERMISSION, LIBRARY_NOT_FOUND, GPU_IS_LOST = 3, 4, 12, 15
WORDS = {
    NOT_SUPPORTED: "Not Supported",
    NO_PERMISSION: "Insufficient Permissions",
    LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
    GPU_IS_LOST: "GPU is lost",
}
HELD_BY_HEAT = 0x40 | 0x8


class NVMLError(Exception):
    """As the library's: made of a code, told in words."""

    def __init__(self, code: int) -> None:
        self.value = code

    def __str__(self) -> str:
        return WORDS[self.value]


@dataclass
class Card:
    """One GPU. A value that is an exception is raised by the call that would tell it."""

    pids: Any = ()
    uuid: str = "GPU-0"
    name: str = "NVIDIA H200"
    used: Any = 139 << 30
    total: int = 141 << 30
    busy: Any = 93
    reasons: Any = 0x4
    milliwatts: Any = 598_250
    lost: bool = False
    instances: list[Card] = field(default_factory=list)
    instance: int = 0


def fake_pynvml(*cards: Card, version: int = 13, init: Exception | None = None) -> ModuleType:
    """The module; `version` 11 lacks what came later, and answers in bytes."""
    made = ModuleType("pynvml")
    state = SimpleNamespace(ready=0)
    old = version < 12

    def told(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        assert state.ready, "asked before nvmlInit or after nvmlShutdown"
        return value

    def text(value: str) -> Any:
        return value.encode() if old else value

    def nvmlInit() -> None:
        if init is not None:
            raise init
        state.ready += 1

    def nvmlShutdown() -> None:
        state.ready -= 1

    def nvmlDeviceGetHandleByIndex(index: int) -> Card:
        card = cards[index]
        return told(NVMLError(GPU_IS_LOST) if card.lost else card)

    def nvmlDeviceGetMemoryInfo(handle: Card, version: int | None = None) -> Any:
        told(handle.used)
        return SimpleNamespace(total=handle.total, free=handle.total - handle.used,
                               used=handle.used)  # fmt: skip

    def nvmlDeviceGetUtilizationRates(handle: Card) -> Any:
        return SimpleNamespace(gpu=told(handle.busy), memory=50)

    def nvmlDeviceGetComputeRunningProcesses(handle: Card) -> list[Any]:
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=1 << 30, gpuInstanceId=0xFFFFFFFF)
            for pid in told(handle.pids)
        ]

    def nvmlDeviceGetClockInfo(handle: Card, type: int) -> int:
        assert type == made.NVML_CLOCK_SM
        return told(1755)

    def nvmlDeviceGetMaxClockInfo(handle: Card, type: int) -> int:
        assert type == made.NVML_CLOCK_SM
        return told(1980)

    def temperature(handle: Card, sensor: int) -> int:
        assert sensor == made.NVML_TEMPERATURE_GPU
        return told(62)

    def nvmlDeviceGetMigMode(device: Card) -> list[int]:
        if not device.instances:
            raise NVMLError(NOT_SUPPORTED)
        return told([1, 1])

    def nvmlDeviceGetMigDeviceHandleByIndex(device: Card, index: int) -> Card:
        if index >= len(device.instances):
            raise NVMLError(NOT_SUPPORTED)
        return told(device.instances[index])

    functions = [
        nvmlInit,
        nvmlShutdown,
        nvmlDeviceGetHandleByIndex,
        nvmlDeviceGetMemoryInfo,
        nvmlDeviceGetUtilizationRates,
        nvmlDeviceGetComputeRunningProcesses,
        nvmlDeviceGetClockInfo,
        nvmlDeviceGetMaxClockInfo,
        nvmlDeviceGetMigMode,
        nvmlDeviceGetMigDeviceHandleByIndex,
    ]
    for function in functions:
        setattr(made, function.__name__, function)
    made.NVMLError = NVMLError  # type: ignore[attr-defined]
    made.NVML_CLOCK_SM, made.NVML_TEMPERATURE_GPU = 1, 0  # type: ignore[attr-defined]
    simple: dict[str, Any] = {
        "nvmlDeviceGetCount": lambda: told(len(cards)),
        "nvmlDeviceGetName": lambda handle: told(text(handle.name)),
        "nvmlDeviceGetUUID": lambda handle: told(text(handle.uuid)),
        "nvmlDeviceGetPowerUsage": lambda handle: told(handle.milliwatts),
        "nvmlDeviceGetMaxMigDeviceCount": lambda device: told(7),
        "nvmlDeviceGetGpuInstanceId": lambda device: told(device.instance),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: told(handle.reasons),
        "nvmlDeviceGetTemperature": temperature,
    }
    if not old:
        simple["nvmlDeviceGetCurrentClocksEventReasons"] = lambda handle: told(handle.reasons)
        simple["nvmlDeviceGetTemperatureV"] = lambda handle, sensor, version=0x100000C: temperature(
            handle, sensor
        )
    for name, call in simple.items():
        setattr(made, name, call)
    made.state = state  # type: ignore[attr-defined]
    return made


# --- /proc ----------------------------------------------------------------------------------------


@dataclass
class Process:
    """`listens`: as /proc/net/tcp has them, such as 0100007F:1F40; `hidden`: another user's."""

    pid: int
    parent: int = 1
    listens: tuple[str, ...] = ()
    name: str = "python3"
    hidden: bool = False


def fake_proc(folder: Path, *processes: Process, in_container: bool = False) -> Path:
    """A /proc with these processes."""
    net = folder / "net"
    net.mkdir(parents=True)
    inode_of: dict[str, int] = {}
    lines: dict[str, list[str]] = {"tcp": ["  sl  local_address …"], "tcp6": ["  sl  …"]}
    for process in processes:
        fd = folder / str(process.pid) / "fd"
        fd.mkdir(parents=True)
        stat = f"{process.pid} ({process.name}) S {process.parent} 1 1 0 -1"
        (folder / str(process.pid) / "stat").write_text(stat)
        (fd / "0").symlink_to("/dev/null")
        for number, address in enumerate(process.listens, start=3):
            inode = inode_of.setdefault(address, 90_000 + len(inode_of))
            if not process.hidden:
                (fd / str(number)).symlink_to(f"socket:[{inode}]")
    for address, inode in inode_of.items():
        zero = "0" * len(address.partition(":")[0])
        line = f" 1: {address} {zero}:0000 0A 00000000:00000000 00:00000000 00000000 1000 0 {inode}"
        lines["tcp6" if len(zero) > 8 else "tcp"].append(line)
    # One that is connected, not listening.
    lines["tcp"].append(
        " 9: 0100007F:1F40 0100007F:C000 01 00000000:00000000 00:00000000 00000000 1000 0 1"
    )
    for name, rows in lines.items():
        (net / name).write_text("\n".join((*rows, "")))
    (folder / "self" / "ns").mkdir(parents=True)
    number = 4026533999 if in_container else 4026531836
    (folder / "self" / "ns" / "pid").symlink_to(f"pid:[{number}]")
    return folder
