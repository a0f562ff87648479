"""What goes wrong in simulated fleets, and which rules must or may tell of it. Data, no tests.

Each scenario has an hour of healthy traffic before its fault, unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from tests.watch.rules.simulator import (
    START_S,
    Engine,
    Fault,
    Machine,
    Request,
    looks,
    merged,
    poisson,
)
from ullage.telemetry.snapshot import Gpu, ProbeFinding, Snapshot
from ullage.watch.history import History
from ullage.watch.incidents import Incidents
from ullage.watch.rule import Judged
from ullage.watch.rules.table import judge_all
from ullage.watch.sight import Incident
from ullage.watch.view import View

FAULT_S = 1200.0
END_S = 1560.0
FALLEN = Gpu("0", "H100", xid_errors=79.0, xid_s=START_S + FAULT_S)
Tell = Callable[[Snapshot, float], Snapshot]


@dataclass
class Replica:
    """An engine, its traffic, what happens to it and what happens to its page."""

    engine: Engine
    traffic: tuple[Iterator[Request], ...]
    fault: Fault | None = None
    tell: Tell | None = None


@dataclass
class Scenario:
    """`fires`: the rules of which incidents must be, on the first replica; `may`: those that are
    true as well and may be told; all others must not be, on no replica."""

    name: str
    make: Callable[[], list[Replica]]
    fires: frozenset[str]
    may: frozenset[str] = frozenset()
    end_s: float = END_S
    severities: dict[str, str] = field(default_factory=dict)
    from_the_start: bool = False


@dataclass
class Seen:
    """What watching a scenario told."""

    incidents: tuple[Incident, ...]
    judged: list[tuple[float, tuple[Judged, ...]]]
    views: tuple[View, ...]


def watch(replicas: list[Replica], end_s: float, interval_s: float = 10.0) -> Seen:
    """Every round of the scenario through the real history, rules and incidents."""
    streams = [
        looks(r.engine, merged(*r.traffic), end_s, interval_s=interval_s, fault=r.fault,
              tell=r.tell)
        for r in replicas
    ]  # fmt: skip
    histories = [History(r.engine.url) for r in replicas]
    incidents, told, judged, views = Incidents(), (), [], ()
    for round_of_looks in zip(*streams, strict=True):
        for history, look in zip(histories, round_of_looks, strict=True):
            history.push(look)
        views = tuple(history.view() for history in histories)
        time_s = round_of_looks[0].time_s
        found = judge_all(views, time_s)
        told = incidents.take(found, views, time_s)
        judged.append((time_s - START_S, found))
    return Seen(told, judged, views)


def one(
    *traffic: Iterator[Request],
    machine: Machine | None = None,
    fault: Fault | None = None,
    tell: Tell | None = None,
    **engine: object,
) -> list[Replica]:
    return [Replica(Engine(machine=machine or Machine(), **engine), traffic, fault, tell)]


def steady(seed: int = 1, per_s: float = 1.0, until_s: float = END_S, **more: object):
    return poisson(per_s, until_s, seed=seed, **more)


def extra(per_s: float, seed: int = 2, until_s: float = END_S, **more: object):
    return poisson(per_s, until_s, seed=seed, from_s=FAULT_S, **more)


def leaking(engine: Engine, time_s: float) -> None:
    """Blocks that nobody gives back, more and more of them."""
    engine.leaked_tokens = int(max(0.0, time_s - FAULT_S) * 1100)


def at(when_s: float, act: Callable[[Engine], None]) -> Fault:
    """The act, once, at the first scrape after `when_s`."""
    done: list[float] = []

    def fault(engine: Engine, time_s: float) -> None:
        if time_s >= when_s and not done:
            done.append(time_s)
            act(engine)

    return fault


def setting(**values: object) -> Callable[[Engine], None]:
    def act(engine: Engine) -> None:
        for name, value in values.items():
            setattr(engine, name, value)

    return act


def restart(engine: Engine) -> None:
    engine.start()


def swap(engine: Engine) -> None:
    engine.start()
    engine.identity = replace(engine.identity, version="0.33.0")


def crash_loop(engine: Engine, time_s: float) -> None:
    if time_s >= FAULT_S and int(time_s) % 60 == 0:
        engine.start()


def without(*names: str, from_s: float = 0.0) -> Tell:
    def tell(seen: Snapshot, time_s: float) -> Snapshot:
        if time_s < from_s:
            return seen
        parts = {
            part: {n: v for n, v in getattr(seen, part).items() if n not in names}
            for part in ("gauges", "counters", "labelled", "histograms")
        }
        lost = dict.fromkeys(names, "it is not on the page")
        return replace(seen, **parts, absent={**seen.absent, **lost})

    return tell


def frozen(from_s: float = FAULT_S) -> Tell:
    """A cached page: nothing changes any more, the process's own numbers neither."""
    kept: list[Snapshot] = []

    def tell(seen: Snapshot, time_s: float) -> Snapshot:
        if time_s < from_s or (seen.gauges["running"] < 1 and not kept):
            return seen
        kept.append(seen)
        return replace(kept[0], time_s=seen.time_s)

    return tell


