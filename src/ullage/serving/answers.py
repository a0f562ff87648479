"""OpenAI's response bodies: whole answers, stream chunks, usage, errors.

Pure functions from what the engine gave to JSON-ready dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ullage.engine.engine import Output
from ullage.engine.request import FinishReason
from ullage.engine.sampler import TokenLogprobs
from ullage.serving.protocol import Kind

Json = dict[str, Any]
TokenText = Callable[[int], str]
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


def whole(
    envelope: Envelope, outputs: Sequence[Output], num_prompt: int, token_text: TokenText
) -> Json:
    """The answer of a request that did not stream."""
    request = outputs[-1].request
    text = "".join(output.text for output in outputs)
    logprobs = [output.logprobs for output in outputs if output.logprobs is not None]
    choice: Json = {"index": 0, "finish_reason": _finish(request.finish_reason)}
    if envelope.kind == "chat":
        choice["message"] = {"role": "assistant", "content": text}
        choice["logprobs"] = chat_logprobs(logprobs, token_text) if logprobs else None
    else:
        choice["text"] = text
        choice["logprobs"] = completion_logprobs(logprobs, token_text, 0) if logprobs else None
    return envelope.body([choice], False, usage=usage(num_prompt, len(request.output_ids)))


def first_chunk(envelope: Envelope) -> Json:
    """A chat stream begins by naming the role."""
    delta = {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return envelope.body([choice], True)


def chunk(envelope: Envelope, output: Output, offset: int, token_text: TokenText) -> Json:
    """One token's chunk; `offset` is how many characters were streamed before it."""
    logprobs = [output.logprobs] if output.logprobs is not None else []
    choice: Json = {
        "index": 0,
        "finish_reason": _finish(output.request.finish_reason) if output.finished else None,
    }
    if envelope.kind == "chat":
        choice["delta"] = {"content": output.text}
        choice["logprobs"] = chat_logprobs(logprobs, token_text) if logprobs else None
    else:
        choice["text"] = output.text
        choice["logprobs"] = completion_logprobs(logprobs, token_text, offset) if logprobs else None
    return envelope.body([choice], True)


def usage_chunk(envelope: Envelope, num_prompt: int, num_generated: int) -> Json:
    """The last chunk, when usage was asked for; it has no choices."""
    return envelope.body([], True, usage=usage(num_prompt, num_generated))


def usage(num_prompt: int, num_generated: int) -> Json:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }


def error(message: str, kind: str, code: int, param: str | None = None) -> Json:
    """OpenAI's error object; its clients raise by the HTTP status."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def chat_logprobs(logprobs: Sequence[TokenLogprobs], token_text: TokenText) -> Json:
    def entry(token_id: int, logprob: float) -> Json:
        text = token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        {
            **entry(one.token_id, one.logprob),
            "top_logprobs": [entry(token_id, logprob) for token_id, logprob in one.top],
        }
        for one in logprobs
    ]
    return {"content": content}


def completion_logprobs(
    logprobs: Sequence[TokenLogprobs], token_text: TokenText, offset: int
) -> Json:
    tokens = [token_text(one.token_id) for one in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [one.logprob for one in logprobs],
        # OpenAI's form has the texts as keys: of alternatives that print alike the best is kept.
        "top_logprobs": [
            {token_text(token): value for token, value in reversed(one.top)} for one in logprobs
        ],
        "text_offset": offsets,
    }


def _finish(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value
