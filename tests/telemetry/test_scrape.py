"""Scraping finds the page, learns who answers, and says of every endpoint what became of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from tests.telemetry.rude_server import (
    PAGE,
    Answer,
    Rude,
    chunked,
    page,
    raw,
    reset,
    rude_server,
    status,
)
from ullage.errors import BadUsage
from ullage.telemetry import scrape
from ullage.telemetry.scrape import DirectSource, Look

OK = b"HTTP/1.1 200 OK\r\n"
T = TypeVar("T")


def with_server(answers: dict[str, Answer], do: Callable[[Rude], Awaitable[T]]) -> T:
    async def run() -> T:
        async with rude_server(answers) as rude:
            return await do(rude)

    return asyncio.run(run())


async def looks_at(
    rude: Rude, *, num: int = 1, path: str = "", interval_s: float = 0.5, pause_s: float = 0.0
) -> list[Look]:
    source = DirectSource([f"127.0.0.1:{rude.port}{path}"], interval_s=interval_s)
    found = []
    for _ in range(num):
        found += await source.look()
        await asyncio.sleep(pause_s)
    await source.close()
    return found


def looked(answers: dict[str, Answer], *, path: str = "") -> Look:
    """One look at a server that answers so."""

    async def do(rude: Rude) -> Look:
        return (await looks_at(rude, path=path))[0]

    return with_server(answers, do)


def with_start(started_s: float, running: int = 3) -> Answer:
    head = b"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds %f\n"
    return page(head % started_s + PAGE.replace(b"3.0", b"%d.0" % running))


def told(**answer: object) -> Answer:
    return page(json.dumps(answer).encode())


SAME = (
    "h:80",
    "h",
    "http://h",
    "http://h/",
    "HTTP://H:80/metrics",
    "h/v1",
    " h/prometheus/metrics",
)


@pytest.mark.parametrize("one", SAME)
@pytest.mark.parametrize("two", SAME)
def test_a_server_that_is_named_twice_is_known_to_be_one(one: str, two: str) -> None:
    assert scrape.twice_named(["other:80", one, two]) == ({two: one} if one != two else {})


@pytest.mark.parametrize("url", ["h:81", "https://h", "h/a", "i", "[::1]"])
def test_another_port_scheme_path_or_host_is_another_server(url: str) -> None:
    assert scrape.twice_named(["h", url]) == {}


# --- where the page is ----------------------------------------------------------------------------

FOUND: dict[str, tuple[dict[str, Answer], str]] = {
    "at /metrics": ({"/metrics": page()}, ""),
    "in chunks, as no kind of text": ({"/metrics": chunked(PAGE[:20], PAGE[20:])}, ""),
    "beside JSON at /metrics": ({"/metrics": page(b"[]"), "/prometheus/metrics": page()}, ""),
    "beside nothing at /metrics": ({"/prometheus/metrics": page()}, ""),
    "with a slash": (
        {"/metrics": status(307, headers=b"Location: /metrics/\r\n"), "/metrics/": page()},
        "",
    ),
    "with a slash, told with a host": (
        {"/metrics": status(307, headers=b"Location: http://h/metrics/\r\n"), "/metrics/": page()},
        "",
    ),
    "beside what OpenAI's clients call the base": ({"/a/metrics": page()}, "/a/v1"),
    "under a prefix": ({"/llm/metrics": page()}, "/llm"),
    "where it was said to be": ({"/metrics": status(500), "/own/metrics": page()}, "/own/metrics"),
}


@pytest.mark.parametrize("place", FOUND)
def test_the_page_is_found(place: str) -> None:
    answers, path = FOUND[place]
    look = looked(answers, path=path)
    assert not look.error
    assert look.snapshot and look.snapshot.gauges["running"] == 3


REFUSED: dict[str, tuple[Answer, str]] = {
    "no route": (status(404), "/metrics: HTTP 404"),
    "500": (status(500), "HTTP 500"),
    "no key": (
        status(401),
        "/metrics and /prometheus/metrics: HTTP 401: it wants a key (--api-key)",
    ),
    "elsewhere": (
        status(302, headers=b"Location: http://evil.example/metrics\r\n"),
        "it sends elsewhere, to 'http://evil.example/metrics'",
    ),
    "HTML": (page(b"<!doctype html>", headers=b"Content-Type: text/html\r\n"), "a web page"),
    "JSON": (page(b'{"object": "list"}'), "JSON instead of metrics"),
    "a reset": (reset(), "closed before an answer"),
    "garbage": (raw(b"\x00\x01\r\n\r\n"), "does not speak HTTP"),
    "a giant": (raw(OK + b"Content-Length: 999999999\r\n\r\n"), "larger than"),
    "a drip": (raw(OK + b"\r\n", b"#", pause_s=0.1, endless=True), "no whole answer within 1 s"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_is_no_page_is_an_error_in_words(way: str) -> None:
    answer, words = REFUSED[way]
    look = looked({"/metrics": answer, "/prometheus/metrics": answer})
    assert look.snapshot is None
    assert words in look.error
    assert len(look.error) <= 200 and look.error.isprintable()


def test_a_page_of_no_engine_is_a_look_that_knows_nothing() -> None:
    look = looked({"/metrics": page(b"up 1\n")})
    assert look.snapshot and not look.error
    assert look.snapshot.identity.engine == "" and not look.snapshot.gauges


def test_the_path_is_sought_again_when_it_is_gone() -> None:
    async def do(rude: Rude) -> list[Look]:
        source = DirectSource([f"127.0.0.1:{rude.port}"], interval_s=0.5)
        first = await source.look()
        rude.answers = {"/prometheus/metrics": page()}
        second, third = await source.look(), await source.look()
        await source.close()
        return [*first, *second, *third]

    first, second, third = with_server({"/metrics": page()}, do)
    assert first.snapshot and third.snapshot
    assert second.error == "/metrics: HTTP 404"


# --- who answers ----------------------------------------------------------------------------------


def test_who_answers_is_asked_once_and_again_when_it_is_another_process() -> None:
    async def do(rude: Rude) -> list[Look]:
        source = DirectSource([f"127.0.0.1:{rude.port}"], interval_s=0.5)
        found = [*await source.look(), *await source.look()]
        asked = rude.paths.count("/version")
        rude.answers |= {"/metrics": with_start(2e9), "/version": told(version="0.33.0")}
        found += [*await source.look(), *await source.look()]
        assert (asked, rude.paths.count("/version")) == (1, 2)
        await source.close()
        return found

    models = {"data": [{"id": "m"}, {"id": "style", "parent": "m"}]}
    answers = {
        "/metrics": with_start(1e9),
        "/version": told(version="0.32.0"),
        "/v1/models": told(**models),
    }
    looks = with_server(answers, do)
    identities = [look.snapshot.identity for look in looks if look.snapshot]
    assert [identity.version for identity in identities] == ["0.32.0"] * 2 + ["0.33.0"] * 2
    assert identities[0].models == ("m",) and identities[0].adapters == ("style",)


@pytest.mark.parametrize("code", [401, 403])
def test_what_is_guarded_by_a_key_is_said_to_be(code: int) -> None:
    """vLLM's --api-key guards /v1 and leaves /metrics open."""
    look = looked({"/metrics": page(), "/version": told(version="1"), "/v1/models": status(code)})
    assert look.snapshot and look.snapshot.identity.version == "1"
    assert look.snapshot.identity.max_model_len is None
    why = f"/v1/models: HTTP {code}: it wants a key (--api-key)"
    assert look.snapshot.identity.why_unsaid == why


