"""A History says of every span what keeping each snapshot would: held against exactly that."""

from __future__ import annotations

import math
import statistics
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.telemetry.histogram import Histogram
from ullage.telemetry.scrape import Look
from ullage.telemetry.snapshot import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    Counter,
    Gauge,
    Histograms,
    Identity,
    Labelled,
    Snapshot,
)
from ullage.watch.history import COARSE_S, FINE_S, History
from ullage.watch.view import PAST_S, RECENT_S, Span, View

URL = "http://replica:8000"
START_S = 1_800_000_000.0
BOUNDS = ((0.1, 1.0, math.inf), (0.5, math.inf))


def snapshot(
    time_s: float,
    *,
    counters: Mapping[Counter, float] | None = None,
    gauges: Mapping[Gauge, float] | None = None,
    labelled: Mapping[Labelled, Mapping[str, float]] | None = None,
    histograms: Mapping[Histograms, Histogram] | None = None,
    identity: Identity | None = None,
) -> Snapshot:
    return Snapshot(
        time_s,
        identity or Identity("vllm"),
        gauges or {},
        counters or {},
        labelled or {},
        histograms or {},
        {},
        {},
    )


def answered(said: Snapshot) -> Look:
    return Look(URL, said.time_s, said)


def failed(time_s: float, error: str = "connection refused") -> Look:
    return Look(URL, time_s, None, error)


def viewed(looks: Sequence[Look]) -> View:
    history = History(URL)
    for look in looks:
        history.push(look)
    return history.view()


# --- the reference: every look is kept ------------------------------------------------------------


@dataclass
class Kept:
    """All looks, and of each answer among them whether another process gave it (`other`), and
    whether its page counts from zero: then, or where any number went back (`anew`)."""

    looks: Sequence[Look]

    def __post_init__(self) -> None:
        self.answers = [look.snapshot for look in self.looks if look.snapshot]
        self.other: list[bool] = []
        self.anew: list[bool] = []
        started_s: float | None = None
        last: dict[object, float] = {}
        for said in self.answers:
            now_s = said.identity.started_s
            self.other.append(None not in (now_s, started_s) and now_s != started_s)
            started_s = started_s if now_s is None else now_s
            numbers: dict[object, float] = {
                **said.counters,
                **{
                    (name, histogram.bounds, at): count
                    for name, histogram in said.histograms.items()
                    for at, count in enumerate(histogram.counts)
                },
            }
            fell = any(value < last.get(key, 0.0) for key, value in numbers.items())
            self.anew.append(self.other[-1] or fell)
            last = numbers if self.anew[-1] else last | numbers

    def between(self, first_s: float, last_s: float) -> range:
        times = [said.time_s for said in self.answers]
        return range(times.index(first_s), times.index(last_s) + 1)

    def rise(self, inside: range, name: Counter) -> float | None:
        """Sum of the steps between answers that have it; from zero after a reset."""
        value = [said.counters.get(name) for said in self.answers]
        resets = self.other if name == "process_cpu_s" else self.anew
        if value[inside[0]] is None or value[inside[-1]] is None:
            return None
        total = 0.0
        there = [at for at in inside if value[at] is not None]
        for one, two in pairwise(there):
            before, after = value[one], value[two]
            assert before is not None and after is not None
            anew = any(resets[one + 1 : two + 1]) or after < before
            total += after if anew else after - before
        return total

    def histogram(self, inside: range, name: Histograms) -> Histogram | None:
        """The same bucket by bucket."""
        ends = [self.answers[at].histograms.get(name) for at in (inside[0], inside[-1])]
        if ends[0] is None or ends[1] is None or ends[0].bounds != ends[1].bounds:
            return None
        total = [0.0] * len(ends[0].counts)
        before, since = ends[0], inside[0]
        for at in inside[1:]:
            after = self.answers[at].histograms.get(name)
            if after is None or after.bounds != before.bounds:
                continue
            step = after if any(self.anew[since + 1 : at + 1]) else after.since(before)
            assert step is not None
            total = [sum(pair) for pair in zip(total, step.counts, strict=True)]
            before, since = after, at
        return Histogram(before.bounds, tuple(total), None)


