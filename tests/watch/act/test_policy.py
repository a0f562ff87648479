"""POLICY.toml: what is understood is followed, anything else is refused whole, in one sentence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.errors import BadInput
from ullage.watch.act.conditions import Condition, parse_condition
from ullage.watch.act.policy import Limits, read_policy

GOOD = """
log = "done.jsonl"
[limits]
per_hour = 3
min_pause_s = 90
[[action]]
name = "shed the oldest"
when = ["kv_used_ratio > 0.95", "W003 fires"]
for_s = 30
do = "cancel_oldest"
percent = 10
[[action]]
when = "waiting >= 100"
for_s = 0
do = "drain"
"""
ACTION = '[[action]]\nwhen = "kv_used_ratio > 0.9"\nfor_s = 5\ndo = "cancel_oldest"\npercent = 10\n'


def read(tmp_path, text: str):
    path = tmp_path / "POLICY.toml"
    path.write_text(text)
    return read_policy(str(path))


def test_a_policy_is_read_as_it_stands(tmp_path):
    policy = read(tmp_path, GOOD)
    first, second = policy.actions
    assert first.when == (Condition("kv_used_ratio", ">", 0.95), Condition("W003"))
    assert (first.name, first.for_s, first.do, first.percent) == (
        "shed the oldest", 30.0, "cancel_oldest", 10.0,
    )  # fmt: skip
    assert (second.do, second.percent, second.for_s) == ("drain", None, 0.0)
    assert policy.limits == Limits(per_hour=3, min_pause_s=90.0)
    assert policy.log == "done.jsonl"


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        ("", "action", "at least one"),
        ("action = 3", "action", "at least one"),
        ("=", "", "a policy"),
        (ACTION + "[typo]\n", "typo", "limits"),
        (ACTION + "tYpe = 1\n", "action[0].tYpe", "when"),
        (ACTION.replace("0.9", "high"), "action[0].when", "a number after"),
        (
            ACTION.replace("0.9", "90"),
            "action[0].when",
            "a ratio from 0 to 1 after > (95% is 0.95)",
        ),
        (ACTION.replace("> 0.9", "< 90"), "action[0].when", "a ratio from 0 to 1"),
        (ACTION.replace("> 0.9", ">= -0.1"), "action[0].when", "a ratio from 0 to 1"),
        (ACTION.replace("0.9", "nan"), "action[0].when", "a number after"),
        (ACTION.replace("kv_used_ratio", "kv_ratio"), "action[0].when", "kv_used_ratio"),
        (ACTION.replace(" > ", " == "), "action[0].when", "such as"),
        (ACTION.replace("kv_used_ratio > 0.9", "W999 fires"), "action[0].when", "W001"),
        (ACTION.replace('"kv_used_ratio > 0.9"', "[]"), "action[0].when", "such as"),
        (ACTION.replace("for_s = 5\n", ""), "action[0].for_s", "0 to 3600"),
        (ACTION.replace("for_s = 5", "for_s = -1"), "action[0].for_s", "0 to 3600"),
        (ACTION.replace("for_s = 5", "for_s = inf"), "action[0].for_s", "0 to 3600"),
        (ACTION.replace("for_s = 5", "for_s = true"), "action[0].for_s", "0 to 3600"),
        (ACTION.replace("percent = 10\n", ""), "action[0].percent", "at most 100"),
        (ACTION.replace("percent = 10", "percent = 0"), "action[0].percent", "above 0"),
        (ACTION.replace("percent = 10", "percent = 101"), "action[0].percent", "at most 100"),
        (ACTION.replace("cancel_oldest", "reboot"), "action[0].do", "drain"),
        (ACTION.replace("cancel_oldest", "drain"), "action[0].percent", "none with drain"),
        (ACTION + "name = 3\n", "action[0].name", "some text"),
        (ACTION + 'name = "a"\n' + ACTION + 'name = "a"\n', "action", "once"),
        ("limits = 3\n" + ACTION, "limits", "a table"),
        ("[limits]\nper_hour = 0\n" + ACTION, "limits.per_hour", "from 1"),
        ("[limits]\nper_hour = 1.5\n" + ACTION, "limits.per_hour", "from 1"),
        ("[limits]\nmin_pause_s = 0\n" + ACTION, "limits.min_pause_s", "1 or more"),
        ("log = 3\n" + ACTION, "log", "a file"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_place(tmp_path, text, field, expected):
    with pytest.raises(BadInput) as refused:
        read(tmp_path, text)
    sentence = str(refused.value)
    assert "POLICY.toml" in sentence
    assert field in sentence
    assert expected in sentence
    assert "\n" not in sentence


def test_a_policy_that_is_not_there(tmp_path):
    for path in (str(tmp_path / "none"), str(tmp_path), "a\0b"):
        with pytest.raises(BadInput, match="cannot be read"):
            read_policy(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("policies")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: (GOOD + text).encode()))
def test_no_bytes_raise_anything_but_a_sentence(place, data):
    path = place / "POLICY.toml"
    path.write_bytes(data)
    try:
        policy = read_policy(str(path))
    except BadInput as refused:
        assert str(refused).isprintable()
    else:
        assert policy.actions


@pytest.mark.parametrize("text", ["kv_used_ratio > 0.95", "waiting <= 3", "W003 fires"])
def test_a_condition_is_written_as_it_was_read(text):
    assert str(parse_condition(text)) == text


@pytest.mark.parametrize("text", [None, 3, "", "W003", "W003 burns", "waiting >", "> 3 waiting"])
def test_what_is_no_condition(text):
    with pytest.raises(ValueError, match=r"such as|rule of watch|one of"):
        parse_condition(text)
