"""GPUs of this machine by NVML, and which of them a server here runs on: by its processes.

Holds the asking; the library (nvidia-ml-py) is imported when it is first asked, and whatever it
lacks is a reason in words. Source: nvml.h and pynvml.py of nvidia-ml-py 13.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ullage.telemetry.gpus import MHZ, throttled_because
from ullage.telemetry.listeners import PROC, Processes, names_pids_as_the_machine
from ullage.telemetry.snapshot import Gpu
from ullage.telemetry.wire import origin_and_path

MODULE = "pynvml"
NO_LIBRARY = "NVML: the Python package nvidia-ml-py is not installed"
FOREIGN_PIDS = (
    "NVML names processes as the machine does, and this runs in a container that names them anew"
)
NOT_YET = "NVML does not answer"
STALE_S = 10.0
"""After which what a driver told before it went silent is told no more."""
LOOK_AGAIN_S = 10.0
"""How long a server's processes are taken to be the same ones."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A GPU, or an instance of one, and the processes that compute on it."""

    gpu: Gpu
    pids: frozenset[int]


def is_installed() -> bool:
    """Whether there is a library to ask. It is not imported for that."""
    return find_spec(MODULE) is not None


class Nvml:
    """The driver of this machine. Raises NoNvml where there is none."""

    def __init__(self) -> None:
        try:
            self._nvml: Any = importlib.import_module(MODULE)
        except ImportError:
            raise NoNvml(NO_LIBRARY) from None
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise NoNvml(f"NVML: {error}") from error

    def close(self) -> None:
        self._asked("nvmlShutdown")

    def devices(self) -> tuple[Owned, ...]:
        """Every GPU of the machine, an instance for itself where it is partitioned.

        Raises:
            NoNvml: the processes of none of them are told.
        """
        count = self._asked("nvmlDeviceGetCount") or 0
        handles = {at: self._asked("nvmlDeviceGetHandleByIndex", at) for at in range(count)}
        found = [
            owned
            for index, handle in handles.items()
            if handle is not None  # one that fell off the bus has no handle
            for owned in self._owned(index, handle)
        ]
        if not found:
            raise NoNvml(
                "NVML knows no GPU" if not count else "NVML: no GPU tells of its processes"
            )
        return tuple(found)

    def _owned(self, index: int, handle: Any) -> Iterator[Owned]:
        gpu = self._gpu(index, handle)
        mode = self._asked("nvmlDeviceGetMigMode", handle)
        if not mode or not mode[0]:
            pids = self._pids(handle)
            if pids is not None:
                yield Owned(gpu, pids)
            return
        for at in range(self._asked("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            instance = self._asked("nvmlDeviceGetMigDeviceHandleByIndex", handle, at)
            if instance is None:
                continue  # not every place has one
            number = self._asked("nvmlDeviceGetGpuInstanceId", instance)
            pids = None if number is None else self._pids(instance)
            if pids is not None:
                used, total = self._memory(instance)
                # Clocks and heat are the whole GPU's; how busy an instance is NVML does not tell.
                yield Owned(
                    replace(gpu, index=f"{index}/{number}", used_bytes=used, total_bytes=total,
                            busy_ratio=None, power_watts=None),
                    pids,
                )  # fmt: skip

    def _gpu(self, index: int, handle: Any) -> Gpu:
        nvml = self._nvml
        used, total = self._memory(handle)
        busy = self._asked("nvmlDeviceGetUtilizationRates", handle)
        clock = self._asked("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM)
        highest = self._asked("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM)
        milliwatts = self._asked("nvmlDeviceGetPowerUsage", handle)
        # The library is to lose the second of each pair, older ones lack the first.
        degrees = self._asked("nvmlDeviceGetTemperatureV", handle, nvml.NVML_TEMPERATURE_GPU)
        if degrees is None:
            degrees = self._asked("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)
        reasons = self._asked("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            reasons = self._asked("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return Gpu(
            index=str(index),
            name=_text(self._asked("nvmlDeviceGetName", handle)),
            used_bytes=used,
            total_bytes=total,
            busy_ratio=None if busy is None or not 0 <= busy.gpu <= 100 else busy.gpu / 100,
            sm_clock_hz=None if clock is None else clock * MHZ,
            max_sm_clock_hz=None if highest is None else highest * MHZ,
            power_watts=None if milliwatts is None else milliwatts / 1000,
            temperature_celsius=None if degrees is None else float(degrees),
            throttled_because=throttled_because(reasons),
            uuid=_text(self._asked("nvmlDeviceGetUUID", handle)),
        )

    def _memory(self, handle: Any) -> tuple[float | None, float | None]:
        memory = self._asked("nvmlDeviceGetMemoryInfo", handle)
        if memory is None or not 0 <= memory.used <= memory.total:
            return None, None
        return float(memory.used), float(memory.total)

    def _pids(self, handle: Any) -> frozenset[int] | None:
        processes = self._asked("nvmlDeviceGetComputeRunningProcesses", handle)
        return None if processes is None else frozenset(one.pid for one in processes)

    def _asked(self, name: str, *arguments: Any) -> Any:
        """The answer; None where this GPU, driver or library has none."""
        function: Callable[..., Any] | None = getattr(self._nvml, name, None)
        if function is None:
            return None
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


_Urls = Sequence[str]
_Answers = Mapping[str, Sequence[Gpu] | str]
"""url → the GPUs that its processes run on, or why they are not known."""


class NoNvml(Exception):
    """There is no NVML, or it tells nothing; `str()` says why."""


def _text(answer: Any) -> str:
    """Older libraries answer in bytes."""
    return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else str(answer or "")


class LocalGpus:
    """The GPUs of servers on this machine, asked for in a thread: the first answer of a driver
    that nobody uses takes seconds, and one whose GPU is lost may never answer."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._nvml: Nvml | None = None
        self._processes: Processes | None = None
        self._look_again_s = 0.0
        self._asking: asyncio.Future[_Answers] | None = None
        self._asked_s = 0.0
        self._last: _Answers = {}

    async def owned(self, urls: Sequence[str], wait_s: float) -> _Answers:
        """url → the GPUs that its processes run on, or why they are not known."""
        if self._asking is None:
            self._asked_s = time.monotonic()
            self._asking = _in_thread(self._ask, tuple(urls))
        await asyncio.wait({self._asking}, timeout=wait_s)
        if self._asking.done():
            asking, self._asking = self._asking, None
            self._last = asking.result()
        elif time.monotonic() - self._asked_s > STALE_S:
            self._last = {}
        return {url: self._last.get(url, NOT_YET) for url in urls}

    async def close(self) -> None:
        """Let the driver go; one that does not answer is left to itself."""
        if self._asking is None and self._nvml is not None:
            self._nvml.close()

    def _ask(self, urls: Sequence[str]) -> _Answers:
        if not names_pids_as_the_machine(self._proc):
            return dict.fromkeys(urls, FOREIGN_PIDS)
        try:
            if self._nvml is None:
                self._nvml = Nvml()
            devices = self._nvml.devices()
        except NoNvml as error:
            return dict.fromkeys(urls, str(error))
        except Exception as error:  # a driver that is being replaced, a library of another kind
            return dict.fromkeys(urls, f"NVML failed ({type(error).__name__}): {error}"[:200])
        if self._processes is None or time.monotonic() >= self._look_again_s:
            self._processes = Processes(self._proc)
            self._look_again_s = time.monotonic() + LOOK_AGAIN_S
        return {url: _of(url, devices, self._processes) for url in urls}


def _in_thread(ask: Callable[[_Urls], _Answers], urls: _Urls) -> asyncio.Future[_Answers]:
    """What `ask` answers, from a thread that no end of the program waits for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Answers] = loop.create_future()

    def take(answers: _Answers) -> None:
        if not future.done():
            future.set_result(answers)

    def run() -> None:
        answers = ask(urls)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(take, answers)

    threading.Thread(target=run, name="NVML", daemon=True).start()
    return future


def _of(url: str, devices: Sequence[Owned], processes: Processes) -> Sequence[Gpu] | str:
    origin, _ = origin_and_path(url)
    serving = processes.serving(origin.host, origin.port)
    if not serving:
        return f"no process that may be seen by this user listens at {origin.header}"
    found = [owned.gpu for owned in devices if owned.pids & serving]
    return found or f"no process of the server at {origin.header} computes on a GPU, says NVML"
