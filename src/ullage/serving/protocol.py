"""The requests that the server understands: every field is read, harmless, or refused by name.

Tables of fields with OpenAI's and vLLM's names, and the pure functions from JSON to `Ask`. A field
that would change the answer and is not implemented gets a sentence, never silence.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ullage.engine.request import SamplingParams
from ullage.serving.fields import (
    MAX_INT32,
    Anything,
    BadRequest,
    Boolean,
    Field,
    Integer,
    Json,
    ListOf,
    Number,
    OneOrMany,
    Only,
    Record,
    Text,
    read_fields,
    show,
)

Kind = Literal["completion", "chat"]
DEFAULT_MAX_TOKENS = 16  # OpenAI's for completions; chat answers may fill the context
MAX_LOGPROBS = 20
MAX_PROMPTS = 1024
MAX_N = 128
MAX_BIAS = 100.0
MAX_SEED = 2**64
DAY_S = 86_400.0

TOKEN_IDS = ListOf(Integer(0), what="token ids")
PROMPT_IDS = ListOf(Integer(0), 1, what="token ids, not empty")


@dataclass(frozen=True, slots=True)
class Prompts:
    """A string, a list of token ids, or a list of either; read to a tuple of prompts."""

    def read(self, value: Any, field: str) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not value:
            raise BadRequest(show(value), field=field, expected="text or token ids, not empty")
        if all(isinstance(part, str) for part in value):
            return ListOf(Text(), 1, MAX_PROMPTS, "prompts").read(value, field)
        if all(isinstance(part, list) for part in value):
            return ListOf(PROMPT_IDS, 1, MAX_PROMPTS, "prompts").read(value, field)
        return (PROMPT_IDS.read(value, field),)

    def schema(self) -> Json:
        single = [Text().schema(), PROMPT_IDS.schema()]
        several = [
            {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_PROMPTS}
            for one in single
        ]
        return {"anyOf": [*single, *several]}


@dataclass(frozen=True, slots=True)
class Messages:
    """A conversation; each message keeps what its template may read, its content joined to text."""

    def read(self, value: Any, field: str) -> tuple[Mapping[str, Any], ...]:
        if not isinstance(value, list) or not value:
            raise BadRequest(show(value), field=field, expected="a list of messages")
        messages = []
        for index, message in enumerate(value):
            where = f"{field}[{index}]"
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise BadRequest(show(message), field=where, expected="an object with a role")
            content = _content(message.get("content"), f"{where}.content")
            messages.append({**message, "content": content})
        return tuple(messages)

    def schema(self) -> Json:
        part = {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
        }
        content = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}
        message = {
            "type": "object",
            "properties": {"role": {"type": "string"}, "content": content},
            "required": ["role", "content"],
        }
        return {"type": "array", "items": message, "minItems": 1}


@dataclass(frozen=True, slots=True)
class Biases:
    """An object from token ids (as strings) to numbers; read to pairs."""

    def read(self, value: Any, field: str) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict):
            raise BadRequest(show(value), field=field, expected="an object of token ids")
        pairs: dict[int, float] = {}
        for key, bias in value.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10) or int(key) > MAX_INT32:
                raise BadRequest(show(key), field=field, expected="token ids as keys")
            number = Number(-MAX_BIAS, MAX_BIAS).read(bias, f"{field}.{key}")
            if pairs.setdefault(int(key), number) is not number:
                raise BadRequest(f"token {int(key)} twice", field=field, expected="each id once")
        return tuple(pairs.items())

    def schema(self) -> Json:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": Number(-MAX_BIAS, MAX_BIAS).schema(),
        }


STREAM_OPTIONS = (
    Field("include_usage", Boolean(), "a last chunk with the usage", False),
    Field("continuous_usage_stats", Boolean(), "the usage so far in every chunk", False),
)
COMMON: tuple[Field, ...] = (
    Field("model", Text(), "the served model or an adapter"),
    Field("temperature", Number(0, 2), "0: the likeliest token", 1.0),
    Field("top_p", Number(0, 1, above=True), "share of probability to draw from", 1.0),
    Field("top_k", Integer(-1), "how many of the likeliest to draw from; 0 and -1: all", 0),
    Field("min_p", Number(0, 1), "least probability, as a share of the greatest", 0.0),
    Field("presence_penalty", Number(-2, 2), "taken from the logit of what was said", 0.0),
    Field("frequency_penalty", Number(-2, 2), "the same for each time it was said", 0.0),
    Field(
        "repetition_penalty",
        Number(0, 100, above=True),
        "divides the logits of what was said or asked, 1 changes nothing",
        1.0,
    ),
    Field("logit_bias", Biases(), "added to logits, by token id", ()),
    Field("min_tokens", Integer(0), "tokens before the answer may end", 0),
    Field("seed", Integer(-MAX_SEED, MAX_SEED), "repeats the random choices"),
    Field("stop", OneOrMany(ListOf(Text(1, 1024), 0, 16, "strings")), "ends the text", ()),
    Field("stop_token_ids", TOKEN_IDS, "tokens that end the answer", ()),
    Field("include_stop_str_in_output", Boolean(), "keep the stop string", False),
    Field("ignore_eos", Boolean(), "go on past the end of sequence", False),
    Field("n", Integer(1, MAX_N), "answers to each prompt", 1),
    Field("stream", Boolean(), "server-sent events, a token each", False),
    Field("stream_options", Record(STREAM_OPTIONS), "with stream only"),
    Field("priority", Integer(-(2**63), 2**63 - 1), "lower runs first, if so scheduled", 0),
    Field(
        "deadline_seconds",
        Number(0, DAY_S, above=True),
        "ullage's own: a 408 instead of an answer that comes later than this",
    ),
    Field("cache_salt", Text(1, 1024), "cached prefixes are shared among the same salt only"),
    # Accepted because they never change the answer.
    *(
        Field(name, Anything(), "changes nothing here")
        for name in ("user", "metadata", "store", "service_tier", "request_id", "session_id")
    ),
    Field("safety_identifier", Anything(), "changes nothing here"),
    # Known, not supported: accepted at the values with which they change nothing.
    Field("length_penalty", Only((1,)), "not supported"),
    Field("use_beam_search", Only((False,)), "not supported"),
    Field("skip_special_tokens", Only((True,)), "always so"),
    Field("spaces_between_special_tokens", Only((True,)), "always so"),
    Field("response_format", Only(({"type": "text"},)), "text only"),
)
FIELDS: Mapping[Kind, tuple[Field, ...]] = {
    "completion": (
        Field("prompt", Prompts(), "text or token ids, or a list of either", required=True),
        Field("max_tokens", Integer(0), "most tokens to generate; 0 with echo only"),
        Field("echo", Boolean(), "the prompt before the answer", False),
        Field("logprobs", Integer(0, MAX_LOGPROBS), "alternatives to report for each token"),
        Field("add_special_tokens", Boolean(), "begin as the tokenizer begins a text", True),
        Field("best_of", Only((1,)), "not supported; ask for n"),
        Field("suffix", Only(("",)), "not supported"),
        *COMMON,
    ),
    "chat": (
        Field("messages", Messages(), "the conversation", required=True),
        Field("max_tokens", Integer(1), "most tokens to generate"),
        Field("max_completion_tokens", Integer(1), "most tokens to generate"),
        Field("logprobs", Boolean(), "report log-probabilities", False),
        Field("top_logprobs", Integer(0, MAX_LOGPROBS), "alternatives; with logprobs only"),
        Field("tools", Only(([],)), "not supported"),
        Field("tool_choice", Only(("none", "auto")), "not supported"),
        Field("parallel_tool_calls", Only((True, False)), "changes nothing here"),
        Field("modalities", Only((["text"],)), "text only"),
        Field("add_generation_prompt", Only((True,)), "always so"),
        Field("continue_final_message", Only((False,)), "not supported"),
        *COMMON,
    ),
}
TOKENIZE: tuple[Field, ...] = (
    Field("model", Text(), "the served model"),
    Field("prompt", Text(), "the text, or else messages"),
    Field("messages", Messages(), "the conversation, or else prompt"),
    Field("add_special_tokens", Boolean(), "as in a completion; a template adds its own"),
    Field("add_generation_prompt", Boolean(), "end where the answer begins", True),
    Field("return_token_strs", Boolean(), "each token's text too", False),
)
DETOKENIZE: tuple[Field, ...] = (
    Field("model", Text(), "the served model"),
    Field("tokens", TOKEN_IDS, "token ids", required=True),
)
LOAD_LORA: tuple[Field, ...] = (
    Field("lora_name", Text(1, 256, clean=True), "its name as a model", required=True),
    Field("lora_path", Text(1, 4096, clean=True), "its directory on the server", required=True),
    Field("allow_partial", Boolean(), "also when part of it is not of this model", False),
)
UNLOAD_LORA: tuple[Field, ...] = (
    Field("lora_name", Text(1, 256, clean=True), "its name as a model", required=True),
    Field("lora_int_id", Anything(), "changes nothing here"),
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as asked. `prompts` are texts or token ids; for a chat, `messages` is set.

    `max_tokens` None: as many as fit. `params.max_tokens` is set when the prompt is known.
    """

    kind: Kind
    model: str | None
    prompts: tuple[str | tuple[int, ...], ...]
    messages: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    params: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    add_special: bool
    echo: bool
    priority: int
    deadline_seconds: float | None
    cache_salt: str


