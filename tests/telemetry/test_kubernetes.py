"""Pods are found as kubectl finds them, and each way in which that fails is one sentence."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.telemetry.cluster import TOKEN, ApiServer, api_server, pod
from ullage.errors import BadUsage, Unreachable
from ullage.telemetry.kubernetes import Cluster, config_of
from ullage.telemetry.pods import (
    USUAL_PORTS,
    Pod,
    candidates,
    facts_of,
    port_of,
    selection_of,
    state_in_words,
)


def listed(
    server: ApiServer,
    folder: Path,
    text: str = "llm/app=vllm",
    *,
    within_s: float = 5.0,
    **user: Any,
) -> tuple[Pod, ...]:
    """What the server's pods are by the selection, asked through a kubeconfig."""

    async def run() -> tuple[Pod, ...]:
        path = server.kubeconfig(folder, **user)
        cluster = Cluster(config_of({"KUBECONFIG": str(path)}), within_s=within_s)
        try:
            return await cluster.pods(selection_of(text))
        finally:
            await cluster.close()

    return asyncio.run(run())


def told(tmp_path: Path, *pods: dict[str, Any]) -> Pod:
    with api_server(*pods) as server:
        (found,) = listed(server, tmp_path)
    return found


# --- which pods -----------------------------------------------------------------------------------

FLEET = [
    pod("a", labels={"app": "vllm", "tier": "gold"}),
    pod("b", labels={"app": "vllm", "tier": "tin", "app.kubernetes.io/name": "vllm"}),
    pod("c", labels={"app": "sglang", "canary": ""}),
    pod("d", namespace="other", labels={"app": "vllm"}),
    pod("e", labels={}),
]
SELECTORS = {
    "app=vllm": "ab",
    "app==vllm": "ab",
    "app!=vllm": "ce",
    "app = vllm , tier != gold": "b",
    "app in (vllm, sglang)": "abc",
    "app notin (vllm)": "ce",
    "app in (vllm),tier in (gold,tin)": "ab",
    "tier": "ab",
    "!tier": "ce",
    "! tier,app": "c",
    "app.kubernetes.io/name=vllm": "b",
    "canary=": "c",
    "tier!=gold,tier!=tin": "ce",
}


@pytest.mark.parametrize("selector", SELECTORS)
def test_pods_are_selected_by_their_labels(selector: str, tmp_path: Path) -> None:
    with api_server(*FLEET) as server:
        found = listed(server, tmp_path, f"llm/{selector}")
    assert "".join(one.name for one in found) == SELECTORS[selector]


KUBECTL = "kubectl get pods -n llm -o json"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_finds_the_same_pods(tmp_path: Path) -> None:
    """The fake server is one that kubectl can talk to, and both read a selector in one way."""
    selector = "app in (vllm, sglang),tier!=gold"
    with api_server(*FLEET) as server:
        server.token = False  # kubectl sends no token where there is no TLS
        path = server.kubeconfig(tmp_path)
        made = subprocess.run(
            [*KUBECTL.split(), "--cache-dir", tmp_path, "--kubeconfig", path, "-l", selector],
            capture_output=True,
            check=True,
            timeout=60,
            env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        )
        theirs = [one["metadata"]["name"] for one in json.loads(made.stdout)["items"]]
        ours = [one.name for one in listed(server, tmp_path, f"llm/{selector}")]
    assert ours == theirs == ["b", "c"]


def test_all_namespaces_can_be_meant(tmp_path: Path) -> None:
    with api_server(*FLEET) as server:
        assert [one.called for one in listed(server, tmp_path, "*/app=vllm")] == [
            "llm/a",
            "llm/b",
            "other/d",
        ]


def test_long_lists_come_in_parts_and_begin_anew_when_they_grow_old(tmp_path: Path) -> None:
    with api_server(*(pod(f"p{num:03}") for num in range(25))) as server:
        server.most_at_once = 10
        assert len(listed(server, tmp_path)) == 25
        server.refuse_parts_after_first = True
        assert len(listed(server, tmp_path)) == 25


@pytest.mark.parametrize(
    "text",
    [
        "llm",
        "llm/",
        "/app=vllm",
        "LLM/app=vllm",
        "llm/app=a b",
        "llm/app in vllm",
        "llm/=x",
        "llm/,",
        "llm/app=vllm,",
        "llm/app>3",
        "llm/app in ()x",
        "llm/-a=b",
        "llm/a\nb=c",
        "llm/app=v/x",
    ],
)
def test_a_bad_selector_is_one_sentence(text: str) -> None:
    with pytest.raises(BadUsage) as caught:
        selection_of(text)
    assert "--k8s" in str(caught.value) and "kubectl" in str(caught.value)
    assert str(caught.value).isprintable()


