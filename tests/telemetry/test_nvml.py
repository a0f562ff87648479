"""A GPU is a local server's where a process of the server computes on it, and else nobody's."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.telemetry.driver import (
    HELD_BY_HEAT,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    NOT_SUPPORTED,
    Card,
    NVMLError,
    Process,
    fake_proc,
    fake_pynvml,
)
from ullage.telemetry import nvml
from ullage.telemetry.listeners import Processes, names_pids_as_the_machine
from ullage.telemetry.nvml import FOREIGN_PIDS, NO_LIBRARY, NOT_YET, LocalGpus
from ullage.telemetry.snapshot import Gpu

URL = "http://127.0.0.1:8000"
AT_8000 = "0100007F:1F40"
ANY_8000 = "00000000:1F40"
GIB = 1 << 30
# A server as vLLM starts it: the API server listens, its child is the engine, whose children work.
VLLM = (
    Process(10, listens=(AT_8000,)),
    Process(11, parent=10, name="VLLM::EngineCor"),
    Process(12, parent=11, name="VLLM::Worker_TP0"),
    Process(13, parent=11, name="VLLM::Worker (1)"),
    Process(99, name="somebody"),
)


def owned(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *cards: Card,
    processes: tuple[Process, ...] = VLLM,
    urls: tuple[str, ...] = (URL,),
    in_container: bool = False,
    **options: Any,
) -> list[Any]:
    """What each of the urls is told to run on."""
    module = fake_pynvml(*cards, **options)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    proc = fake_proc(folder / "proc", *processes, in_container=in_container)

    async def ask() -> list[Any]:
        local = LocalGpus(proc)
        try:
            found = await local.owned(urls, 60.0)
            assert found == await local.owned(urls, 60.0)
        finally:
            await local.close()
        return [found[url] for url in urls]

    told = asyncio.run(ask())
    assert module.state.ready == 0, "what was begun is ended"
    return told


def test_a_server_has_the_gpus_on_which_its_processes_compute(tmp_path, monkeypatch) -> None:
    cards = (Card((12,), "GPU-a"), Card((13, 99), "GPU-b"), Card((99,), "GPU-c"), Card((), "GPU-d"))
    (gpus,) = owned(tmp_path, monkeypatch, *cards)
    assert [gpu.uuid for gpu in gpus] == ["GPU-a", "GPU-b"]
    assert gpus[0] == Gpu(
        "0",
        "NVIDIA H200",
        used_bytes=139 * GIB,
        total_bytes=141 * GIB,
        busy_ratio=0.93,
        sm_clock_hz=1.755e9,
        max_sm_clock_hz=1.98e9,
        power_watts=598.25,
        temperature_celsius=62.0,
        throttled_because=("sw_power_cap",),
        uuid="GPU-a",
    )


def test_servers_of_one_machine_are_told_apart(tmp_path, monkeypatch) -> None:
    processes = (*VLLM, Process(20, listens=("0100007F:1F41",)), Process(21, parent=20))
    cards = (Card((12, 13), "GPU-a"), Card((21,), "GPU-b"))
    urls = (URL, "localhost:8001/v1")
    one, two = owned(tmp_path, monkeypatch, *cards, processes=processes, urls=urls)
    assert [gpu.uuid for gpu in one] == ["GPU-a"]
    assert [gpu.uuid for gpu in two] == ["GPU-b"]


def test_api_servers_beside_the_engine_hold_their_parents_socket(tmp_path, monkeypatch) -> None:
    """vLLM with several of them: the parent opened it, and started the engine too."""
    processes = (
        Process(10, listens=(AT_8000,)),
        Process(11, parent=10, listens=(AT_8000,)),
        Process(12, parent=10, name="VLLM::EngineCor"),
    )
    (gpus,) = owned(tmp_path, monkeypatch, Card((12,)), processes=processes)
    assert len(gpus) == 1


@pytest.mark.parametrize(
    ("listens", "url"),
    [
        (AT_8000, "http://localhost:8000"),
        (ANY_8000, URL),
        ("00000000000000000000000000000000:1F40", URL),
        ("0000000000000000FFFF00000100007F:1F40", URL),
        ("00000000000000000000000001000000:1F40", "http://[::1]:8000"),
        ("0200007F:1F40", "http://127.0.0.2:8000/metrics"),
    ],
)
def test_a_listener_is_found_however_it_listens(listens, url, tmp_path, monkeypatch) -> None:
    processes = (Process(10, listens=(listens,)),)
    (gpus,) = owned(tmp_path, monkeypatch, Card((10,)), processes=processes, urls=(url,))
    assert len(gpus) == 1


def test_who_listens_at_the_very_address_comes_first(tmp_path, monkeypatch) -> None:
    processes = (Process(10, listens=(AT_8000,)), Process(20, listens=(ANY_8000,)))
    urls = (URL, "http://127.0.0.2:8000")
    cards = (Card((10,), "GPU-a"), Card((20,), "GPU-b"))
    one, two = owned(tmp_path, monkeypatch, *cards, processes=processes, urls=urls)
    assert [one[0].uuid, two[0].uuid] == ["GPU-a", "GPU-b"]


# --- reasons --------------------------------------------------------------------------------------


def test_without_the_library_it_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    proc = fake_proc(tmp_path / "proc", *VLLM)

    async def ask() -> Any:
        local = LocalGpus(proc)
        return await local.owned((URL,), 60.0)

    assert asyncio.run(ask()) == {URL: NO_LIBRARY}


def test_without_a_driver_the_library_says_so(tmp_path, monkeypatch) -> None:
    (why,) = owned(tmp_path, monkeypatch, Card((12,)), init=NVMLError(LIBRARY_NOT_FOUND))
    assert why == "NVML: NVML Shared Library Not Found"


@pytest.mark.parametrize(
    ("cards", "processes", "why"),
    [
        ((), VLLM, "NVML knows no GPU"),
        ((Card((99,)),), VLLM, "no process of the server at 127.0.0.1:8000 computes on a GPU"),
        ((Card((12,)),), (), "no process that may be seen by this user listens at 127.0.0.1:8000"),
        (
            (Card((10,)),),
            (Process(10, listens=(AT_8000,), hidden=True),),
            "no process that may be seen by this user listens at",
        ),
        ((Card(NVMLError(NO_PERMISSION)),), VLLM, "NVML: no GPU tells of its processes"),
        ((Card((12,), lost=True),), VLLM, "NVML: no GPU tells of its processes"),
    ],
)
def test_what_keeps_it_from_being_known_is_said(cards, processes, why, tmp_path, monkeypatch):
    (told,) = owned(tmp_path, monkeypatch, *cards, processes=processes)
    assert isinstance(told, str) and why in told


def test_in_a_container_process_ids_are_other_ones(tmp_path, monkeypatch) -> None:
    """12 there may be anybody here."""
    (why,) = owned(tmp_path, monkeypatch, Card((12,)), in_container=True)
    assert why == FOREIGN_PIDS


def test_a_library_that_breaks_is_said_to(tmp_path, monkeypatch) -> None:
    (why,) = owned(tmp_path, monkeypatch, Card(ValueError("odd")))
    assert why == "NVML failed (ValueError): odd"


def test_a_driver_that_takes_its_time_holds_up_no_round(monkeypatch, tmp_path) -> None:
    go_on = threading.Event()

    def slowly(urls: Any) -> Any:
        go_on.wait(60.0)
        return {URL: (Gpu("0"),)}

    async def ask() -> None:
        local = LocalGpus(tmp_path)
        monkeypatch.setattr(local, "_ask", slowly)
        assert await local.owned((URL,), 0.01) == {URL: NOT_YET}
        go_on.set()
        assert await local.owned((URL,), 60.0) == {URL: (Gpu("0"),)}
        await local.close()

    asyncio.run(ask())


def test_what_a_driver_told_before_it_hung_is_not_told_for_long(monkeypatch, tmp_path) -> None:
    """As one does whose GPU is lost. It keeps nobody from ending."""
    never = threading.Event()
    answers = iter([lambda: {URL: (Gpu("0"),)}, never.wait])

    async def ask() -> None:
        local = LocalGpus(tmp_path)
        monkeypatch.setattr(local, "_ask", lambda _: next(answers)())
        assert await local.owned((URL,), 60.0) == {URL: (Gpu("0"),)}
        assert await local.owned((URL,), 0.01) == {URL: (Gpu("0"),)}, "it may be slow"
        monkeypatch.setattr(nvml, "STALE_S", 0.0)
        assert await local.owned((URL,), 0.01) == {URL: NOT_YET}
        await local.close()

    asyncio.run(ask())
    (thread,) = [one for one in threading.enumerate() if one.name == "NVML"]
    assert thread.daemon
    never.set()
    thread.join(60.0)


# --- values ---------------------------------------------------------------------------------------


def test_what_a_gpu_does_not_tell_is_not_known(tmp_path, monkeypatch) -> None:
    no = NVMLError(NOT_SUPPORTED)
    card = Card((12,), used=no, busy=no, reasons=no, milliwatts=no)
    ((gpu,),) = owned(tmp_path, monkeypatch, card)
    assert (gpu.used_bytes, gpu.total_bytes, gpu.busy_ratio) == (None, None, None)
    assert (gpu.power_watts, gpu.throttled_because) == (None, None)
    assert gpu.temperature_celsius == 62.0


def test_an_old_library_is_asked_by_its_names(tmp_path, monkeypatch) -> None:
    ((gpu,),) = owned(tmp_path, monkeypatch, Card((12,), reasons=HELD_BY_HEAT), version=11)
    assert gpu.throttled_because == ("hw_slowdown", "hw_thermal_slowdown")
    assert (gpu.name, gpu.uuid, gpu.temperature_celsius) == ("NVIDIA H200", "GPU-0", 62.0)


def test_of_a_gpu_in_parts_a_server_has_its_part(tmp_path, monkeypatch) -> None:
    parts = [Card((99,), used=GIB, total=20 * GIB, instance=1),
             Card((12,), used=15 * GIB, total=20 * GIB, instance=2)]  # fmt: skip
    ((gpu,),) = owned(tmp_path, monkeypatch, Card((), instances=parts))
    assert (gpu.index, gpu.used_bytes, gpu.total_bytes) == ("0/2", 15 * GIB, 20 * GIB)
    assert (gpu.busy_ratio, gpu.power_watts) == (None, None), "told of the whole GPU alone"
    assert gpu.sm_clock_hz == 1.755e9


# --- the real ones --------------------------------------------------------------------------------


def test_the_stand_in_has_the_librarys_names_and_arguments() -> None:
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    for name, stand_in in vars(fake_pynvml()).items():
        if name.startswith("nvml"):
            names = list(inspect.signature(stand_in).parameters)
            assert len(names) == len(inspect.signature(getattr(real, name)).parameters), name
        elif name.startswith("NVML_"):
            assert getattr(real, name) == stand_in
    assert str(real.NVMLError(LIBRARY_NOT_FOUND)) == str(NVMLError(LIBRARY_NOT_FOUND))


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux's /proc is needed")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_machines_own_proc_tells_who_listens_and_their_children(family) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.socket(family) as listening:
        try:
            listening.bind((host, 0))
        except OSError:
            pytest.skip(f"no {host} on this machine")
        listening.listen()
        port = listening.getsockname()[1]
        with subprocess.Popen(["sleep", "600"]) as child:
            try:
                assert {os.getpid(), child.pid} <= Processes().serving(host, port)
                assert Processes().serving("127.0.0.77", port) == frozenset()
                assert Processes().serving(host, 1) == frozenset()
            finally:
                child.kill()
    assert isinstance(names_pids_as_the_machine(), bool)


def test_without_a_proc_nobody_is_known(tmp_path) -> None:
    assert Processes(tmp_path / "none").serving("127.0.0.1", 8000) == frozenset()
    assert not names_pids_as_the_machine(tmp_path / "none")


def test_whether_it_is_installed_is_told_without_importing_it(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    nvml.is_installed()
    assert "pynvml" not in sys.modules
