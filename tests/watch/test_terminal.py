"""The terminal view: it fits, it says what matters first, and it hides nothing that it cuts."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.watch import sights
from ullage.findings.finding import Severity
from ullage.telemetry.histogram import Histogram
from ullage.telemetry.snapshot import Gpu
from ullage.watch.alarms import clock
from ullage.watch.rule import Judged
from ullage.watch.terminal import lines
from ullage.watch.view import Change

WIDTHS = (60, 80, 120, 200)
GPU = Gpu("0", "H200", 7e10, 1.5e11, 0.97, 1.41e9, 1.98e9, 690, 81, ("power cap",))
NO_BYTES = {
    name: value
    for name, value in sights.GAUGE_VALUES.items()
    if "bytes" not in name and "page" not in name
}


def text(sight, width=120, **more) -> str:
    return "".join(f"{line.plain}\n" for line in lines(sight, width=width, **more))


def many(num: int, **gauges):
    """`num` replicas, each one a little fuller than the one before."""
    return [
        sights.view(
            f"http://10.0.0.{at}:8000",
            now=sights.snapshot(gauges={**sights.GAUGE_VALUES, "kv_used_ratio": at / num}),
        )
        for at in range(num)
    ]


def mixed():
    judged = (
        Judged(sights.URL, sights.fired()),
        Judged("http://b:8000", sights.fired("W006", "the queue", Severity.error)),
        Judged(sights.URL, sights.lacking()),
        Judged(sights.URL, sights.clear()),
    )
    return sights.sight(
        sights.view(now=sights.snapshot(gpus=(GPU,))),
        sights.view("http://b:8000", now=sights.snapshot(gauges=NO_BYTES)),
        sights.down(),
        judged=judged,
        incidents=(sights.incident(),),
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("make", [mixed, lambda: sights.sight(*many(100), sights.down())])
def test_no_line_is_wider_than_the_terminal(make, width):
    for line in lines(make(), width=width):
        assert line.cell_len <= width, line.plain


@pytest.mark.parametrize("height", [10, 24, 50])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("make", [mixed, lambda: sights.sight(*many(1000))])
def test_a_screen_is_never_overfull(make, width, height):
    assert len(lines(make(), width=width, height=height)) <= height


def lacking(num: int) -> list[Judged]:
    """As many rules, each of which lacks something of its own."""
    return [
        Judged(sights.URL, replace(sights.lacking(), id=f"W{at:03}", missing=(f"thing {at}",)))
        for at in range(num)
    ]


@pytest.mark.parametrize("width", [60, 100])
def test_what_could_not_be_evaluated_gives_way_to_the_replica(width):
    sight = sights.sight(sights.view(), judged=lacking(30))
    card = lines(sights.sight(sights.view(), judged=()), width=width)
    shown = lines(sight, width=width, height=len(card) + 3)
    assert [line.plain for line in shown[: len(card)]] == [line.plain for line in card]
    assert "more lines" in shown[-1].plain


@pytest.mark.parametrize("num_rules", [1, 3, 6, 12])
@pytest.mark.parametrize("height", [20, 30, 40, 60])
def test_no_line_of_a_finding_is_cut_while_others_stand_empty(num_rules, height):
    fired = [Judged(sights.URL, sights.fired(f"W{at:03}", "a rule")) for at in range(num_rules)]
    sight = sights.sight(sights.view(), judged=[*fired, *lacking(9)])
    shown, whole = lines(sight, width=100, height=height), lines(sight, width=100)
    assert len(shown) == min(height, len(whole))
    assert any("more lines" in line.plain for line in shown) == (len(whole) > height)


def test_what_of_a_page_was_not_read_is_told():
    cut = replace(sights.snapshot(), dropped="71 bytes of an unfinished last line")
    shown = text(sights.sight(sights.view(now=cut), sights.view("http://b:8000")))
    assert "not read of its page: 71 bytes of an unfinished last line (1 replica)" in shown
    views = [
        sights.view(f"http://{at}", now=replace(cut, dropped=f"{at + 1} malformed lines"))
        for at in range(9)
    ]
    shown = text(sights.sight(*views))
    assert (
        shown.count("not read of its page:") == 3 and "and 6 replicas more, in other ways" in shown
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_that_is_asked_for_is_shown_at_every_width(width):
    shown = " ".join(
        text(sights.sight(sights.view(now=sights.snapshot(gpus=(GPU,)))), width).split()
    )
    for part in (
        "75%",
        "60.0 of 80.0 GB",
        "20.0 GB free",
        "750,000 of 1,000,000 tokens",
        "full in 2.1 min",
        "pages 94% filled",
        "prefix hits 41%",
        "running 12",
        "waiting 5 (capacity 4, deferred 1)",
        "preemptions 0.4/s",
        "TTFT p50 0.25–0.5 s, p99 > 1 s",
        "ITL p50 10–25 ms, p99 25–50 ms",
        "busy 97%",
        "clock 1.41 GHz of 1.98 GHz",
        "throttled: power cap",
    ):
        assert part in shown, part


def test_what_is_absent_is_a_dash_with_its_reason_once():
    view = sights.view("http://b:8000", now=sights.snapshot(gauges=NO_BYTES))
    shown = text(sights.sight(view, replace(view, url="http://c:8000")))
    assert shown.count("KV bytes –") == 2
    assert shown.count(sights.WHY) == 1
    assert re.search(r"– KV bytes, pages: vllm 0\.32 does not export it$", shown, re.M)


def test_an_absent_number_is_never_a_nought():
    nothing = sights.snapshot(gauges={}, counters={}, labelled={}, histograms={})
    silent = sights.view(now=nothing, last=sights.span(rises={}, histograms={}, trends={}))
    shown = text(sights.sight(replace(silent, recent=silent.last)))
    assert not re.search(
        r"\b0\b(?!\.)",
        shown.split("every 5 s")[1]
        .replace(sights.WHY, "")
        .replace("127.0.0.1", "")
        .replace("vllm 0.32.0", ""),
    )
    assert "running –" in shown
    assert "waiting –" in shown
    assert "preemptions –" in shown


def test_findings_come_the_gravest_first_with_cause_remedy_and_what_changed():
    shown = text(mixed())
    assert shown.index("error W006") < shown.index("warning W001")
    assert "The cache is 96% full and fills in 20 s." in shown
    assert "→ Lower --max-num-seqs or add a replica." in shown
    assert "version 0.31.0 → 0.32.0" in shown
    assert "since 00:52:20" in shown
    assert "not evaluated for want of page_utilization_ratio: W002" in shown
    assert "1 error, 1 warning; 1 clear; 1 not evaluated" in shown


@pytest.mark.parametrize(("later_s", "told"), [(-30, ""), (0, ""), (4, ", 4 s after it began")])
def test_what_changed_only_after_it_began_is_said_to_have(later_s: float, told: str):
    began = sights.incident()
    change = Change(began.since_s + later_s, "version", "0.31.0", "0.32.0")
    incident = replace(began, changed=(change,))
    judged = (Judged(sights.URL, incident.finding),)
    shown = text(sights.sight(judged=judged, incidents=(incident,)))
    assert f"changed {clock(change.time_s)}{told}: version 0.31.0 → 0.32.0" in shown


def test_a_rule_that_fires_everywhere_is_told_once():
    views = many(200)
    judged = tuple(Judged(view.url, sights.fired()) for view in views)
    shown = text(sights.sight(*views, judged=judged))
    assert shown.count("warning W001") == 1
    assert "and 197 more" in shown


def test_many_replicas_are_totals_and_the_worst_of_them():
    views = [*many(1000), sights.down()]
    judged = (Judged("http://10.0.0.3:8000", sights.fired()),)
    shown = text(sights.sight(*views, judged=judged), height=40)
    names = re.findall(r"^([\d.]+:8000)", shown, re.M)
    assert names[0] == "10.0.0.3:8000"
    assert names[1] == "10.0.0.999:8000"
    assert "running 12,000" in shown
    assert "1,001 replicas" in shown
    assert "1 not answering" in shown
    left = re.search(r"… ([\d,]+) more replicas", shown)
    assert left and int(left[1].replace(",", "")) + len(names) + 1 == 1001


def test_totals_say_of_how_many_they_speak():
    shown = text(mixed())
    assert "60.0 of 80.0 GB (in 1 of 2)" in shown


def test_without_answers_there_are_reasons():
    shown = text(sights.sight(sights.down(), sights.down("http://c:1", "HTTP 500")))
    assert "no answer: connection refused" in shown
    assert "no answer: HTTP 500" in shown


def test_what_a_server_says_steers_nothing():
    evil = "\x1b[2J\x1b]0;gone\x07[bold]acme[/bold]\n\u202e"
    view = sights.view(
        f"http://h/{evil}", now=sights.snapshot(engine=evil, version=evil, models=(evil,))
    )
    judged = (Judged(view.url, sights.fired(cause=evil, remedy=evil)),)
    sight = sights.sight(view, sights.down(error=evil), judged=judged)
    for line in lines(sight, width=200):
        assert line.plain.isprintable(), repr(line.plain)
    assert "[bold]acme[/bold]" in text(sight, 200)


def test_colours_are_the_terminals_own():
    """A colour that was chosen by its value is invisible on somebody's background."""
    for line in lines(mixed(), width=120):
        for style in (line.style, *(span.style for span in line.spans)):
            assert not re.search(r"#|rgb|white|black|color\(", str(style)), style


