"""DCGM's series in a Prometheus are joined to its replicas; one that has none is asked once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.telemetry.dcgm import dcgm_page, labels_of
from tests.telemetry.prometheus_server import (
    NEEDS_PROMETHEUS,
    Prometheus,
    page_server,
    prometheus,
)
from tests.telemetry.test_prometheus_api import Asked, serving
from tests.telemetry.test_promql import VLLM
from ullage.telemetry.gpu_series import GpuSeries, samples_of, selectors_of
from ullage.telemetry.gpus import METRICS, NO_SERIES, devices_of
from ullage.telemetry.promql import PrometheusSource
from ullage.telemetry.scrape import Look
from ullage.watch.gpus import GpuSource

WITHIN_S = 60.0


def looks_at(url: str) -> dict[str, Look]:
    """One round, by the first word of each name."""

    async def run() -> tuple[Look, ...]:
        source = PrometheusSource(url)
        gpus = GpuSource(source, exporters=[GpuSeries(source)], none_at_all=NO_SERIES)
        try:
            return await gpus.look()
        finally:
            await gpus.close()
            await source.close()

    return {look.url: look for look in asyncio.run(run())}


# --- a real one -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Engines a and b are pods on gpu-1, whose exporter names workloads; c is none, on gpu-2, whose
    exporter is a pod that names none; d and e are on one machine."""
    mapped = dcgm_page(
        labels_of(0, pod="llm/a"),
        labels_of(1, pod="llm/a"),
        labels_of(2, pod="llm/b"),
        labels_of(3),
        DCGM_FI_DEV_CLOCKS_EVENT_REASONS=0x24,
    )
    plain = dcgm_page(labels_of(0, host="", uuid="GPU-z"), labels_of(1, host="", uuid="GPU-y"))
    shown = {f"/{name}": VLLM for name in "abcde"} | {"/mapped": mapped, "/plain": plain}
    with page_server(shown) as pages:
        at = pages.target

        def target(**labels: str) -> dict[str, object]:
            return {"targets": [at], "labels": labels}

        jobs = {
            "a": [target(namespace="llm", pod="a", node="gpu-1", instance="10.1.0.1:8000")],
            "b": [target(namespace="llm", pod="b", node="gpu-1", instance="10.1.0.2:8000")],
            "c": [target(node="gpu-2", instance="10.1.0.3:8000")],
            "d": [target(instance="box:8000")],
            "e": [target(instance="box:8001")],
            "mapped": [target(namespace="gpu", pod="dcgm-1", instance="10.1.0.9:9400")],
            "plain": [target(namespace="gpu", pod="dcgm-2", node="gpu-2", instance="box:9400")],
        }
        paths = {name: f"/{name}" for name in jobs}
        folder = tmp_path_factory.mktemp("prometheus")
        with prometheus(folder, jobs, paths=paths) as server:
            server.until(lambda: _all_up(server, len(jobs)), WITHIN_S, "all scraped")
            yield server


def _all_up(server: Prometheus, num: int) -> bool:
    found = server.query("sum(up)")
    return bool(found) and float(found[0]["value"][1]) == num


@NEEDS_PROMETHEUS
def test_replicas_have_the_gpus_of_their_pods_and_hosts(fleet: Prometheus) -> None:
    found = {name.split("/")[1] if "llm" in name else name.split("/")[0]: look.snapshot
             for name, look in looks_at(fleet.url).items()}  # fmt: skip
    told = {name: [gpu.index for gpu in one.gpus] for name, one in found.items() if one}
    assert (told["a"], told["b"]) == (["0", "1"], ["2"])
    assert found["a"].sources["gpus"] == f"DCGM by {fleet.url}, by pod"
    gpu = found["a"].gpus[0]
    assert (gpu.busy_ratio, gpu.throttled_because) == (
        0.97,
        ("sw_power_cap", "sw_thermal_slowdown"),
    )
    # The pod that stands on c's GPUs is their exporter's.
    assert told["c"] == ["0", "1"] and found["c"].sources["gpus"].endswith("by host")
    for name in "de":
        assert told[name] == []
        assert "on box, and nothing says which GPU is whose" in found[name].absent["gpus"]


