"""`/v1/embeddings` as the `openai` client uses it, its limits, its batches and its end."""

from __future__ import annotations

import asyncio
import base64
import math
import random
import re
import signal
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.encoders import require_minilm, write_encoder
from tests.serving.test_serve_command import serve
from ullage.engine.encoder.embedder import Embedder
from ullage.engine.options import EngineOptions
from ullage.engine.positions.scaling import model_rope_fingerprint
from ullage.errors import BadUsage
from ullage.serving.app import ServerHandle, start_server
from ullage.serving.embedding_loop import EmbeddingLoop
from ullage.serving.embedding_metrics import EmbeddingMetrics
from ullage.serving.embeddings import ANSWER
from ullage.serving.refusals import NotFinite, QueueFull

OPTIONS = EngineOptions(max_num_seqs=4, max_num_batched_tokens=160)
WORDS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder("bert", tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def embedding_server(bert: Path) -> Iterator[ServerHandle]:
    handle = start_server(bert, OPTIONS, served_model_name="tiny", max_num_queued_reqs=4)
    yield handle
    handle.stop()


@pytest.fixture(scope="module")
def embedder(bert: Path) -> Embedder:
    """A second one, for what the server should have answered."""
    return Embedder.load(bert, OPTIONS)


@pytest.fixture(scope="module")
def client(embedding_server: ServerHandle) -> Iterator[openai.OpenAI]:
    base = f"{embedding_server.url}/v1"
    with openai.OpenAI(base_url=base, api_key="unused", max_retries=0) as client:
        yield client


def _expected(embedder: Embedder, texts: list[str]) -> list[list[float]]:
    found: list[list[float]] = embedder.embed([embedder.tokens(t) for t in texts]).tolist()
    return found


def test_the_client_gets_one_vector_per_text_in_order(
    client: openai.OpenAI, embedder: Embedder
) -> None:
    """The client asks for base64 of its own accord and decodes it."""
    answer = client.embeddings.create(model="tiny", input=WORDS)
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert (answer.model, answer.object) == ("tiny", "list")
    for each, expected in zip(answer.data, _expected(embedder, WORDS), strict=True):
        assert each.embedding == pytest.approx(expected, abs=1e-5)
        assert math.sqrt(sum(x * x for x in each.embedding)) == pytest.approx(1, abs=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 3 + 1 + 5 + 2 * 3


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_both_encodings_hold_the_same_numbers(
    encoding: str, embedding_server: ServerHandle, embedder: Embedder
) -> None:
    body = {"input": "w1 w2", "encoding_format": encoding}
    answer = httpx.post(f"{embedding_server.url}/v1/embeddings", json=body).json()
    jsonschema.validate(answer, ANSWER)
    found = answer["data"][0]["embedding"]
    if encoding == "base64":
        found = struct.unpack("<64f", base64.b64decode(found))
    assert list(found) == pytest.approx(_expected(embedder, ["w1 w2"])[0], abs=1e-6)


def test_token_ids_are_taken_as_they_are(client: openai.OpenAI, embedder: Embedder) -> None:
    text = client.embeddings.create(model="tiny", input="w1 w2").data[0].embedding
    ids = list(embedder.tokens("w1 w2"))
    one = client.embeddings.create(model="tiny", input=ids)
    many = client.embeddings.create(model="tiny", input=[ids, [2, 9, 3]])
    assert one.data[0].embedding == pytest.approx(text, abs=1e-5)
    assert many.data[0].embedding == pytest.approx(text, abs=1e-5)
    assert many.usage.prompt_tokens == 7


def test_a_text_is_cut_only_where_that_is_asked_for(
    client: openai.OpenAI, embedder: Embedder
) -> None:
    long = " ".join(f"w{number}" for number in range(200))
    with pytest.raises(openai.BadRequestError, match=r"202 tokens.*at most 130"):
        client.embeddings.create(model="tiny", input=long)
    cut = client.embeddings.create(
        model="tiny", input=[long, "w1"], extra_body={"truncate_prompt_tokens": -1}
    )
    assert cut.usage.prompt_tokens == 130 + 3
    kept = " ".join(f"w{number}" for number in range(128))
    assert cut.data[0].embedding == pytest.approx(_expected(embedder, [kept])[0], abs=1e-5)
    end = {"truncate_prompt_tokens": 4, "truncation_side": "left"}
    cut = client.embeddings.create(model="tiny", input=long, extra_body=end)
    assert cut.data[0].embedding == pytest.approx(_expected(embedder, ["w198 w199"])[0], abs=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_cut_of_a_long_text_is_that_of_the_whole(embedder: Embedder, side: str) -> None:
    long = " ".join(f"w{number % 200}" for number in range(40_000))
    whole = embedder.tokenizer.encode(long, add_special=False)
    wanted = whole[-7:] if side == "left" else whole[:7]
    cut = embedder.tokens(long, limit=7, keep_end=side == "left", add_special=False)
    assert list(cut) == wanted


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": 3}, "input"),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": ["a", [1]]}, r"input\[1\]"),
    ({"input": [[1], "a"]}, r"input\[1\]"),
    ({"input": [1, "a"]}, r"input\[1\]"),
    ({"input": [1, True]}, r"input\[1\]"),
    ({"input": [-1]}, r"input\[0\]"),
    ({"input": [320]}, "ids below 320"),
    ({"input": [10**400]}, "input"),
    ({"input": ["a"] * 2049}, "2048"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 32}, "dimensions"),
    ({"input": "a", "truncate_prompt_tokens": 131}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
    ({"input": [5], "truncate_prompt_tokens": 0}, "no tokens"),
    ({"input": "", "add_special_tokens": False}, "no tokens"),
    ({"input": "a", "use_activation": False}, "use_activation"),
    ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
    ({"input": "a", "colour": "red"}, "colour"),
    ({"input": "a", "priority": 3}, "priority: 3 is not supported; expected 0"),
    ({"input": "w1 " * 100_000}, "input: more than 130 tokens; expected at most 130"),
]


