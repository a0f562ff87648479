"""A server that answers badly, in part or not at all is told of in one line, never guessed over."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.errors import BadUsage
from ullage.telemetry import promql
from ullage.telemetry.prometheus_api import (
    Access,
    PrometheusApi,
    QueryFailed,
    TooLarge,
    access_from,
    answer_of,
    base_of,
)
from ullage.telemetry.promql import PrometheusSource
from ullage.telemetry.scrape import Look


@dataclass
class Asked:
    """One question as the server got it."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]


Answer = Callable[[Asked], tuple[int, bytes]]


@dataclass
class Server:
    url: str
    asked: list[Asked] = field(default_factory=list)


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[Server]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(self.path.partition("?")[2])

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["Content-Length"])).decode())

        def _answer(self, text: str) -> None:
            query = dict(urllib.parse.parse_qsl(text))
            headers = {name.lower(): value for name, value in self.headers.items()}
            asked = Asked(self.command, self.path.partition("?")[0], query, headers)
            server.asked.append(asked)
            status, body = answer(asked)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{httpd.server_address[1]}")
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def vector(*rows: tuple[dict[str, str], str], **more: object) -> bytes:
    result = [{"metric": labels, "value": [1e9, value]} for labels, value in rows]
    data = {"resultType": "vector", "result": result}
    return json.dumps({"status": "success", "data": data, **more}).encode()


def ask(url: str, access: Access = Access(), within_s: float = 5.0):  # noqa: B008 (frozen)
    async def asking():
        api = PrometheusApi(url, access, within_s=within_s)
        try:
            return await api.query("up", 12.3456)
        finally:
            await api.aclose()

    return asyncio.run(asking())


# --- one question ---------------------------------------------------------------------------------


def test_labels_and_values_are_what_was_sent() -> None:
    rows = (({"__name__": "up", "a": "ü"}, "NaN"), ({}, "+Inf"))
    with serving(lambda _: (200, vector(*rows, warnings=["partial\nresponse"]))) as server:
        series, warnings = ask(f"{server.url}/prefix/")
    assert series == rows
    assert warnings == ("partial response",)
    (asked,) = server.asked
    assert (asked.method, asked.path) == ("POST", "/prefix/api/v1/query")
    assert asked.query == {"query": "up", "time": "12.346"}


def test_where_only_get_passes_get_is_used() -> None:
    def answer(asked: Asked) -> tuple[int, bytes]:
        return (200, vector()) if asked.method == "GET" else (405, b"no")

    with serving(answer) as server:
        assert ask(server.url) == ((), ())
    assert [asked.method for asked in server.asked] == ["POST", "GET"]


@pytest.mark.parametrize(
    ("access", "header", "value"),
    [
        (Access(bearer_token="t0p"), "authorization", "Bearer t0p"),
        (Access(user="u", password="p"), "authorization", "Basic dTpw"),
        (Access(bearer_token="t", user="u", password="p"), "authorization", "Bearer t"),
        (Access(headers={"X-Scope-OrgID": "team"}), "x-scope-orgid", "team"),
    ],
)
def test_access_is_sent(access: Access, header: str, value: str) -> None:
    with serving(lambda _: (200, vector())) as server:
        ask(server.url, access)
    assert server.asked[0].headers[header] == value


def test_a_user_in_the_url_is_sent_and_never_shown() -> None:
    with serving(lambda _: (401, b"Unauthorized s3cret")) as server:
        url = server.url.replace("//", "//me:s3cret%21@")
        with pytest.raises(QueryFailed) as raised:
            ask(url)
    assert server.asked[0].headers["authorization"] == "Basic bWU6czNjcmV0IQ=="
    assert "s3cret" not in str(raised.value)
    assert base_of(url) == (server.url, ("me", "s3cret!"))
    assert "t0p" not in repr(Access(bearer_token="t0p", password="t0p", headers={"a": "t0p"}))


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b"Unauthorized", "HTTP 401: it wants another login"),
        (403, b'{"status":"error","error":"no"}', "HTTP 403: it wants another login"),
        (200, b"<html>", "not an answer of Prometheus' API"),
        (200, b"[]", "not an answer"),
        (200, b"\xff\xfe", "not an answer"),
        (200, b"[" * 100_000, "not an answer"),
        (422, b'{"status":"error","errorType":"execution","error":"too\\nmany"}', "too many"),
        (503, b'{"status":"error"}', "HTTP 503: no reason given"),
        (200, b'{"status":"success"}', "not a vector"),
        (200, b'{"status":"success","data":{"resultType":"matrix","result":[]}}', "not a vector"),
        (200, b'{"status":"success","data":{"resultType":"vector","result":{}}}', "not a vector"),
    ],
)
def test_what_is_no_vector_is_said(status: int, body: bytes, said: str) -> None:
    with pytest.raises(QueryFailed, match=said) as raised:
        answer_of(status, body)
    assert str(raised.value).isprintable()


