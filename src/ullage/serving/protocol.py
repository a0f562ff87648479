"""OpenAI's request bodies, read strictly: every field is understood, harmless, or refused by name.

Pure functions from JSON to `Ask`. A field that would change the answer and is not implemented gets
a sentence, never silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ullage.engine.request import SamplingParams
from ullage.errors import BadInput

Kind = Literal["completion", "chat"]
DEFAULT_MAX_TOKENS = 16  # OpenAI's for completions; chat answers may fill the context
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_SEED = 2**64

# Fields that are read below.
COMMON_FIELDS = frozenset(
    {
        *("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop"),
        *("stop_token_ids", "ignore_eos", "stream", "stream_options", "logprobs"),
    }
)
FIELDS: Mapping[Kind, frozenset[str]] = {
    "completion": COMMON_FIELDS | {"prompt", "add_special_tokens"},
    "chat": COMMON_FIELDS | {"messages", "max_completion_tokens", "top_logprobs"},
}
# Fields that never change the answer.
IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "request_id", "safety_identifier", "priority"}
)
# Fields that are accepted at the values with which they change nothing.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


class BadRequest(BadInput):
    """The body is not a request that can be served; becomes a 400."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as asked. `prompt` is text or token ids; for a chat, `messages` is set.

    `max_tokens` None: as many as fit. `params.max_tokens` is set when the prompt is known.
    """

    kind: Kind
    model: str | None
    prompt: str | tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    params: SamplingParams
    stream: bool
    include_usage: bool
    add_special: bool


@dataclass(frozen=True, slots=True)
class LoadLora:
    """An adapter to load. `allow_partial`: also when part of it is not of this model."""

    name: str
    path: str
    allow_partial: bool


def parse_body(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises BadRequest."""
    try:
        body = json.loads(raw)
        if b"\\u" in raw:
            # Half of a surrogate pair is valid JSON but no text; nothing can be made of it.
            json.dumps(body, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise BadRequest(f"the body is not Unicode text ({error.reason})") from error
    except ValueError as error:
        raise BadRequest(f"the body is not JSON ({error})") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    return body


def parse_ask(body: Mapping[str, Any], kind: Kind) -> Ask:
    """Read a completion or chat request. Raises BadRequest naming the field."""
    _refuse_unknown(body, kind)
    max_tokens = _integer(body, "max_completion_tokens", 1) or _integer(body, "max_tokens", 1)
    if max_tokens is None and kind == "completion":
        max_tokens = DEFAULT_MAX_TOKENS
    stream = _boolean(body, "stream")
    options = body.get("stream_options")
    if options is not None and not (isinstance(options, dict) and stream):
        raise BadRequest(
            _show(options), field="stream_options", expected="an object, with stream true"
        )
    params = SamplingParams(
        temperature=_number(body, "temperature", 1.0, 0.0, 2.0),
        top_p=_number(body, "top_p", 1.0, 1e-9, 1.0),
        top_k=_top_k(body),
        seed=_integer(body, "seed", -MAX_SEED, MAX_SEED),
        stop=_stops(body),
        stop_token_ids=_token_ids(body.get("stop_token_ids") or [], "stop_token_ids"),
        ignore_eos=_boolean(body, "ignore_eos"),
        logprobs=_logprobs(body, kind),
    )
    return Ask(
        kind,
        _text(body, "model"),
        _prompt(body) if kind == "completion" else "",
        _messages(body.get("messages")) if kind == "chat" else (),
        max_tokens,
        params,
        stream,
        _boolean(options or {}, "include_usage", "stream_options.include_usage"),
        _boolean(body, "add_special_tokens", default=True),
    )


def parse_tokenize(body: Mapping[str, Any]) -> tuple[str | None, tuple[Mapping[str, Any], ...]]:
    """The text, or the messages, that /tokenize is asked about. Raises BadRequest."""
    if "messages" in body:
        return None, _messages(body["messages"])
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise BadRequest(_show(prompt), field="prompt", expected="a string, or messages")
    return prompt, ()


def parse_load_lora(body: Mapping[str, Any]) -> LoadLora:
    """What /v1/load_lora_adapter is asked for, with vLLM's names. Raises BadRequest."""
    for field in body:
        if field not in ("lora_name", "lora_path", "allow_partial"):
            raise BadRequest("this field is not known here", field=field[:80])
    return LoadLora(
        _required_text(body, "lora_name"),
        _required_text(body, "lora_path"),
        _boolean(body, "allow_partial"),
    )


def parse_unload_lora(body: Mapping[str, Any]) -> str:
    """The name of the adapter that /v1/unload_lora_adapter is to drop. Raises BadRequest."""
    for field in body:
        if field not in ("lora_name", "lora_int_id"):
            raise BadRequest("this field is not known here", field=field[:80])
    return _required_text(body, "lora_name")


def _refuse_unknown(body: Mapping[str, Any], kind: Kind) -> None:
    for field, value in body.items():
        if field in FIELDS[kind] or field in IGNORED or value is None:
            continue
        if field not in NEUTRAL:
            raise BadRequest("this field is not known here", field=field[:80])
        if not any(_same(value, accepted) for accepted in NEUTRAL[field]):
            expected = " or ".join(_show(accepted) for accepted in NEUTRAL[field])
            raise BadRequest(f"{_show(value)} is not supported", field=field, expected=expected)


def _same(value: object, accepted: object) -> bool:
    """Equality of JSON values: true is not 1 there, as it is in Python."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)


def _prompt(body: Mapping[str, Any]) -> str | tuple[int, ...]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one, as vLLM and OpenAI accept it
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and not any(isinstance(part, str | list) for part in prompt):
        return _token_ids(prompt, "prompt")
    found = "several prompts" if isinstance(prompt, list) else _show(prompt)
    raise BadRequest(found, field="prompt", expected="one string or one list of token ids")


def _messages(value: object) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise BadRequest(_show(value), field="messages", expected="a list of messages")
    messages = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(_show(message), field=where, expected="an object with a role")
        messages.append({**message, "content": _content(message.get("content"), where)})
    return tuple(messages)


def _content(value: object, where: str) -> str:
    """A message's text: a string, or OpenAI's list of text parts joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest(_show(value), field=f"{where}.content", expected="text")
    pieces = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise BadRequest(_show(part), field=f"{where}.content", expected="parts of type text")
        pieces.append(text)
    return "".join(pieces)


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    fine = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not fine or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in stops):
        raise BadRequest(
            _show(value),
            field="stop",
            expected=f"up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters",
        )
    return tuple(stops)


