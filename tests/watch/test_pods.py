"""Pods that Kubernetes names are replicas: asked where they answer, followed, and never lost."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.telemetry.cluster import ApiServer, api_server, pod
from tests.telemetry.rude_server import PAGE, Answer, Rude, page, rude_server, status
from tests.telemetry.test_kv_bytes import TINY, anatomy_of
from ullage.cli.main import main
from ullage.errors import Unreachable
from ullage.telemetry.kubernetes import Cluster, config_of
from ullage.telemetry.pods import selection_of
from ullage.telemetry.reading import snapshot_of
from ullage.telemetry.scrape import Look
from ullage.telemetry.snapshot import Identity
from ullage.watch import pods as watched_pods
from ullage.watch.changes import Known
from ullage.watch.history import History
from ullage.watch.modelled import ModelledSource
from ullage.watch.pods import PodSource
from ullage.watch.rules.table import judge_all
from ullage.watch.view import Change
from ullage.watch.watcher import PartlyKnown, Watcher

SELECTION = "llm/app=vllm"
INTERVAL_S = 0.3


@pytest.fixture(autouse=True)
def lists_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_pods, "LIST_EVERY_S", 0.0)


@asynccontextmanager
async def engine(last: int, answers: dict[str, Answer] | None = None) -> AsyncIterator[Rude]:
    """An engine at 127.0.0.`last`, as in a pod with an address of its own."""
    found = {"/metrics": page()} if answers is None else answers
    async with rude_server(found, host=f"127.0.0.{last}") as rude:
        yield rude


@asynccontextmanager
async def source_of(
    server: ApiServer, folder: Path, *, port: str = "", within_s: float = 5.0
) -> AsyncIterator[PodSource]:
    cluster = Cluster(config_of({"KUBECONFIG": str(server.kubeconfig(folder))}), within_s=within_s)
    source = PodSource(cluster, selection_of(SELECTION), interval_s=INTERVAL_S, port=port)
    try:
        yield source
    finally:
        await source.close()
        await cluster.close()


def with_source(
    folder: Path,
    do: Callable[[ApiServer, PodSource], Awaitable[None]],
    *pods: dict[str, Any],
    **options: Any,
) -> None:
    async def run() -> None:
        with api_server(*pods) as server:
            async with source_of(server, folder, **options) as source:
                await do(server, source)

    asyncio.run(run())


async def settled(source: PodSource) -> dict[str, Look]:
    """By name, after a round in which what the API told of in the one before is taken."""
    await source.look()
    await asyncio.sleep(0.1)
    return {look.url: look for look in await source.look()}


# --- one round ------------------------------------------------------------------------------------


def test_pods_are_asked_at_their_addresses_and_told_of_with_their_state(tmp_path: Path) -> None:
    async def do(server: ApiServer, source: PodSource) -> None:
        async with engine(2) as one, engine(3) as two:
            server.pods = [
                pod("a", ip="127.0.0.2", ports={"http": one.port}, restarts=3),
                pod("b", ip="127.0.0.3", ports={"http": two.port}, node="node-b"),
                pod("c", phase="Pending", state={"waiting": {"reason": "ContainerCreating"}}),
                pod("d", labels={"app": "another"}, ip="127.0.0.2", ports={"http": one.port}),
            ]
            a, b, c = await source.look()
        assert [look.url for look in (a, b, c)] == ["llm/a", "llm/b", "llm/c"]
        assert a.snapshot and b.snapshot and not a.error
        assert a.pod and a.pod["restarts"] == "3"
        assert a.pod["address"] == f"http://127.0.0.2:{one.port}"
        assert b.pod and b.pod["node"] == "node-b"
        assert c.snapshot is None
        assert c.error == "the pod is Pending: container vllm: ContainerCreating"
        assert c.pod and c.pod["phase"] == "Pending"

    with_source(tmp_path, do)


def test_the_port_that_is_an_engines_is_found(tmp_path: Path) -> None:
    """Among a side-car's page, a port that answers otherwise, and one at which nobody listens."""

    async def do(server: ApiServer, source: PodSource) -> None:
        side = {"/metrics": page(b"envoy_cluster_upstream_rq 3\n")}
        async with engine(2, side) as proxy, engine(2, {"/": status(404)}) as web, engine(2) as one:
            ports = {"metrics": proxy.port, "http": web.port, "z": 1, "api": one.port}
            server.pods = [pod("a", ip="127.0.0.2", ports=ports)]
            (look,) = await source.look()
            assert look.snapshot and look.snapshot.identity.engine == "vllm"
            assert look.pod and look.pod["address"].endswith(f":{one.port}")
            num_tried = len(web.requests)
            await settled(source)
            assert len(web.requests) == num_tried  # found once, not sought again

    with_source(tmp_path, do)


