"""The document of an embedding server is true, as `test_openapi` holds it for the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
import schemathesis
from schemathesis import GenerationMode

from tests.engine.encoders import write_encoder
from tests.serving.test_openapi import HEADERS, KEY, held_to
from ullage.engine.options import EngineOptions
from ullage.serving.app import ServerHandle, start_server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHandle]:
    handle = start_server(
        write_encoder("bert", tmp_path_factory.mktemp("bert"), num_hidden_layers=1),
        EngineOptions(max_num_seqs=8),
        served_model_name="tiny",
        api_key=KEY,
    )
    yield handle
    handle.stop()


@pytest.fixture(scope="module")
def api(guarded: ServerHandle) -> Any:
    schema = schemathesis.openapi.from_dict(httpx.get(f"{guarded.url}/openapi.json").json())
    schema.config.update(base_url=guarded.url)
    return schema


@pytest.mark.parametrize(
    "name", ["embeddings", "models", "model", "metrics", "ready", "tokenize", "detokenize"]
)
def test_what_is_allowed_is_answered_as_described(api: Any, name: str) -> None:
    held_to(api, name, GenerationMode.POSITIVE, 12)


def test_what_is_not_allowed_is_refused(api: Any) -> None:
    held_to(api, "embeddings", GenerationMode.NEGATIVE, 25)


@pytest.mark.slow
def test_both_at_length(api: Any) -> None:
    held_to(api, "embeddings", GenerationMode.POSITIVE, 200)
    held_to(api, "embeddings", GenerationMode.NEGATIVE, 400)


def test_what_the_other_kind_would_serve_is_guarded_too(guarded: ServerHandle) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert httpx.post(guarded.url + path, json={}).status_code == 401
        assert httpx.post(guarded.url + path, json={}, headers=HEADERS).status_code == 404
