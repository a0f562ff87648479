"""The OpenAPI document is true: whatever it allows is answered as it says, and nothing is a 5xx."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2 as httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from ullage.engine.options import EngineOptions
from ullage.serving.app import ServerHandle, start_server
from ullage.serving.operations import CONTROL_OPERATIONS, LORA_OPERATIONS, OPERATIONS

KEY = "a-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    negative_data_rejection,
    unsupported_method,
]
# Draining would end the server.
ALL = (*OPERATIONS, *LORA_OPERATIONS, *(o for o in CONTROL_OPERATIONS if o.name != "drain"))
NAMES = [operation.name for operation in ALL]
WITH_INPUT = [operation.name for operation in ALL if operation.body or operation.query]


@pytest.fixture(scope="module")
def guarded(model_dir: Path) -> Iterator[ServerHandle]:
    """A server with every route that there is, but for draining: that would end it."""
    options = EngineOptions(
        kv_cache_memory_bytes=1 << 22,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=128,
        enable_lora=True,
    )
    handle = start_server(
        model_dir,
        options,
        served_model_name="tiny",
        api_key=KEY,
        enable_control_routes=True,
        probe_quality=True,
        probe=True,
        probe_every=2,
        max_num_queued_reqs=16,
    )
    yield handle
    handle.stop()
    assert handle.engine.pool.num_used == 0


@pytest.fixture(scope="module")
def described(guarded: ServerHandle) -> dict[str, Any]:
    document: dict[str, Any] = httpx.get(f"{guarded.url}/openapi.json").json()
    return document


@pytest.fixture(scope="module")
def api(guarded: ServerHandle, described: dict[str, Any]) -> Any:
    schema = schemathesis.openapi.from_dict(described)
    schema.config.update(base_url=guarded.url)
    return schema


def checks_of(answer: Any) -> list[Any]:
    """All checks, but that a query must be refused which holds nothing wrong as it was sent.

    What schemathesis makes wrong may have no place in a URL (an empty list, say) or be the missing
    key, which every request here has.
    """
    query = parse_qs(urlsplit(answer.request.url).query, keep_blank_values=True)
    if not query or answer.request.body:
        return CHECKS
    known = set(query) <= {"percent", "dry_run"} and all(len(v) == 1 for v in query.values())
    number = re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d+)?", query.get("percent", [""])[0])
    dry_run = query.get("dry_run", ["true"])[0] in ("true", "false")
    if known and number and dry_run and 0 < float(number[0]) <= 100:
        return [check for check in CHECKS if check is not negative_data_rejection]
    return CHECKS


def held_to(api: Any, name: str, mode: GenerationMode, num_examples: int) -> set[int]:
    """Send `num_examples` requests of an operation, valid or not, check every answer; statuses."""
    statuses: set[int] = set()
    (operation,) = (found.ok() for found in api.include(operation_id=name).get_all_operations())

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def every_answer_is_as_described(case: Any) -> None:
        answer = case.call(headers=HEADERS, timeout=60)
        statuses.add(answer.status_code)
        case.validate_response(answer, checks=checks_of(answer), headers=HEADERS)

    every_answer_is_as_described()
    return statuses


@pytest.mark.parametrize("name", NAMES)
def test_what_is_allowed_is_answered_as_described(api: Any, name: str) -> None:
    statuses = held_to(api, name, GenerationMode.POSITIVE, 8)
    # Adapters and models of random names are not here; of prompt and messages only one may come.
    assert name in ("load_lora", "unload_lora", "model", "tokenize") or 200 in statuses


@pytest.mark.parametrize("name", WITH_INPUT)
def test_what_is_not_allowed_is_refused(api: Any, name: str) -> None:
    held_to(api, name, GenerationMode.NEGATIVE, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_INPUT)
def test_both_at_length(api: Any, name: str) -> None:
    held_to(api, name, GenerationMode.POSITIVE, 100)
    held_to(api, name, GenerationMode.NEGATIVE, 200)


def test_the_document_lists_every_route(described: dict[str, Any]) -> None:
    operations = (*OPERATIONS, *LORA_OPERATIONS, *CONTROL_OPERATIONS)
    listed = {(verb.upper(), path) for path, verbs in described["paths"].items() for verb in verbs}
    assert listed == {(operation.verb, operation.path) for operation in operations}


def test_guarded_routes_say_so_and_are(guarded: ServerHandle, described: dict[str, Any]) -> None:
    with httpx.Client(base_url=guarded.url) as http:
        for path, verbs in described["paths"].items():
            for verb, operation in verbs.items():
                if "security" in operation:
                    assert http.request(verb, path).status_code == 401, path
                else:
                    assert http.request(verb, path).status_code == 200, path
        # What nobody serves is guarded too.
        assert http.get("/ullage/nowhere").status_code == 401
        assert http.get("/v1/../v1/models").status_code == 401
        assert http.get("//v1/models").status_code == 401