def check_span(span: Span, kept: Kept, first_s: float, last_s: float) -> None:
    inside = kept.between(first_s, last_s)
    said = [kept.answers[at] for at in inside]
    assert span.num_scrapes == len(inside)
    assert span.num_failed == sum(
        look.snapshot is None and first_s < look.time_s < last_s for look in kept.looks
    )
    for name in COUNTERS:
        assert span.rises.get(name) == kept.rise(inside, name), name
    for field in HISTOGRAMS:
        found, true = span.histograms.get(field), kept.histogram(inside, field)
        assert (found and (found.bounds, found.counts)) == (true and (true.bounds, true.counts))
    for gauge in GAUGES:
        check_trend(span.trends.get(gauge), [(s.time_s, s.gauges.get(gauge)) for s in said])
    for reason in ("capacity", "deferred"):
        waiting = [s.labelled.get("waiting_by_reason", {}).get(reason) for s in said]
        points = list(zip([s.time_s for s in said], waiting, strict=True))
        check_trend(span.waiting_by_reason.get(reason), points)


def check_trend(trend: object, samples: Sequence[tuple[float, float | None]]) -> None:
    points = [(time_s, value) for time_s, value in samples if value is not None]
    if not points:
        assert trend is None
        return
    times, values = zip(*points, strict=True)
    slope = statistics.linear_regression(times, values).slope if len(points) > 1 else 0.0
    expected = (values[0], values[-1], min(values), max(values), statistics.fmean(values))
    fields = ("first", "last", "least", "most", "mean")
    assert tuple(getattr(trend, name) for name in fields) == pytest.approx(expected)
    assert getattr(trend, "num") == len(points)  # noqa: B009 (trend is object to mypy)
    assert getattr(trend, "slope_per_s") == pytest.approx(slope, abs=1e-6)  # noqa: B009


# --- lives of a replica ---------------------------------------------------------------------------


@st.composite
def lives(draw: st.DrawFn) -> list[Look]:
    """Answers and failures in time order: fields come and go, counters restart, bounds change."""
    looks: list[Look] = []
    now_s = START_S
    count = {"preemptions": 0, "prompt_tokens": 0, "process_cpu_s": 0}
    buckets, bounds = [0, 0, 0], BOUNDS[0]
    started_s: float | None = START_S - 1000
    pace = draw(st.sampled_from([1.0, 5.0, 7.0, 29.0, 200.0]))
    for _ in range(draw(st.integers(2, 60))):
        now_s += pace * draw(st.sampled_from([1, 1, 1, 1, 2, 30]))
        event = draw(st.sampled_from(["answer"] * 12 + ["fail", "restart", "back", "bounds"]))
        if event == "fail":
            looks.append(failed(now_s))
            continue
        if event == "restart":
            started_s = draw(st.sampled_from([None, now_s - 1]))
            count, buckets = dict.fromkeys(count, 0), [0] * len(buckets)
        elif event == "back":
            count["preemptions"] //= 2
            buckets[0] = 0
        elif event == "bounds":
            bounds = BOUNDS[1] if bounds == BOUNDS[0] else BOUNDS[0]
            buckets = [0] * len(bounds)
        for name in count:
            count[name] += draw(st.integers(0, 9))
        step = draw(st.integers(0, 5))
        buckets = [here + step for here in buckets[:-1]] + [buckets[-1] + step + 1]
        there = draw(st.sets(st.sampled_from(["preemptions", "running", "ttft_s", "capacity"])))
        running = float(draw(st.integers(0, 40)))
        looks.append(
            answered(
                snapshot(
                    now_s,
                    counters={
                        name: float(value)
                        for name, value in count.items()
                        if name != "preemptions" or name in there  # type: ignore[misc]
                    },
                    gauges={"kv_used_ratio": running / 40}
                    | ({"running": running} if "running" in there else {}),
                    labelled={
                        "waiting_by_reason": {"deferred": running / 2}
                        | ({"capacity": running} if "capacity" in there else {})
                    },
                    histograms={"ttft_s": Histogram(bounds, tuple(map(float, buckets)), None)}
                    if "ttft_s" in there
                    else {},
                    identity=Identity("vllm", started_s=started_s),
                )
            )
        )
    return looks


@given(lives())
@settings(deadline=None, max_examples=40)
def test_spans_are_those_of_all_snapshots(looks: list[Look]) -> None:
    history = History(URL)
    for upto, look in enumerate(looks, 1):
        history.push(look)
        if upto % 7 and upto < len(looks):
            continue
        kept = Kept(looks[:upto])
        times = [said.time_s for said in kept.answers]
        view = history.view()
        assert (view.last is None) == (len(times) < 2)
        if view.last:
            check_span(view.last, kept, times[-2], times[-1])
        begin_s = times[-1] if times else 0.0
        if view.recent:
            begin_s = times[-1] - view.recent.seconds
            check_span(view.recent, kept, begin_s, times[-1])
        if view.past:
            check_past(view.past, kept, begin_s)


