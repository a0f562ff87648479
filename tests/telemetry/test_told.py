"""What servers tell beside their metrics is read by route; what is odd tells nothing; no secret."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.telemetry.reading import Told
from ullage.telemetry.told import (
    MAX_CHARS,
    MAX_SETTINGS,
    READERS,
    ROUTES,
    joined,
    routes_of,
    told_by,
)


def body(answer: object) -> bytes:
    return json.dumps(answer).encode()


def told_of(bodies: Mapping[str, bytes]) -> Told:
    return joined(told_by(route, answer) for route, answer in bodies.items())


def test_vllm_tells_version_models_adapters_and_length() -> None:
    # Shape: vLLM 0.32's /v1/models with --enable-lora.
    models = {
        "object": "list",
        "data": [
            {"id": "smol", "root": "/models/smol", "parent": None, "max_model_len": 8192},
            {"id": "sql", "root": "/loras/sql", "parent": "smol", "max_model_len": None},
        ],
    }
    told = told_of({"/version": body({"version": "0.32.0"}), "/v1/models": body(models)})
    assert told == Told(
        version="0.32.0",
        models=("smol",),
        adapters=("sql",),
        max_model_len=8192,
        settings={"model_root": "/models/smol"},
    )


def test_several_models_of_several_lengths_tell_no_length() -> None:
    entries = [{"id": "a", "max_model_len": 10}, {"id": "b", "max_model_len": 20}]
    assert told_of({"/v1/models": body({"data": entries})}).max_model_len is None


def test_sglang_tells_its_arguments_but_no_secret_and_nothing_that_moves() -> None:
    answer = {
        "model_path": "org/m",
        "served_model_name": "m",
        "mem_fraction_static": 0.88,
        "context_length": None,
        "max_total_tokens": 1000,
        "api_key": "sk-1",
        "admin_api_key": "sk-2",
        "ssl_keyfile_password": "pw",
        "hf_token": "t",
        "version": "0.5.9",
        "tokenizer_path": "org/m",
        "enable_metrics": True,
        "internal_states": [{"last_gen_throughput": 3.0}],
    }
    told = told_of({"/get_server_info": body(answer)})
    assert (told.engine, told.version, told.models) == ("sglang", "0.5.9", ("m",))
    assert told.settings == {
        "model_path": "org/m",
        "served_model_name": "m",
        "mem_fraction_static": "0.88",
        "max_total_tokens": "1000",
        "tokenizer_path": "org/m",
        "enable_metrics": "true",
    }


def test_llamacpp_tells_its_build_and_the_context_of_one_slot() -> None:
    answer = {
        "default_generation_settings": {"n_ctx": 4096, "temperature": 0.8},
        "total_slots": 4,
        "model_path": "/m.gguf",
        "chat_template": "{{ x }}" * 1000,
        "build_info": "b6000-abc",
    }
    told = told_of({"/props": body(answer)})
    assert (told.engine, told.version, told.max_model_len) == ("llamacpp", "b6000-abc", 4096)
    assert told.settings == {"total_slots": "4", "model_path": "/m.gguf"}


def test_tgi_tells_all_in_one_answer() -> None:
    answer = {
        "model_id": "org/m",
        "model_sha": "abc",
        "max_concurrent_requests": 128,
        "max_total_tokens": 4096,
        "version": "3.3.0",
    }
    told = told_of({"/info": body(answer)})
    assert (told.engine, told.version, told.models) == ("tgi", "3.3.0", ("org/m",))
    assert told.max_model_len == 4096 and told.settings["model_sha"] == "abc"


def test_of_what_two_routes_tell_the_first_counts() -> None:
    bodies = {
        "/v1/models": body({"data": [{"id": "first", "max_model_len": 1}]}),
        "/get_server_info": body({"served_model_name": "second", "context_length": 2}),
    }
    told = told_of(bodies)
    assert told.models == ("first",) and told.max_model_len == 1


def test_an_engine_that_is_not_known_is_asked_what_most_answer() -> None:
    assert routes_of("") == routes_of("no such engine") == ("/version", "/v1/models")


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(["data", "id", "parent", "root", "version", "max_model_len", "model_path",
                         "default_generation_settings", "n_ctx", "api_key"]) | st.text(),
        inner,
        max_size=6,
    ),
    max_leaves=30,
)  # fmt: skip


@given(st.sampled_from(sorted(READERS)), JSONS)
@settings(max_examples=80, deadline=None)
def test_no_answer_however_odd_does_more_than_tell_nothing(route: str, answer: object) -> None:
    told = told_of({route: body(answer)})
    assert len(told.settings) <= MAX_SETTINGS
    for text in (told.version, *told.models, *told.adapters, *told.settings.values()):
        assert isinstance(text, str) and len(text) <= MAX_CHARS and (not text or text.isprintable())
    assert told.max_model_len is None or told.max_model_len > 0
    assert "api_key" not in told.settings


@pytest.mark.parametrize("text", [b"", b"\xff", b"[" * 100_000, b'"x"', b"7", b"{} {}", b"null"])
def test_what_is_no_object_tells_nothing(text: bytes) -> None:
    assert told_of(dict.fromkeys(READERS, text)) == Told()


def test_every_dialect_that_is_asked_has_a_way_to_tell() -> None:
    from ullage.telemetry.dialects.table import DIALECTS

    assert {dialect.engine for dialect in DIALECTS} <= set(ROUTES)
