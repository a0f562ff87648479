"""Asking an engine to act: what it answers is believed only where it is what this route answers."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.telemetry.rude_server import Rude, chunked, page, raw, reset, rude_server, status
from ullage.errors import BadUsage
from ullage.watch.act.conditions import parse_condition
from ullage.watch.act.perform import Outcome, Performer, base_of
from ullage.watch.act.policy import Action

WHEN = (parse_condition("kv_used_ratio > 0.9"),)
SHED = Action("shed", WHEN, 5.0, "cancel_oldest", 12.5)
DRAIN = Action("drain", WHEN, 5.0, "drain")
ASK = "/ullage/cancel_oldest?percent=12.5&dry_run=true"
DO = "/ullage/cancel_oldest?percent=12.5&dry_run=false"


def report(num: int = 2, promised: float = 100, freed: float = 0, dry_run: bool = True, **more):
    ids = [f"r{at}" for at in range(num)]
    found = {"request_ids": ids, "promised_bytes": promised, "freed_bytes": freed}
    return page(json.dumps({**found, "dry_run": dry_run, **more}).encode())


def ask(answers, action: Action = SHED, *, dry_run: bool = False) -> tuple[Outcome, Rude]:
    """What becomes of the action against a server that answers so."""

    async def asked() -> tuple[Outcome, Rude]:
        async with rude_server(answers) as rude:
            performer = Performer(api_key="k", dry_run=dry_run)
            try:
                return await performer.perform(
                    action, f"http://127.0.0.1:{rude.port}/metrics"
                ), rude
            finally:
                await performer.close()

    return asyncio.run(asked())


def test_what_would_be_is_asked_before_and_the_promise_stands_beside_what_was_freed():
    """The promise is that of the deed: requests have grown since the question."""
    outcome, rude = ask({ASK: report(), DO: report(promised=110, freed=90, dry_run=False)})
    assert outcome == Outcome("done", "ended 2 requests", 2, 110.0, 90.0)
    assert rude.paths == [ASK, DO]
    assert all(headers["authorization"] == "bearer k" for _, headers in rude.requests)


def test_a_dry_run_only_asks():
    outcome, rude = ask({ASK: report(), DO: report(dry_run=False)}, dry_run=True)
    assert outcome == Outcome("would", "would end 2 requests", 2, 100.0, None)
    assert rude.paths == [ASK]


def test_where_nothing_runs_nothing_is_ended():
    outcome, rude = ask({ASK: report(0, 0)})
    assert outcome.kind == "nothing"
    assert rude.paths == [ASK]


@pytest.mark.parametrize("code", [401, 403, 404, 405, 501])
def test_engines_that_cannot_are_told_apart_from_failures(code):
    outcome, _ = ask({ASK: status(code)})
    assert outcome.kind == "cannot"
    assert str(code) in outcome.message


@pytest.mark.parametrize(
    "answer",
    [
        status(500),
        status(302, headers=b"Location: http://127.0.0.1:1/\r\n"),
        reset(),
        raw(b"nonsense\r\n\r\n", close=True),
        report(promised=-1),
        report(promised=None),
        report(promised=True),
        report(dry_run=False),
        report(dry_run=None),
        report(request_ids=3),
        page(b'{"request_ids": ["a"], "promised_bytes": NaN, "dry_run": true}'),
        page(b"[" * 100_000),
    ],
    ids=[
        "500", "elsewhere", "reset", "no HTTP", "less than nothing", "no bytes", "bytes are true",
        "it did it", "it does not say", "no list", "NaN", "deep",
    ],
)  # fmt: skip
def test_what_is_not_this_routes_answer_ends_it_before_anything_is_done(answer):
    outcome, rude = ask({ASK: answer, DO: report(dry_run=False)})
    assert outcome.kind in ("failed", "cannot")
    assert DO not in rude.paths
    assert outcome.freed_bytes is None


def test_another_server_on_that_port_cannot():
    assert ask({ASK: page(b"<html>")})[0].kind == "cannot"
    assert ask({ASK: chunked(b"[]")})[0].kind == "cannot"


def test_a_failure_after_the_promise_is_a_failure():
    outcome, _ = ask({ASK: report(), DO: status(503)})
    assert (outcome.kind, outcome.message) == ("failed", "HTTP 503")


def test_draining_is_believed_when_it_is_said():
    drained = page(b'{"draining": true, "in_flight": 3}')
    outcome, _ = ask({"/ullage/drain": drained}, DRAIN)
    assert outcome == Outcome("done", "it takes nothing new, 3 requests in flight", 3)
    assert ask({"/ullage/drain": page(b'{"draining": false}')}, DRAIN)[0].kind == "failed"
    assert ask({"/ullage/drain": page(b'{"draining": true}')}, DRAIN)[0].num_requests is None


def test_a_dry_run_of_a_drain_only_looks_whether_it_could_be_asked():
    outcome, rude = ask({"/ullage/kv": page(b"{}")}, DRAIN, dry_run=True)
    assert outcome.kind == "would"
    assert rude.paths == ["/ullage/kv"]
    assert ask({}, DRAIN, dry_run=True)[0].kind == "cannot"


def test_nobody_there():
    async def asked() -> Outcome:
        performer = Performer(api_key=None, dry_run=False)
        try:
            return await performer.perform(SHED, "http://127.0.0.1:1")
        finally:
            await performer.close()

    assert asyncio.run(asked()).kind == "failed"


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("10.0.0.1:8000", "http://10.0.0.1:8000"),
        ("https://h/metrics", "https://h"),
        ("http://h:8000/one/prometheus/metrics", "http://h:8000/one"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_routes_lie_where_the_page_lies(url, base):
    assert base_of(url) == base


def test_a_name_that_is_no_address():
    with pytest.raises(BadUsage):
        base_of("pod-3 in production")


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("url", "said"),
    [("127.0.0.1:1", "connection refused"), ("no.invalid:1", "no.invalid has no address")],
)
def test_nobody_there_is_said_as_it_is_of_a_scrape(url: str, said: str, dry_run: bool):
    async def asked() -> Outcome:
        performer = Performer(api_key=None, dry_run=dry_run)
        try:
            return await performer.perform(SHED, url)
        finally:
            await performer.close()

    assert asyncio.run(asked()) == Outcome("failed", said)