def test_rows_that_are_no_samples_are_left_out() -> None:
    rows = [
        {"metric": {"a": "b"}, "histogram": [1, {}]},
        {"metric": {"a": "b"}, "value": [1, "many"]},
        {"metric": None, "value": [1, "1"]},
        {"value": [1, "1"]},
        7,
        {"metric": {"a": "c"}, "value": [1, "1"]},
    ]
    document = {"status": "success", "data": {"resultType": "vector", "result": rows}}
    assert answer_of(200, json.dumps(document).encode()) == ((({"a": "c"}, "1"),), ())


@given(st.binary(max_size=200))
def test_no_bytes_break_it(body: bytes) -> None:
    with contextlib.suppress(QueryFailed):
        answer_of(200, body)


def test_nobody_there_and_too_slow_are_said() -> None:
    with pytest.raises(QueryFailed):
        ask("http://127.0.0.1:1")
    stop = threading.Event()

    def slow(_: Asked) -> tuple[int, bytes]:
        stop.wait(5.0)
        return 200, vector()

    with serving(slow) as server:
        with pytest.raises(QueryFailed):
            ask(server.url, within_s=0.2)
        stop.set()


def test_more_than_is_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(lambda _: (200, vector(({"a": "x" * 9_000_000}, "1")))) as server,
        pytest.raises(TooLarge, match="larger than"),
    ):
        ask(server.url)


@pytest.mark.parametrize(
    "url", ["", "ftp://a", "http://", "http://a:b", "http://a?x=1", "http://a#b", "a:99999"]
)
def test_what_is_no_url_is_bad_usage(url: str) -> None:
    with pytest.raises(BadUsage, match="--prometheus"):
        base_of(url)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("prom:9090", "http://prom:9090"),
        ("https://p/x/", "https://p/x"),
        ("http://[::1]:9090", "http://[::1]:9090"),
    ],
)
def test_a_url_is_a_base(url: str, base: str) -> None:
    assert base_of(url) == (base, None)


def test_access_comes_from_the_environment_and_from_flags() -> None:
    environ = {
        "ULLAGE_PROMETHEUS_TOKEN": "t\n",
        "ULLAGE_PROMETHEUS_USER": "u",
        "ULLAGE_PROMETHEUS_PASSWORD": "p",
    }
    headers = {"X-Scope-OrgID": "team: a"}
    assert access_from(environ, ["X-Scope-OrgID: team: a"]) == Access("t", "u", "p", headers)
    assert access_from(environ, (), "given").bearer_token == "given"
    for wrong in ("no colon", ": value", "a b: c", "a: b\r\nc: d", "ü: a"):
        with pytest.raises(BadUsage, match="--prometheus-header"):
            access_from({}, [wrong])
    with pytest.raises(BadUsage, match="ULLAGE_PROMETHEUS_USER"):
        access_from({"ULLAGE_PROMETHEUS_USER": "a\nb"})


# --- a fleet behind an API that is written out here -----------------------------------------------


@dataclass
class Fake:
    """Prometheus' API over `num` replicas of one job, scraped at `scraped_s`."""

    num: int
    now_s: float = 1e9
    scraped_s: float = 1e9 - 3
    padding: int = 0
    up: str = "1"
    broken: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)

    def __call__(self, asked: Asked) -> tuple[int, bytes]:
        query = asked.query["query"]
        if query == "vector(time())":
            return 200, vector(({}, repr(self.now_s)))
        assert float(asked.query["time"]) == pytest.approx(self.now_s, abs=0.01)
        targets = [{"job": "j", "instance": f"h{i}:1"} for i in range(self.num)]
        if query.startswith("timestamp("):
            return 200, vector(*((labels, repr(self.scraped_s)) for labels in targets))
        if '__name__="up"' in query:
            return 200, vector(*(({"__name__": "up", **one}, self.up) for one in targets))
        if "last_over_time" in query:
            return 200, vector(*((one, "1") for one in targets), warnings=self.warnings)
        self.pages.append(query)
        asked_for = [one for one in targets if f"{one['instance'][:-2]}:" in query]
        if any(one["instance"] in self.broken for one in asked_for):
            return 422, b'{"status":"error","error":"query processing would load too many samples"}'
        return 200, vector(
            *(
                (
                    {"__name__": "vllm:num_requests_running", "x": "y" * self.padding, **one},
                    str(7 + int(one["instance"][1:-2])),
                )
                for one in asked_for
            )
        )


