"""Before the server is ready it has met the shapes that it will run, and nothing of it stays."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engine.adapters import write_adapter
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.serving.warmup import warm_up


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Engine:
    options = EngineOptions(
        kv_cache_memory_bytes=1 << 22, max_num_seqs=12, max_num_batched_tokens=64, enable_lora=True
    )
    return Engine.load(model_dir, options)


@pytest.fixture
def batches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the decoder is given."""
    seen: list[Any] = []
    forward = engine._decoder.forward

    def recorded(batch: Any, *rest: Any) -> Any:
        seen.append(batch)
        return forward(batch, *rest)

    monkeypatch.setattr(engine, "_decoder", _Recorded(engine._decoder, recorded))
    return seen


class _Recorded:
    def __init__(self, decoder: Any, forward: Any) -> None:
        self._decoder, self.forward = decoder, forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


def test_every_shape_and_way_is_met(
    engine: Engine,
    batches: list[Any],
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine.load_lora("tuned", write_adapter(model_dir, tmp_path))
    params: list[Any] = []
    add = engine.add_request

    def recorded(request_id: str, prompt: Any, wish: Any, *rest: Any) -> Any:
        params.append(wish)
        return add(request_id, prompt, wish, *rest)

    monkeypatch.setattr(engine, "add_request", recorded)
    warm_up(engine)
    alone = [batch.prefills[0].count for batch in batches if len(batch.prefills) == 1]
    assert {64, 32, 16, 8, 4, 2} <= set(alone)
    decodes = {len(batch.decodes) for batch in batches if not batch.prefills}
    assert {1, 12} <= decodes
    # From each size to the next at most a halving.
    sizes = sorted(decodes)
    assert all(2 * small >= large for small, large in pairwise(sizes)), sizes
    assert any(batch.lora for batch in batches)
    assert any(not batch.lora for batch in batches)
    assert {wish.temperature > 0 for wish in params} == {True, False}
    for name, neutral in (("logprobs", None), ("top_k", 0), ("presence_penalty", 0.0)):
        assert any(getattr(wish, name) != neutral for wish in params), name


def test_nothing_of_it_stays(engine: Engine) -> None:
    warm_up(engine)
    assert not engine.has_work
    assert engine.pool.num_used == engine.pool.num_cached == 0


@pytest.mark.parametrize("max_model_len", [1, 2, 3, 17])
def test_the_shortest_contexts_are_warmed_too(model_dir: Path, max_model_len: int) -> None:
    options = EngineOptions(
        kv_cache_memory_bytes=1 << 18, max_model_len=max_model_len, block_size=4, max_num_seqs=3
    )
    warm_up(Engine.load(model_dir, options))
