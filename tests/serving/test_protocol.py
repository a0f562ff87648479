"""Any JSON at all is a request, or a BadRequest with one sentence."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.serving.protocol import (
    COMMON_FIELDS,
    FIELDS,
    IGNORED,
    NEUTRAL,
    BadRequest,
    Kind,
    parse_ask,
    parse_body,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(sorted(COMMON_FIELDS | FIELDS["completion"] | FIELDS["chat"] | {*NEUTRAL}))


@settings(max_examples=300, deadline=None)
@given(body=st.dictionaries(NAMES, JSON, max_size=6), kind=st.sampled_from(["completion", "chat"]))
def test_any_values_are_read_or_refused_with_a_sentence(body: dict, kind: Kind) -> None:
    if kind == "completion":
        body.setdefault("prompt", "a")
    else:
        body.setdefault("messages", [{"role": "user", "content": "a"}])
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
    assert ask.max_tokens is None or ask.max_tokens >= 1


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=60) | JSON.map(lambda v: json.dumps(v).encode()))
def test_any_bytes_are_an_object_or_refused(raw: bytes) -> None:
    try:
        assert isinstance(parse_body(raw), dict)
    except BadRequest as refusal:
        assert "the body" in str(refusal)


@pytest.mark.parametrize("field", sorted(NEUTRAL))
def test_values_that_change_nothing_pass_others_do_not(field: str) -> None:
    for value in (*NEUTRAL[field], None):
        assert parse_ask({"prompt": "a", field: value}, "completion").prompt == "a"
    with pytest.raises(BadRequest, match=f"^{field}: .* is not supported"):
        parse_ask({"prompt": "a", field: "something else"}, "completion")


def test_fields_that_never_change_the_answer_pass() -> None:
    assert parse_ask({"prompt": "a", **dict.fromkeys(IGNORED, "x")}, "completion").prompt == "a"


def test_defaults_are_openais() -> None:
    ask = parse_ask({"prompt": "a"}, "completion")
    assert (ask.max_tokens, ask.params.temperature, ask.params.top_p) == (16, 1.0, 1.0)
    assert (ask.stream, ask.params.seed, ask.params.logprobs) == (False, None, None)
    chat = parse_ask({"messages": [{"role": "user", "content": "a"}]}, "chat")
    assert chat.max_tokens is None


def test_true_is_not_one() -> None:
    """JSON's true equals Python's 1, which must not slip through."""
    for field in ("n", "max_tokens", "seed", "temperature", "presence_penalty"):
        with pytest.raises(BadRequest, match=field):
            parse_ask({"prompt": "a", field: True}, "completion")