def test_the_usual_ports_are_tried_where_none_is_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def do(server: ApiServer, source: PodSource) -> None:
        async with engine(2) as one:
            monkeypatch.setattr("ullage.telemetry.pods.USUAL_PORTS", (1, one.port))
            server.pods = [pod("a", ip="127.0.0.2")]
            (look,) = await source.look()
        assert look.snapshot

    with_source(tmp_path, do)


def test_an_engine_that_starts_late_is_found_late(tmp_path: Path) -> None:
    async def do(server: ApiServer, source: PodSource) -> None:
        side = {"/metrics": page(b"envoy_cluster_upstream_rq 3\n")}
        async with engine(2, side) as proxy, engine(2, {}) as one:
            ports = {"metrics": proxy.port, "http": one.port}
            server.pods = [pod("a", ip="127.0.0.2", ports=ports, ready=False)]
            (before,) = await source.look()
            assert before.snapshot and before.snapshot.identity.engine == ""
            one.answers = {"/metrics": page()}
            for _ in range(4):
                (after,) = await source.look()
                await asyncio.sleep(0.05)
        assert after.snapshot and after.snapshot.identity.engine == "vllm"

    with_source(tmp_path, do)


def test_a_port_that_was_named_is_the_only_one(tmp_path: Path) -> None:
    async def do(server: ApiServer, source: PodSource) -> None:
        async with engine(2) as one, engine(3) as two:
            server.pods = [
                pod("a", ip="127.0.0.2", ports={"http": one.port, "odd": 1}),
                pod("b", ip="127.0.0.3", ports={"http": two.port}),
            ]
            a, b = await source.look()
        assert "connection refused" in a.error and a.error.startswith("http://127.0.0.2:1:")
        assert b.error == "no container of the pod has a port named odd"
        assert not one.requests and not two.requests

    with_source(tmp_path, do, port="odd")


def test_a_pod_that_is_not_ready_and_answers_keeps_its_numbers(tmp_path: Path) -> None:
    """An engine that is too busy for its probe is the one whose numbers are wanted most."""

    async def do(server: ApiServer, source: PodSource) -> None:
        async with engine(2) as one:
            server.pods = [pod("a", ip="127.0.0.2", ports={"http": one.port}, ready=False)]
            (look,) = await source.look()
        assert look.snapshot and look.pod and look.pod["ready"] == "false"

    with_source(tmp_path, do)


def test_why_a_pod_does_not_answer_comes_with_what_kubernetes_says(tmp_path: Path) -> None:
    crash = {"waiting": {"reason": "CrashLoopBackOff"}}

    async def do(server: ApiServer, source: PodSource) -> None:
        server.pods = [
            pod("a", ip="127.0.0.2", ports={"http": 1}, ready=False, state=crash),
            pod("b", ip="127.0.0.2", ports={"http": 2}, deleted="2026-11-30T05:00:00Z"),
        ]
        a, b = await source.look()
        assert a.error.startswith("the pod is not ready: container vllm: CrashLoopBackOff; http://")
        assert "connection refused" in a.error
        assert b.error.startswith("the pod is terminating since 2026-11-30T04:59:30Z; http://")

    with_source(tmp_path, do)


def test_pods_that_ended_are_no_replicas(tmp_path: Path) -> None:
    evicted = {"phase": "Failed", "reason": "Evicted", "containerStatuses": []}
    now = [{"type": "Ready", "status": "False", "lastTransitionTime": "2100-01-01T00:00:00Z"}]

    async def do(_: ApiServer, source: PodSource) -> None:
        (look,) = await source.look()
        assert look.url == "llm/new" and look.error == "the pod is Failed: Evicted"

    with_source(
        tmp_path,
        do,
        pod("done", phase="Succeeded"),
        pod("old", **evicted),
        pod("new", **evicted, conditions=now),
    )


# --- over time ------------------------------------------------------------------------------------