def engine_stats_stop(from_s: float = FAULT_S) -> Tell:
    """As vLLM's page when its engine core hangs: only the API process's CPU time moves."""
    kept: list[Snapshot] = []

    def tell(seen: Snapshot, time_s: float) -> Snapshot:
        if time_s < from_s or (seen.gauges["running"] < 1 and not kept):
            return seen
        kept.append(seen)
        counters = {**kept[0].counters, "process_cpu_s": seen.counters["process_cpu_s"]}
        return replace(kept[0], time_s=seen.time_s, counters=counters)

    return tell


def changed(from_s: float = FAULT_S, **values: object) -> Tell:
    def tell(seen: Snapshot, time_s: float) -> Snapshot:
        return replace(seen, **values) if time_s >= from_s else seen

    return tell


def asleep(seen: Snapshot, time_s: float) -> Snapshot:
    if time_s < FAULT_S:
        return seen
    states = {"awake": 0.0, "weights_offloaded": 1.0, "discard_all": 0.0}
    return replace(seen, labelled={**seen.labelled, "sleep_state": states})


def unset_kv(seen: Snapshot, time_s: float) -> Snapshot:
    gauges = {
        name: v for name, v in seen.gauges.items() if not name.startswith(("kv_used", "page"))
    }
    return replace(seen, gauges={**gauges, "kv_used_ratio": 0.0})


def tells_no_cpu(tell: Tell) -> Tell:
    hidden = without("process_cpu_s")
    return lambda seen, time_s: hidden(tell(seen, time_s), time_s)


def fleet(*shares: float, **first: object) -> list[Replica]:
    """Replicas with these requests per second each; `first` are the first one's traits."""
    replicas = []
    for number, per_s in enumerate(shares):
        engine = Engine(url=f"http://replica-{number}:8000", **(first if number == 0 else {}))
        engine.machine = Machine(max_num_seqs=16)
        replicas.append(Replica(engine, (steady(10 + number, per_s, 900.0),)))
    return replicas


SMALL = Machine(step_s=0.03, pool_tokens=40_000, max_model_len=32_768)
SLOW = Machine(step_s=0.05, per_prompt_token_s=0.0003, pool_tokens=4_000_000, max_num_seqs=64)


def _scenario(name: str, make: Callable[[], list[Replica]], fires: str, may: str = "", **more):
    return Scenario(name, make, frozenset(fires.split()), frozenset(may.split()), **more)


