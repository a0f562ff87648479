"""The plugin in vLLM servers that end otherwise than they began, each with flags of its own.

Overload, drains, several API processes, and what is there when it steps aside. As in
test_plugin.py, numbers are held to vLLM's own and to what clients received.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest
from plugin_server import BYTES_PER_BLOCK, DEV, KEY, ON, TIGHT, Servers, eventually, prompt_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True, scope="module")
def stopped(launched: Servers) -> Iterator[None]:
    yield
    launched.stop()


def test_cancelling_under_overload_frees_what_was_promised(launched: Servers) -> None:
    """Twelve requests of up to 1,500 tokens want 576 blocks; there are 64.

    The storm goes on meanwhile: who is chosen runs, and is ended before another step can preempt
    it. Answers come in one piece: streams keep a server busy after its engine has ended them.
    """
    server = launched.start(TIGHT, ON)
    before = server.metrics()
    with ThreadPoolExecutor(12) as clients:
        asked = [clients.submit(server.ask, prompt_of(number, 20), 1500) for number in range(12)]
        eventually(
            lambda: (
                server.metrics()["vllm:num_preemptions_total"]
                >= before["vllm:num_preemptions_total"] + 3
            )
        )
        answer = server.http.post("/ullage/cancel_oldest", params={"percent": 40})
        report = answer.raise_for_status().json()
    assert len(report["request_ids"]) >= 1
    assert report["freed_bytes"] == report["promised_bytes"] > 0
    ends: dict[str, list[int]] = {"abort": [], "length": []}
    for one in asked:
        got = one.result().raise_for_status().json()
        ends[got["choices"][0]["finish_reason"]].append(got["usage"]["completion_tokens"])
    assert len(ends["abort"]) == len(report["request_ids"])
    assert all(tokens < 1500 for tokens in ends["abort"])
    assert ends["length"] == [1500] * (12 - len(ends["abort"]))
    cancelled = 'ullage_requests_cancelled_total{by="operator"}'
    assert server.metrics()[cancelled] - before[cancelled] == len(report["request_ids"])


def test_every_token_that_was_computed_is_some_requests_or_recomputed(launched: Servers) -> None:
    """vLLM logs the tokens of every step: more than clients got were recomputed, to the token."""
    server = launched.start((*TIGHT, "--enable-logging-iteration-details"), ON)

    def computed() -> int:
        """By vLLM's own log. An engine core answers after a step, and has then logged it."""
        assert server.kv()["running"] == 0
        said = re.findall(
            r"Iteration\(\d+\): \d+ context requests, (\d+) context tokens, "
            r"\d+ generation requests, (\d+) generation tokens",
            server.said(),
        )
        return sum(int(context) + int(generation) for context, generation in said)

    before, computed_before = server.metrics(), computed()
    lengths = [5 + 3 * number for number in range(12)]
    running = [server.stream(prompt_of(60 + n, length), 400) for n, length in enumerate(lengths)]
    for stream in running:
        stream.wait()
    needed = sum(length + 400 - 1 for length in lengths)
    again = computed() - computed_before - needed
    assert again > 0

    def rise() -> dict[str, float]:
        after = server.metrics()
        return {name: after[name] - before[name] for name in after if name in before}

    eventually(lambda: rise()["ullage_recomputed_tokens_total"] >= again)
    rose = rise()
    assert rose["ullage_recomputed_tokens_total"] == again
    assert 0 < rose["ullage_recomputed_requests_total"] <= rose["vllm:num_preemptions_total"]


def test_a_drain_under_load_loses_nothing(launched: Servers) -> None:
    server = launched.start((*TIGHT, "--max-num-seqs", "4"), {**ON, **DEV})
    # Four run, four wait for a seat, and all of it is preempted now and then.
    running = server.streams([prompt_of(number, 20) for number in range(8)], 1000)
    answer = server.http.post("/ullage/drain")
    assert answer.status_code == 202
    assert answer.json() == {"draining": True, "in_flight": 8}
    server.resume()
    late = server.ask(prompt_of(9, 5), 5)
    assert late.status_code == 503
    assert int(late.headers["retry-after"]) >= 1
    assert "draining" in late.json()["error"]["message"]
    for path in ("/v1/chat/completions", "/v1/embeddings", "/tokenize", "/pooling"):
        assert server.http.post(path, json={}).status_code == 503
    # The engine runs, and probes and operators are answered as before.
    for path in ("/health", "/metrics", "/v1/models", "/ullage/kv"):
        assert server.http.get(path).status_code == 200
    for stream in running:
        stream.wait()
        assert (stream.status, stream.reason, stream.tokens) == (200, "length", 1000)
    eventually(lambda: server.http.get("/ullage/drain").json()["in_flight"] == 0)
    assert server.http.post("/ullage/drain").json() == {"draining": True, "in_flight": 0}


