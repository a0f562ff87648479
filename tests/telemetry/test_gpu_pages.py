"""Exporters are asked once a round each; one that answers badly is said to, and holds up nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from tests.telemetry.dcgm import dcgm_page, labels_of
from tests.telemetry.rude_server import PAGE, Answer, page, raw, reset, rude_server, status
from ullage.errors import BadUsage
from ullage.telemetry.gpu_pages import GpuPages, Told
from ullage.telemetry.gpus import NO_METRIC

WAIT_S = 60.0


async def told_by(pages: GpuPages, wait_s: float = WAIT_S) -> tuple[Told, ...]:
    pages.begin()
    return await pages.told((), wait_s)


def with_server(
    answers: dict[str, Answer], do: Callable[[str, GpuPages], Awaitable[None]], path: str = ""
) -> list[str]:
    """What was asked for, in the end."""

    async def run() -> list[str]:
        async with rude_server(answers) as rude:
            url = f"http://127.0.0.1:{rude.port}{path}"
            pages = GpuPages([url])
            try:
                await do(url, pages)
            finally:
                await pages.close()
            assert all("authorization" not in headers for _, headers in rude.requests)
            return rude.paths

    return asyncio.run(run())


def test_a_page_is_asked_once_a_round_whoever_has_its_gpus() -> None:
    body = dcgm_page(labels_of(0, pod="llm/a"), labels_of(1, pod="llm/b"))

    async def do(url: str, pages: GpuPages) -> None:
        for _ in range(3):
            (told,) = await told_by(pages)
            assert (told.called, told.error, len(told.devices)) == (url, "", 2)
            assert told.hosts == {"gpu-1", "127.0.0.1"}

    assert with_server({"/metrics": page(body)}, do) == ["/metrics"] * 3


def test_a_path_of_its_own_is_asked_for() -> None:
    async def do(url: str, pages: GpuPages) -> None:
        (told,) = await told_by(pages)
        assert len(told.devices) == 1

    assert with_server({"/gpus": page(dcgm_page(labels_of()))}, do, "/gpus") == ["/gpus"]


def test_the_host_of_the_url_is_not_that_of_gpus_that_several_hosts_have() -> None:
    body = dcgm_page(labels_of(0, host="gpu-1"), labels_of(1, host="gpu-2"))

    async def do(url: str, pages: GpuPages) -> None:
        (told,) = await told_by(pages)
        assert [device.place.hosts for device in told.devices] == [("gpu-1",), ("gpu-2",)]

    with_server({"/metrics": page(body)}, do)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (status(404), "/metrics: HTTP 404"),
        (status(403), "/metrics: it wants a key, and an exporter is sent none"),
        (page(b"<html></html>"), "a web page instead of metrics"),
        (page(b'{"a": 1}'), "JSON instead of metrics"),
        (page(PAGE), NO_METRIC),
        (page(b""), NO_METRIC),
        (page(b"\xff\x00" * 400), NO_METRIC),
        (page(b"DCGM_FI_DEV_GPU_UTIL 97\n"), NO_METRIC),
        (reset(), "the connection was closed before an answer"),
        (raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "does not speak HTTP"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n"), "larger than"),
    ],
)
def test_a_page_that_is_none_is_said_to_be(answer: Answer, why: str) -> None:
    async def do(url: str, pages: GpuPages) -> None:
        (told,) = await told_by(pages)
        assert why in told.error and told.devices == ()
        assert told.hosts == {"127.0.0.1"}, "of whom it would have told"

    with_server({"/metrics": answer}, do)


def test_nobody_there_is_said() -> None:
    async def do() -> None:
        pages = GpuPages(["127.0.0.1:1"])
        (told,) = await told_by(pages)
        await pages.close()
        assert (told.called, told.error) == ("127.0.0.1:1", "connection refused")

    asyncio.run(do())


def test_what_was_told_before_it_failed_is_not_told_now() -> None:
    answers = {"/metrics": page(dcgm_page(labels_of()))}

    async def do(url: str, pages: GpuPages) -> None:
        await told_by(pages)
        answers["/metrics"] = status(500)
        (told,) = await told_by(pages)
        assert (told.devices, told.error) == ((), "/metrics: HTTP 500")
        assert "gpu-1" in told.hosts, "it is still known whose they were"

    with_server(answers, do)


def test_one_that_drips_holds_up_no_round_and_is_asked_one_question_at_a_time() -> None:
    drips = raw(
        b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", b"#", pause_s=0.05, endless=True
    )

    async def do(url: str, pages: GpuPages) -> None:
        begin_s = time.monotonic()
        for _ in range(3):
            (told,) = await told_by(pages, wait_s=0.01)
            assert told.error == "it has not answered yet"
        assert time.monotonic() - begin_s < 5

    assert with_server({"/metrics": drips}, do) == ["/metrics"]


def test_pages_come_and_go() -> None:
    async def do(url: str, pages: GpuPages) -> None:
        await told_by(pages)
        pages.aim({url: "node-a"})
        (told,) = await told_by(pages)
        assert told.devices, "the one that was there keeps its connection"
        pages.aim({})
        assert await told_by(pages) == ()

    with_server({"/metrics": page(dcgm_page(labels_of()))}, do)


@pytest.mark.parametrize("url", ["ftp://gpu-1", "http://", "http://a:b@gpu-1:9400"])
def test_what_cannot_be_asked_is_refused(url: str) -> None:
    with pytest.raises(BadUsage):
        GpuPages([url])