def test_the_models_are_asked_for_again_since_adapters_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scrape, "TELL_AGAIN_S", 0.0)

    async def do(rude: Rude) -> list[Look]:
        source = DirectSource([f"127.0.0.1:{rude.port}"], interval_s=0.5)
        found = [*await source.look()]
        rude.answers["/v1/models"] = told(data=[{"id": "m"}, {"id": "new", "parent": "m"}])
        found += await source.look()
        assert rude.paths.count("/version") == 1
        await source.close()
        return found

    answers = {
        "/metrics": page(),
        "/version": told(version="1"),
        "/v1/models": told(data=[{"id": "m"}]),
    }
    first, second = with_server(answers, do)
    assert first.snapshot and first.snapshot.identity.adapters == ()
    assert second.snapshot and second.snapshot.identity.adapters == ("new",)


@pytest.mark.parametrize("answer", [status(404), reset(), page(b"[]"), page(b"\xff"), page(b"{")])
def test_a_page_is_not_lost_for_routes_that_tell_nothing(answer: Answer) -> None:
    look = looked({"/metrics": page(), "/version": answer, "/v1/models": answer})
    assert look.snapshot and not look.error
    assert look.snapshot.identity.version == ""


# --- when whom ------------------------------------------------------------------------------------


def test_all_are_looked_at_in_order_and_one_bad_one_spoils_no_other() -> None:
    async def do(rude: Rude) -> tuple[Look, ...]:
        urls = [f"127.0.0.1:{rude.port}", "127.0.0.1:1", f"127.0.0.1:{rude.port}/bad"]
        source = DirectSource(urls, interval_s=0.5)
        looks = await source.look()
        await source.close()
        assert [look.url for look in looks] == urls
        return looks

    good, closed, bad = with_server({"/metrics": page()}, do)
    assert good.snapshot and closed.error == "connection refused" and "404" in bad.error