@given(st.text(max_size=60))
def test_any_text_is_a_selection_or_a_sentence(text: str) -> None:
    try:
        selection = selection_of(text)
    except BadUsage:
        return
    assert selection.terms and selection.namespace


# --- what a pod is --------------------------------------------------------------------------------

OOM = {
    "terminated": {
        "exitCode": 137,
        "reason": "OOMKilled",
        "startedAt": "2026-11-30T04:00:00Z",
        "finishedAt": "2026-11-30T04:20:00Z",
        "containerID": "x",
    }
}


def test_what_kubernetes_says_of_a_pod_is_kept(tmp_path: Path) -> None:
    labels = {"app": "vllm", "pod-template-hash": "7f9c"}
    found = told(tmp_path, pod("a", ip="10.1.0.7", labels=labels, restarts=2, last_state=OOM))
    assert facts_of(found, "http://10.1.0.7:8000") == {
        "name": "a",
        "namespace": "llm",
        "uid": "uid-a",
        "address": "http://10.1.0.7:8000",
        "node": "node-a",
        "phase": "Running",
        "ready": "true",
        "restarts": "2",
        "last_termination": "vllm: OOMKilled, exit code 137 at 2026-11-30T04:20:00Z",
        "image": "vllm/vllm-openai:v0.32.0",
        "revision": "7f9c",
        "created": "2026-11-30T04:00:00Z",
    }
    assert state_in_words(found) == ""


def test_since_when_a_pod_is_not_ready_and_until_when_it_may_stay(tmp_path: Path) -> None:
    since = [{"type": "Ready", "status": "False", "lastTransitionTime": "2026-11-30T04:30:00Z"}]
    # What the API calls the time of deletion is when the grace (here 30 s) is over.
    found = told(tmp_path, pod("a", ready=False, conditions=since, deleted="2026-11-30T05:00:00Z"))
    facts = facts_of(found)
    assert facts["unready_since"] == "2026-11-30T04:30:00Z"
    assert facts["terminating_since"] == "2026-11-30T04:59:30Z"
    assert facts["gone_by"] == "2026-11-30T05:00:00Z"
    # No condition says so before it has a node; it is not ready since it was made.
    pending = told(tmp_path, pod("a", phase="Pending", conditions=[UNSCHEDULABLE]))
    assert facts_of(pending)["unready_since"] == "2026-11-30T04:00:00Z"
    assert "unready_since" not in facts_of(told(tmp_path, pod("a")))


UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient gpu.",
}
READINESS = [
    {"type": "Ready", "status": "False", "reason": "ContainersNotReady",
     "message": "containers with unready status: [vllm]"},
]  # fmt: skip
CRASH = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting"}}
STATES: dict[str, tuple[dict[str, Any], str]] = {
    "no node has room": (
        pod("a", phase="Pending", conditions=[UNSCHEDULABLE], state={"waiting": {}}, node=""),
        "the pod is Pending: Unschedulable: 0/3 nodes are available: 3 Insufficient gpu.",
    ),
    "no image": (
        pod("a", phase="Pending", state={"waiting": {"reason": "ImagePullBackOff"}}),
        "the pod is Pending: container vllm: ImagePullBackOff",
    ),
    "it crashes": (
        pod("a", ip="10.1.0.7", ready=False, state=CRASH, last_state=OOM, restarts=9),
        "the pod is not ready: container vllm: CrashLoopBackOff: back-off 5m0s restarting",
    ),
    "it is not ready": (
        pod("a", ip="10.1.0.7", ready=False, conditions=READINESS),
        "the pod is not ready: ContainersNotReady: containers with unready status: [vllm]",
    ),
    "it has just died": (
        pod("a", ip="10.1.0.7", ready=False, state=OOM),
        "the pod is not ready: container vllm ended: OOMKilled, exit code 137",
    ),
    "it was evicted": (
        pod("a", phase="Failed", reason="Evicted", message="The node was low on memory.",
            containerStatuses=[]),
        "the pod is Failed: Evicted: The node was low on memory.",
    ),
    "it is going": (
        pod("a", ip="10.1.0.7", deleted="2026-11-30T05:00:00Z"),
        "the pod is terminating since 2026-11-30T04:59:30Z",
    ),
}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
def test_why_a_pod_may_not_answer_is_said(state: str, tmp_path: Path) -> None:
    answered, words = STATES[state]
    assert state_in_words(told(tmp_path, answered)) == words