def test_pods_that_come_and_go_are_followed(tmp_path: Path) -> None:
    async def do(server: ApiServer, source: PodSource) -> None:
        async with engine(2) as one, engine(3) as two:
            a = pod("a", ip="127.0.0.2", ports={"http": one.port})
            server.pods = [a]
            assert [look.url for look in await source.look()] == ["llm/a"]
            server.pods = [a, pod("b", ip="127.0.0.3", ports={"http": two.port})]
            for _ in range(4):
                looks = {look.url: look for look in await source.look()}
                await asyncio.sleep(0.05)
            assert looks["llm/b"].snapshot
            assert one.num_connections == 2  # one to find the port, one that is kept
            server.pods = server.pods[1:]
            assert list(await settled(source)) == ["llm/b"]

    with_source(tmp_path, do)


def test_a_pod_that_is_replaced_under_its_name_is_asked_anew(tmp_path: Path) -> None:
    async def do(server: ApiServer, source: PodSource) -> None:
        async with engine(2) as one, engine(3) as two:
            server.pods = [pod("a", uid="1", ip="127.0.0.2", ports={"http": one.port})]
            await source.look()
            server.pods = [pod("a", uid="2", ip="127.0.0.3", ports={"http": two.port})]
            for _ in range(4):
                (look,) = await source.look()
                await asyncio.sleep(0.05)
        assert look.pod and look.pod["uid"] == "2" and look.snapshot
        assert look.pod["address"] == f"http://127.0.0.3:{two.port}"

    with_source(tmp_path, do)


REFUSED = (403, "Forbidden", "no")


def test_while_the_api_fails_the_pods_that_are_known_are_watched_on(tmp_path: Path) -> None:
    async def do(server: ApiServer, source: PodSource) -> None:
        async with engine(2) as one:
            server.pods = [pod("a", ip="127.0.0.2", ports={"http": one.port})]
            watcher = Watcher(source, INTERVAL_S)
            assert (await watcher.round()).error == ""
            server.refusal = REFUSED
            for _ in range(3):
                sight = await watcher.round()
                await asyncio.sleep(0.05)
            assert "does not let this user list pods" in sight.error
            (view,) = sight.views
            assert view.now and not view.error
            assert view.pod and view.pod["as_of"].endswith("Z")
            server.refusal = None
            for _ in range(3):
                sight = await watcher.round()
                await asyncio.sleep(0.05)
            assert sight.error == ""
            (view,) = sight.views
            assert view.pod and "as_of" not in view.pod

    with_source(tmp_path, do)


def test_a_loop_that_kubernetes_tells_of_is_a_finding(tmp_path: Path) -> None:
    crash = {"waiting": {"reason": "CrashLoopBackOff"}}

    async def do(server: ApiServer, source: PodSource) -> None:
        server.pods = [
            pod("a", ip="127.0.0.2", ports={"http": 1}, ready=False, state=crash, restarts=7)
        ]
        sight = await Watcher(source, INTERVAL_S).round()
        fired = {one.finding.id for one in sight.judged if one.finding.state == "fired"}
        assert fired == {"W017", "W025"}

    with_source(tmp_path, do)


def test_a_slow_api_does_not_hold_up_scraping(tmp_path: Path) -> None:
    async def do(server: ApiServer, source: PodSource) -> None:
        async with engine(2) as one:
            server.pods = [pod("a", ip="127.0.0.2", ports={"http": one.port})]
            await source.look()
            server.pause_s = 1.0
            begin_s = asyncio.get_running_loop().time()
            for _ in range(3):
                (look,) = await source.look()
                assert look.snapshot
            assert asyncio.get_running_loop().time() - begin_s < 0.9

    with_source(tmp_path, do)


def test_no_pod_and_no_api_are_said(tmp_path: Path) -> None:
    async def do(server: ApiServer, source: PodSource) -> None:
        with pytest.raises(Unreachable) as caught:
            await source.look()
        assert str(caught.value) == ("Kubernetes has no pod in namespace llm that matches app=vllm")
        server.refusal = REFUSED
        with pytest.raises(Unreachable, match="does not let this user"):
            await source.look()

    with_source(tmp_path, do)


# --- what changed ---------------------------------------------------------------------------------

POD = {"image": "v1", "ready": "true", "restarts": "0", "node": "a", "address": "x"}


def test_what_kubernetes_changed_is_a_change_and_not_always_another_model() -> None:
    known = Known()
    known.take(Identity(engine="vllm"), 1.0)
    known.take_pod(POD, 1.0)
    known.take_pod({**POD, "address": "y"}, 2.0)
    assert known.changes == ()
    known.take_pod({**POD, "ready": "false", "image": "v2"}, 3.0)
    assert known.changes == (
        Change(3.0, "pod image", "v1", "v2"),
        Change(3.0, "pod ready", "true", "false"),
    )