def check_past(past: Span, kept: Kept, recent_s: float) -> None:
    """It ends where recent begins, at an answer; which one it began at, its length says."""
    times = [said.time_s for said in kept.answers]
    begins = [time_s for time_s in times if math.isclose(recent_s - time_s, past.seconds)]
    assert len(begins) == 1
    check_span(past, kept, begins[0], recent_s)


@given(st.lists(st.floats(0.5, 29.0), min_size=2, max_size=400))
@settings(deadline=None, max_examples=60)
def test_spans_are_as_long_as_they_say_and_nearly_as_they_could_be(gaps: list[float]) -> None:
    times = [START_S]
    for gap in gaps:
        times.append(times[-1] + gap)
    view = viewed([answered(snapshot(time_s, gauges={"running": 1.0})) for time_s in times])
    assert view.recent
    lived_s = times[-1] - times[0]
    assert view.recent.seconds <= RECENT_S
    assert view.recent.seconds > min(RECENT_S - 2 * FINE_S, lived_s - 1e-6)
    if lived_s <= RECENT_S:
        assert view.recent.seconds == pytest.approx(lived_s)
    if view.past:
        assert view.past.seconds <= PAST_S
        before_s = lived_s - view.recent.seconds
        assert view.past.seconds > min(PAST_S - COARSE_S - FINE_S, before_s - 1e-6)


# --- by hand --------------------------------------------------------------------------------------


def every(num: int, step_s: float, **said: Mapping[Counter, float]) -> Iterator[Snapshot]:
    for at in range(num):
        yield snapshot(START_S + at * step_s, counters={"prompt_tokens": 100.0 * at})


def test_before_any_answer_nothing_is_known_but_why() -> None:
    view = viewed([failed(START_S), failed(START_S + 5, "HTTP 503")])
    assert (view.now, view.last, view.recent, view.past) == (None, None, None, None)
    assert view.error == "HTTP 503"


def test_an_error_leaves_what_was_known_and_an_answer_clears_it() -> None:
    first = snapshot(START_S, counters={"preemptions": 1.0})
    history = History(URL)
    history.push(answered(first))
    history.push(failed(START_S + 5))
    assert history.view().now == first and history.view().error
    history.push(answered(replace(first, time_s=START_S + 10)))
    view = history.view()
    assert not view.error
    assert view.last and view.last.num_failed == 1 and view.last.seconds == 10


def test_a_restart_counts_from_zero_even_where_the_counter_is_higher_than_before() -> None:
    before = snapshot(START_S, counters={"prompt_tokens": 10.0}, identity=Identity(started_s=1.0))
    after = snapshot(
        START_S + 5, counters={"prompt_tokens": 30.0}, identity=Identity(started_s=START_S + 1)
    )
    last = viewed([answered(before), answered(after)]).last
    assert last and last.rises["prompt_tokens"] == 30 and last.resets == 1


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 999), st.integers(0, 999)),
        min_size=1,
        max_size=20,
    )
)
@settings(deadline=None, max_examples=200)
def test_a_restart_that_any_number_shows_is_one_of_all_whatever_they_counted_since(
    steps: list[tuple[bool, int, int, int]],
) -> None:
    """Truth is a server that counts; of a restart only the fall of its preemptions tells."""
    has = {"preemptions": 10.0, "prompt_tokens": 10.0, "stop": 10.0, "ttft_s": 10.0}
    true = dict.fromkeys(has, 0.0)
    resets, looks = 0, []
    for at, (restarts, few, many, some) in enumerate([(False, 0, 0, 0), *steps]):
        gains = {"preemptions": few, "prompt_tokens": many, "stop": some, "ttft_s": some}
        if restarts and has["preemptions"]:
            gains["preemptions"] = min(few, int(has["preemptions"]) - 1)
            has, resets = dict.fromkeys(has, 0.0), resets + 1
        for name, gain in gains.items():
            has[name] += gain
            true[name] += gain
        counters: dict[Counter, float] = {
            "preemptions": has["preemptions"],
            "prompt_tokens": has["prompt_tokens"],
        }
        observed = Histogram((math.inf,), (has["ttft_s"],), has["ttft_s"] / 4)
        said = snapshot(
            START_S + at,
            counters=counters,
            labelled={"finished_by_reason": {"stop": has["stop"]}},
            histograms={"ttft_s": observed},
        )
        looks.append(answered(said))
    recent = viewed(looks).recent
    assert recent and recent.resets == resets
    assert recent.rises == {name: true[name] for name in ("preemptions", "prompt_tokens")}
    assert recent.labelled_rises == {"finished_by_reason": {"stop": true["stop"]}}
    expected = Histogram((math.inf,), (true["ttft_s"],), true["ttft_s"] / 4)
    assert recent.histograms["ttft_s"] == expected


