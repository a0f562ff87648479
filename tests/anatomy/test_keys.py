"""Reading a section key by key: what is accepted, what is refused, and what is remembered."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.anatomy.config.keys import Reading, Section, parse_json, show
from ullage.errors import MalformedConfig


def section(values: Mapping[str, object], **defaults: object) -> Section:
    return Section(values, Reading("config.json"), "text_config.", defaults, "LlamaConfig")


def source_of(made: Section, field: str) -> str:
    return made.reading.sources["text_config." + field].source


class TestWhereAValueComesFrom:
    def test_the_file_wins_over_the_class(self) -> None:
        made = section({"hidden_size": 64}, hidden_size=4096)
        assert made.integer("hidden_size") == 64
        assert source_of(made, "hidden_size") == "config: text_config.hidden_size"

    def test_another_spelling_is_named_in_the_source(self) -> None:
        made = section({"n_embd": 64})
        assert made.integer("hidden_size") == 64
        assert source_of(made, "hidden_size") == "config: text_config.n_embd"

    def test_the_class_answers_for_an_absent_key(self) -> None:
        made = section({}, hidden_size=4096)
        assert made.integer("hidden_size") == 4096
        assert source_of(made, "hidden_size") == "default: LlamaConfig"

    def test_null_is_absent_for_a_required_field(self) -> None:
        assert section({"hidden_size": None}, hidden_size=4096).integer("hidden_size") == 4096

    def test_null_is_none_for_an_optional_field(self) -> None:
        # Mixtral writes sliding_window: null where its class says 4096.
        made = section({"sliding_window": None}, sliding_window=4096)
        assert made.optional_integer("sliding_window") is None
        assert section({}, sliding_window=4096).optional_integer("sliding_window") == 4096

    def test_a_required_field_that_nobody_answers_is_an_error(self) -> None:
        with pytest.raises(
            MalformedConfig, match=r"config\.json: text_config\.hidden_size: missing"
        ):
            section({}).integer("hidden_size")


class TestTypes:
    @pytest.mark.parametrize("bad", [True, "64", 64.5, [64, 65], {}, -1, 0, 1 << 60, float("inf")])
    def test_what_is_not_a_size_is_refused(self, bad: object) -> None:
        with pytest.raises(MalformedConfig, match=r"text_config\.hidden_size: found .*; expected"):
            section({"hidden_size": bad}).integer("hidden_size")

    def test_a_whole_float_is_an_integer(self) -> None:
        assert section({"hidden_size": 64.0}).integer("hidden_size") == 64

    def test_one_number_repeated_per_layer_is_that_number(self) -> None:
        assert section({"moe_topk": [8, 8, 8]}).integer("num_experts_per_tok") == 8

    @pytest.mark.parametrize("bad", [1, "true", [], 0.0])
    def test_a_flag_is_true_or_false(self, bad: object) -> None:
        with pytest.raises(MalformedConfig, match="expected true or false"):
            section({"attention_bias": bad}).boolean("attention_bias", False)

    def test_a_list_has_the_length_that_it_must_have(self) -> None:
        with pytest.raises(MalformedConfig, match="expected a list of 4"):
            section({"layer_types": ["full_attention"]}).texts("layer_types", length=4)


class TestWhatNobodyRead:
    def test_keys_without_structure_are_not_listed(self) -> None:
        made = section(
            {"use_cache": True, "eos_token_id": 2, "attention_dropout": 0.1, "_name": "x"}
        )
        assert made.unread() == []

    def test_a_key_that_may_matter_is_listed_dotted(self) -> None:
        assert section({"secret_rank": 8}).unread() == ["text_config.secret_rank"]

    def test_reading_it_takes_it_off_the_list(self) -> None:
        made = section({"n_embd": 8})
        made.integer("hidden_size")
        assert made.unread() == []

    def test_a_spelling_that_disagrees_stays_on_the_list(self) -> None:
        made = section({"num_experts": 8, "num_local_experts": 16})
        assert made.integer("num_experts") == 8
        assert made.unread() == ["text_config.num_local_experts"]


class TestJson:
    def test_a_key_given_twice_is_refused(self) -> None:
        with pytest.raises(MalformedConfig, match='"a" appears twice'):
            parse_json('{"a": 1, "a": 2}', file="f")

    def test_infinity_is_let_through_and_nan_is_not(self) -> None:
        assert parse_json('{"time_step_limit": [0.0, Infinity]}', file="f") == {
            "time_step_limit": [0.0, float("inf")]
        }
        with pytest.raises(MalformedConfig, match="NaN"):
            parse_json('{"a": NaN}', file="f")

    @pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "{", "1" * 5000, "\0"])
    def test_text_that_is_not_json_gives_one_sentence(self, text: str) -> None:
        with pytest.raises(MalformedConfig) as caught:
            parse_json(text, file="config.json")
        assert str(caught.value).startswith("config.json: ")
        assert "\n" not in str(caught.value)

    @given(
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=8)
    )
    def test_what_json_wrote_is_read_back(self, value: object) -> None:
        assert parse_json(json.dumps(value), file="f") == value


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_any_value_is_shown_shortly(value: object) -> None:
    assert len(show(value)) < 1200


def test_a_bracket_is_asked_for_by_mode() -> None:
    answers = {}
    for mode in ("likely", "low", "high"):
        reading = Reading("f", mode)  # type: ignore[arg-type]
        answers[mode] = reading.decide(
            "gated", "absent", likely=True, low=False, high=True, widens=("weights",)
        )
        assert reading.unknowns["gated"].widens == ("weights",)
    assert answers == {"likely": True, "low": False, "high": True}


def test_brackets_that_agree_leave_nothing_unknown() -> None:
    reading = Reading("f", "high")
    assert reading.decide("x", "absent", likely=3, low=4, high=4, widens=("kv",)) == 4
    assert not reading.unknowns
