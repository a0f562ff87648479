"""Each round's looks have their GPUs, and exporters neither hold up a round nor cost it much."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.telemetry.cluster import ApiServer, api_server, pod
from tests.telemetry.dcgm import dcgm_page, labels_of
from tests.telemetry.rude_server import page, raw, rude_server
from ullage.telemetry.gpu_pages import GpuPages, Told
from ullage.telemetry.gpus import NOBODY_ASKED, devices_on, hosts_on
from ullage.telemetry.kubernetes import Cluster, config_of
from ullage.telemetry.pods import Pod, selection_of
from ullage.telemetry.reading import snapshot_of
from ullage.telemetry.scrape import Look
from ullage.telemetry.snapshot import Gpu, Snapshot
from ullage.watch import gpu_pods, gpus
from ullage.watch.figures import figures_of
from ullage.watch.gpu_pods import GpuPods
from ullage.watch.gpus import Driver, GpuSource
from ullage.watch.history import History
from ullage.watch.rules.table import judge_all
from ullage.watch.watcher import PartlyKnown

URL = "http://gpu-1:8000"
PAGE = b"vllm:num_requests_running 3.0\n"
SNAPSHOT = snapshot_of(PAGE, time_s=1000.0)


class Engines:
    """A source of looks at `urls`, a second apart; `partly` is raised with them."""

    def __init__(self, *urls: str, partly: str = "", pause_s: float = 0.0) -> None:
        self.urls = urls or (URL,)
        self.partly, self.pause_s, self.num = partly, pause_s, 0

    async def look(self) -> tuple[Look, ...]:
        await asyncio.sleep(self.pause_s)
        self.num += 1
        now = replace(SNAPSHOT, time_s=1000.0 + self.num)
        looks = tuple(Look(url, now.time_s, now) for url in self.urls)
        if self.partly:
            raise PartlyKnown(self.partly, looks)
        return looks


class Exporter:
    """Tells what `pages` say, one after the other; the last for ever. "" is no answer."""

    def __init__(self, *pages: bytes) -> None:
        self.pages = list(pages)

    def begin(self) -> None:
        pass

    async def told(self, _looks: Sequence[Look], _wait_s: float) -> tuple[Told, ...]:
        body = self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]
        devices = devices_on(body)
        if not devices:
            return (Told("dcgm", hosts=frozenset({"gpu-1"}), error="connection refused"),)
        return (Told("dcgm", devices, hosts_on(devices)),)

    async def close(self) -> None:
        pass


class Owning:
    """A driver that says whose GPUs are."""

    def __init__(self, owned: Mapping[str, Sequence[Gpu] | str]) -> None:
        self.known, self.asked = owned, list[Sequence[str]]()

    async def owned(self, urls: Sequence[str], _wait_s: float) -> Mapping[str, Sequence[Gpu] | str]:
        self.asked.append(urls)
        return {url: self.known[url] for url in urls}

    async def close(self) -> None:
        pass


def rounds_of(source: GpuSource, num: int = 1) -> list[tuple[Look, ...]]:
    async def run() -> list[tuple[Look, ...]]:
        try:
            return [await source.look() for _ in range(num)]
        finally:
            await source.close()

    return asyncio.run(run())


def snapshots(source: GpuSource, num: int = 1) -> list[Snapshot]:
    """Of the first replica, round by round."""
    found = [looks[0].snapshot for looks in rounds_of(source, num)]
    assert all(one is not None for one in found)
    return [one for one in found if one is not None]


def test_gpus_come_with_who_told_of_them() -> None:
    (now,) = snapshots(GpuSource(Engines(), exporters=[Exporter(dcgm_page(labels_of(0)))]))
    assert [gpu.index for gpu in now.gpus] == ["0"]
    assert now.sources["gpus"] == "dcgm, by host"
    assert now.gauges == SNAPSHOT.gauges and now.sources["running"] == SNAPSHOT.sources["running"]


def test_an_exporter_that_stops_answering_takes_its_gpus_along() -> None:
    pages = (dcgm_page(labels_of(0)), b"", dcgm_page(labels_of(0)))
    now = snapshots(GpuSource(Engines(), exporters=[Exporter(*pages)]), 3)
    assert [len(one.gpus) for one in now] == [1, 0, 1]
    assert now[1].absent["gpus"] == "dcgm: connection refused"
    assert "gpus" not in now[1].sources and "gpus" not in now[2].absent


def test_a_replica_that_does_not_answer_is_left_as_it_is() -> None:
    class Down:
        async def look(self) -> tuple[Look, ...]:
            return (Look(URL, 1.0, None, "connection refused"),)

    ((look,),) = rounds_of(GpuSource(Down(), exporters=[Exporter(dcgm_page(labels_of(0)))]))
    assert look == Look(URL, 1.0, None, "connection refused")


def test_looks_that_are_partly_known_have_gpus_too() -> None:
    source = GpuSource(Engines(partly="why"), exporters=[Exporter(dcgm_page(labels_of(0)))])
    with pytest.raises(PartlyKnown, match="why") as caught:
        asyncio.run(source.look())
    assert caught.value.looks[0].snapshot and caught.value.looks[0].snapshot.gpus


# --- the driver -----------------------------------------------------------------------------------

LOCAL = "http://localhost:8000"


@pytest.mark.parametrize(
    ("owned", "gpus", "absent"),
    [((Gpu("0"),), 1, None), ("no process listens", 0, "no process listens")],
)
def test_the_driver_is_asked_for_engines_on_this_machine_alone(owned, gpus, absent) -> None:
    driver: Driver = Owning({LOCAL: owned})
    ((mine, theirs),) = rounds_of(GpuSource(Engines(LOCAL, URL), driver=driver))
    assert driver.asked == [[LOCAL]]  # type: ignore[attr-defined]
    assert mine.snapshot and theirs.snapshot
    assert len(mine.snapshot.gpus) == gpus
    assert mine.snapshot.absent.get("gpus") == absent
    assert "gpus" not in theirs.snapshot.absent, "nobody was asked for those"


def test_an_exporters_reason_goes_before_the_drivers() -> None:
    source = GpuSource(Engines(LOCAL), exporters=[Exporter(b"")], driver=Owning({LOCAL: "odd"}))
    (now,) = snapshots(source)
    assert now.absent["gpus"] == "dcgm: connection refused"


# --- Xid errors -----------------------------------------------------------------------------------


def with_xid(code: float | None) -> bytes:
    """An exporter's page; None: it has no series of an Xid error, as 4.8's until the first."""
    values = {"DCGM_FI_DEV_GPU_UTIL": 97.0}
    return dcgm_page(labels_of(0), values=values if code is None
                     else values | {"DCGM_FI_DEV_XID_ERRORS": code})  # fmt: skip


@pytest.mark.parametrize(
    ("codes", "came"),
    [
        ((79, 79, 79), (None, None, None)),  # it was there: nothing is known of when
        ((0, 79, 79), (None, 1002.0, 1002.0)),
        ((None, 79, 79), (None, 1002.0, 1002.0)),
        ((0, 31, 79), (None, 1002.0, 1003.0)),
        ((79, None, 79), (None, None, None)),  # an exporter that begins anew says nothing at first
        ((0, 79, None), (None, 1002.0, None)),
        ((0, 79, 0), (None, 1002.0, None)),
        ((79, 48, 79), (None, 1002.0, 1003.0)),
    ],
)
def test_when_a_code_came_is_known_of_those_that_came_while_watching(codes, came) -> None:
    source = GpuSource(Engines(), exporters=[Exporter(*map(with_xid, codes))])
    told = [one.gpus[0] for one in snapshots(source, len(codes))]
    assert [gpu.xid_errors for gpu in told] == list(codes)
    assert [gpu.xid_s if gpu.xid_errors else None for gpu in told] == list(came)


def test_what_was_there_before_never_becomes_news_and_what_comes_does() -> None:
    for codes, state in (((79, 79, 79), "not_evaluable"), ((0, 0, 79), "fired")):
        source = GpuSource(Engines(), exporters=[Exporter(*map(with_xid, codes))])
        history = History(URL)
        for (look,) in rounds_of(source, 3):
            history.push(look)
        found = {one.finding.id: one.finding for one in judge_all((history.view(),), 1004.0)}
        assert found["W019"].state == state


def test_gpus_of_replicas_that_are_gone_are_not_remembered_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(gpus, "MOST_XIDS", 2)

    class Churn(Engines):
        async def look(self) -> tuple[Look, ...]:
            self.urls = (f"http://gpu-1:{9000 + self.num}",)
            return await super().look()

    source = GpuSource(Churn(), exporters=[Exporter(dcgm_page(labels_of(0)))])
    rounds_of(source, 20)
    assert len(source._xids) <= 3


# --- what is shown --------------------------------------------------------------------------------


def figures(now: Snapshot) -> Any:
    history = History(URL)
    history.push(Look(URL, now.time_s, now))
    return figures_of(history.view())


def test_a_figure_is_known_with_its_source_or_absent_with_its_reason() -> None:
    known = figures(snapshots(GpuSource(Engines(), exporters=[Exporter(with_xid(0))]))[0])
    assert (known.sources["gpus"], "gpus" in known.absent) == ("dcgm, by host", False)
    lacking = figures(snapshots(GpuSource(Engines(), exporters=[Exporter(b"")]))[0])
    assert lacking.absent["gpus"] == "dcgm: connection refused"
    assert figures(SNAPSHOT).absent["gpus"] == NOBODY_ASKED


# --- pace -----------------------------------------------------------------------------------------


def test_a_page_that_hangs_holds_up_no_later_round_than_an_engine_would() -> None:
    hangs = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", b"#", pause_s=600.0)

    async def run() -> None:
        async with rude_server({"/metrics": hangs}) as rude:
            pages = GpuPages([f"http://127.0.0.1:{rude.port}"], interval_s=0.5)
            source = GpuSource(Engines(LOCAL), exporters=[pages], interval_s=0.5)
            await source.look()
            begin_s = time.monotonic()
            for _ in range(4):
                (look,) = await source.look()
                assert look.snapshot and "http://127.0.0.1" in look.snapshot.absent["gpus"]
            assert time.monotonic() - begin_s < 4 * 0.5 + 10
            await source.close()

    asyncio.run(run())


def test_a_page_is_asked_once_a_round_for_all_its_replicas() -> None:
    body = dcgm_page(*(labels_of(n, pod=f"llm/p{n}") for n in range(8)))

    class Pods(Engines):
        async def look(self) -> tuple[Look, ...]:
            looks = await super().look()
            return tuple(
                replace(look, pod={"namespace": "llm", "name": look.url}) for look in looks
            )

    async def run() -> None:
        async with rude_server({"/metrics": page(body)}) as rude:
            pages = GpuPages([f"http://127.0.0.1:{rude.port}"])
            source = GpuSource(Pods(*(f"p{n}" for n in range(8))), exporters=[pages])
            for _ in range(3):
                for n, look in enumerate(await source.look()):
                    assert look.snapshot and [g.index for g in look.snapshot.gpus] == [str(n)]
            await source.close()
            assert len(rude.paths) == 3

    asyncio.run(run())


def test_a_thousand_replicas_cost_a_round_little() -> None:
    """One core has five seconds for a round; half a second of it is a bar that slow machines
    keep, too."""
    nodes = [
        dcgm_page(*(labels_of(g, uuid=f"GPU-{n}-{g}", host=f"gpu-{n}", pod=f"llm/p{8 * n + g}")
                    for g in range(8)), DCGM_FI_DEV_CLOCKS_EVENT_REASONS=4)
        for n in range(125)
    ]  # fmt: skip

    class Pods(Engines):
        async def look(self) -> tuple[Look, ...]:
            looks = await super().look()
            return tuple(
                replace(look, pod={"namespace": "llm", "name": look.url}) for look in looks
            )

    source = GpuSource(
        Pods(*(f"p{n}" for n in range(1000))), exporters=[Exporter(n) for n in nodes]
    )
    rounds_of(source)  # what is read once
    spent_s = []
    for _ in range(3):
        begin_s = time.process_time()
        ((*looks,),) = rounds_of(source)
        spent_s.append(time.process_time() - begin_s)
        assert all(look.snapshot and len(look.snapshot.gpus) == 1 for look in looks)
    assert min(spent_s) < 0.5


# --- pods of exporters ----------------------------------------------------------------------------


FACTS = {"namespace": "llm", "name": "a", "node": "a"}


def with_exporters(
    folder: Path, do: Callable[[ApiServer, GpuPods], Awaitable[None]], *pods: dict[str, Any]
) -> None:
    async def run() -> None:
        with api_server(*pods) as server:
            cluster = Cluster(config_of({"KUBECONFIG": str(server.kubeconfig(folder))}))
            exporters = GpuPods(cluster, selection_of("gpu/app=dcgm"))
            try:
                await do(server, exporters)
            finally:
                await exporters.close()
                await cluster.close()

    asyncio.run(run())


async def told_on(exporters: GpuPods, node: str) -> tuple[Told, ...]:
    exporters.begin()
    look = Look("llm/a", 1.0, SNAPSHOT, pod={**FACTS, "node": node})
    return await exporters.told((look,), 60.0)


def test_exporters_are_found_by_labels_and_asked_on_the_nodes_of_replicas(tmp_path: Path) -> None:
    body = dcgm_page(labels_of(0, host="dcgm-x"))

    async def do(server: ApiServer, exporters: GpuPods) -> None:
        async with (
            rude_server({"/metrics": page(body)}, host="127.0.0.2") as here,
            rude_server({"/metrics": page(body)}, host="127.0.0.3") as there,
        ):
            for name, ip, rude in (("a", "127.0.0.2", here), ("b", "127.0.0.3", there)):
                ports = {"metrics": rude.port}
                labels = {"app": "dcgm"}
                server.pods.append(
                    pod(f"dcgm-{name}", namespace="gpu", labels=labels, ip=ip, ports=ports,
                        node=name)
                )  # fmt: skip
            (told,) = await told_on(exporters, "a")
            assert [one.place.hosts for one in told.devices] == [("dcgm-x", "127.0.0.2", "a")]
            (none,) = await told_on(exporters, "c")
            assert none.error == "no pod in namespace gpu that matches app=dcgm runs there"
            assert none.hosts == {"c"}
            assert there.paths == [], "nobody's GPUs"
            await exporters.close()

    with_exporters(tmp_path, do)


def test_an_api_that_does_not_tell_of_exporters_is_said(tmp_path: Path) -> None:
    async def do(server: ApiServer, exporters: GpuPods) -> None:
        server.refusal = (403, "Forbidden", "pods is forbidden")
        (refused,) = await told_on(exporters, "a")
        assert "does not let this user list pods" in refused.error
        assert refused.hosts == {"a"}

    with_exporters(tmp_path, do)


@pytest.mark.parametrize(
    ("ports", "port"),
    [({}, 9400), ({"metrics": 9500}, 9500), ({"http-metrics": 9501}, 9501), ({"web": 1}, 9400)],
)
def test_where_a_pod_is_asked(ports: dict[str, int], port: int) -> None:
    one = Pod("gpu", "dcgm", ip="10.1.0.9", ports=tuple(ports.items()))
    assert gpu_pods.url_of(one) == f"http://10.1.0.9:{port}"
    six = replace(one, ip="fd00::9")
    assert gpu_pods.url_of(six) == f"http://[fd00::9]:{port}"