def test_an_answer_that_is_late_counts_in_the_next_round_and_is_not_asked_for_twice() -> None:
    late = raw(OK + b"Content-Length: %d\r\n\r\n" % len(PAGE), PAGE, pause_s=0.2)

    async def do(rude: Rude) -> list[Look]:
        source = DirectSource([f"127.0.0.1:{rude.port}"], interval_s=0.3)
        found = [*await source.look()]
        rude.answers["/metrics"] = late
        found += [*await source.look(), *await source.look()]
        assert rude.most_at_once == 1
        assert rude.paths.count("/metrics") == 2
        await source.close()
        return found

    first, second, third = with_server({"/metrics": page()}, do)
    assert first.snapshot and second is first  # not asked again, and no failure either
    assert third.snapshot and third.time_s > first.time_s


def test_who_has_never_answered_in_time_has_not_answered_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scrape, "FIRST_ROUND_S", 0.1)
    look = looked({"/metrics": raw(OK + b"\r\n", b"#", pause_s=0.1, endless=True)})
    assert look.error == "it has not answered yet"


def test_the_dead_are_asked_less_and_less_and_their_look_stays_the_same() -> None:
    async def do(rude: Rude) -> list[Look]:
        return await looks_at(rude, num=8, interval_s=0.5)

    async def run() -> tuple[list[Look], int]:
        async with rude_server({}) as rude:
            return await do(rude), rude.paths.count("/metrics")

    looks, asked = asyncio.run(run())
    assert asked == 2  # the third attempt waits for a second
    assert len({look.time_s for look in looks}) == 2
    assert {look.error for look in looks} == {"/metrics and /prometheus/metrics: HTTP 404"}


def test_who_comes_back_is_seen_after_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "MAX_BACKOFF_S", 0.05)

    async def do(rude: Rude) -> list[Look]:
        source = DirectSource([f"127.0.0.1:{rude.port}"], interval_s=0.5)
        found = [*await source.look(), *await source.look(), *await source.look()]
        rude.answers["/metrics"] = page()
        await asyncio.sleep(0.06)
        found += await source.look()
        await source.close()
        return found

    looks = with_server({}, do)
    assert [look.snapshot is not None for look in looks] == [False, False, False, True]


def test_many_are_spread_over_the_interval_and_asked_over_one_connection_each() -> None:
    num, interval_s = 60, 0.8
    times: list[float] = []

    async def noted(writer: asyncio.StreamWriter) -> None:
        times.append(time.monotonic())
        await page()(writer)

    async def do(rude: Rude) -> int:
        urls = [f"127.0.0.1:{rude.port}/{place}/metrics" for place in range(num)]
        rude.answers |= {f"/{place}/metrics": noted for place in range(num)}
        source = DirectSource(urls, interval_s=interval_s)
        await source.look()
        await source.look()
        await source.close()
        return rude.num_connections

    assert with_server({}, do) == num
    first = sorted(times[:num])
    assert first[-1] - first[0] > 0.8 * scrape.SPREAD * interval_s