@pytest.mark.parametrize(
    ("later", "swapped"),
    [
        ({"ready": "false", "restarts": "2", "node": "b", "uid": "2"}, False),
        ({"image": "v2"}, True),
        ({"revision": "8d"}, True),
    ],
)
def test_only_another_image_or_revision_is_a_swap(later: dict[str, str], swapped: bool) -> None:
    """A pod that is started anew, or elsewhere, serves what it served."""
    history = History("llm/a")
    for num in range(3):
        time_s = 1000.0 + num
        facts = {**POD, "revision": "7f", "uid": "1", **(later if num == 2 else {})}
        history.push(Look("llm/a", time_s, snapshot_of(PAGE, time_s=time_s), pod=facts))
    view = history.view()
    assert {change.what for change in view.changes} == {f"pod {what}" for what in later}
    (judged,) = (one for one in judge_all((view,), 1002.0) if one.finding.id == "W016")
    assert judged.finding.state == ("fired" if swapped else "clear")


# --- from the command line ------------------------------------------------------------------------


def test_once_from_the_command_line(tmp_path: Path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    answers = PAGE + b'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'

    async def run() -> None:
        async with engine(2, {"/metrics": page(answers)}) as one:
            with api_server(
                pod("a", ip="127.0.0.2", ports={"http": one.port}), pod("b", phase="Pending")
            ) as server:
                monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
                flags = ["--once", "--interval", "0.3", "--output", "json"]
                code = await asyncio.to_thread(_main, ["watch", "--k8s", SELECTION, *flags])
                assert code == 0

    asyncio.run(run())
    replicas = json.loads(capsys.readouterr().out)["replicas"]
    assert [(one["url"], bool(one["error"])) for one in replicas] == [
        ("llm/a", False),
        ("llm/b", True),
    ]
    assert replicas[0]["kv_used_ratio"] == 0.5
    assert replicas[0]["pod"]["node"] == "node-a"


def _main(arguments: list[str]) -> int:
    """`main` in a thread of its own, where no signal can be handled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", lambda *_: None)
        return main(arguments)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--k8s", "llm"], 2, "has no selector"),
        (["--k8s", SELECTION, "--k8s-port", "0"], 2, "--k8s-port"),
        (["--k8s", SELECTION, "--k8s-context", "x"], 2, "'x' not found"),
        (["--k8s", SELECTION, "--act", "p.toml"], 2, "--act"),
        (["--k8s", SELECTION, "http://127.0.0.1:1"], 2, "more than one way"),
        (["http://127.0.0.1:1", "--k8s-port", "1"], 2, "there is no cluster"),
        (["--k8s", SELECTION, "--once"], 3, "no pod in namespace llm that matches app=vllm"),
        (["--k8s", "*/app=vllm", "--once"], 3, "does not let this user list pods in all"),
    ],
)
def test_what_is_wrong_is_one_sentence(  # type: ignore[no-untyped-def]
    arguments, code, words, tmp_path, monkeypatch, capsys
) -> None:
    with api_server() as server:
        if "all" in words:
            server.refusal = REFUSED
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
        assert main(["watch", *arguments, "--interval", "0.2"]) == code
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1


def test_without_lightkube_the_extra_is_named(  # type: ignore[no-untyped-def]
    monkeypatch, capsys
) -> None:
    monkeypatch.setitem(sys.modules, "lightkube", None)
    monkeypatch.delitem(sys.modules, "ullage.telemetry.kubernetes", raising=False)
    assert main(["watch", "--k8s", SELECTION, "--once"]) == 2
    assert "ullage[watch]" in capsys.readouterr().err


def test_partly_known_looks_are_told_their_bytes_too() -> None:
    class Partly:
        async def look(self) -> tuple[Look, ...]:
            raise PartlyKnown("why", (Look("a", 1.0, snapshot_of(PAGE, time_s=1.0)),))

    source = ModelledSource(Partly(), anatomy_of(TINY))
    with pytest.raises(PartlyKnown, match="why") as caught:
        asyncio.run(source.look())
    (look,) = caught.value.looks
    assert look.snapshot
    assert "how many KV blocks" in look.snapshot.absent["kv_total_bytes"]  # the model was asked
