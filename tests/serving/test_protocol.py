"""Any JSON at all is a request, or a BadRequest with one sentence."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.serving.fields import Anything, BadRequest, Only, schema_of
from ullage.serving.protocol import (
    DETOKENIZE,
    FIELDS,
    LOAD_LORA,
    TOKENIZE,
    Kind,
    parse_ask,
    parse_body,
    parse_tokenize,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(sorted({field.name for kind in FIELDS.values() for field in kind}))
MINIMAL: dict[Kind, dict] = {
    "completion": {"prompt": "a"},
    "chat": {"messages": [{"role": "user", "content": "a"}]},
}


@settings(max_examples=150, deadline=None)
@given(body=st.dictionaries(NAMES, JSON, max_size=6), kind=st.sampled_from(["completion", "chat"]))
def test_any_values_are_read_or_refused_with_a_sentence(body: dict, kind: Kind) -> None:
    body = {**MINIMAL[kind], **body}
    try:
        ask = parse_ask(body, kind)
    except BadRequest as refusal:
        assert refusal.field
        assert len(str(refusal)) < 400
        return
    assert 0 <= ask.params.temperature <= 2
    assert 0 < ask.params.top_p <= 1
    assert ask.params.top_k >= 0
    assert all(isinstance(stop, str) and stop for stop in ask.params.stop)
    assert ask.max_tokens is None or ask.max_tokens >= 0


@settings(max_examples=150, deadline=None)
@given(field=NAMES, value=JSON, kind=st.sampled_from(["completion", "chat"]))
def test_the_schema_and_the_parser_agree(field: str, value: object, kind: Kind) -> None:
    """What the document calls a valid field is read, what it calls invalid is refused."""
    if field not in {known.name for known in FIELDS[kind]}:
        return
    body = {**MINIMAL[kind], field: value}
    # JSON has no NaN and no infinity; `parse_body` refuses them.
    body = json.loads(json.dumps(body).replace("NaN", "1.5").replace("Infinity", "1.5"))
    valid = jsonschema.Draft202012Validator(schema_of(FIELDS[kind])).is_valid(body)
    try:
        parse_ask(body, kind)
    except BadRequest as refusal:
        # Rules between two fields are beyond a schema.
        between = ("beside it", "at most max_tokens", "expected at least 1", "token", "not empty")
        assert not valid or any(words in str(refusal) for words in between), refusal
    else:
        assert valid, (field, value)


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=60) | JSON.map(lambda v: json.dumps(v).encode()))
def test_any_bytes_are_an_object_or_refused(raw: bytes) -> None:
    try:
        assert isinstance(parse_body(raw), dict)
    except BadRequest as refusal:
        assert "the body" in str(refusal) or "given twice" in str(refusal)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"a": 1, "a": 2}', "a: it is given twice"),
        (b'{"a": {"b": 1, "b": 1}}', "b: it is given twice"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b'{"a": "\\ud800"}', "not Unicode"),
        (b"\xff", "not Unicode"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'"a"', "not a JSON object"),
    ],
)
def test_what_json_leaves_open_is_refused(raw: bytes, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        parse_body(raw)


def test_what_is_shown_of_any_value_is_short() -> None:
    for value in ([0] * 10**6, {str(i): i for i in range(1000)}, 10**4000, [10**4299], "x" * 9999):
        with pytest.raises(BadRequest) as refusal:
            parse_ask({"prompt": "a", "temperature": value}, "completion")
        assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_unsupported_fields_pass_at_the_values_that_change_nothing(kind: Kind) -> None:
    plain = parse_ask(MINIMAL[kind], kind)
    seen = 0
    for field in FIELDS[kind]:
        if isinstance(field.kind, Only):
            seen += 1
            for value in (*field.kind.values, None):
                assert parse_ask({**MINIMAL[kind], field.name: value}, kind) == plain
            with pytest.raises(BadRequest, match=rf"^{field.name}: .* is not supported"):
                parse_ask({**MINIMAL[kind], field.name: "something else"}, kind)
        elif isinstance(field.kind, Anything):
            assert parse_ask({**MINIMAL[kind], field.name: "x"}, kind) == plain
    assert seen > 5


def test_defaults_are_openais() -> None:
    ask = parse_ask({"prompt": "a"}, "completion")
    assert (ask.max_tokens, ask.params.temperature, ask.params.top_p) == (16, 1.0, 1.0)
    assert (ask.stream, ask.params.seed, ask.params.logprobs) == (False, None, None)
    assert (ask.params.n, ask.params.repetition_penalty, ask.params.min_p) == (1, 1.0, 0.0)
    chat = parse_ask(MINIMAL["chat"], "chat")
    assert chat.max_tokens is None


def test_null_is_absent() -> None:
    for kind in ("completion", "chat"):
        names = {field.name for field in FIELDS[kind] if not field.required}
        assert parse_ask({**MINIMAL[kind], **dict.fromkeys(names)}, kind) == parse_ask(
            MINIMAL[kind], kind
        )


def test_true_is_not_one() -> None:
    """JSON's true equals Python's 1, which must not slip through."""
    for field in ("n", "max_tokens", "seed", "temperature", "presence_penalty", "best_of"):
        with pytest.raises(BadRequest, match=field):
            parse_ask({"prompt": "a", field: True}, "completion")


def test_a_whole_number_may_be_written_with_a_point() -> None:
    assert parse_ask({"prompt": "a", "max_tokens": 5.0}, "completion").max_tokens == 5
    with pytest.raises(BadRequest, match="max_tokens"):
        parse_ask({"prompt": "a", "max_tokens": 5.5}, "completion")


def test_tokenize_wants_a_text_or_messages() -> None:
    assert parse_tokenize({"prompt": ""}).add_special
    assert not parse_tokenize(MINIMAL["chat"]).add_special
    for body in ({}, {**MINIMAL["chat"], "prompt": "a"}):
        with pytest.raises(BadRequest, match="prompt or messages"):
            parse_tokenize(body)


def test_every_table_is_a_valid_schema_and_says_what_its_fields_are() -> None:
    for fields in (*FIELDS.values(), TOKENIZE, DETOKENIZE, LOAD_LORA):
        jsonschema.Draft202012Validator.check_schema(schema_of(fields))
        assert all(field.text for field in fields)
        assert len({field.name for field in fields}) == len(fields)
