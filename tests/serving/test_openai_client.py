"""The `openai` client works unchanged: completions, chats, streams, errors."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.serving.conftest import MODEL
from ullage.serving.app import ServerHandle

MESSAGES = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def client(server: ServerHandle) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 512


def test_completion_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "prompt": "hello", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**ask)
    choice = whole.choices[0]
    assert choice.finish_reason in ("length", "stop")
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.total_tokens) == (
        5,
        5 + whole.usage.completion_tokens,
    )
    chunks = list(
        client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == choice.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == choice.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    # One chunk per token, then the usage.
    assert len(chunks) == whole.usage.completion_tokens + 1
    assert len({c.id for c in chunks}) == 1


def test_chat_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 9, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len("<user>Say something.<assistant>")
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_token_ids_are_a_prompt_too(client: openai.OpenAI) -> None:
    def ask(prompt: object) -> str:
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, temperature=0)
        return answer.choices[0].text

    ids = _tokenize(client, "hello")
    assert ask("hello") == ask(ids) == ask([ids]) == ask(["hello"])


def test_text_parts_are_joined(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "something."}]
    answers = [
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": c}], max_tokens=5, temperature=0
        )
        for c in ("Say something.", parts)
    ]
    assert answers[0].choices == answers[1].choices


def test_a_seed_repeats(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="x", max_tokens=20, temperature=2.0, top_p=0.9, seed=seed
        )
        return answer.choices[0].text

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in range(5)}) > 1


def test_stop_strings_end_the_text_and_are_not_in_it(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "prompt": "hello", "max_tokens": 40, "temperature": 0}
    text = client.completions.create(**ask, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[10:12]
    stopped = client.completions.create(**ask, stop=[stop], extra_body={"ignore_eos": True})
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == text[: text.index(stop)]
    streamed = client.completions.create(
        **ask, stop=stop, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(c.choices[0].text for c in streamed) == stopped.choices[0].text


def test_logprobs(client: openai.OpenAI) -> None:
    plain = client.completions.create(
        model=MODEL, prompt="a", max_tokens=3, temperature=0, logprobs=2
    )
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == len(logprobs.tokens or []) == 3
    for value, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert value == max(top.values())
        assert value <= 0
    chat = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    content = chat.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in content.content)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n": 2}, "n: 2 is not supported"),
        ({"temperature": -1}, "temperature: -1"),
        ({"max_tokens": 100_000}, "at most 512 together"),
        ({"presence_penalty": 1.0}, "presence_penalty: 1.0 is not supported"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate"),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": "é" * 600}, "at most 512 together"),
    ],
)
def test_bad_requests_get_a_400_and_a_sentence(
    client: openai.OpenAI, change: dict, said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        client.completions.create(**{"model": MODEL, "prompt": "a", **change})
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["code"] == 400


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9' here"):
        client.completions.create(model="gpt-9", prompt="a")


def _tokenize(client: openai.OpenAI, text: str) -> list[int]:
    url = str(client.base_url).replace("/v1/", "/tokenize")
    answer = client.post(url, cast_to=object, body={"prompt": text})
    assert isinstance(answer, dict)
    assert answer["count"] == len(answer["tokens"])
    return answer["tokens"]
