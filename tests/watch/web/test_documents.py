"""The page's JSON: what is unknown says why, nothing from outside keeps its teeth, worst first."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.watch import sights
from tests.watch.web import simulated
from ullage.findings.finding import Evidence, Finding, Severity
from ullage.telemetry.snapshot import Gpu
from ullage.watch.figures import FIELDS
from ullage.watch.rule import Judged
from ullage.watch.sight import Incident, Sight
from ullage.watch.view import Change
from ullage.watch.web import documents
from ullage.watch.web.feed import STATES, Feed, Round, id_of
from ullage.watch.web.wording import FIGURES, plain


def taken(sight: Sight) -> Round:
    feed = Feed()
    feed.take(sight)
    assert feed.round is not None
    return feed.round


def texts(document: Any) -> list[str]:
    """Every string in a document, keys too."""
    if isinstance(document, dict):
        return [*map(str, document), *(t for v in document.values() for t in texts(v))]
    if isinstance(document, list):
        return [t for item in document for t in texts(item)]
    return [document] if isinstance(document, str) else []


def everything(latest: Round) -> list[Any]:
    feed = Feed()
    feed.take(latest.sight)
    rows = feed.past.fleet.since(0)
    return [
        documents.round_document(latest),
        documents.history_document(rows, {}),
        *(documents.replica_document(replica) for replica in latest.replicas),
    ]


def test_every_document_of_a_fleet_is_strict_json() -> None:
    for document in everything(taken(simulated.sight_at(simulated.START_S))):
        json.loads(json.dumps(document, allow_nan=False))


@settings(max_examples=25)
@given(st.text(max_size=60))
def test_names_from_outside_come_without_teeth(name: str) -> None:
    name = "\x1b[31m\u202e<img src=x onerror=alert(1)>" + name + "x" * 2000
    gpus = (Gpu(name, name, throttled_because=(name,)),)
    now = sights.snapshot(models=(name,), settings={name: name}, version=name, gpus=gpus)
    change = Change(sights.NOW_S, name, name, name)
    view = sights.view(name, now=now, changes=(change,), pod={name: name})
    finding = sights.fired(title=name, cause=name * 9, remedy=name)
    incident = Incident(name, finding, sights.NOW_S, None, (change,))
    latest = taken(
        sights.sight(
            view,
            sights.down(name + "2", error=name),
            judged=(Judged(name, finding), Judged(name, sights.lacking(missing=name))),
            incidents=(incident,),
        )
    )
    for document in everything(latest):
        for text in texts(json.loads(json.dumps(document, allow_nan=False))):
            assert text.isprintable()
            assert len(text) <= 1200


def test_every_field_is_a_figure_or_says_why_it_is_none() -> None:
    assert set(FIGURES) >= set(FIELDS)
    latest = taken(sights.sight(sights.view(), sights.view("http://b", once=True)))
    for replica in latest.replicas:
        told = documents.replica_document(replica)
        shown = " ".join(f["words"] for f in told["figures"]) + " ".join(
            word for reason in told["absent"] for word in reason["what"]
        )
        for field in FIELDS:
            if field not in ("engine", "version"):
                assert FIGURES[field][0] in shown, field
        assert all(reason["reason"] for reason in told["absent"])


def test_a_figure_of_the_list_is_a_number_or_absent_never_both() -> None:
    latest = taken(simulated.sight_at(simulated.START_S))
    for row in documents.round_document(latest)["replicas"]["rows"]:
        for figure in row["figures"].values():
            assert ("value" in figure) != ("absent" in figure)
            assert figure.get("absent", "a reason")


def test_old_answers_are_not_shown_as_now() -> None:
    latest = taken(simulated.sight_at(simulated.START_S))
    told = documents.round_document(latest, search="unreachable")
    (row,) = told["replicas"]["rows"]
    assert row["state"] == "unreachable"
    assert all("absent" in figure for figure in row["figures"].values())
    detail = documents.replica_document(latest.by_id[row["id"]])
    assert detail["figures"] == []
    assert detail["answered_s"] == simulated.START_S - 900


def test_the_worst_come_first() -> None:
    told = documents.round_document(taken(simulated.sight_at(simulated.START_S)))
    ranks = [STATES.index(row["state"]) for row in told["replicas"]["rows"]]
    assert ranks == sorted(ranks)
    assert told["states"] == {
        "unreachable": 1, "error": 1, "warning": 1, "info": 0, "unknown": 1, "clear": 8,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sort", "figure"),
    [("kv", "kv_used_ratio"), ("running", "running"), ("waiting", "waiting"),
     ("preemptions", "preemptions_per_s"), ("ttft", "ttft_p99_s"), ("itl", "itl_p99_s")],
)  # fmt: skip
def test_an_order_is_by_its_figure_and_the_unknown_come_last(sort: str, figure: str) -> None:
    latest = taken(simulated.sight_at(simulated.START_S))
    rows = documents.round_document(latest, sort=sort)["replicas"]["rows"]
    known = [r["figures"][figure]["value"] for r in rows if "value" in r["figures"][figure]]
    assert known == sorted(known, reverse=True)
    assert all("value" in r["figures"][figure] for r in rows[: len(known)])


def test_clear_is_only_said_where_a_rule_was_evaluated() -> None:
    quiet = sights.view("http://quiet")
    unasked = sights.view("http://unasked")
    fine = sights.view("http://fine")
    judged = (Judged(quiet.url, sights.lacking()), Judged(fine.url, sights.clear()))
    latest = taken(sights.sight(quiet, unasked, fine, judged=judged))
    assert [r.state for r in latest.replicas] == ["unknown", "unknown", "clear"]


def test_what_was_accepted_does_not_count_as_fired() -> None:
    from dataclasses import replace

    judged = (Judged(sights.URL, replace(sights.fired(), accepted=True)),
              Judged(sights.URL, sights.clear()))  # fmt: skip
    latest = taken(sights.sight(sights.view(), judged=judged))
    assert latest.replicas[0].state == "clear"
    assert documents.round_document(latest)["replicas"]["rows"][0]["fired"] == []


def test_a_rule_counts_its_states_and_its_worst_severity() -> None:
    views = [sights.view(f"http://{name}") for name in "abcd"]
    judged = (
        Judged("http://a", sights.fired(severity=Severity.warning)),
        Judged("http://b", sights.fired(severity=Severity.error)),
        Judged("http://c", sights.lacking("W001", "kv_used_ratio")),
        Judged("http://d", sights.lacking("W001", "kv_used_ratio")),
        Judged("", sights.clear("W010", "how even the load is")),
    )
    one, ten = documents.round_document(taken(sights.sight(*views, judged=judged)))["rules"]
    assert (one["fired"], one["clear"], one["not_evaluable"]) == (2, 0, 2)
    assert one["severity"] == "error"
    assert one["missing"] == [["kv_used_ratio", 2]]
    assert (ten["id"], ten["clear"]) == ("W010", 1)


@settings(max_examples=25)
@given(st.text(max_size=20))
def test_a_search_finds_what_holds_all_its_words(search: str) -> None:
    latest = taken(simulated.sight_at(simulated.START_S))
    told = documents.round_document(latest, search=search)["replicas"]
    assert told["matched"] == len(told["rows"])
    for row in told["rows"]:
        fields = [row["name"], row["state"], row["engine"], *row["models"], *row["fired"]]
        if row["state"] != "unreachable":
            fields.append(row["version"])
            assert all(word in " ".join(fields).lower() for word in search.lower().split())


def test_a_thousand_are_counted_and_few_are_told() -> None:
    latest = taken(simulated.sight_at(simulated.START_S, num=1000))
    told = documents.round_document(latest, limit=100_000)
    assert told["replicas"]["matched"] == 1000
    assert len(told["replicas"]["rows"]) == documents.MOST_ROWS
    assert sum(told["states"].values()) == 1000
    few = documents.round_document(latest, search=simulated.name_of(702), limit=50)
    assert [row["name"] for row in few["replicas"]["rows"]] == [simulated.name_of(702)]
    assert len(json.dumps(documents.round_document(latest))) < 120_000


def test_an_incident_says_which_since_when_and_what_changed() -> None:
    told = documents.round_document(taken(simulated.sight_at(simulated.START_S)))["incidents"]
    storm = told["now"][0]
    assert (storm["severity"], storm["replica"]) == ("error", id_of(simulated.name_of(2)))
    assert storm["since_s"] == simulated.START_S - simulated.STORM_S
    assert storm["changed"][0]["what"] == "gpu_memory_utilization"
    assert (told["num_now"], told["num_ended"]) == (2, 1)


@pytest.mark.parametrize(
    ("finding", "now", "lacks"),
    [
        (sights.fired(), "fired", []),
        (sights.clear("W001", "how full the KV cache is"), "clear", []),
        (sights.lacking("W001", "kv_used_ratio"), "not_evaluable", ["kv_used_ratio"]),
        (sights.clear("W099", "another rule"), None, []),
    ],
)
def test_an_incident_that_goes_on_says_what_its_rule_says_now(
    finding: Finding, now: str | None, lacks: list[str]
) -> None:
    for url in (sights.URL, ""):
        incident = Incident(url, sights.fired(), sights.NOW_S - 60, None)
        sight = sights.sight(sights.view(), judged=(Judged(url, finding),), incidents=(incident,))
        (told,) = documents.round_document(taken(sight))["incidents"]["now"]
        assert (told["now"], told["lacks"]) == (now, lacks)


def test_a_total_says_of_how_many_it_is() -> None:
    figures = documents.round_document(taken(simulated.sight_at(simulated.START_S)))["fleet"]
    assert (figures["num"], figures["answering"]) == (12, 11)
    used = figures["figures"]["kv_used_bytes"]
    assert (used["num"], used["of"]) == (10, 11)
    empty = documents.round_document(taken(sights.sight(sights.down())))["fleet"]["figures"]
    assert all(f == {"absent": "no replica answers"} for f in empty.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, True, 3, "text", 1e300])
def test_any_value_of_evidence_can_be_told(value: Any) -> None:
    from dataclasses import replace

    finding = replace(sights.fired(), evidence=(Evidence("x", value, "", "y"),))
    json.dumps(documents.finding_document(finding), allow_nan=False)


def test_long_and_unprintable_text_is_cut_and_marked() -> None:
    assert plain("a\nb\u202ec") == "a\ufffdb\ufffdc"
    assert plain("x" * 500, 10) == "x" * 9 + "…"
    assert plain("x" * 10, 10) == "x" * 10
