"""The plugin's routes over ASGI: key first, what is asked, errors, and refusing in a drain."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ullage_vllm import keys, routes
from ullage_vllm.draining import Draining
from ullage_vllm.engines import Engines

from tests.plugins import vllm_posts
from tests.plugins.vllm_core import Client, EngineCore, Request, core_of

KEY = "secret"


class Answer:
    """Status, headers and body of one call of an ASGI application; `sent` is all it said."""

    def __init__(self, sent: list[dict[str, Any]]) -> None:
        self.sent = sent
        self.status = sent[0].get("status")
        self.headers = {name.decode(): value.decode() for name, value in sent[0].get("headers", [])}
        self.body = b"".join(one.get("body", b"") for one in sent)

    def json(self) -> Any:
        return json.loads(self.body)


class Server:
    """The middleware around an application that answers 200 when `finish` is set."""

    def __init__(
        self,
        cores: list[EngineCore] | None = None,
        *,
        tokens: tuple[str, ...] = (KEY,),
        draining: Draining | None = None,
        missing: str = "",
        root_path: str = "",
    ) -> None:
        self.client = Client([core_of()] if cores is None else cores)
        self.draining, self.cancelled = draining or Draining(), 0
        self.root_path, self.reached = root_path, 0
        self.finish = asyncio.Event()
        self.finish.set()
        self.site: routes.Site | None = routes.Site(
            Engines(SimpleNamespace(engine_core=self.client)),
            self.draining,
            keys.Keys(tokens),
            self._count,
            missing,
        )
        self.middleware = routes.Middleware(self._app, self)

    def _count(self, count: int) -> None:
        self.cancelled += count

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached += 1
        await self.finish.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def call(
        self,
        method: str,
        path: str,
        query: str = "",
        authorization: str | None = f"Bearer {KEY}",
        kind: str = "http",
        **scope: Any,
    ) -> Answer:
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(dict(message))

        async def receive() -> Any:
            raise AssertionError("no route reads a body")

        headers = [] if authorization is None else [(b"authorization", authorization.encode())]
        asked = {
            "type": kind,
            "method": method,
            "path": self.root_path + path,
            "root_path": self.root_path,
            "query_string": query.encode(),
            "headers": headers,
            **scope,
        }
        await self.middleware(asked, receive, send)
        return Answer(sent)

    def ask(self, *args: Any, **kwargs: Any) -> Answer:
        return asyncio.run(self.call(*args, **kwargs))


pytestmark = pytest.mark.usefixtures("vllm_request")


def busy(requests: int, first: float = 0.0) -> EngineCore:
    core = core_of(257)
    for number in range(requests):
        core.scheduler.add(request := Request(f"r{first + number:g}", first + number))
        core.scheduler.compute(request, 40)
    return core


# --- the key ---


@pytest.mark.parametrize("path", ["/ullage/kv", "/ullage/drain", "/ullage/", "/ullage/other"])
@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x"],
)
def test_nobody_without_the_key(path: str, authorization: str | None) -> None:
    server = Server()
    for method in ("GET", "POST", "OPTIONS", "DELETE"):
        answer = server.ask(method, path, authorization=authorization)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert server.client.calls == []
    assert not server.draining.asked


def test_with_no_key_at_all_nobody_is_let_in() -> None:
    answer = Server(tokens=()).ask("POST", "/ullage/drain", authorization="Bearer ")
    assert answer.status == 403
    assert "--api-key" in answer.json()["error"]["message"]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize("token", ["one", "two", "drei€"])
def test_any_of_several_keys(scheme: str, token: str) -> None:
    known = keys.Keys(("one", "two", "drei€"))
    assert known.admit(f"{scheme} {token}".encode())


@given(st.text(min_size=1), st.text(min_size=1))
def test_only_an_equal_key(known: str, given_: str) -> None:
    held = keys.Keys((known,))
    encoded = given_.encode(errors="surrogatepass")
    assert held.admit(b"Bearer " + encoded) == (encoded == known.encode(errors="surrogatepass"))


@pytest.mark.parametrize(
    ("of_args", "of_vllm", "own", "expected"),
    [
        (["a", "b"], "c", "d", ("a", "b")),
        (None, "c", "d", ("c",)),
        ([], "c", None, ("c",)),
        ([""], None, "d", ("d",)),
        (None, None, "d", ("d",)),
        (None, None, None, ()),
        (None, "", "", ()),
    ],
)
def test_whose_key(
    monkeypatch: pytest.MonkeyPatch, of_args: Any, of_vllm: Any, own: Any, expected: Any
) -> None:
    monkeypatch.delenv(keys.OWN_KEY, raising=False)
    if own is not None:
        monkeypatch.setenv(keys.OWN_KEY, own)
    assert keys.expected(of_args, of_vllm) == expected


# --- what is answered ---


def test_the_report_has_the_embedded_engines_fields() -> None:
    from dataclasses import fields

    from ullage.engine.reports import Holder, KVReport

    answer = Server([busy(3)]).ask("GET", "/ullage/kv").json()
    assert list(answer) == [field.name for field in fields(KVReport)]
    assert [list(holder) for holder in answer["holders"]] == [[f.name for f in fields(Holder)]] * 3


def test_the_cancel_has_the_embedded_engines_fields() -> None:
    from dataclasses import fields

    from ullage.engine.reports import CancelReport

    server = Server([busy(3)])
    answer = server.ask("POST", "/ullage/cancel_oldest", "percent=50").json()
    assert list(answer) == [field.name for field in fields(CancelReport)]
    assert answer["request_ids"] == ["r0", "r1"]
    assert answer["promised_bytes"] == answer["freed_bytes"] == 6 * 4096
    assert server.cancelled == 2
    assert server.client.cores[0].told == ["r0", "r1"]


def test_a_dry_run_ends_nobody() -> None:
    server = Server([busy(3)])
    answer = server.ask("POST", "/ullage/cancel_oldest", "dry_run=true&percent=100").json()
    assert (answer["promised_bytes"], answer["freed_bytes"]) == (9 * 4096, 0)
    assert (server.cancelled, len(server.client.cores[0].scheduler.running)) == (0, 3)


def test_the_oldest_of_all_engines_end() -> None:
    cores = [busy(2, first=5.0), busy(4, first=1.0)]
    answer = Server(cores).ask("POST", "/ullage/cancel_oldest", "percent=50").json()
    assert answer["request_ids"] == ["r1", "r2", "r3"]
    assert answer["freed_bytes"] == 9 * 4096


def preempt_the_oldest(core: EngineCore) -> None:
    core.scheduler.preempt(min(core.scheduler.running, key=lambda one: one.arrival_time))


@pytest.mark.parametrize("firsts", [[0.0], [1.5, 1.0], [0.0, 0.0, 100.0]])
def test_who_is_preempted_meanwhile_is_not_chosen_and_the_promise_holds(
    firsts: list[float],
) -> None:
    """A storm: between any two calls a step preempts the oldest of each engine."""
    server = Server([busy(4, first) for first in firsts])
    preempted = {f"r{first:g}" for first in firsts}
    # The last call of each story is the one that ends requests.
    for method in ("ullage_cancel_share", "ullage_cancel_oldest"):
        server.client.before[method] = preempt_the_oldest
    answer = server.ask("POST", "/ullage/cancel_oldest", "percent=50").json()
    running = 3 if len(firsts) == 1 else 4 * len(firsts)
    assert len(answer["request_ids"]) == -(-running // 2) == server.cancelled
    assert not preempted & set(answer["request_ids"])
    assert answer["freed_bytes"] == answer["promised_bytes"] == 3 * 4096 * server.cancelled
    for core in server.client.cores:
        assert len(core.scheduler.waiting) == 1
        assert all(one.request_id not in core.told for one in core.scheduler.running)


def test_one_engine_chooses_and_ends_in_one_call() -> None:
    server = Server([busy(3)])
    server.ask("POST", "/ullage/cancel_oldest", "percent=50")
    assert server.client.calls == ["ullage_cancel_share"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        *((q, "percent") for q in ("", "percent=", "percent=0", "percent=-1", "percent=100.1")),
        *((q, "percent") for q in ("percent=nan", "percent=inf", "percent=ten")),
        ("percent=1&percent=1", "percent"),
        *((f"percent=5&dry_run={v}", "dry_run") for v in ("", "1", "True", "maybe")),
        ("percent=5&force=true", "force"),
    ],
)  # fmt: skip
def test_a_cancel_that_is_not_clear(query: str, param: str) -> None:
    server = Server([busy(2)])
    answer = server.ask("POST", "/ullage/cancel_oldest", query)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    assert len(server.client.cores[0].scheduler.running) == 2


def test_an_engine_that_refuses_or_hangs_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    server.client.failure = Exception("Server shutting down")
    answer = server.ask("GET", "/ullage/kv")
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    assert "Server shutting down" in answer.json()["error"]["message"]
    server.client.failure, server.client.silent = None, True
    monkeypatch.setattr(Engines.ask, "__kwdefaults__", {"patience_s": 0.02})
    assert "has not answered for 0.02 s" in server.ask("GET", "/ullage/kv").body.decode()


def test_a_cancel_without_an_answer_does_not_say_that_nothing_ends() -> None:
    server = Server([busy(2)])
    core = server.client.cores[0]
    core.ullage_cancel_share = lambda percent, dry_run: 1 / 0  # type: ignore[attr-defined]
    answer = server.ask("POST", "/ullage/cancel_oldest", "percent=50")
    assert answer.status == 503
    assert "may still be ended" in answer.json()["error"]["message"]
    assert server.cancelled == 0


def test_a_vllm_that_lacks_something_says_what() -> None:
    server = Server(missing="steps aside: this vLLM lacks scheduler.running")
    for method, path, query in (
        ("GET", "/ullage/kv", ""),
        ("POST", "/ullage/cancel_oldest", "percent=5"),
    ):
        answer = server.ask(method, path, query)
        assert answer.status == 501
        assert "scheduler.running" in answer.json()["error"]["message"]


@pytest.mark.parametrize("root_path", ["", "/base"])
def test_other_paths_are_vllms(root_path: str) -> None:
    server = Server(root_path=root_path)
    for path in ("/health", "/v1/models", "/ullage", "/metrics"):
        assert server.ask("GET", path, authorization=None).status == 200
    assert server.reached == 4
    assert server.ask("GET", "/ullage/kv").json()["running"] == 0


def test_before_there_is_an_engine_everything_passes() -> None:
    server = Server()
    server.site = None
    assert server.ask("GET", "/ullage/kv").status == 200
    assert server.reached == 1


# --- draining ---


def test_a_drain_refuses_new_requests_and_lets_the_others_end() -> None:
    async def whole(server: Server) -> None:
        server.finish.clear()
        taken = [asyncio.create_task(server.call("POST", "/v1/completions")) for _ in range(3)]
        await asyncio.sleep(0)
        await server.call("POST", "/ullage/drain")
        server.finish.set()
        assert [answer.status for answer in await asyncio.gather(*taken)] == [200, 200, 200]
        done = await server.call("GET", "/ullage/drain")
        assert done.json() == {"draining": True, "in_flight": 0}

    async def refused(server: Server) -> None:
        server.finish.clear()
        taken = asyncio.create_task(server.call("POST", "/v1/completions"))
        await asyncio.sleep(0)
        answer = await server.call("POST", "/ullage/drain")
        assert (answer.status, answer.json()) == (202, {"draining": True, "in_flight": 1})
        for path in ("/v1/completions", "/v1/chat/completions", "/pooling", "/invocations", "/new"):
            late = await server.call("POST", path)
            assert (late.status, late.headers["connection"]) == (503, "close")
            assert int(late.headers["retry-after"]) >= 1
        assert server.reached == 1
        server.finish.set()
        assert (await taken).status == 200
        assert (await server.call("GET", "/health")).status == 200

    asyncio.run(whole(Server()))
    asyncio.run(refused(Server()))


@pytest.mark.parametrize("path", sorted(vllm_posts.WORK | vllm_posts.OPERATORS))
def test_a_drain_refuses_work_on_every_path_of_vllm_and_answers_operators(path: str) -> None:
    server = Server()
    server.draining.begin()
    expected = 503 if path in vllm_posts.WORK else 200
    assert server.ask("POST", path.format(response_id="resp_1")).status == expected


def test_websockets_are_refused_as_they_understand_it() -> None:
    server = Server()
    server.draining.begin()
    plain = server.ask("GET", "/v1/realtime", kind="websocket")
    assert plain.sent[0]["type"] == "websocket.close"
    assert plain.sent[0]["code"] == 1013
    able = server.ask(
        "GET", "/v1/realtime", kind="websocket", extensions={"websocket.http.response": {}}
    )
    assert (able.sent[0]["type"], able.status) == ("websocket.http.response.start", 503)
    assert server.reached == 0


def test_a_request_without_a_connection_is_in_flight_too() -> None:
    """A response in the background: HTTP has answered, the engine works on."""
    server = Server([busy(2)])
    assert server.ask("POST", "/ullage/drain").json()["in_flight"] == 2


def test_what_cannot_be_told_is_null_and_never_0() -> None:
    server = Server()
    server.client.failure = Exception("Server shutting down")
    assert server.ask("POST", "/ullage/drain").json() == {"draining": True, "in_flight": None}


def test_without_a_folder_to_share_there_is_no_drain() -> None:
    server = Server()
    assert server.site is not None
    server.site.draining = None
    assert server.ask("POST", "/ullage/drain").status == 501
    assert server.ask("POST", "/v1/completions").status == 200


def test_a_client_that_goes_away_is_in_flight_no_more() -> None:
    async def story() -> None:
        server = Server()
        server.finish.clear()
        task = asyncio.create_task(server.call("POST", "/v1/completions"))
        await asyncio.sleep(0)
        assert server.draining.in_flight().requests == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert server.draining.in_flight().requests == 0

    asyncio.run(story())