def test_a_cancel_and_a_drain_reach_every_engine(launched: Servers) -> None:
    """Two API processes before two data-parallel engines; connections meet either process."""
    flags = ("--api-server-count", "2", "--data-parallel-size", "2", "--max-num-seqs", "8")
    server = launched.start((*flags, "--num-gpu-blocks-override", "1025"), {**ON, **DEV})
    eventually(lambda: server.said().count("Application startup complete") == 2)
    # Each engine begins by itself: one may be done before the other has said a word.
    running = server.streams([prompt_of(number, 20) for number in range(8)], 1500, of=all)
    report = server.kv()
    assert {holder["engine"] for holder in report["holders"]} == {0, 1}
    assert report["num_blocks"] == 2 * 1024
    ended = server.http.post("/ullage/cancel_oldest", params={"percent": 30}).json()
    assert len(ended["request_ids"]) == 3  # of 8
    assert ended["freed_bytes"] == ended["promised_bytes"] > 0
    for engine in (0, 1):
        # Ages of two engines are of two instants.
        mine = [one for one in report["holders"] if one["engine"] == engine]
        by_age = [one["request_id"] for one in sorted(mine, key=lambda one: -one["age_s"])]
        num_ended = len(set(by_age) & set(ended["request_ids"]))
        assert set(by_age[:num_ended]) <= set(ended["request_ids"])
    answer = server.http.post("/ullage/drain")
    assert (answer.status_code, answer.json()["draining"]) == (202, True)
    eventually(lambda: server.http.get("/ullage/drain").json()["in_flight"] == 5)
    server.resume()
    for _ in range(20):
        # A new connection each: the kernel spreads them over the processes.
        with httpx.Client(trust_env=False, headers={"Authorization": f"Bearer {KEY}"}) as stranger:
            body = {"model": "tiny", "prompt": [5], "max_tokens": 1}
            assert stranger.post(f"{server.url}/v1/completions", json=body).status_code == 503
    for stream in running:
        stream.wait()
    assert sorted(str(stream.reason) for stream in running) == ["abort"] * 3 + ["length"] * 5
    assert all(stream.tokens == 1500 for stream in running if stream.reason == "length")
    eventually(lambda: server.http.get("/ullage/drain").json()["in_flight"] == 0)
    text = server.http.get("/metrics").text
    for engine in (0, 1):
        found = re.search(
            rf'^ullage_kv_cache_total_bytes{{engine="{engine}",model_name="tiny"}} (\S+)',
            text,
            re.M,
        )
        assert found is not None and float(found[1]) == 1024 * BYTES_PER_BLOCK


def test_it_needs_a_key_even_where_vllm_has_none(launched: Servers) -> None:
    server = launched.start((*TIGHT, "--api-key", ""), ON)
    stranger = httpx.get(f"{server.url}/ullage/kv", trust_env=False)
    assert stranger.status_code == 403
    assert "--api-key" in stranger.json()["error"]["message"]
    assert server.ask([5], 1).status_code == 200


@pytest.mark.parametrize("environment", [{}, {"ULLAGE_VLLM": "1"}, {"VLLM_PLUGINS": "ullage"}])
def test_without_being_asked_for_nothing_is_there(
    launched: Servers, environment: dict[str, str]
) -> None:
    server = launched.start(TIGHT, environment)
    assert server.http.get("/ullage/kv").status_code == 404
    assert server.http.post("/ullage/drain").status_code == 404
    assert server.ask([5, 6], 3).status_code == 200
    assert not [name for name in server.metrics() if "ullage" in name]
    assert "ullage_vllm" not in server.said().replace("ullage_vllm.plugin:", "")
    # Who asks for it in one place only is told of the other, once.
    half = environment == {"ULLAGE_VLLM": "1"}
    assert server.said().count("set VLLM_PLUGINS=ullage") == half


def test_on_a_version_that_it_does_not_know_it_says_so_once_and_is_not_there(
    launched: Servers,
) -> None:
    server = launched.start(TIGHT, ON, version="0.99.0")
    assert server.http.get("/ullage/kv").status_code == 404
    assert server.ask([5, 6], 3).status_code == 200
    assert not [name for name in server.metrics() if "ullage" in name]
    # Once, though both the API's process and the engine's load it.
    (told,) = [line for line in server.said().splitlines() if "steps aside" in line]
    assert "vLLM 0.99.0 is not one that it knows (0.30 to 0.33)" in told


def test_tokens_are_the_same_with_it_and_without(launched: Servers) -> None:
    said = []
    for environment in ({}, ON):
        server = launched.start(TIGHT, environment)
        answers = [server.ask(prompt_of(n, 30), 50).json()["choices"][0]["text"] for n in range(4)]
        said.append(answers)
    assert said[0] == said[1]
    assert statistics.mean(len(text) for text in said[0]) > 50