SCENARIOS = (
    _scenario(
        "twice the requests on a small pool",
        lambda: one(steady(), extra(3.0, answer=900), machine=SMALL),
        "W001 W003 W006",
        "W014 W015",
    ),
    _scenario(
        "the pool fills slowly",
        lambda: one(steady(), fault=leaking),
        "W001",
        end_s=FAULT_S + 320.0,
    ),
    _scenario(
        "more requests than the device computes",
        lambda: one(steady(per_s=1.0), extra(3.0, prompt=1200), machine=SLOW),
        "W005",
        "W014 W015",
    ),
    _scenario(
        "too few seats",
        lambda: one(steady(per_s=1.0), extra(4.0, answer=400), machine=Machine(max_num_seqs=12)),
        "W005",
        "W014 W015",
    ),
    _scenario(
        "adapters wait for a slot",
        lambda: one(steady(), extra(0.3, deferred_s=25.0)),
        "W007",
        "W014",
    ),
    _scenario(
        "the engine hangs", lambda: one(steady(), fault=at(FAULT_S, setting(hung=True))), "W009"
    ),
    _scenario("the engine core hangs", lambda: one(steady(), tell=engine_stats_stop()), "W009"),
    _scenario(
        "it hangs and tells no CPU time",
        lambda: one(steady(), tell=tells_no_cpu(engine_stats_stop())),
        "W009",
    ),
    _scenario("a cached page", lambda: one(steady(), tell=frozen()), "W011"),
    _scenario(
        "a metric is renamed",
        lambda: one(steady(), tell=without("waiting")),
        "W011",
        from_the_start=True,
    ),
    _scenario(
        "KV use is never set", lambda: one(steady(), tell=unset_kv), "W011", from_the_start=True
    ),
    _scenario(
        "a page that no dialect knows",
        lambda: one(
            steady(),
            tell=lambda seen, t: replace(
                without(*seen.gauges, *seen.counters, *seen.labelled, *seen.histograms)(seen, t),
                identity=replace(seen.identity, engine=""),
            ),
        ),
        "W011",
        end_s=300.0,
        from_the_start=True,
    ),
    _scenario("it restarts", lambda: one(steady(), fault=at(FAULT_S, restart)), "W012"),
    _scenario(
        "it crashes in a loop",
        lambda: one(steady(), fault=crash_loop),
        "W012",
        "W013 W014 W015",
        severities={"W012": "error"},
    ),
    _scenario("it is rolled out anew", lambda: one(steady(), fault=at(FAULT_S, swap)), "W012 W016"),
    _scenario(
        "the device is three times slower",
        lambda: one(steady(per_s=1.0), fault=at(FAULT_S, setting(slow=3.0))),
        "W014",
    ),
    _scenario(
        "prompts of another kind",
        lambda: one(steady(until_s=FAULT_S), extra(1.0, prompt=9000)),
        "W015",
    ),
    _scenario(
        "answers are cut at a limit",
        lambda: one(steady(until_s=FAULT_S), extra(1.5, ends="length")),
        "W013",
    ),
    _scenario(
        "max_tokens falls",
        lambda: one(steady(until_s=FAULT_S), extra(1.5, max_tokens=64)),
        "W013",
        severities={"W013": "info"},
    ),
    _scenario(
        "clients give up", lambda: one(steady(until_s=FAULT_S), extra(1.5, ends="abort")), "W024"
    ),
    _scenario("requests fail", lambda: one(steady(), extra(0.3, ends="error")), "W023"),
    _scenario(
        "blocks of departed requests stay held",
        lambda: one(
            steady(until_s=FAULT_S - 120), fault=at(FAULT_S, setting(leaked_tokens=80_000))
        ),
        "W020",
    ),
    _scenario(
        "it sleeps and is asked",
        lambda: one(steady(), fault=at(FAULT_S, setting(hung=True)), tell=asleep),
        "W021",
        "W009",
    ),
    _scenario(
        "blocks are large for the prompts",
        lambda: one(
            steady(per_s=6.0, prompt=60, answer=60),
            machine=Machine(pool_tokens=16_384, block_size=512, step_s=0.05, max_model_len=8192),
        ),
        "W002",
        "W001 W006 W003",
        end_s=300.0,
        from_the_start=True,
    ),
    _scenario(
        "the pool is smaller than a request",
        lambda: one(steady(), machine=Machine(pool_tokens=100_000)),
        "W008",
        end_s=300.0,
        from_the_start=True,
    ),
    _scenario(
        "the prefix cache thrashes",
        lambda: one(
            steady(),
            machine=replace(SMALL, max_num_seqs=24, step_s=0.04),
            hit_ratio=0.6,
            fault=at(
                FAULT_S,
                lambda e: (setattr(e, "hit_ratio", 0.05), setattr(e, "leaked_tokens", 28_000)),
            ),
        ),
        "W004",
        "W001 W003 W006 W014",
    ),
    _scenario(
        "one replica gets most",
        lambda: fleet(9.0, 1.0, 1.0),
        "W010 W005",
        end_s=300.0,
        from_the_start=True,
    ),
    _scenario(
        "one replica gets nothing",
        lambda: fleet(0.0001, 1.5, 1.5),
        "W010",
        end_s=600.0,
        from_the_start=True,
    ),
    _scenario(
        "one replica finds no prefixes",
        lambda: [
            Replica(replace(r.engine, hit_ratio=0.05 if n == 0 else 0.6), r.traffic)
            for n, r in enumerate(fleet(1.5, 1.5, 1.5))
        ],
        "W022",
        end_s=900.0,
        from_the_start=True,
    ),
    _scenario(
        "a hot device",
        lambda: one(
            steady(),
            tell=changed(gpus=(Gpu("0", "H100", throttled_because=("hw_thermal_slowdown",)),)),
        ),
        "W018",
    ),
    _scenario(
        "a device fell off the bus",
        lambda: one(steady(), tell=changed(gpus=(FALLEN,))),
        "W019",
    ),
    _scenario(
        "its own probe finds another model",
        lambda: one(
            steady(), tell=changed(probe_findings=(ProbeFinding("P001", "q", "12", "fired"),))
        ),
        "W026",
        severities={"W026": "error"},
    ),
    _scenario(
        "its own probe finds texts of another sort",
        lambda: one(
            steady(), tell=changed(probe_findings=(ProbeFinding("P009", "size", "3", "fired"),))
        ),
        "W026",
        severities={"W026": "warning"},
    ),
)
