"""What vLLM must look like, said name by name; growth; and methods that every core gets."""

from __future__ import annotations

import pytest
from ullage_vllm import engine

from tests.plugins import vllm_core
from tests.plugins.vllm_core import Request, core_of


class Core(vllm_core.EngineCore): ...


engine.add_methods(Core)


def fresh() -> Core:
    pool = vllm_core.Pool(65)
    return Core(vllm_core.Scheduler(pool, [vllm_core.FullAttentionManager(pool, 16)]))


def test_a_core_as_it_was_read_lacks_nothing() -> None:
    assert list(engine.lacking(fresh())) == []


@pytest.mark.parametrize("path", [*engine.ATTRIBUTES, *(path for path, _ in engine.SIGNATURES)])
def test_whatever_is_missing_is_named_and_nothing_is_wrapped(path: str) -> None:
    core = fresh()
    owner: object = core
    *way, last = path.split(".")
    for name in way:
        owner = getattr(owner, name)
    setattr(owner, last, None)
    missing = core.ullage_attach()
    assert any(path in one or one in path for one in missing)
    # Not even where only something else is missing.
    assert "_preempt_request" not in vars(core.scheduler) or path.endswith("_preempt_request")
    with pytest.raises(RuntimeError, match="does not watch"):
        core.ullage_statistics()


@pytest.mark.parametrize("name", engine.OF_GROUPS)
def test_a_group_of_another_shape_is_named(name: str) -> None:
    core = fresh()
    delattr(core.scheduler.groups[0], name)
    assert core.ullage_attach() == [f"FullAttentionManager.{name}"]


def test_another_signature_is_named_with_what_was_found() -> None:
    core = fresh()
    core.scheduler.finish_requests = lambda ids, why: []
    (missing,) = core.ullage_attach()
    assert missing == (
        "scheduler.finish_requests(request_ids, finished_status), which takes (ids, why)"
    )


def test_growth_is_that_of_the_last_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(engine.time, "monotonic", lambda: now_s[0])
    core = core_of()
    scheduler = core.scheduler
    scheduler.add(one := Request("a", 0.0))
    assert core.ullage_report()["growth_blocks_per_s"] is None
    for _ in range(41):
        core.ullage_statistics()
        scheduler.compute(one, 16)
        now_s[0] += 1.0
    assert core.ullage_report()["growth_blocks_per_s"] == pytest.approx(1.0, rel=0.05)
    scheduler.free(one)
    scheduler.add(one)
    assert core.ullage_report()["growth_blocks_per_s"] < 0


def test_measuring_page_use_takes_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, walks = [1000.0], []

    def slow(scheduler: object) -> tuple[int, int]:
        walks.append(now_s[0])
        now_s[0] += 0.01
        return (1, 2)

    monkeypatch.setattr(engine.time, "monotonic", lambda: now_s[0])
    core = core_of()
    monkeypatch.setattr(engine.pool, "slots", slow)
    for _ in range(100):
        assert core.ullage_statistics()["slots"] == (1, 2)
        now_s[0] += 1.0
    # 10 ms of work, a thousandth of the time: once in ten seconds.
    assert 9 <= len(walks) <= 11


@pytest.mark.usefixtures("vllm_request")
def test_a_cancel_tells_the_clients() -> None:
    core = core_of()
    core.scheduler.add(Request("b", 1.0))
    core.scheduler.add(Request("a", 0.0))
    core.ullage_cancel_oldest(1, True)
    assert core.told == []
    core.ullage_cancel_oldest(1, False)
    assert core.told == ["a"]


@pytest.mark.usefixtures("vllm_request")
def test_a_share_is_of_those_that_run_now() -> None:
    core = core_of()
    for number in range(5):
        core.scheduler.add(Request(f"r{number}", float(number)))
    core.scheduler.preempt(core.scheduler.requests["r0"])
    assert core.ullage_cancel_share(50.0, False)["request_ids"] == ["r1", "r2"]
    assert core.told == ["r1", "r2"]
