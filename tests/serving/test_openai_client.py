"""The `openai` client works unchanged: completions, chats, streams, errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch

from tests.engine.references import load_reference
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
        model=MODEL,
        prompt="a",
        max_tokens=3,
        temperature=0,
        logprobs=2,
        extra_body={"ignore_eos": True},
    )
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == len(logprobs.tokens or []) == 3
    for value, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert value is not None
        assert top is not None
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


def test_several_prompts_are_answered_in_their_order(client: openai.OpenAI) -> None:
    def ask(prompt: object, **more: object) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=6, temperature=0, **more
        )
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    prompts = ["hello", "a", "b c"]
    alone = [ask(prompt)[0] for prompt in prompts]
    assert ask(prompts) == alone
    assert ask([_tokenize(client, prompt) for prompt in prompts]) == alone
    assert ask(prompts, n=2) == [text for text in alone for _ in range(2)]


def test_n_choices_of_a_seed_are_those_of_the_seeds_that_follow(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "prompt": "x", "max_tokens": 10, "temperature": 2.0}
    single = [client.completions.create(**ask, seed=seed).choices[0].text for seed in (5, 6, 7)]
    together = client.completions.create(**ask, seed=5, n=3)
    assert [choice.text for choice in together.choices] == single
    assert together.usage is not None
    assert together.usage.prompt_tokens == 1  # counted once


@pytest.mark.parametrize("chat", [True, False])
def test_streamed_choices_are_told_apart_by_their_index(client: openai.OpenAI, chat: bool) -> None:
    ask = {"model": MODEL, "seed": 3, "n": 3, "temperature": 1.5, "max_tokens": 8}
    if chat:
        whole = client.chat.completions.create(**ask, messages=MESSAGES)
        texts = [choice.message.content for choice in whole.choices]
        chunks = list(client.chat.completions.create(**ask, messages=MESSAGES, stream=True))
        assert sum(c.choices[0].delta.role == "assistant" for c in chunks) == 3
        pieces = [(c.choices[0].index, c.choices[0].delta.content or "") for c in chunks]
    else:
        whole = client.completions.create(**ask, prompt=["a", "b"])
        texts = [choice.text for choice in whole.choices]
        chunks = list(client.completions.create(**ask, prompt=["a", "b"], stream=True))
        pieces = [(c.choices[0].index, c.choices[0].text) for c in chunks]
    streamed = ["" for _ in texts]
    for index, piece in pieces:
        streamed[index] += piece
    assert streamed == texts
    ends = [c.choices[0].index for c in chunks if c.choices[0].finish_reason]
    assert sorted(ends) == list(range(len(texts)))


@pytest.mark.parametrize("prompt", ["hello", [107, 104, 111]])
def test_echo_puts_the_prompt_before_the_answer(client: openai.OpenAI, prompt: object) -> None:
    ask = {"model": MODEL, "prompt": prompt, "max_tokens": 5, "temperature": 0}
    answer = client.completions.create(**ask).choices[0].text
    echoed = client.completions.create(**ask, echo=True).choices[0].text
    assert echoed.endswith(answer)
    assert len(echoed) > len(answer)
    streamed = client.completions.create(**ask, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == echoed


def test_usage_so_far_is_in_every_chunk_when_asked_for(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="hey", max_tokens=4, stream=True, stream_options=options
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks)
    assert counts == [*range(1, len(chunks)), len(chunks) - 1]


def test_penalties_and_biases_change_the_answer(client: openai.OpenAI) -> None:
    def ask(**more: object) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt="aa", max_tokens=12, temperature=0, logprobs=0, **more
        )
        assert answer.choices[0].logprobs is not None
        return answer.choices[0].logprobs.tokens or []

    letter = _tokenize(client, "z")[0]
    extra = {"ignore_eos": True}
    assert ask(logit_bias={str(letter): 100}, extra_body=extra) == ["z"] * 12
    # Each time it is said it loses 2 of its lead of about 100.
    said = ask(logit_bias={str(letter): 100}, frequency_penalty=2, extra_body=extra)
    assert said == ["z"] * 12
    barred = ask(logit_bias={str(letter): -100}, extra_body=extra)
    assert "z" not in barred
    banned = ask(extra_body={**extra, "repetition_penalty": 100.0})
    # Of the others several may print alike: half a character, nothing at all.
    letters = [token for token in banned if token.isascii() and token.isalnum()]
    assert len(set(letters)) == len(letters)


def test_min_tokens_keeps_an_answer_going(client: openai.OpenAI) -> None:
    eos = 2
    ask = {"model": MODEL, "prompt": "hello", "max_tokens": 9, "logit_bias": {str(eos): 100}}
    short = client.completions.create(**ask).usage
    long = client.completions.create(**ask, extra_body={"min_tokens": 6}).usage
    assert short is not None
    assert long is not None
    assert (short.completion_tokens, long.completion_tokens) == (1, 7)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n": 0}, "n: 0; expected an integer from 1 to 128"),
        ({"n": 100}, "n: 100 choices in one request; expected at most 8"),
        ({"best_of": 2}, "best_of: 2 is not supported"),
        ({"temperature": -1}, "temperature: -1"),
        ({"max_tokens": 100_000}, "at most 512 together"),
        ({"presence_penalty": 3.0}, "presence_penalty: 3.0; expected a number from -2 to 2"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias: token 999999; expected ids below 320"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate"),
        ({"extra_body": {"min_tokens": 99}}, "min_tokens: 99; expected at most max_tokens 16"),
        ({"extra_body": {"priority": 1}}, "priority: 1; expected 0 without"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": []}, "prompt"),
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: .* not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format: .* not supported"),
        ({"top_logprobs": 2}, "top_logprobs: 2; expected logprobs true beside it"),
        ({"stream_options": {"include_usage": True}}, "stream_options: .* stream true"),
    ],
)
def test_what_a_chat_cannot_do_is_refused_by_name(
    client: openai.OpenAI, change: dict, said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **change})


def test_a_deadline_that_passes_is_a_408_that_is_not_retried(server: ServerHandle) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=3) as client,
        pytest.raises(openai.APIStatusError, match="deadline_seconds passed") as caught,
    ):
        client.completions.create(
            model=MODEL,
            prompt="hello",
            max_tokens=500,
            extra_body={"deadline_seconds": 0.05, "ignore_eos": True},
        )
    assert caught.value.status_code == 408


def test_a_deadline_that_passes_ends_a_stream_with_an_error(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL,
        prompt="hello",
        max_tokens=500,
        stream=True,
        extra_body={"deadline_seconds": 0.05, "ignore_eos": True},
    )
    with pytest.raises(openai.APIError, match="deadline_seconds passed"):
        list(stream)


def test_one_model_by_name(client: openai.OpenAI) -> None:
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9' here"):
        client.completions.create(model="gpt-9", prompt="a")


def _tokenize(client: openai.OpenAI, text: str) -> list[int]:
    url = str(client.base_url).replace("/v1/", "/tokenize")
    answer = client.post(url, cast_to=object, body={"prompt": text})
    assert isinstance(answer, dict)
    assert answer["count"] == len(answer["tokens"])
    return answer["tokens"]


def test_the_echo_alone_costs_no_token(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "prompt": "hello", "max_tokens": 0, "echo": True}
    answer = client.completions.create(**ask)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    streamed = client.completions.create(**ask, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "hello"


def test_a_cached_prefix_is_in_the_usage_and_a_salt_keeps_it_apart(client: openai.OpenAI) -> None:
    def cached(salt: str | None) -> int:
        answer = client.completions.create(
            model=MODEL, prompt="a long prompt " * 5, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached("mine"), cached("mine")] == [0, 64]
    assert [cached("yours"), cached("yours")] == [0, 64]


@pytest.mark.parametrize("stream", [True, False])
def test_an_echo_with_logprobs_has_those_of_the_prompt(
    client: openai.OpenAI, server: ServerHandle, model_dir: Path, stream: bool
) -> None:
    """As transformers has them; two prompts, of which one takes two chunks."""
    prompts = ["hello", "a" * 90]
    ask = {"model": MODEL, "prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 2}
    reference = load_reference(model_dir)
    if stream:
        chunks = client.completions.create(**ask, stream=True)
        found = [c.choices[0].logprobs for c in chunks if c.choices[0].text]
    else:
        found = [choice.logprobs for choice in client.completions.create(**ask).choices]
    assert len(found) == 2
    for prompt, logprobs in zip(prompts, found, strict=True):
        ids = _tokenize(client, prompt)
        with torch.no_grad():
            wanted = reference(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        assert logprobs.tokens == list(prompt)
        assert logprobs.text_offset == list(range(len(prompt)))
        assert logprobs.token_logprobs[0] is None
        assert logprobs.top_logprobs[0] is None
        for at in range(1, len(ids)):
            value = logprobs.token_logprobs[at]
            assert value == pytest.approx(float(wanted[at - 1, ids[at]]), abs=1e-4)
            best = max((logprobs.top_logprobs[at] or {}).values())
            assert best == pytest.approx(float(wanted[at - 1].max()), abs=1e-4)
    assert server.engine.pool.num_used == 0