def test_a_pod_without_anything_is_no_error(tmp_path: Path) -> None:
    bare = {"metadata": {"name": "a", "namespace": "llm", "labels": {"app": "vllm"}}}
    found = told(tmp_path, bare)
    assert (found.called, found.runs, found.ready) == ("llm/a", False, False)
    assert state_in_words(found) == "the pod is in no known phase"


# --- where it is asked ----------------------------------------------------------------------------

AT = "http://10.1.0.7"
PLACES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "the metrics port first": (
        {"ports": (("http", 8000), ("metrics", 9000))},
        "",
        [f"{AT}:9000", f"{AT}:8000"],
    ),
    "what is annotated": (
        {
            "ports": (("x", 5),),
            "annotations": {"prometheus.io/port": "7000", "prometheus.io/path": "/m"},
        },
        "",
        [f"{AT}:7000/m", f"{AT}:5"],
    ),
    "by https": (
        {"annotations": {"prometheus.io/port": "7000", "prometheus.io/scheme": "https"}},
        "",
        ["https://10.1.0.7:7000"],
    ),
    "an annotation that is none": ({"annotations": {"prometheus.io/port": "8000/x"}}, "", []),
    "a number": ({"ports": (("http", 8000),)}, "1234", [f"{AT}:1234"]),
    "a name": ({"ports": (("http", 8000), ("api", 5))}, "api", [f"{AT}:5"]),
    "a name that it has not": ({"ports": (("http", 8000),)}, "api", []),
    "IPv6": ({"ip": "fd00::7", "ports": (("http", 8000),)}, "", ["http://[fd00::7]:8000"]),
}


@pytest.mark.parametrize("place", PLACES)
def test_where_an_engine_may_answer(place: str) -> None:
    fields, port, urls = PLACES[place]
    declared, usual = candidates(Pod("llm", "a", **{"ip": "10.1.0.7", **fields}), port)
    assert list(declared) == urls
    assert bool(usual) == (not port)
    assert not set(declared) & set(usual)
    assert len(usual) <= len(USUAL_PORTS)


@pytest.mark.parametrize("text", ["0", "65536", "Metrics", "", "-a", "a" * 16, "８", "9" * 5000])
def test_a_port_that_is_none_is_a_sentence(text: str) -> None:
    with pytest.raises(BadUsage, match="--k8s-port"):
        port_of(text)


# --- what goes wrong ------------------------------------------------------------------------------

FORBIDDEN = 'pods is forbidden: User "jo" cannot list resource "pods" in API group ""'
REFUSALS: dict[str, tuple[tuple[int, str, str], str]] = {
    "RBAC": (
        (403, "Forbidden", FORBIDDEN),
        f"Kubernetes does not let this user list pods in namespace llm: {FORBIDDEN}",
    ),
    "always too old": ((410, "Expired", "too old"), "the Kubernetes API answers HTTP 410: too old"),
    "overload": ((429, "TooManyRequests", "later"), "the Kubernetes API answers HTTP 429: later"),
    "a bad gateway": ((502, "", ""), "the Kubernetes API answers HTTP 502"),
    "a selector": (
        (400, "BadRequest", "unable to parse requirement"),
        "the Kubernetes API does not understand the selector app=vllm: unable to parse requirement",
    ),
}


@pytest.mark.parametrize("way", REFUSALS)
def test_a_refusal_is_one_sentence(way: str, tmp_path: Path) -> None:
    with api_server(pod("a")) as server:
        server.refusal, words = REFUSALS[way]
        with pytest.raises(Unreachable) as caught:
            listed(server, tmp_path)
        assert str(caught.value) == f"{server.url}: {words}"


def test_an_expired_token_is_said(tmp_path: Path) -> None:
    with api_server(pod("a")) as server, pytest.raises(Unreachable, match="has the token expired"):
        listed(server, tmp_path, token="another")


def test_a_slow_api_is_said_in_time(tmp_path: Path) -> None:
    with api_server(pod("a")) as server:
        server.pause_s = 1.0
        with pytest.raises(Unreachable, match="did not answer in time"):
            listed(server, tmp_path, within_s=0.2)


@pytest.mark.parametrize(
    "body", [b"<html>", b"{}", b'{"items": 3}', b'{"items": [{"spec": 4}]}', b""]
)
def test_what_is_no_api_is_said(body: bytes, tmp_path: Path) -> None:
    with api_server() as server:
        server.body = body
        with pytest.raises(Unreachable, match="what answers is not the Kubernetes API"):
            listed(server, tmp_path)