@dataclass(frozen=True, slots=True)
class TokenizeAsk:
    """What /tokenize is asked about: a text, or messages where `text` is None."""

    text: str | None
    messages: tuple[Mapping[str, Any], ...]
    add_special: bool
    add_generation_prompt: bool
    with_texts: bool


def parse_body(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises BadRequest."""
    try:
        body = json.loads(raw, parse_constant=_no_constant, object_pairs_hook=_once)
        if b"\\u" in raw:
            # Half of a surrogate pair is valid JSON but no text; nothing can be made of it.
            json.dumps(body, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise BadRequest(f"the body is not Unicode text ({error.reason})") from error
    except BadRequest:
        raise
    except ValueError as error:
        raise BadRequest(f"the body is not JSON ({error})") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    return body


def parse_ask(body: Mapping[str, Any], kind: Kind) -> Ask:
    """Read a completion or chat request. Raises BadRequest naming the field."""
    read = read_fields(FIELDS[kind], body)
    max_tokens = read.get("max_completion_tokens") or read["max_tokens"]
    if max_tokens is None and kind == "completion":
        max_tokens = DEFAULT_MAX_TOKENS
    echo = bool(read.get("echo"))
    if max_tokens == 0 and not echo:
        raise BadRequest("0", field="max_tokens", expected="at least 1, or 0 with echo")
    if max_tokens is not None and read["min_tokens"] > max_tokens:
        raise BadRequest(
            str(read["min_tokens"]), field="min_tokens", expected=f"at most max_tokens {max_tokens}"
        )
    options = read["stream_options"]
    if options is not None and not read["stream"]:
        raise BadRequest(show(options), field="stream_options", expected="stream true beside it")
    options = options or {}
    params = SamplingParams(
        n=read["n"],
        temperature=read["temperature"],
        top_p=read["top_p"],
        top_k=max(0, read["top_k"]),
        min_p=read["min_p"],
        presence_penalty=read["presence_penalty"],
        frequency_penalty=read["frequency_penalty"],
        repetition_penalty=read["repetition_penalty"],
        logit_bias=read["logit_bias"],
        min_tokens=read["min_tokens"],
        seed=read["seed"],
        stop=read["stop"],
        stop_token_ids=read["stop_token_ids"],
        include_stop_str_in_output=read["include_stop_str_in_output"],
        ignore_eos=read["ignore_eos"],
        logprobs=read["logprobs"] if kind == "completion" else _chat_logprobs(read),
    )
    return Ask(
        kind,
        read["model"],
        read.get("prompt", ()),
        read.get("messages", ()),
        max_tokens,
        params,
        read["stream"],
        options.get("include_usage", False),
        options.get("continuous_usage_stats", False),
        read.get("add_special_tokens", True),
        echo,
        read["priority"],
        read["deadline_seconds"],
        read["cache_salt"] or "",
    )


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeAsk:
    """What /tokenize is asked about. Raises BadRequest."""
    read = read_fields(TOKENIZE, body)
    text, messages = read["prompt"], read["messages"]
    if (text is None) == (messages is None):
        raise BadRequest(
            "neither" if text is None else "both", field="prompt", expected="prompt or messages"
        )
    add_special = read["add_special_tokens"]
    if add_special is None:
        # vLLM's defaults: a text begins as a text, a template has written its own tokens.
        add_special = messages is None
    return TokenizeAsk(
        text, messages or (), add_special, read["add_generation_prompt"], read["return_token_strs"]
    )


def _chat_logprobs(read: Mapping[str, Any]) -> int | None:
    """A chat says whether, and how many alternatives in top_logprobs."""
    top: int | None = read["top_logprobs"]
    if not read["logprobs"]:
        if top:
            raise BadRequest(str(top), field="top_logprobs", expected="logprobs true beside it")
        return None
    return top or 0


def _content(value: Any, where: str) -> str:
    """A message's text: a string, or OpenAI's list of text parts joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest(show(value), field=where, expected="text")
    pieces = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise BadRequest(show(part), field=where, expected="parts of type text")
        pieces.append(text)
    return "".join(pieces)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a name that comes twice would have to be guessed about."""
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise BadRequest("it is given twice", field=twice[:80], expected="each field once")
    return found


def _no_constant(name: str) -> None:
    raise BadRequest(f"the body is not JSON ({name} is no number there)")