def test_a_quantile_of_nothing_is_a_dash():
    none = Histogram((1.0, float("inf")), (0.0, 0.0), 0.0)
    view = sights.view(recent=sights.span(histograms={"ttft_s": none}))
    shown = text(sights.sight(view))
    assert "TTFT –" in shown
    assert "nothing was observed" in shown


def test_gpus_in_total_and_as_a_column():
    busy = (Gpu("0", busy_ratio=1.0, throttled_because=("power",)), Gpu("1"))
    views = [sights.view(f"http://h{at}:1", now=sights.snapshot(gpus=busy)) for at in range(10)]
    shown = text(sights.sight(*views), 200)
    assert "GPUs 20   busy 100% on average (of 10)   10 throttled" in shown
    (head,) = re.findall(r"^replica.*$", shown, re.M)
    assert "GPU" in head


def test_reasons_of_their_own_for_each_of_many_replicas_are_bounded():
    views = many(300)
    judged = tuple(
        Judged(view.url, sights.lacking(missing=f"{at} of 300 requests"))
        for at, view in enumerate(views)
    )
    shown = text(sights.sight(*views, judged=judged))
    assert shown.count("not evaluated for want of") == 6
    assert "and for 294 more reasons" in shown


def test_an_incident_that_is_quiet_for_the_moment_is_still_there():
    over = replace(
        sights.incident(finding=sights.fired("W003", "preemption")), until_s=sights.NOW_S
    )
    shown = text(sights.sight(incidents=(sights.incident(), over)))
    assert "not over yet, though quiet now: W001" in shown
    assert "ended 00:53:20 after 60 s: W003 preemption" in shown
    firing = sights.sight(
        judged=(Judged(sights.URL, sights.fired()),), incidents=(sights.incident(),)
    )
    assert "quiet now" not in text(firing)