def test_an_api_that_is_not_there_is_said(tmp_path: Path) -> None:
    with api_server() as server:
        path = server.kubeconfig(tmp_path)
    # The server is closed: nobody listens there now.
    cluster = Cluster(config_of({"KUBECONFIG": str(path)}))
    with pytest.raises(Unreachable, match="cannot be reached"):
        asyncio.run(cluster.pods(selection_of("llm/app=vllm")))


PLUGIN = {"apiVersion": "client.authentication.k8s.io/v1beta1", "args": []}


def test_credentials_come_from_a_plugin(tmp_path: Path) -> None:
    script = tmp_path / "plugin"
    script.write_text(f'#!/bin/sh\necho \'{{"status": {{"token": "{TOKEN}"}}}}\'\n')
    script.chmod(0o755)
    with api_server(pod("a")) as server:
        assert listed(server, tmp_path, exec={**PLUGIN, "command": str(script)})
        script.write_text("#!/bin/sh\necho log in first >&2\nexit 1\n")
        with pytest.raises(Unreachable, match="log in first"):
            listed(server, tmp_path, exec={**PLUGIN, "command": str(script)})
        with pytest.raises(Unreachable, match="No such file"):
            listed(server, tmp_path, exec={**PLUGIN, "command": "/no/plugin"})


# --- the kubeconfig -------------------------------------------------------------------------------


def config_file(path: Path, **parts: object) -> Path:
    named = {"name": "c"}
    document = {
        "current-context": "c",
        "clusters": [named | {"cluster": {"server": "http://127.0.0.1:1"}}],
        "contexts": [named | {"context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    path.write_text(yaml.safe_dump({**document, **parts}))
    return path


BAD_FILES: dict[str, tuple[dict[str, object], str]] = {
    "no such context": ({"current-context": "x"}, "'x' not found"),
    "no context": ({"current-context": None}, "No current context"),
    "no clusters": ({"clusters": []}, "'c' is missing"),
    "no list": ({"clusters": {"a": 1}}, "clusters: not a list"),
    "no user": ({"users": []}, "'u' is missing"),
    "a number": ({"users": [{"name": "u", "user": {"token": 3}}]}, "Expected `str"),
}


@pytest.mark.parametrize("way", BAD_FILES)
def test_a_bad_kubeconfig_is_one_sentence(way: str, tmp_path: Path) -> None:
    parts, words = BAD_FILES[way]
    path = config_file(tmp_path / "config", **parts)
    with pytest.raises(BadUsage) as caught:
        config_of({"KUBECONFIG": str(path)})
    assert str(path) in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize("text", ["[1]", "a: [", "", "\x00"])
def test_a_file_that_is_no_kubeconfig_is_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(BadUsage, match="kubeconfig"):
        config_of({"KUBECONFIG": str(path)})


def test_files_are_joined_as_kubectl_joins_them(tmp_path: Path) -> None:
    """The first that names a thing defines it, and paths are relative to the file they are in."""
    (tmp_path / "b").mkdir()
    first = config_file(tmp_path / "a", users=[], clusters=[])
    second = config_file(
        tmp_path / "b" / "b",
        **{"current-context": "other"},
        clusters=[{"name": "c", "cluster": {"server": "http://127.0.0.1:2",
                                            "certificate-authority": "ca.crt"}}],
    )  # fmt: skip
    environ = {"KUBECONFIG": os.pathsep.join(map(str, (first, tmp_path / "none", second)))}
    config = config_of(environ)
    assert config.context_name == "c" and config.cluster.server == "http://127.0.0.1:2"
    assert config.cluster.certificate_auth == str(tmp_path / "b" / "ca.crt")


def test_a_context_can_be_named_and_needs_no_user(tmp_path: Path) -> None:
    path = config_file(tmp_path / "a", contexts=[{"name": "x", "context": {"cluster": "c"}}])
    assert config_of({"KUBECONFIG": str(path)}, "x").context_name == "x"
    Cluster(config_of({"KUBECONFIG": str(path)}, "x"))


def test_no_cluster_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(BadUsage, match="no cluster is known"):
        config_of({})
    with pytest.raises(BadUsage, match="no such file"):
        config_of({"KUBECONFIG": "/none"})


def test_a_certificate_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    path = config_file(
        tmp_path / "a",
        clusters=[{"name": "c", "cluster": {"server": "https://127.0.0.1:1",
                                            "certificate-authority": "none.crt"}}],
    )  # fmt: skip
    with pytest.raises(BadUsage, match="context c"):
        Cluster(config_of({"KUBECONFIG": str(path)}))
