"""`--probe-quality` on a server: series from the first scrape, the route behind its key, no text.

That findings fire when they should is `tests/probes/test_quality_watch.py`'s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.engine.driving import slow_steps
from tests.serving.clients import eventually, metrics
from ullage.engine.options import EngineOptions
from ullage.probes.quality.quality import ENDS
from ullage.probes.quality.rules import RULES
from ullage.probes.quality.traits import TRAITS
from ullage.serving.app import ServerHandle, start_server

KEY = "secret"
ASK = {"prompt": "hello there " * 4, "max_tokens": 48, "temperature": 0, "seed": 1}


@pytest.fixture
def server(
    model_dir: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServerHandle]:
    slow_steps(monkeypatch)
    handle = start_server(
        model_dir,
        options,
        served_model_name="tiny",
        api_key=KEY,
        enable_control_routes=True,
        probe_quality=True,
    )
    yield handle
    handle.stop()


@pytest.fixture
def http(server: ServerHandle) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, timeout=60, headers=headers) as client:
        yield client


def ask(http: httpx.Client, **changes: object) -> dict[str, object]:
    answer = http.post("/v1/completions", json={**ASK, **changes})
    answer.raise_for_status()
    found: dict[str, object] = answer.json()
    return found


def test_every_series_is_there_before_the_first_answer(http: httpx.Client) -> None:
    found = metrics(http)
    for how in ENDS:
        assert found[f"ullage_answer_ends_total|{how}"] == 0
    for trait in TRAITS:
        assert found[f"ullage_answer_trait_looks_total|{trait.name}"] == 0
        assert found[f"ullage_answer_traits_total|{trait.name}"] == 0
    for rule in RULES:
        assert math.isnan(found[f"ullage_answer_finding|{rule.id}"])
    document = http.get("/ullage/quality").json()
    assert document["running"] == 0  # the warm-up's requests are nobody's answers
    assert document["recent"]["tokens"] is None


def test_answers_are_judged_once_and_by_how_they_ended(http: httpx.Client) -> None:
    ask(http, n=3)
    ask(http, ignore_eos=True)
    with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as answer:
        next(answer.iter_lines())
    eventually(lambda: metrics(http)["ullage_answer_ends_total|aborted"] == 1)
    document = http.get("/ullage/quality").json()
    assert document["ended"] == {"judged": 3, "ignore_eos": 1, "aborted": 1, "failed": 0}
    assert document["recent"]["answers"] == 3
    assert document["running"] == 0
    found = metrics(http)
    assert found["ullage_answer_ends_total|judged"] == 3
    assert found["ullage_answer_confidence_ratio_count"] == 3
    assert 0 < document["recent"]["confidence"] <= 1


def test_a_finding_that_cannot_be_evaluated_yet_says_what_it_lacks(http: httpx.Client) -> None:
    ask(http)
    findings = http.get("/ullage/quality").json()["findings"]
    assert [finding["id"] for finding in findings] == [rule.id for rule in RULES]
    for finding in findings:
        assert finding["state"] == "not_evaluable"
        assert "0 of 50 answers" in " ".join(finding["missing"])


def test_it_tells_nothing_of_what_was_said(http: httpx.Client) -> None:
    said = ask(http, echo=True)["choices"][0]["text"]  # type: ignore[index]
    told = json.dumps(http.get("/ullage/quality").json()) + http.get("/metrics").text
    assert "hello there" in said
    assert not [word for word in said.split() if len(word) > 6 and word in told]


def test_the_route_wants_the_key_and_both_flags(
    server: ServerHandle, model_dir: Path, options: EngineOptions
) -> None:
    assert httpx.get(f"{server.url}/ullage/quality").status_code == 401
    for flags in ({"probe_quality": True}, {"enable_control_routes": True}):
        handle = start_server(model_dir, options, api_key=KEY, **flags)
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=handle.url, headers=headers) as http:
            assert http.get("/ullage/quality").status_code == 404
        handle.stop()


def test_off_is_nothing_no_call_and_no_series(model_dir: Path, options: EngineOptions) -> None:
    handle = start_server(model_dir, options)
    with httpx.Client(base_url=handle.url) as http:
        assert handle.engine.on_logits is None
        assert "ullage_answer_" not in http.get("/metrics").text
    handle.stop()