def looks_at(url: str, times: int = 1, between: Callable[[], None] = lambda: None, **more: object):
    async def looking() -> list[tuple[Look, ...]]:
        source = PrometheusSource(url, **more)  # type: ignore[arg-type]
        try:
            found = []
            for _ in range(times):
                found.append(await source.look())
                between()
            return found
        finally:
            await source.close()

    return asyncio.run(looking())


def test_replicas_are_asked_for_in_groups() -> None:
    fake = Fake(100)
    with serving(fake) as server:
        (looks,) = looks_at(server.url)
    assert len(fake.pages) == -(-100 // promql.TARGETS_PER_QUERY)
    assert {look.url: look.snapshot and look.snapshot.gauges["running"] for look in looks} == {
        f"j/h{i}:1": 7 + i for i in range(100)
    }


def test_a_group_that_is_too_large_is_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(8, padding=3_000_000)
    with serving(fake) as server:
        (looks,) = looks_at(server.url)
    assert len(fake.pages) == 1 + 2 + 4
    assert all(look.snapshot for look in looks)


def test_one_that_is_too_large_alone_says_so() -> None:
    with serving(Fake(1, padding=9_000_000)) as server:
        ((look,),) = looks_at(server.url)
    assert (look.snapshot, look.error) == (None, "its series are more than are read at once")


def test_a_query_that_fails_spoils_its_own_replicas_and_is_asked_again() -> None:
    fake = Fake(40, broken={"h0:1"})
    with serving(fake) as server:
        first, second = looks_at(server.url, 2, fake.broken.clear)
    failed = [look.url for look in first if look.error]
    assert "j/h0:1" in failed
    assert len(failed) == promql.TARGETS_PER_QUERY
    assert all("too many samples" in look.error for look in first if look.error)
    assert [look.url for look in first if not look.asked] == failed  # it is no fault of theirs
    assert not [look for look in second if look.error]


def test_only_new_scrapes_are_read() -> None:
    fake = Fake(4)
    with serving(fake) as server:
        first, second = looks_at(server.url, 2)
        assert len(fake.pages) == 1
    assert all(one is two for one, two in zip(first, second, strict=True))


def test_a_scrape_long_ago_is_stale() -> None:
    fake = Fake(1, scraped_s=1e9 - 200)
    with serving(fake) as server:
        ((look,),) = looks_at(server.url)
    assert (look.snapshot, look.error) == (None, "Prometheus last scraped it 200 s ago")


def test_a_slow_scrape_interval_is_learned() -> None:
    fake = Fake(1, scraped_s=1e9 - 100)

    def later() -> None:
        fake.scraped_s, fake.now_s = fake.scraped_s + 100, fake.now_s + 240

    with serving(fake) as server:
        (first,), (second,) = looks_at(server.url, 2, later)
    assert not first.error
    assert not second.error  # 240 s old, where a scrape comes every 100 s


def test_down_is_told_once_per_scrape() -> None:
    with serving(Fake(1, up="0")) as server:
        (first,), (second,) = looks_at(server.url, 2)
    assert first == second
    assert first.error == "Prometheus could not scrape it (up is 0)" and first.asked


def test_times_are_of_this_clock() -> None:
    # The server's clock is in 2001.
    import time

    with serving(Fake(1)) as server:
        ((look,),) = looks_at(server.url)
    assert look.time_s == pytest.approx(time.time() - 3, abs=2)


def test_a_part_of_an_answer_comes_with_its_warning_once() -> None:
    heard: list[str] = []
    fake = Fake(1, warnings=["store gateway b is unreachable"])
    with serving(fake) as server:
        looks_at(server.url, 3, on_warning=heard.append)
    assert heard == ["store gateway b is unreachable"]


def test_replicas_that_are_gone_are_not_named() -> None:
    fake = Fake(3)

    def fewer() -> None:
        fake.num = 1

    with serving(fake) as server:
        first, second, third = looks_at(server.url, 3, fewer)
    assert [len(looks) for looks in (first, second, third)] == [3, 1, 1]


def test_a_server_without_replicas_or_without_life_raises() -> None:
    with serving(Fake(0)) as server, pytest.raises(QueryFailed, match="no target of a known"):
        looks_at(server.url)
    with pytest.raises(QueryFailed, match=r"http://127\.0\.0\.1:1: connection refused$"):
        looks_at("http://127.0.0.1:1")