def _logprobs(body: Mapping[str, Any], kind: Kind) -> int | None:
    """Completions say how many with `logprobs`; chats say whether, and how many in top_logprobs."""
    if kind == "completion":
        return _integer(body, "logprobs", 0, MAX_LOGPROBS)
    top = _integer(body, "top_logprobs", 0, MAX_LOGPROBS)
    if not _boolean(body, "logprobs"):
        if top:
            raise BadRequest(str(top), field="top_logprobs", expected="logprobs true beside it")
        return None
    return top or 0


def _top_k(body: Mapping[str, Any]) -> int:
    """vLLM takes 0 and −1 as "all"."""
    return max(0, _integer(body, "top_k", -1) or 0)


def _token_ids(value: object, field: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise BadRequest(_show(value), field=field, expected="a list of token ids")
    return tuple(value)


def _text(body: Mapping[str, Any], field: str) -> str | None:
    value = body.get(field)
    if value is not None and not isinstance(value, str):
        raise BadRequest(_show(value), field=field, expected="a string")
    return value


def _required_text(body: Mapping[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not value or "\0" in value:
        raise BadRequest(_show(value), field=field, expected="a string")
    return value


def _boolean(
    body: Mapping[str, Any], key: str, field: str | None = None, default: bool = False
) -> bool:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(_show(value), field=field or key, expected="true or false")
    return value


def _integer(body: Mapping[str, Any], field: str, low: int, high: int = 2**31 - 1) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(_show(value), field=field, expected=f"an integer from {low} to {high}")
    return value


def _number(body: Mapping[str, Any], field: str, default: float, low: float, high: float) -> float:
    value = body.get(field)
    if value is None:
        return default
    # NaN is in no range; a bool is not a number here.
    if type(value) not in (int, float) or not low <= value <= high:
        raise BadRequest(_show(value), field=field, expected=f"a number from {low:g} to {high:g}")
    return float(value)


def _show(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, int) else _show_int(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _show_int(value: int) -> str:
    # Python refuses to print integers of thousands of digits.
    return json.dumps(value) if value.bit_length() < 256 else "a huge number"
