"""`ullage watch --gpu-metrics`: GPUs from the exporter's page to the document, or why not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.telemetry.cluster import api_server, pod
from tests.telemetry.dcgm import dcgm_page, labels_of
from tests.telemetry.driver import Card, fake_pynvml
from tests.telemetry.prometheus_server import NEEDS_PROMETHEUS, Pages, page_server, prometheus
from ullage.cli.main import main
from ullage.telemetry.gpus import NO_METRIC, NO_SERIES, NOBODY_ASKED

PUBLISHED = Path(__file__).parents[1] / "telemetry" / "pages" / "published" / "gpus"
ENGINE = (
    b'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    b'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_waiting{engine="0"} 0\n'
)


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether nvidia-ml-py is on this machine is not what these tests are about."""
    monkeypatch.setattr("ullage.telemetry.nvml.is_installed", lambda: False)


@pytest.fixture
def engine() -> Iterator[Pages]:
    with page_server({"/metrics": ENGINE, "/b/metrics": ENGINE}) as pages:
        yield pages


@pytest.fixture
def exporter() -> Iterator[Pages]:
    body = (PUBLISHED / "dcgm-exporter-4.9.prom").read_bytes()
    with page_server({"/metrics": body}) as pages:
        yield pages


def watched(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["watch", *arguments, "--once", "--interval", "0.2", "--output", "json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def finding(document: dict[str, Any], rule: str) -> dict[str, Any]:
    (found,) = [one for one in document["findings"] if one["id"] == rule]
    return found


def test_a_replica_has_the_gpus_of_its_host(engine, exporter, capsys) -> None:
    made = watched(capsys, engine.target, "--gpu-metrics", f"http://{exporter.target}")
    (replica,) = made["replicas"]
    assert replica["sources"]["gpus"] == f"http://{exporter.target}, by host"
    assert "gpus" not in replica["absent"]
    one, two = replica["gpus"]
    assert one == {
        "index": "0",
        "name": "NVIDIA H200",
        "used_bytes": 139_375_083_520,
        "total_bytes": 150_754_820_096,
        "busy_ratio": 0.97,
        "sm_clock_hz": 2_520_000_000,
        "max_sm_clock_hz": 2_820_000_000,
        "power_watts": 598.25,
        "temperature_celsius": 66,
        "throttled_because": ["sw_power_cap"],
        "xid_errors": None,
        "uuid": "GPU-604ac76c-d9cf-fef3-62e9-000000000000",
        "mig_profile": "",
        "xid_s": None,
    }
    assert two["throttled_because"] == ["hw_slowdown", "hw_thermal_slowdown"]
    assert made["totals"]["gpus"]["num"] == 2
    clocks, errors = finding(made, "W018"), finding(made, "W019")
    assert clocks["state"] == "fired" and "GPU 1 (NVIDIA H200) is held down" in clocks["cause"]
    # Xid 79 was there in the first round: when it came is not known, nor whether it was mended.
    assert errors["state"] == "not_evaluable" and "Xid 79" in errors["missing"][0]


def test_the_terminal_shows_them(engine, exporter, capsys) -> None:
    arguments = ["watch", engine.target, "--gpu-metrics", exporter.target]
    assert main([*arguments, "--once", "--interval", "0.2"]) == 0
    out = capsys.readouterr().out
    assert "GPU 0 NVIDIA H200   busy 97%   clock 2.52 GHz of 2.82 GHz" in out
    assert "last Xid 79" in out


def test_replicas_that_share_a_host_have_none_and_are_told_why(engine, exporter, capsys) -> None:
    urls = (engine.target, f"http://{engine.target}/b")
    made = watched(capsys, *urls, "--gpu-metrics", exporter.target)
    for replica in made["replicas"]:
        why = "2 replicas are watched on localhost, and nothing says which GPU is whose"
        assert (replica["gpus"], replica["absent"]["gpus"]) == (None, why)
    assert "nothing says which GPU is whose" in finding_of_first(made, "W018")["missing"][0]


def finding_of_first(document: dict[str, Any], rule: str) -> dict[str, Any]:
    return next(one for one in document["findings"] if one["id"] == rule)


def test_several_exporters_are_asked_each_for_its_own(engine, exporter, capsys) -> None:
    with page_server({"/dcgm": dcgm_page(labels_of(5, host="gpu-9"), labels_of(6))}) as other:
        flags = [f for p in (f"{other.target}/dcgm", exporter.target) for f in ("--gpu-metrics", p)]
        (replica,) = watched(capsys, engine.target, *flags)["replicas"]
    # The first tells of two hosts, neither of which is this one.
    assert [gpu["index"] for gpu in replica["gpus"]] == ["0", "1"]


@pytest.mark.parametrize(
    ("pages", "why"),
    [({}, "/metrics: HTTP 404"), ({"/metrics": ENGINE}, NO_METRIC)],
)
def test_an_exporter_that_is_none_is_said_in_both(pages, why, engine, capsys) -> None:
    with page_server(pages) as odd:
        arguments = (engine.target, "--gpu-metrics", odd.target)
        (replica,) = watched(capsys, *arguments)["replicas"]
        assert replica["gpus"] is None
        assert replica["absent"]["gpus"] == f"{odd.target}: {why}"
        assert replica["running"] == 3, "the engine is watched all the same"
        assert main(["watch", *arguments, "--once", "--interval", "0.2"]) == 0
    out = capsys.readouterr().out
    assert "  GPUs –\n" in out and "– GPUs: " in out


def test_who_did_not_ask_is_told_in_the_document_alone(engine, capsys) -> None:
    (replica,) = watched(capsys, engine.target)["replicas"]
    assert (replica["gpus"], replica["absent"]["gpus"]) == (None, NOBODY_ASKED)
    assert main(["watch", engine.target, "--once", "--interval", "0.2"]) == 0
    assert "GPUs" not in capsys.readouterr().out


def test_nvml_is_asked_for_an_engine_on_this_machine(engine, capsys, monkeypatch) -> None:
    """The page server listens in this very process."""
    import os

    monkeypatch.setattr("ullage.telemetry.nvml.is_installed", lambda: True)
    monkeypatch.setattr("ullage.telemetry.nvml.names_pids_as_the_machine", lambda _: True)
    cards = (Card((1,), "GPU-a"), Card((os.getpid(),), "GPU-b"))
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml(*cards))
    if not Path("/proc/net/tcp").exists():
        pytest.skip("Linux's /proc is needed")
    (replica,) = watched(capsys, engine.target)["replicas"]
    assert replica["sources"]["gpus"] == "NVML, by process"
    assert [gpu["uuid"] for gpu in replica["gpus"]] == ["GPU-b"]


# --- Kubernetes and Prometheus --------------------------------------------------------------------


def test_pods_of_exporters_are_found_beside_pods_of_engines(
    engine, capsys, tmp_path, monkeypatch
) -> None:
    body = dcgm_page(labels_of(0, pod="llm/a"), labels_of(1, pod="llm/b"))
    with page_server({"/metrics": body}) as dcgm, api_server() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
        at = {"ip": "127.0.0.1", "node": "gpu-1"}
        server.pods = [
            pod("a", **at, ports={"http": engine.port}),
            pod("x", namespace="gpu", labels={"app": "dcgm"}, ports={"metrics": dcgm.port}, **at),
        ]
        where = ("--k8s", "llm/app=vllm", "--gpu-metrics")
        (replica,) = watched(capsys, *where, "gpu/app=dcgm")["replicas"]
        assert [gpu["index"] for gpu in replica["gpus"]] == ["0"]
        assert replica["sources"]["gpus"].endswith(", by pod")
        (replica,) = watched(capsys, *where, dcgm.target)["replicas"]
        assert [gpu["index"] for gpu in replica["gpus"]] == ["0"], "by its URL as well"
        (replica,) = watched(capsys, *where, "gpu/app=none")["replicas"]
        assert "no pod in namespace gpu that matches app=none" in replica["absent"]["gpus"]


@NEEDS_PROMETHEUS
def test_a_prometheus_tells_of_gpus_without_a_flag(tmp_path, capsys) -> None:
    body = dcgm_page(labels_of(0, pod="llm/a"), labels_of(1, pod="llm/b"))
    jobs: dict[str, Any] = {}
    with page_server({"/engine": ENGINE, "/dcgm": body}) as pages:
        labels = {"namespace": "llm", "pod": "a", "instance": "10.1.0.1:8000"}
        jobs["vllm"] = [{"targets": [pages.target], "labels": labels}]
        own = {"namespace": "gpu", "pod": "dcgm", "instance": "10.1.0.9:9400"}
        jobs["dcgm"] = [{"targets": [pages.target], "labels": own}]
        paths = {"vllm": "/engine", "dcgm": "/dcgm"}
        with prometheus(tmp_path, jobs, paths=paths) as server:
            server.until(lambda: len(server.query("up == 1")) == 2, 60.0, "both scraped")
            (replica,) = watched(capsys, "--prometheus", server.url)["replicas"]
    assert [gpu["index"] for gpu in replica["gpus"]] == ["0"]
    assert replica["sources"]["gpus"] == f"DCGM by {server.url}, by pod"


@NEEDS_PROMETHEUS
def test_one_without_them_is_no_news_to_the_terminal(tmp_path, engine, capsys) -> None:
    jobs = {"vllm": [{"targets": [engine.target]}]}
    with prometheus(tmp_path, jobs) as server:
        server.until(lambda: len(server.query("up == 1")) == 1, 60.0, "scraped")
        (replica,) = watched(capsys, "--prometheus", server.url)["replicas"]
        assert replica["absent"]["gpus"] == NO_SERIES
        assert main(["watch", "--prometheus", server.url, "--once", "--interval", "0.2"]) == 0
    assert "– GPUs" not in capsys.readouterr().out


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["h:1", "--gpu-metrics", "ftp://gpu-1"], "--gpu-metrics: 'ftp://gpu-1' is not the URL"),
        (["h:1", "--gpu-metrics", "http://a:b@gpu-1"], "a URL with a name or a password in it"),
        (["h:1", "--gpu-metrics", "http://gpu-1?a=b"], "has a query"),
        (["h:1", "--gpu-metrics", ""], "--gpu-metrics: '' is not the URL"),
        (["h:1", "--gpu-metrics", "gpu/app=dcgm"], "selects pods of no cluster"),
        (["--k8s", "llm/app=vllm", "--gpu-metrics", "GPU/app=dcgm"], "'GPU' is no namespace"),
        (["--k8s", "llm/app=vllm", "--gpu-metrics", "gpu/a=b=c"], "is no condition on labels"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(
    arguments, words, capsys, tmp_path, monkeypatch
) -> None:
    with api_server() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
        assert main(["watch", *arguments, "--once"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("ullage watch: ") and printed.err.count("\n") == 1
    assert words in printed.err and "--gpu-metrics" in printed.err
