"""OpenAI's response bodies: whole answers, stream chunks, usage, errors.

Pure functions from what the engine gave to JSON-ready dictionaries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ullage.engine.engine import Output
from ullage.engine.request import FinishReason, Request
from ullage.engine.sampler import TokenLogprobs
from ullage.serving.protocol import Kind

Json = dict[str, Any]
TokenText = Callable[[int], str]
# vLLM's stand-in for minus infinity, which JSON lacks.
LEAST_LOGPROB = -9999.0
OBJECTS: Mapping[tuple[Kind, bool], str] = {
    ("completion", False): "text_completion",
    ("completion", True): "text_completion",
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every body of one answer repeats."""

    kind: Kind
    id: str
    model: str
    created: int

    def body(self, choices: Sequence[Json], streamed: bool, **more: object) -> Json:
        return {
            "id": self.id,
            "object": OBJECTS[self.kind, streamed],
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            **more,
        }


@dataclass(slots=True)
class Choice:
    """One choice as its tokens come. `prefix` is the echoed prompt, `text` all that was said."""

    index: int
    prefix: str = ""
    # Of the echoed prompt: None where nothing came before.
    prompt_logprobs: Sequence[TokenLogprobs | int] = ()
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_chars: int = 0
    num_tokens: int = 0
    finish_reason: FinishReason | None = None

    def take(self, output: Output) -> None:
        """Add one token's worth."""
        self.pieces.append(output.text)
        if output.logprobs is not None:
            self.logprobs.append(output.logprobs)
        self.num_chars += len(output.text)
        self.num_tokens += output.token_id is not None
        if output.finished:
            self.finish_reason = output.request.finish_reason


def whole(
    envelope: Envelope,
    choices: Sequence[Choice],
    usage: Json,
    token_text: TokenText,
    with_logprobs: bool,
) -> Json:
    """The answer of a request that did not stream."""
    return envelope.body(
        [_whole_choice(envelope.kind, choice, token_text, with_logprobs) for choice in choices],
        False,
        usage=usage,
    )


def _whole_choice(kind: Kind, choice: Choice, token_text: TokenText, with_logprobs: bool) -> Json:
    body: Json = {"index": choice.index, "finish_reason": _finish(choice.finish_reason)}
    text = choice.prefix + "".join(choice.pieces)
    logprobs = None
    if kind == "chat":
        body["message"] = {"role": "assistant", "content": text}
        if with_logprobs:
            logprobs = chat_logprobs(choice.logprobs, token_text)
    else:
        body["text"] = text
        if with_logprobs:
            logprobs = completion_logprobs(
                [*choice.prompt_logprobs, *choice.logprobs], token_text, 0
            )
    return {**body, "logprobs": logprobs}


def first_chunks(
    envelope: Envelope, choices: Sequence[Choice], token_text: TokenText
) -> list[Json]:
    """A chat stream begins by naming the role, an echoed one with the prompt."""
    chunks = []
    for choice in choices:
        body: Json = {"index": choice.index, "logprobs": None, "finish_reason": None}
        if envelope.kind == "chat":
            body["delta"] = {"role": "assistant", "content": ""}
        elif choice.prefix:
            body["text"] = choice.prefix
            if choice.prompt_logprobs:
                body["logprobs"] = completion_logprobs(choice.prompt_logprobs, token_text, 0)
        else:
            continue
        chunks.append(envelope.body([body], True))
    return chunks


def chunk(
    envelope: Envelope, choice: Choice, output: Output, token_text: TokenText, **more: object
) -> Json:
    """One token's chunk, before `choice` takes it."""
    logprobs = [output.logprobs] if output.logprobs is not None else []
    body: Json = {
        "index": choice.index,
        "finish_reason": _finish(output.request.finish_reason) if output.finished else None,
    }
    if envelope.kind == "chat":
        body["delta"] = {"content": output.text}
        body["logprobs"] = chat_logprobs(logprobs, token_text) if logprobs else None
    else:
        offset = len(choice.prefix) + choice.num_chars
        body["text"] = output.text
        body["logprobs"] = completion_logprobs(logprobs, token_text, offset) if logprobs else None
    return envelope.body([body], True, **more)


def usage_chunk(envelope: Envelope, usage: Json) -> Json:
    """The last chunk, when usage was asked for; it has no choices."""
    return envelope.body([], True, usage=usage)


def usage(
    prompts: Sequence[Sequence[int]], requests: Sequence[Request], num_generated: int
) -> Json:
    """Each prompt counts once, however many choices answer it; cached are those it did not run."""
    num_prompt = sum(map(len, prompts))
    num_cached = sum(request.num_cached_tokens for request in requests if request.index == 0)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def error(message: str, kind: str, code: int, param: str | None = None) -> Json:
    """OpenAI's error object; its clients raise by the HTTP status."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


def chat_logprobs(logprobs: Sequence[TokenLogprobs], token_text: TokenText) -> Json:
    def entry(token_id: int, logprob: float) -> Json:
        text = token_text(token_id)
        return {
            "token": text,
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(text.encode()),
        }

    content = [
        {
            **entry(one.token_id, one.logprob),
            "top_logprobs": [entry(token_id, logprob) for token_id, logprob in one.top],
        }
        for one in logprobs
    ]
    return {"content": content}


def completion_logprobs(
    logprobs: Sequence[TokenLogprobs | int], token_text: TokenText, offset: int
) -> Json:
    """A bare token id has no log-probability: nothing comes before a prompt's first token."""
    tokens = [token_text(one if isinstance(one, int) else one.token_id) for one in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [
            None if isinstance(one, int) else max(one.logprob, LEAST_LOGPROB) for one in logprobs
        ],
        "top_logprobs": [
            None if isinstance(one, int) else _alternatives(one, token_text) for one in logprobs
        ],
        "text_offset": offsets,
    }


def _alternatives(one: TokenLogprobs, token_text: TokenText) -> dict[str, float]:
    """The best ones and the one that was chosen, as OpenAI's form has it.

    It has the texts as keys: of alternatives that print alike the best is kept.
    """
    pairs = [(one.token_id, one.logprob), *reversed(one.top)]
    return {token_text(token): max(value, LEAST_LOGPROB) for token, value in pairs}


def _finish(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value
