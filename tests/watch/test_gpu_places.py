"""A GPU is joined to a replica where something says whose it is, and else to none, with why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.telemetry.dcgm import dcgm_page, labels_of, uuid_of
from ullage.telemetry.gpu_pages import Told
from ullage.telemetry.gpus import at, devices_on, hosts_on
from ullage.telemetry.scrape import Look
from ullage.telemetry.snapshot import Gpu
from ullage.watch.gpu_places import Found, Whereabouts, joined, plain_host, whereabouts_of

EXPORTER = "http://gpu-1:9400"


def exporter(*gpus: dict[str, str], called: str = EXPORTER, asked: str = "") -> Told:
    devices = tuple(at(device, asked) for device in devices_on(dcgm_page(*gpus)))
    return Told(called, devices, hosts_on(devices))


def silent(called: str = EXPORTER, *hosts: str, error: str = "connection refused") -> Told:
    return Told(called, hosts=frozenset(hosts), error=error)


def pod(name: str, node: str = "gpu-1", ip: str = "10.1.0.7") -> Whereabouts:
    facts = {"namespace": "llm", "name": name, "node": node, "address": f"http://{ip}:8000"}
    return whereabouts_of(Look(f"llm/{name}", 0.0, None, pod=facts))


def url(text: str) -> Whereabouts:
    return whereabouts_of(Look(text, 0.0, None))


def target(**labels: str) -> Whereabouts:
    return whereabouts_of(Look("a", 0.0, None, labels=labels))


def found(where: Whereabouts, *exporters: Told, **others: Whereabouts) -> Found:
    return joined({"me": where, **others}, exporters, {})["me"]


def indexes(one: Found) -> list[str]:
    assert bool(one.gpus) != bool(one.absent), "never both, never neither"
    return [gpu.index for gpu in one.gpus]


# --- by pod ---------------------------------------------------------------------------------------


def test_a_pod_has_the_gpus_that_the_exporter_gives_it() -> None:
    one = exporter(labels_of(0, pod="llm/a"), labels_of(1, pod="llm/a"), labels_of(2, pod="llm/b"))
    mine = found(pod("a"), one, b=pod("b"))
    assert (indexes(mine), mine.source) == (["0", "1"], f"{EXPORTER}, by pod")
    assert indexes(found(pod("b"), one)) == ["2"]


def test_a_pod_of_another_namespace_or_cluster_is_another() -> None:
    other = exporter(labels_of(0, pod="test/a"))
    assert "belong to test/a, none to llm/a" in found(pod("a"), other).absent
    mine = target(pod="a", namespace="llm", instance="10.1.0.7:8000", cluster="eu")
    theirs = exporter(labels_of(0, pod="llm/a", cluster="us"))
    assert not found(mine, theirs).gpus
    assert indexes(found(mine, exporter(labels_of(0, pod="llm/a", cluster="eu")))) == ["0"]
    assert indexes(found(mine, exporter(labels_of(0, pod="llm/a")))) == ["0"]


def test_mig_instances_are_their_pods() -> None:
    one = exporter(
        labels_of(0, mig=("3g.40gb", "1"), pod="llm/a"),
        labels_of(0, mig=("3g.40gb", "2"), pod="llm/b"),
    )
    (gpu,) = found(pod("a"), one, b=pod("b")).gpus
    assert (gpu.index, gpu.mig_profile) == ("0/1", "3g.40gb")


def test_a_gpu_that_is_told_of_twice_is_one() -> None:
    """Two containers of a pod, two exporters of a node, two jobs of a Prometheus."""
    containers = [labels_of(0, pod="llm/a", container=name) for name in ("vllm", "side")]
    twice = exporter(*containers), exporter(*containers, called="http://gpu-1:9401")
    mine = found(pod("a"), *twice)
    assert (indexes(mine), mine.source) == (["0"], f"{EXPORTER}, http://gpu-1:9401, by pod")


def test_a_gpu_that_pods_share_is_each_ones() -> None:
    one = exporter(labels_of(0, pod="llm/a", vgpu="0"), labels_of(0, pod="llm/b", vgpu="1"))
    assert indexes(found(pod("a"), one, b=pod("b"))) == ["0"]
    assert indexes(found(pod("b"), one)) == ["0"]


@pytest.mark.parametrize("where", [pod("a"), target(pod="a", namespace="llm", node="gpu-1")])
def test_a_pod_has_no_gpu_only_for_being_on_its_host(where) -> None:
    """It may have none: one that computes on the CPU, beside GPUs that nobody has."""
    absent = found(where, exporter(labels_of(0))).absent
    assert absent.startswith("no pod is named for the GPUs of gpu-1: no pod has them, or ")


def test_gpus_are_in_the_order_of_their_numbers() -> None:
    one = exporter(*(labels_of(number, pod="llm/a") for number in (10, 2, 0)))
    assert indexes(found(pod("a"), one)) == ["0", "2", "10"]


# --- by host --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "host", "asked"),
    [
        (url("http://gpu-1:8000"), "gpu-1", ""),
        (url("gpu-1:8000"), "dcgm-exporter-x2x", "gpu-1"),
        (url("http://GPU-1.:8000/v1"), "gpu-1", ""),
        (url("http://gpu-1.example.com:8000"), "gpu-1", ""),
        (url("http://gpu-1:8000"), "gpu-1.example.com", ""),
        (url("http://10.0.0.1:8000"), "gpu-1", "10.0.0.1"),
        (url("http://localhost:8000"), "gpu-1", "127.0.0.1"),
        (url("http://[::1]:8000"), "", "localhost"),
        (url("http://[fd00::a]:8000"), "", "fd00:0::a"),
        (target(instance="gpu-1:8000", job="vllm"), "gpu-1", ""),
        (target(instance="[fd00::a]:8000"), "", "fd00::a"),
        (target(instance="10.1.0.7:8000", node="gpu-1"), "gpu-1", ""),
        (target(instance="10.1.0.7:8000"), "gpu-1", "10.1.0.7"),
    ],
)
def test_alone_on_a_host_a_replica_has_its_gpus(where, host, asked) -> None:
    one = exporter(labels_of(0, host=host), labels_of(1, host=host), asked=asked)
    mine = found(where, one, elsewhere=url("http://gpu-9:8000"))
    assert (indexes(mine), mine.source) == (["0", "1"], f"{EXPORTER}, by host")


@pytest.mark.parametrize(
    ("where", "host"),
    [
        (url("http://gpu-10:8000"), "gpu-1"),
        (url("http://gpu-1.a.com:8000"), "gpu-1.b.com"),
        (url("http://10.0.0.1:8000"), "10.0.0.11"),
        (url("http://10.0.0.1:8000"), "10"),
        (target(instance="a:8000", node="gpu-2"), "gpu-1"),
    ],
)
def test_another_host_is_another(where, host) -> None:
    absent = found(where, exporter(labels_of(host=host))).absent
    assert absent.startswith("no exporter tells of GPUs of ") and absent.endswith(f": {host}")


def test_of_several_replicas_on_a_host_none_has_its_gpus() -> None:
    one = exporter(labels_of(0), labels_of(1))
    neighbours = {"other": url("http://gpu-1.example.com:8001"), "far": url("http://gpu-9:1")}
    absent = found(url("http://gpu-1:8000"), one, **neighbours).absent
    assert absent == "2 replicas are watched on gpu-1, and nothing says which GPU is whose"


def test_all_addresses_of_loopback_are_one_machine() -> None:
    one = exporter(labels_of(0), asked="127.0.0.1")
    both = {"other": url("http://127.0.0.2:8000")}
    assert "2 replicas are watched on localhost" in found(url("localhost:8000"), one, **both).absent


def test_a_replica_that_is_no_pod_has_what_the_one_pod_there_has() -> None:
    one = exporter(labels_of(0, pod="llm/a"), labels_of(1))
    assert indexes(found(url("http://gpu-1:8000"), one)) == ["0"], "not what nobody has"
    two = exporter(labels_of(0, pod="llm/a"), labels_of(1, pod="llm/b"))
    absent = found(url("http://gpu-1:8000"), two).absent
    assert absent == "2 pods have GPUs on gpu-1, and nothing says which GPU is whose"


def test_a_replica_that_is_no_pod_has_nothing_of_a_pod_that_is_watched_too() -> None:
    one = exporter(labels_of(0, pod="llm/a"))
    mine = found(url("http://gpu-1:8000"), one, a=pod("a", node="node-7"))
    assert mine.absent == "the GPUs of gpu-1 belong to llm/a, none to what is no pod"


def test_a_pod_has_nothing_of_what_others_are_given() -> None:
    one = exporter(labels_of(0, pod="llm/b"), labels_of(1))
    assert found(pod("a"), one).absent == "the GPUs of gpu-1 belong to llm/b, none to llm/a"


def test_a_short_name_that_may_be_two_hosts_is_neither() -> None:
    one = exporter(labels_of(0, host="gpu-1.a.com"), labels_of(1, host="gpu-1.b.com"))
    absent = found(url("http://gpu-1:8000"), one).absent
    assert absent == "exporters tell of GPUs on gpu-1.a.com, gpu-1.b.com, and gpu-1 may be any"


def test_nodes_of_one_name_in_two_clusters_are_two() -> None:
    eu = target(instance="gpu-1:8000", cluster="eu")
    us = target(instance="gpu-1:8000", cluster="us")
    one = exporter(labels_of(0, cluster="eu"), labels_of(1, cluster="us"))
    assert indexes(found(eu, one, other=us)) == ["0"]
    assert indexes(found(us, one, other=eu)) == ["1"]


# --- by process -----------------------------------------------------------------------------------


def test_what_the_driver_says_is_a_servers_is_told_by_the_exporter_which_knows_more() -> None:
    mine = (Gpu("1", uuid=uuid_of(1)),)
    here = exporter(labels_of(0), labels_of(1), asked="localhost")
    where = {"me": url("http://localhost:8000"), "other": url("http://localhost:8001")}
    one = joined(where, [here], {"me": mine})
    assert (indexes(one["me"]), one["me"].source) == (["1"], f"{EXPORTER}, by process")
    assert one["me"].gpus[0].xid_errors == 0.0, "NVML does not tell of those"
    assert "nothing says which" in one["other"].absent


def test_without_an_exporter_that_tells_of_it_the_driver_tells() -> None:
    mine = (Gpu("1", uuid=uuid_of(7)),)
    here = exporter(labels_of(0), asked="localhost")
    one = joined({"me": url("http://localhost:8000")}, [here], {"me": mine})["me"]
    assert (one.gpus, one.source) == (mine, "NVML, by process")


# --- nothing --------------------------------------------------------------------------------------


def test_an_exporter_that_does_not_answer_is_said_to_those_whom_it_would_have_served() -> None:
    there = exporter(labels_of(0, host="gpu-2"), called="http://gpu-2:9400")
    both = (silent(EXPORTER, "gpu-1"), there)
    assert found(url("http://gpu-2:8000"), *both).gpus
    absent = found(url("http://gpu-1:8000"), *both).absent
    assert absent == f"no other tells of its GPUs; {EXPORTER}: connection refused"
    assert found(url("http://gpu-1:8000"), both[0]).absent == f"{EXPORTER}: connection refused"


def test_of_many_that_do_not_answer_one_is_named() -> None:
    absent = found(url("http://x:1"), silent("a", "h"), silent("b", "i"), silent("c", "j")).absent
    assert absent == "a: connection refused, and 2 more"


def test_nothing_known_is_said_in_words() -> None:
    assert found(url("http://x:1")).absent == "no exporter of GPUs was found"
    somewhere = exporter(labels_of(host=""))
    assert found(url("http://x:1"), somewhere).absent.endswith("GPUs of x; told of: no host")
    assert found(Whereabouts(), somewhere).absent == "nothing tells on which host it runs"


NAMES = st.sampled_from(["gpu-1", "gpu-2", "gpu-1.a.com", "10.0.0.1", "127.0.0.1", "localhost", ""])
PODS = st.sampled_from(["", "llm/a", "llm/b", "test/a"])


@given(
    st.lists(st.tuples(NAMES, PODS), max_size=5),
    st.lists(st.one_of(NAMES, PODS.filter(bool)), min_size=1, max_size=4),
)
def test_whatever_there_is_no_gpu_is_anybodys_by_guess(gpus, replicas) -> None:
    """Each has GPUs or a reason; two share one only where the exporter gives it to both."""
    told = exporter(*(labels_of(n, host=h, pod=p) for n, (h, p) in enumerate(gpus)))
    where = {
        str(n): pod(name.partition("/")[2], node="gpu-1")
        if "/" in name
        else url(f"http://{name or 'x'}:{n + 1}")
        for n, name in enumerate(replicas)
    }
    result = joined(where, [told], {})
    assert result.keys() == where.keys()
    owners: dict[str, list[str]] = {}
    for name, one in result.items():
        indexes(one)
        for gpu in one.gpus:
            owners.setdefault(gpu.key, []).append(name)
    for names in owners.values():
        pods = {(where[name].namespace, where[name].pod) for name in names}
        assert len(names) == 1 or (len(pods) == 1 and pods != {("", "")})


@pytest.mark.parametrize(
    ("host", "plain"),
    [
        ("LOCALHOST", "localhost"),
        ("127.3.2.1", "localhost"),
        ("::1", "localhost"),
        ("[::ffff:127.0.0.1]", "localhost"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("Gpu-1.Example.com.", "gpu-1.example.com"),
    ],
)
def test_one_host_has_one_spelling(host: str, plain: str) -> None:
    assert plain_host(host) == plain