@pytest.mark.parametrize(("body", "match"), BAD)
def test_bad_bodies_get_a_sentence(
    body: dict[str, Any], match: str, embedding_server: ServerHandle
) -> None:
    answer = httpx.post(f"{embedding_server.url}/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert re.search(match, answer.json()["error"]["message"]), answer.text


@pytest.mark.parametrize("raw", [b"", b"[", b'"a"', b"\xff", b'{"input": "\\ud800"}'])
def test_bodies_that_are_no_json_get_a_400(raw: bytes, embedding_server: ServerHandle) -> None:
    answer = httpx.post(
        f"{embedding_server.url}/v1/embeddings",
        content=raw,
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400


def test_what_an_encoder_does_not_do_is_said(
    client: openai.OpenAI, embedding_server: ServerHandle
) -> None:
    with pytest.raises(openai.NotFoundError, match="embeds texts and generates none"):
        client.completions.create(model="tiny", prompt="w1")
    with pytest.raises(openai.NotFoundError, match="embeds texts and generates none"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.embeddings.create(model="other", input="w1")
    (model,) = client.models.list().data
    assert (model.id, client.models.retrieve("tiny").id) == ("tiny", "tiny")
    assert httpx.get(f"{embedding_server.url}/v1/models/other").status_code == 404


def test_what_a_generating_model_does_not_do_is_said(server: ServerHandle) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused")
    with client, pytest.raises(openai.NotFoundError, match="generates text and embeds none"):
        client.embeddings.create(model="tiny", input="w1")


def _metrics(server: ServerHandle) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics").text
    return {
        sample.name + ("!" + sample.labels.get("finished_reason", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_many_clients_share_batches_and_each_gets_its_own(
    embedding_server: ServerHandle, embedder: Embedder
) -> None:
    before = _metrics(embedding_server)
    texts = [" ".join(f"w{7 * number + k}" for k in range(number % 5 + 1)) for number in range(24)]

    def ask(text: str) -> list[float]:
        body = {"input": text}
        while True:  # more than may wait come at once
            answer = httpx.post(f"{embedding_server.url}/v1/embeddings", json=body, timeout=30)
            if answer.status_code != 429:
                found: list[float] = answer.json()["data"][0]["embedding"]
                return found
            assert answer.headers["retry-after"] == "1"
            time.sleep(0.05)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, texts))
    for answer, expected in zip(answers, _expected(embedder, texts), strict=True):
        assert answer == pytest.approx(expected, abs=1e-5)
    after = _metrics(embedding_server)
    grown = {name: after[name] - before[name] for name in after}
    num_tokens = sum(len(text.split()) + 2 for text in texts)
    assert grown["vllm:prompt_tokens_total!"] == num_tokens
    assert grown["vllm:request_success_total!stop"] == 24
    assert grown["vllm:e2e_request_latency_seconds_count!"] == 24
    assert grown["vllm:request_prompt_tokens_sum!"] == num_tokens
    assert grown["vllm:iteration_tokens_total_sum!"] == num_tokens
    assert grown["vllm:iteration_tokens_total_count!"] <= 24
    assert after["vllm:num_requests_running!"] == after["vllm:num_requests_waiting!"] == 0
    assert after["ullage_weights_bytes!"] == embedder.weights_bytes


def test_metrics_say_how_embeddings_are_made(tmp_path: Path) -> None:
    directory = write_encoder("modernbert", tmp_path, {"pooling_mode": ["cls", "mean"]}, False)
    embedder = Embedder.load(directory)
    text = EmbeddingMetrics(embedder, "tiny").render().decode()
    (line,) = (each for each in text.splitlines() if each.startswith("ullage_engine_info{"))
    fingerprint = model_rope_fingerprint(embedder.spec, embedder.max_model_len)
    for label in (
        'pooling="cls+mean"',
        'normalized="False"',
        'quantization="none"',
        f'rope_fingerprint="{fingerprint}"',
    ):
        assert label in line


def test_probes_version_and_the_openapi_document(embedding_server: ServerHandle) -> None:
    url = embedding_server.url
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/ready").status_code == 200
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    assert set(paths) >= {"/v1/embeddings", "/v1/models", "/metrics", "/health", "/ready"}
    assert "/v1/completions" not in paths
    described = paths["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]
    jsonschema.validate({"input": ["a", "b"], "model": "tiny"}, described["schema"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"input": 3}, described["schema"])


def test_tokens_of_a_text_and_back(embedding_server: ServerHandle) -> None:
    url = embedding_server.url
    found = httpx.post(f"{url}/tokenize", json={"prompt": "w1 w2"}).json()
    assert found == {"count": 4, "max_model_len": 130, "tokens": [2, 5, 6, 3]}
    bare = {"prompt": "w1", "add_special_tokens": False, "return_token_strs": True}
    assert httpx.post(f"{url}/tokenize", json=bare).json()["token_strs"] == ["w1"]
    assert httpx.post(f"{url}/detokenize", json={"tokens": [5, 6]}).json()["prompt"] == "w1 w2"
    for path, body in (
        ("tokenize", {"messages": [{"role": "user", "content": "a"}]}),
        ("detokenize", {"tokens": [320]}),
    ):
        assert httpx.post(f"{url}/{path}", json=body).status_code == 400
    other = {"prompt": "w1", "model": "other"}
    assert httpx.post(f"{url}/tokenize", json=other).status_code == 404


def test_a_key_guards_embeddings_and_no_probe(bert: Path) -> None:
    handle = start_server(bert, OPTIONS, api_key="secret")
    try:
        assert httpx.get(f"{handle.url}/health").status_code == 200
        url = f"{handle.url}/v1/embeddings"
        assert httpx.post(url, json={"input": "w1"}).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert httpx.post(url, json={"input": "w1"}, headers=headers).status_code == 200
    finally:
        handle.stop()


@pytest.mark.parametrize(
    ("keys", "flag"),
    [
        ({"enable_control_routes": True, "api_key": "k"}, "--enable-control-routes"),
        ({"trace": "/nowhere/trace.json"}, "--trace"),
        ({"lora_modules": {"a": "b"}}, "--lora-modules"),
        ({"probe_quality": True}, "--probe-quality"),
        ({"probe": True}, "--probe"),
        ({"probe_every": 4}, "--probe-every"),
        ({"probe_baseline": "healthy.safetensors"}, "--probe-baseline"),
    ],
)
def test_what_only_generating_servers_have_is_refused(
    keys: dict[str, Any], flag: str, bert: Path
) -> None:
    with pytest.raises(BadUsage, match=flag):
        start_server(bert, OPTIONS, **keys)


# --- the loop alone ------------------------------------------------------------------------------


class _Slow:
    """An embedder whose batches wait for leave, and which remembers them."""

    def __init__(self, inner: Embedder) -> None:
        self._inner = inner
        self.batches: list[list[tuple[int, ...]]] = []
        self.go = threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def embed(self, texts: list[tuple[int, ...]]) -> Any:
        self.batches.append(list(texts))
        assert self.go.acquire(timeout=20)
        return self._inner.embed(texts)


@pytest.fixture
def slow(embedder: Embedder) -> _Slow:
    return _Slow(embedder)


async def _started(slow: _Slow, max_num_queued_reqs: int = 10) -> EmbeddingLoop:
    metrics = EmbeddingMetrics(slow, "tiny")  # type: ignore[arg-type]
    loop = EmbeddingLoop(slow, metrics, max_num_queued_reqs)  # type: ignore[arg-type]
    slow.go.release(2)
    loop.start()
    while not loop.ready:
        await asyncio.sleep(0.005)
    slow.batches.clear()
    return loop


async def _until_batch(slow: _Slow, count: int) -> None:
    async with asyncio.timeout(20):
        while len(slow.batches) < count:
            await asyncio.sleep(0.005)


def test_requests_take_turns_so_that_a_small_one_passes_a_large_one(slow: _Slow) -> None:
    async def main() -> None:
        loop = await _started(slow)
        large = loop.submit([(5, number) for number in range(4, 24)])
        await _until_batch(slow, 1)
        small = loop.submit([(7,)])
        slow.go.release(2)
        await small.answer
        assert not large.answer.done()
        assert len(large.found) < 20
        slow.go.release(20)
        assert len(await large.answer) == 20
        assert max(map(len, slow.batches)) == OPTIONS.max_num_seqs
        loop.close(large)
        loop.close(small)
        loop.stop()

    asyncio.run(main())


def test_a_batch_holds_no_more_tokens_than_it_may(slow: _Slow) -> None:
    async def main() -> None:
        loop = await _started(slow)
        slow.go.release(20)
        lengths = [130, 130, 20, 130, 10, 30, 1]
        ticket = loop.submit([(9,) * length for length in lengths])
        await ticket.answer
        for batch in slow.batches:
            assert sum(map(len, batch)) <= OPTIONS.max_num_batched_tokens
        # A batch may be in flight before the last texts are queued, but nothing is left behind.
        assert sorted(len(text) for batch in slow.batches for text in batch) == sorted(lengths)
        loop.close(ticket)
        loop.stop()

    asyncio.run(main())


def test_a_client_that_leaves_frees_its_place_at_once(slow: _Slow) -> None:
    async def main() -> None:
        loop = await _started(slow, max_num_queued_reqs=0)
        tickets = [loop.submit([(5,) * 130]) for _ in range(4)]
        await _until_batch(slow, 1)
        with pytest.raises(QueueFull):
            loop.submit([(6,)])
        loop.close(tickets[2])
        late = loop.submit([(6,)])
        slow.go.release(10)
        await late.answer
        ran = [text for batch in slow.batches for text in batch]
        assert ran.count((5,) * 130) == 3
        for ticket in (*tickets, late):
            loop.close(ticket)
        loop.stop()

    asyncio.run(main())


def test_numbers_that_are_not_finite_fail_their_own_request_only(
    slow: _Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        loop = await _started(slow)
        whole = slow._inner.embed

        def broken(texts: list[tuple[int, ...]]) -> Any:
            found = whole(texts)
            found[[index for index, text in enumerate(texts) if 13 in text]] = float("nan")
            return found

        monkeypatch.setattr(slow._inner, "embed", broken)
        slow.go.release(10)
        good, bad = loop.submit([(5,)]), loop.submit([(13,)])
        await good.answer
        with pytest.raises(NotFinite):
            await bad.answer
        loop.close(good)
        loop.close(bad)
        loop.stop()

    asyncio.run(main())


def test_whatever_clients_do_every_place_is_given_back(embedder: Embedder) -> None:
    """Requests of all sizes, many of which leave before, while and after they run."""

    async def client(loop: EmbeddingLoop, draw: random.Random) -> bool:
        await asyncio.sleep(draw.random() * 0.3)
        texts = [
            (draw.randrange(4, 320),) * draw.choice([1, 3, 30, 130])
            for _ in range(draw.randrange(1, 9))
        ]
        ticket = loop.submit(texts)
        try:
            async with asyncio.timeout(draw.choice([0, 0.01, 0.1, 60])):
                vectors = await ticket.answer
        except TimeoutError:
            return False
        finally:
            loop.close(ticket)
        alone = embedder.embed([texts[-1]])[0]
        torch.testing.assert_close(vectors[-1], alone, rtol=1e-4, atol=1e-5)
        return True

    async def main() -> None:
        metrics = EmbeddingMetrics(embedder, "tiny")
        loop = EmbeddingLoop(embedder, metrics, max_num_queued_reqs=200)
        loop.start()
        draws = [random.Random(seed) for seed in range(120)]  # noqa: S311
        answered = await asyncio.gather(*(client(loop, draw) for draw in draws))
        assert 20 < sum(answered) < 120
        assert await loop.drain() == 0
        assert not loop._open
        assert not loop._queue
        loop.stop()
        assert loop.failure is None
        text = metrics.render().decode()
        assert re.search(r"num_requests_waiting\{.*\} 0.0", text)
        assert re.search(r'request_success_total\{.*"abort".*\} [1-9]', text)

    asyncio.run(main())


# --- the process ---------------------------------------------------------------------------------


def test_the_real_minilm_is_served_and_sigterm_answers_what_runs() -> None:
    directory = require_minilm()
    with serve(str(directory), "--port", "0", "--served-model-name", "minilm") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(
            r"ready on (http://\S+): embeddings of texts of up to 256 tokens\n", line
        )
        assert found, line
        texts = [f"The cask numbered {number} is nearly full of wine." for number in range(60)]
        answers: list[int] = []

        def ask() -> None:
            body = {"model": "minilm", "input": texts}
            answer = httpx.post(f"{found[1]}/v1/embeddings", json=body, timeout=60)
            answers.append(len(answer.json()["data"]))

        asking = threading.Thread(target=ask)
        asking.start()
        until = time.monotonic() + 30
        while "running{" not in (text := httpx.get(f"{found[1]}/metrics").text) or not re.search(
            r"num_requests_running\{.*\} [1-9]", text
        ):
            assert time.monotonic() < until
        process.send_signal(signal.SIGTERM)
        asking.join(60)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
        assert answers == [60]
