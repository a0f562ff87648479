"""A replica is compared with the others of its model, each counted once, itself left out."""

from __future__ import annotations

from dataclasses import replace
from statistics import median_low

from hypothesis import given
from hypothesis import strategies as st

from tests.watch.rules.cases import Past, World, level
from ullage.telemetry.snapshot import Identity
from ullage.watch.peers import FINISHED, HITS, Group, key_of, peers_of

VALUES = st.lists(st.floats(0, 100).map(lambda v: round(v, 1)), min_size=1, max_size=12)


@given(VALUES, st.data())
def test_the_median_of_the_others_leaves_one_out(values: list[float], data: st.DataObject):
    at = data.draw(st.integers(0, len(values) - 1))
    others = values[:at] + values[at + 1 :]
    group = Group({"running": tuple(sorted(values))})
    found = group.median_of_others("running", values[at])
    assert found == (median_low(others) if others else None)


def test_what_is_not_in_the_group_has_no_others():
    assert Group({"running": (1.0, 2.0)}).median_of_others("running", 1.5) is None
    assert Group({}).median_of_others("running", 1.5) is None


def test_replicas_of_a_model_are_one_group_whatever_their_adapters():
    one = Identity("vllm", models=("base", "poet"), adapters=("poet",))
    two = Identity("vllm", models=("base",))
    assert key_of(one) == key_of(two) != key_of(Identity("sglang", models=("base",)))


def test_only_those_that_answer_and_were_seen_for_a_minute_are_compared():
    def view(seconds: float, error: str = "", url: str = "x"):
        world = World(recent=Past(seconds, 50.0, 10), error=error)
        world.recent.trends["running"] = level(seconds)
        return replace(world.view(), url=url)

    views = (view(300.0), view(120.0), view(30.0), view(200.0, "timed out"))
    (group,) = peers_of(views).values()
    assert group.values["running"] == (120.0, 300.0)
    assert group.num(FINISHED) == group.num(HITS) == 2