@NEEDS_PROMETHEUS
@pytest.mark.parametrize(
    "name", ["a.b-c", "gpu-7.a.com", "[::1]:80", 'x"} or vector(1) or {a="', "\\"]
)
def test_whatever_replicas_are_called_the_question_is_one(fleet: Prometheus, name: str) -> None:
    for selector in selectors_of([{"pod": name, "node": name, "instance": name}]):
        assert fleet.query(selector) == []


# --- one that counts what it is asked -------------------------------------------------------------


def answer_of(asked: Asked, *, dcgm: bool) -> tuple[int, bytes]:
    query = asked.query["query"]
    labels = {"job": "vllm", "instance": "gpu-1:8000"}
    if query.startswith("vector(time())"):
        rows = [{"metric": {}, "value": [0, "1700000000"]}]
    elif "DCGM" in query:
        gpu = {**labels_of(0), "__name__": "DCGM_FI_DEV_GPU_UTIL", "job": "dcgm"}
        rows = [{"metric": gpu, "value": [0, "97"]}] if dcgm else []
    elif query.startswith("timestamp("):
        rows = [{"metric": labels, "value": [0, "1700000000"]}]
    else:
        rows = [{"metric": {**labels, "__name__": name}, "value": [0, "1"]}
                for name in ("up", "vllm:num_requests_running")]  # fmt: skip
    return 200, json.dumps(
        {"status": "success", "data": {"resultType": "vector", "result": rows}}
    ).encode()


def questions(*, dcgm: bool, rounds: int) -> list[str]:
    with serving(lambda asked: answer_of(asked, dcgm=dcgm)) as server:

        async def run() -> None:
            source = PrometheusSource(server.url)
            gpus = GpuSource(source, exporters=[GpuSeries(source)], none_at_all=NO_SERIES)
            for _ in range(rounds):
                (look,) = await gpus.look()
                assert look.snapshot is not None
                if dcgm:
                    assert [gpu.busy_ratio for gpu in look.snapshot.gpus] == [0.97]
                else:
                    assert look.snapshot.absent["gpus"] == NO_SERIES
            await gpus.close()
            await source.close()

        asyncio.run(run())
        return [one.query["query"] for one in server.asked if "DCGM" in one.query["query"]]


def test_a_server_without_them_is_asked_once() -> None:
    assert len(questions(dcgm=False, rounds=5)) == 1


def test_a_server_with_them_is_asked_once_a_round_for_up_to_64_replicas() -> None:
    assert len(questions(dcgm=True, rounds=5)) == 2 + 5


def test_a_question_that_fails_is_said_and_loses_no_replica() -> None:
    def answer(asked: Asked) -> tuple[int, bytes]:
        if "DCGM" in asked.query["query"]:
            return 503, b'{"status": "error", "error": "query timed out"}'
        return answer_of(asked, dcgm=True)

    with serving(answer) as server:
        (look,) = looks_at(server.url).values()
    assert look.snapshot is not None and look.snapshot.gauges["running"] == 1
    assert "query timed out" in look.snapshot.absent["gpus"]


# --- what is asked for ----------------------------------------------------------------------------


def test_every_name_that_is_read_is_asked_for() -> None:
    (selector, *_) = selectors_of([{"pod": "a", "instance": "10.0.0.1:8000"}])
    assert all(name in selector for name in METRICS)


def test_the_pod_of_an_exporter_is_no_workload_unless_it_is_said_to_be() -> None:
    own = {"__name__": "DCGM_FI_DEV_GPU_UTIL", "job": "dcgm", "instance": "10.1.0.9:9400",
           "namespace": "gpu", "pod": "dcgm-1", "gpu": "0", "UUID": "GPU-a"}  # fmt: skip
    theirs = {**own, "exported_pod": "a", "exported_namespace": "llm", "UUID": "GPU-b"}
    honoured = {**own, "pod": "b", "namespace": "llm", "UUID": "GPU-c"}
    series = [(labels, "97") for labels in (own, theirs, honoured)]
    found = devices_of(samples_of(series, {("dcgm", "10.1.0.9:9400", "gpu", "dcgm-1")}))
    pods = {one.gpu.uuid: f"{one.place.namespace}/{one.place.pod}" for one in found}
    assert pods == {"GPU-a": "/", "GPU-b": "llm/a", "GPU-c": "llm/b"}
