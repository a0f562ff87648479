"""Everything at once, at random: adapters, choices, prefixes, priorities, aborts, little KV.

Each answer must be the one that its prompt and adapter get from the reference alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.adapters import load_adapted, write_adapter
from tests.engine.driving import greedy_params
from tests.engine.families import COMMON
from tests.engine.references import is_greedy, load_reference
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.request import FinishReason, SamplingParams

FamilyDir = Callable[[str], Path]
ROUNDS = {False: 24, True: 120}  # by whether it is one of the slow ones


@pytest.mark.parametrize(
    ("family", "seed", "slow", "options"),
    [
        ("llama", 1, False, {"scheduling_policy": "priority"}),
        ("gemma3", 2, False, {}),
        pytest.param("llama", 3, True, {"scheduling": "static"}, marks=pytest.mark.slow),
        pytest.param("qwen2-window", 4, True, {"block_size": 3}, marks=pytest.mark.slow),
        pytest.param("mistral-window", 5, True, {"block_size": 1}, marks=pytest.mark.slow),
        pytest.param("gemma3", 6, True, {"scheduling_policy": "priority"}, marks=pytest.mark.slow),
    ],
)
def test_no_answer_depends_on_what_else_happens(
    family_dir: FamilyDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    seed: int,
    slow: bool,
    options: dict[str, Any],
) -> None:
    monkeypatch.setenv("ULLAGE_CHECK", "1")
    draw = random.Random(seed)  # noqa: S311
    model = family_dir(family)
    given: dict[str, Any] = {
        "max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 160, "block_size": 8,
        "enable_lora": True, **options,
    }  # fmt: skip
    kv = Engine.load(model, EngineOptions(**given))
    room = int(1.5 * kv.tables.most_blocks(160)) * kv.kv.bytes_per_block
    engine = Engine.load(model, EngineOptions(**given, kv_cache_memory_bytes=room))
    path = write_adapter(model, tmp_path / "adapter", seed)
    lora = engine.load_lora("adapter", path)
    references = {None: load_reference(model), lora: load_adapted(model, path)}
    beginnings = [[draw.randrange(3, COMMON["vocab_size"]) for _ in range(60)] for _ in range(3)]
    live, done = [], []
    for number in range(ROUNDS[slow]):
        shared = draw.choice(beginnings)[: draw.randrange(1, 60)]
        tail = [draw.randrange(3, COMMON["vocab_size"]) for _ in range(draw.randrange(1, 20))]
        params = greedy_params(draw.randrange(1, 40))
        live += engine.add_request(
            str(number),
            tuple(shared + tail),
            SamplingParams(n=draw.choice((1, 1, 2, 4)), max_tokens=params.max_tokens,
                           temperature=0.0, ignore_eos=True),
            draw.choice((None, lora)),
            priority=draw.randrange(3),
        )  # fmt: skip
        for _ in range(draw.randrange(6)):
            engine.step()
        if draw.random() < 0.2:
            engine.abort(draw.choice(live))
        if draw.random() < 0.1:
            engine.reset_prefix_cache()
    while engine.has_work:
        engine.step()
    assert engine.pool.num_used == 0
    assert engine.pool.num_free == engine.pool.num_blocks
    done = [r for r in live if r.finish_reason is FinishReason.LENGTH]
    assert len(done) > ROUNDS[slow]
    assert sum(r.num_preemptions for r in live) > 0
    assert sum(r.num_cached_tokens for r in live) > 0
    checked: set[tuple[Any, ...]] = set()
    for request in done:
        key = (request.prompt_ids, request.lora, tuple(request.output_ids))
        if key not in checked:
            checked.add(key)
            reference = references[request.lora]
            assert is_greedy(reference, list(request.prompt_ids), request.output_ids), request.id