def test_a_source_that_is_closed_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "FIRST_ROUND_S", 0.1)

    async def do(rude: Rude) -> int:
        source = DirectSource([f"127.0.0.1:{rude.port}"], interval_s=0.1)
        await source.look()
        await source.close()
        return len(asyncio.all_tasks()) - 1

    drip = raw(OK + b"\r\n", b"#", pause_s=0.05, endless=True)
    assert with_server({"/metrics": drip}, do) <= 1  # the server's own connection


def test_with_nothing_to_look_at_there_are_no_looks() -> None:
    assert asyncio.run(DirectSource([]).look()) == ()


def test_who_joins_is_looked_at_and_who_left_is_let_go() -> None:
    async def do(rude: Rude) -> list[list[str]]:
        a, b, c = (f"127.0.0.1:{rude.port}/{name}" for name in "abc")
        source = DirectSource([a, b], interval_s=0.5)
        found = [[look.url[-1] for look in await source.look() if look.snapshot]]
        source.aim([b, c])
        found.append([look.url[-1] for look in await source.look() if look.snapshot])
        await asyncio.sleep(0.02)
        assert rude.num_connections == 3  # b kept its own
        with pytest.raises(BadUsage):
            source.aim([a, "ftp://c"])
        found.append([look.url[-1] for look in await source.look() if look.snapshot])
        source.aim([])
        assert await source.look() == ()
        await source.close()
        return found

    answers = {f"/{name}/metrics": page() for name in "abc"}
    assert with_server(answers, do) == [["a", "b"], ["b", "c"], ["b", "c"]]


def test_who_leaves_while_it_is_asked_is_asked_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "FIRST_ROUND_S", 0.1)

    async def do(rude: Rude) -> int:
        source = DirectSource([f"127.0.0.1:{rude.port}"], interval_s=0.1)
        await source.look()
        source.aim([])
        await asyncio.sleep(0.05)
        return len(asyncio.all_tasks()) - 1

    drip = raw(OK + b"\r\n", b"#", pause_s=0.01, endless=True)
    assert with_server({"/metrics": drip}, do) <= 1  # the server's own connection


def test_a_page_that_breaks_its_reader_is_that_endpoints_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = scrape.snapshot_of

    def breaking(body: bytes, **more: object) -> object:
        if body.startswith(b"bad"):
            raise RuntimeError("a fault of ours")
        return whole(body, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(scrape, "snapshot_of", breaking)

    async def do(rude: Rude) -> list[Look]:
        urls = [f"127.0.0.1:{rude.port}{path}" for path in ("", "/bad")]
        source = DirectSource(urls, interval_s=0.5)
        looks = list(await source.look())
        await source.close()
        return looks

    good, bad = with_server({"/metrics": page(), "/bad/metrics": page(b"bad 1\n")}, do)
    assert good.snapshot
    assert bad.error == "it cannot be read: RuntimeError: a fault of ours"


def test_a_page_is_not_lost_for_a_route_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "TELL_WITHIN_S", 0.6)  # with another route, longer than the page's
    drip = raw(OK + b"\r\n", b"#", pause_s=0.05, endless=True)
    look = looked({"/metrics": page(), "/version": drip, "/v1/models": drip})
    assert look.snapshot and not look.error


def test_time_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = scrape.Clock()
    first_s = clock.now()
    assert abs(first_s - time.time()) < 5
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert first_s <= clock.now() < first_s + 5


def test_a_thousand_connections_are_allowed_for_where_the_system_allows_them() -> None:
    script = (
        "import resource as r\n"
        "from ullage.telemetry.scrape import DirectSource\n"
        "hard = r.getrlimit(r.RLIMIT_NOFILE)[1]\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, hard))\n"
        "DirectSource([f'h{n}:1' for n in range(1000)])\n"
        "wanted = 2256 if hard == r.RLIM_INFINITY else min(2256, hard)\n"
        "assert r.getrlimit(r.RLIMIT_NOFILE)[0] == wanted, r.getrlimit(r.RLIMIT_NOFILE)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
