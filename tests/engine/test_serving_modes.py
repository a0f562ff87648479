"""Tokens stay those of the reference whatever is shared, forked, freed, preempted or reordered."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engine.adapters import EVERYWHERE, load_adapted, write_adapter
from tests.engine.driving import finish, generate, greedy_params
from tests.engine.references import is_greedy, load_reference
from tests.engine.test_greedy import LENGTHS, PROMPTS
from ullage.engine.engine import Engine, StepReport
from ullage.engine.options import EngineOptions
from ullage.engine.paging.layout import FREED
from ullage.engine.request import Request, SamplingParams

FamilyDir = Callable[[str], Path]
# Full attention; windows everywhere; windows and full layers, two tables and seven.
FAMILIES = ("llama", "mistral-window", "qwen2-window", "gemma3")
SHARED = PROMPTS[LENGTHS.index(100)]
TAILS = [PROMPTS[LENGTHS.index(n)] for n in (1, 5, 17, 33)]
NUM_NEW = 32


@pytest.fixture(scope="module")
def reference(family_dir: FamilyDir) -> Callable[[str], Any]:
    return cache(lambda family: load_reference(family_dir(family)))


@pytest.fixture
def make(family_dir: FamilyDir, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    monkeypatch.setenv("ULLAGE_CHECK", "1")

    def engine(family: str, **options: Any) -> Engine:
        options = {"kv_cache_memory_bytes": 16 << 20, **options}
        return Engine.load(family_dir(family), EngineOptions(**options))

    return engine


def steps(engine: Engine) -> list[StepReport]:
    reports = []
    while engine.has_work:
        reports.append(engine.step())
    assert engine.pool.num_used == 0
    return reports


def one(engine: Engine, name: str, prompt: list[int], num_new: int = NUM_NEW) -> Request:
    (request,) = engine.add_request(name, tuple(prompt), greedy_params(num_new))
    return request


def check(model: Any, requests: list[Request]) -> None:
    for request in requests:
        assert len(request.output_ids) == request.params.max_tokens
        assert is_greedy(model, list(request.prompt_ids), request.output_ids), request.id


# --- prefixes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_hits_save_their_tokens_and_change_none(
    make: Callable[..., Engine], reference: Callable[[str], Any], family: str
) -> None:
    served = make(family)
    first = one(served, "first", SHARED + TAILS[0])
    computed = sum(report.plan.num_tokens for report in steps(served))
    assert computed == 101 + NUM_NEW - 1
    later = [one(served, str(i), SHARED + tail) for i, tail in enumerate(TAILS)]
    reports = steps(served)
    # 101 tokens are six full blocks and a begun one.
    assert [r.num_cached_tokens for r in (first, *later)] == [0, 96, 96, 96, 96]
    lengths = [len(r.prompt_ids) for r in later]
    assert sum(r.plan.num_tokens for r in reports) == sum(lengths) - 4 * 96 + 4 * (NUM_NEW - 1)
    assert sum(r.plan.prefix_hits for r in reports) == 4 * 96
    assert sum(r.plan.prefix_queries for r in reports) == sum(lengths)
    check(reference(family), [first, *later])


def test_an_answer_is_a_prefix_too(
    make: Callable[..., Engine], reference: Callable[[str], Any]
) -> None:
    """A conversation goes on from what was generated in its turn before."""
    served = make("llama")
    turn = one(served, "turn", SHARED)
    finish(served)
    following = one(served, "next", SHARED + turn.output_ids + TAILS[1])
    finish(served)
    # The last token of the answer was chosen but never computed.
    assert following.num_cached_tokens == (100 + NUM_NEW - 1) // 16 * 16
    check(reference("llama"), [turn, following])


def test_the_cache_can_be_emptied_and_be_off(make: Callable[..., Engine]) -> None:
    served, off = make("llama"), make("llama", enable_prefix_caching=False)
    for engine in (served, off):
        one(engine, "a", SHARED)
        finish(engine)
    again = one(served, "b", SHARED)
    finish(served)
    assert again.num_cached_tokens == 96
    served.reset_prefix_cache()
    after, never = one(served, "c", SHARED), one(off, "b", SHARED)
    finish(served)
    finish(off)
    assert after.num_cached_tokens == never.num_cached_tokens == 0
    assert off.pool.num_cached == 0
    assert again.output_ids == after.output_ids == never.output_ids


def test_adapters_and_salts_share_no_prefix_even_under_one_name(
    make: Callable[..., Engine],
    reference: Callable[[str], Any],
    family_dir: FamilyDir,
    tmp_path: Path,
) -> None:
    model = family_dir("llama")
    paths = [write_adapter(model, tmp_path / str(i), i, target_modules=EVERYWHERE) for i in (1, 2)]
    served = make("llama", enable_lora=True)
    base = one(served, "base", SHARED)
    finish(served)
    prompt, params = tuple(SHARED), greedy_params(NUM_NEW)
    for path in paths:
        lora = served.load_lora("same name", path)
        for turn, cached in (("first", 0), ("second", 96)):
            (request,) = served.add_request(turn, prompt, params, lora)
            finish(served)
            assert request.num_cached_tokens == cached
            assert is_greedy(load_adapted(model, path), SHARED, request.output_ids)
        served.unload_lora("same name")
    for salt, cached in (("tenant", 0), ("tenant", 96), ("another", 0), ("", 96)):
        (request,) = served.add_request("salted", prompt, params, cache_salt=salt)
        finish(served)
        assert request.num_cached_tokens == cached
        assert request.output_ids == base.output_ids
    check(reference("llama"), [base])


# --- forks ---------------------------------------------------------------------------------------


def separate(engine: Engine, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    """What n requests of their own answer, each with its own seed."""
    from dataclasses import replace

    answers = []
    for index in range(params.n):
        seed = None if params.seed is None else params.seed + index
        (request,) = engine.add_request("x", tuple(prompt), replace(params, n=1, seed=seed))
        finish(engine)
        answers.append(request.output_ids)
    return answers


@pytest.mark.parametrize(
    ("family", "num_prompt"),
    [
        ("llama", 33),
        ("llama", 64),
        ("mistral-window", 33),
        pytest.param("gemma3", 33, marks=pytest.mark.slow),
        pytest.param("qwen2-window", 64, marks=pytest.mark.slow),
    ],
)
def test_choices_compute_the_prompt_once_and_answer_as_if_alone(
    make: Callable[..., Engine], family: str, num_prompt: int
) -> None:
    prompt = PROMPTS[LENGTHS.index(num_prompt)]
    params = SamplingParams(n=4, max_tokens=24, temperature=1.2, seed=11, ignore_eos=True)
    wanted = separate(make(family, enable_prefix_caching=False), prompt, params)
    served = make(family, max_num_batched_tokens=16, max_num_seqs=8, enable_prefix_caching=False)
    requests = served.add_request("four", tuple(prompt), params)
    assert [r.id for r in requests] == [f"four-{i}" for i in range(4)]
    assert [r.index for r in requests] == [0, 1, 2, 3]
    computed = sum(report.plan.num_tokens for report in steps(served))
    assert computed == num_prompt + 4 * 23
    assert [r.output_ids for r in requests] == wanted
    assert len({tuple(r.output_ids) for r in requests}) == 4


def test_choices_hold_the_prompt_once(make: Callable[..., Engine]) -> None:
    served = make("llama")
    params = SamplingParams(n=8, max_tokens=10, temperature=1.0, seed=1, ignore_eos=True)
    served.add_request("eight", tuple(SHARED), params)
    served.step()
    assert served.pool.num_used == 7
    report = served.step()  # all write behind 100 tokens: seven copies of the begun block
    assert len(report.plan.copies) == 7
    assert served.pool.num_used == 7 + 7
    finish(served)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 3},
        # 96 tokens in all for four answers that come to 78 each, 33 of them shared.
        {"kv_cache_memory_bytes": 96 * 3 * 2 * 2 * 16 * 4, "max_model_len": 96, "block_size": 4},
    ],
)
def test_choices_that_wait_or_are_preempted_answer_the_same(
    make: Callable[..., Engine], options: dict[str, Any]
) -> None:
    prompt = PROMPTS[LENGTHS.index(33)]
    params = SamplingParams(n=4, max_tokens=45, temperature=1.2, seed=3, ignore_eos=True)
    wanted = separate(make("llama"), prompt, params)
    served = make("llama", **options)
    requests = served.add_request("four", tuple(prompt), params)
    reports = steps(served)
    assert [r.output_ids for r in requests] == wanted
    if "block_size" in options:
        assert sum(r.num_preemptions for r in requests) > 0
        assert sum(report.num_recomputed for report in reports) > 0
    else:
        assert all(len(report.plan.work) <= 3 for report in reports)


def test_a_choice_may_be_aborted_alone_at_any_time(make: Callable[..., Engine]) -> None:
    params = SamplingParams(n=3, max_tokens=12, temperature=1.2, seed=5, ignore_eos=True)
    wanted = separate(make("llama"), SHARED, params)
    for aborted in range(3):
        for when in (0, 1, 3):
            served = make("llama", max_num_batched_tokens=64)
            requests = served.add_request("three", tuple(SHARED), params)
            for _ in range(when):
                served.step()
            served.abort(requests[aborted])
            finish(served)
            rest = [i for i in range(3) if i != aborted]
            assert [requests[i].output_ids for i in rest] == [wanted[i] for i in rest]


# --- order, preemption, windows ------------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "static": {"scheduling": "static", "max_num_seqs": 4},
    "priority": {"scheduling_policy": "priority", "max_num_seqs": 4},
    "long prompts in small pieces": {"long_prefill_token_threshold": 7, "max_num_seqs": 4},
    "no long prompts": {"long_prefill_token_threshold": 0, "max_num_seqs": 4},
    "little KV": {"kv_cache_memory_bytes": 0, "max_model_len": 192, "block_size": 8},
}


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *(("llama", mode) for mode in MODES),
        ("gemma3", "little KV"),
        *(pytest.param(f, mode, marks=pytest.mark.slow) for f in FAMILIES[1:] for mode in MODES),
    ],
)
def test_tokens_do_not_depend_on_the_order_of_work(
    make: Callable[..., Engine], reference: Callable[[str], Any], family: str, mode: str
) -> None:
    options = {"max_num_batched_tokens": 32, **MODES[mode]}
    if mode == "little KV":
        plain = make(family, block_size=8, max_num_batched_tokens=32, max_num_seqs=8)
        fits_one = plain.tables.most_blocks(192) * plain.kv.bytes_per_block
        options.update(kv_cache_memory_bytes=fits_one, max_num_seqs=8)
    served = make(family, **options)
    requests = []
    for index, prompt in enumerate([SHARED, *TAILS, PROMPTS[LENGTHS.index(150)]] * 2):
        requests += served.add_request(
            str(index), tuple(prompt), greedy_params(NUM_NEW), priority=index % 3
        )
        served.step()
    reports = steps(served)
    check(reference(family), requests)
    if mode == "little KV":
        assert sum(len(report.plan.preempted) for report in reports) > 0


def test_a_static_batch_runs_to_its_end_before_the_next(make: Callable[..., Engine]) -> None:
    served = make("llama", scheduling="static", max_num_seqs=3)
    lengths = [4, 9, 2, 5, 5, 3]
    for index, num_new in enumerate(lengths):
        one(served, str(index), TAILS[1], num_new)
    alive = [{w.request.id for w in report.plan.work} for report in steps(served)]
    first, second = {"0", "1", "2"}, {"3", "4", "5"}
    assert alive[0] == first
    assert all(ids <= first for ids in alive[:9])
    assert alive[9] == second
    assert len(alive) == 9 + 5


def test_the_most_urgent_goes_first_and_takes_the_place_of_others(
    make: Callable[..., Engine], reference: Callable[[str], Any]
) -> None:
    served = make("llama", scheduling_policy="priority", max_num_seqs=1)
    requests = []
    for name, priority in (("late", 5), ("usual", 0), ("soon", 0), ("now", -1)):
        requests += served.add_request(name, tuple(TAILS[1]), greedy_params(8), priority=priority)
        served.step()
    order = [out.request.id for rep in steps(served) for out in rep.outputs if out.finished]
    assert order == ["now", "usual", "soon", "late"]
    assert [r.num_preemptions for r in requests] == [1, 1, 0, 0]
    check(reference("llama"), requests)


def test_a_window_holds_what_it_sees_however_long_the_text(
    make: Callable[..., Engine], reference: Callable[[str], Any]
) -> None:
    """24 tokens of window in blocks of 4: far less KV than the sequence has tokens will do."""
    kv = make("mistral-window", block_size=4).kv
    served = make(
        "mistral-window",
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=2,
        kv_cache_memory_bytes=24 * kv.bytes_per_block,
        max_model_len=400,
    )
    requests = [one(served, str(n), PROMPTS[LENGTHS.index(n)], 100) for n in (300, 250)]
    most = 0
    while served.has_work:
        served.step()
        most = max(most, served.pool.num_used)
        for request in served.scheduler.running:
            table = request.tables[0]
            # The row before saw 24 tokens, itself among them, and the chunk is at most 16.
            assert sum(block != FREED for block in table) * 4 < 24 + 16 + 2 * 4
    assert 0 < most <= 24
    assert not any(r.num_preemptions for r in requests)
    check(reference("mistral-window"), requests)


def test_preempted_requests_find_what_they_had_computed(make: Callable[..., Engine]) -> None:
    token_bytes = 3 * 2 * 2 * 16 * 4
    tight = {"kv_cache_memory_bytes": 96 * token_bytes, "max_model_len": 96, "block_size": 4}
    recomputed = {}
    for caching in (True, False):
        served = make("llama", enable_prefix_caching=caching, **tight)
        prompts = [PROMPTS[LENGTHS.index(n)] for n in (31, 33, 40)]
        for index, prompt in enumerate(prompts):
            one(served, str(index), prompt, 50)
        recomputed[caching] = sum(report.num_recomputed for report in steps(served))
    assert 0 < recomputed[True] < recomputed[False]


def test_generate_is_the_same_with_everything_on_and_off(make: Callable[..., Engine]) -> None:
    on = make("gemma3", max_num_batched_tokens=24, max_num_seqs=6, block_size=8)
    off = make(
        "gemma3",
        enable_prefix_caching=False,
        long_prefill_token_threshold=0,
        scheduling="static",
    )
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    prompts = [SHARED + tail for tail in TAILS] * 2
    found = [[r.output_ids for r in generate(engine, prompts, params)] for engine in (on, off)]
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8_per_token_head", "int4_per_token_head"])
def test_copied_blocks_of_quantised_kv_are_whole(make: Callable[..., Engine], dtype: str) -> None:
    """Numbers and scales: a choice that writes into its copy answers as if it had been alone."""
    options = {"kv_cache_dtype": dtype, "enable_prefix_caching": False}
    prompt = PROMPTS[LENGTHS.index(33)]
    params = SamplingParams(n=3, max_tokens=24, temperature=1.2, seed=11, ignore_eos=True)
    wanted = separate(make("llama", **options), prompt, params)
    served = make("llama", **options)
    requests = served.add_request("three", tuple(prompt), params)
    copies = sum(len(report.plan.copies) for report in steps(served))
    assert copies == 2
    assert [r.output_ids for r in requests] == wanted
