"""Speeds of an engine: every request decodes in the steps that are counted, and all end after."""

from __future__ import annotations

import pytest

from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.lab.speeds import decode_step_s, prefill_tokens_per_s, way_of, ways
from ullage.lab.synthetic import write_synthetic


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    model = write_synthetic(tmp_path_factory.mktemp("model"), quick=True)
    return Engine.load(
        model, EngineOptions(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=160)
    )


def test_prompts_that_come_in_one_by_one_outlast_no_answer(engine):
    # 4 prompts of 64 tokens in chunks of 8: the first answers for 24 steps before the last begins.
    assert 0 < decode_step_s(engine, batch=4, context=64, steps=3) < 10
    assert not engine.has_work and engine.pool.num_used == 0


def test_prefill_is_timed_over_all_of_its_chunks(engine):
    assert 0 < prefill_tokens_per_s(engine, tokens=40, repeats=1) < 1e6
    assert not engine.has_work and engine.pool.num_used == 0


def test_ways_are_said_once_where_they_are_alike(engine):
    way = way_of(engine)
    assert ways({"a": way, "b": way}) == f"All ran in {way}."
    assert ways({"a": way, "b": "x"}) == f"a ran in {way}; b ran in x."