def test_a_page_made_anew_in_one_process_does_not_reset_its_cpu_time() -> None:
    one = Identity(started_s=1.0)
    looks = [
        answered(
            snapshot(
                START_S + at,
                counters={"prompt_tokens": tokens, "process_cpu_s": 500.0 + at},
                identity=one,
            )
        )
        for at, tokens in ((0, 90.0), (5, 30.0))
    ]
    last = viewed(looks).last
    assert last and last.rises == {"prompt_tokens": 30, "process_cpu_s": 5} and last.resets == 1


def test_a_rounded_sum_that_trembles_is_no_restart() -> None:
    looks = [
        answered(
            snapshot(
                START_S + at,
                counters={"prompt_tokens": 90.0},
                histograms={"ttft_s": Histogram((math.inf,), (3.0,), total)},
            )
        )
        for at, total in ((0, 0.30000000000000004), (5, 0.3))
    ]
    last = viewed(looks).last
    assert last and last.resets == 0 and last.rises["prompt_tokens"] == 0


def test_a_start_time_that_trembles_is_no_restart() -> None:
    looks = [
        answered(
            snapshot(
                START_S + at,
                counters={"prompt_tokens": 10.0 * at},
                identity=Identity(started_s=1000.0 + 0.01 * at),
            )
        )
        for at in range(5)
    ]
    recent = viewed(looks).recent
    assert recent and recent.resets == 0 and recent.rises["prompt_tokens"] == 40


def _balanced(starts: Sequence[float], step_s: float = 5.0) -> list[Look]:
    """What processes with these start times answer in turn, each of which counts by itself."""
    return [
        answered(
            snapshot(
                START_S + step_s * at,
                counters={"prompt_tokens": 1e6 + 100.0 * at - started_s % 977},
                identity=Identity("vllm", started_s=started_s),
            )
        )
        for at, started_s in enumerate(starts)
    ]


@pytest.mark.parametrize("num", [2, 3, 7])
def test_replicas_behind_one_address_are_no_restarts_and_give_no_rates(num: int) -> None:
    starts = [START_S - 1000.0 - 50 * (at % num) for at in range(20)]
    view = viewed(_balanced(starts))
    assert view.num_swaps == 19
    assert view.last is None and view.recent is None and view.now is not None


def test_a_young_replica_behind_an_address_is_known_when_it_answers_again() -> None:
    """The first time it may be a restart; who ran before it did not end."""
    old, young = START_S - 1000.0, START_S + 1.0
    view = viewed(_balanced([old, young, old, young, old]))
    assert view.num_swaps == 3 and view.last is None


def test_spans_begin_anew_with_the_process_that_took_an_address_over() -> None:
    view = viewed(_balanced([START_S - 5000.0] * 3 + [START_S - 600.0] * 3))
    assert view.num_swaps == 1
    assert view.recent and view.recent.seconds == 10 and view.recent.resets == 0
    assert view.recent.rises == {"prompt_tokens": 200}


def test_another_engine_is_no_restart_and_continues_no_count() -> None:
    looks = [
        answered(
            snapshot(START_S + at, counters={"prompt_tokens": 1e6 / at}, identity=Identity(engine))
        )
        for at, engine in enumerate(["vllm", "", "sglang", "vllm"], 1)
    ]
    view = viewed(looks)
    assert view.num_swaps == 2 and view.last is None and view.recent is None


def test_restarts_one_after_the_other_are_no_swaps() -> None:
    starts = [START_S - 5000.0, *(START_S + 60.0 * at - 2.0 for at in range(1, 8))]
    view = viewed(_balanced(starts, step_s=60.0))
    assert view.num_swaps == 0 and view.recent and view.recent.resets == 5


def test_swaps_are_forgotten_with_the_span_they_were_in() -> None:
    one, two = START_S - 1000.0, START_S - 2000.0
    later = answered(snapshot(START_S + 2 * RECENT_S, identity=Identity("vllm", started_s=one)))
    assert viewed([*_balanced([one, two, one]), later]).num_swaps == 0


def test_a_label_that_first_appears_in_a_known_family_began_at_zero() -> None:
    looks = [
        answered(snapshot(START_S, labelled={"finished_by_reason": {"stop": 5.0}})),
        answered(
            snapshot(START_S + 5, labelled={"finished_by_reason": {"stop": 6.0, "error": 2.0}})
        ),
    ]
    last = viewed(looks).last
    assert last and last.labelled_rises == {"finished_by_reason": {"stop": 1.0, "error": 2.0}}


def test_a_family_that_first_appears_is_left_out() -> None:
    looks = [
        answered(snapshot(START_S)),
        answered(snapshot(START_S + 5, labelled={"finished_by_reason": {"stop": 600.0}})),
    ]
    last = viewed(looks).last
    assert last and last.labelled_rises == {}


def test_a_view_stays_as_it_was_when_more_is_pushed() -> None:
    history = History(URL)
    said = list(every(400, 5.0))
    for one in said[:200]:
        history.push(answered(one))
    view = history.view()
    for one in said[200:]:
        history.push(answered(one))
    assert view.recent and view.past and view.last
    assert view.recent.rate("prompt_tokens") == view.last.rate("prompt_tokens") == 20.0
    assert view.past.rate("prompt_tokens") == 20.0
    assert view.now == said[199]


def test_the_same_look_again_counts_once() -> None:
    looks = [answered(one) for one in every(3, 5.0)]
    assert viewed(looks) == viewed([looks[0], looks[1], looks[1], looks[2], looks[2]])


def test_time_that_goes_back_begins_anew() -> None:
    said = list(every(10, 5.0))
    looks = [*map(answered, said), answered(replace(said[0], time_s=START_S - 3600))]
    view = viewed(looks)
    assert view.last is None and view.now and view.now.time_s == START_S - 3600


def test_a_failure_told_by_another_clock_costs_no_history() -> None:
    said = list(every(3, 5.0))
    behind, ahead = failed(START_S - 100), failed(START_S + 100)
    looks = [answered(said[0]), behind, answered(said[1]), ahead, answered(said[2])]
    recent = viewed(looks).recent
    assert recent and (recent.num_scrapes, recent.num_failed) == (3, 2)


def test_a_page_is_frozen_since_its_last_number_moved() -> None:
    def said(at: int, tokens: float) -> Look:
        counters: dict[Counter, float] = {"generation_tokens": tokens, "process_cpu_s": float(at)}
        return answered(snapshot(START_S + at, counters=counters, gauges={"running": 1.0}))

    history = History(URL)
    for at in range(0, 30, 5):
        history.push(said(at, min(at, 10)))
    assert history.view().unchanged_s == 15
    history.push(said(30, 11))
    assert history.view().unchanged_s == 0


def test_each_counter_tells_how_long_it_has_stood_still() -> None:
    def said(at: int, tokens: float) -> Look:
        counters: dict[Counter, float] = {"generation_tokens": tokens, "preemptions": 3.0}
        if at == 20:
            del counters["preemptions"]
        return answered(snapshot(START_S + at, counters=counters))

    looks = [said(0, 5), said(5, 6), said(10, 6), said(15, 6)]
    assert viewed(looks).still_s == {"generation_tokens": 10, "preemptions": 15}
    assert viewed([*looks, said(20, 1)]).still_s == {"generation_tokens": 0}


def test_what_a_replica_is_changes_when_it_says_other_not_when_it_falls_silent() -> None:
    told = [
        Identity("vllm", "0.31", ("m",), settings={"block_size": "16"}),
        Identity("vllm", "", (), settings={}),
        Identity("vllm", "0.32", ("m",), adapters=("style",), settings={"block_size": "32"}),
        Identity("vllm", "0.32", ("m",), settings={"block_size": "32"}),
    ]
    looks = [answered(snapshot(START_S + at, identity=one)) for at, one in enumerate(told)]
    found = [(c.time_s - START_S, c.what, c.before, c.after) for c in viewed(looks).changes]
    assert sorted(found) == [
        (2, "adapters", "", "style"),
        (2, "block_size", "16", "32"),
        (2, "version", "0.31", "0.32"),
        (3, "adapters", "style", ""),
    ]


def test_names_without_end_do_not_fill_the_memory() -> None:
    tracemalloc.start()
    history = History(URL)
    for at in range(150):
        labels = {f"reason-{at}-{more}": 1.0 for more in range(100)}
        history.push(
            answered(
                snapshot(
                    START_S + at,
                    labelled={"finished_by_reason": labels, "waiting_by_reason": labels},
                )
            )
        )
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 3e6
