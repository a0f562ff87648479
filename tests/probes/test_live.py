"""Reading along: who is sampled and when, and that answers are what they are without it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.probes.planting import OTHERS, answer, tappable
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.request import SamplingParams
from ullage.errors import UnsupportedModel
from ullage.probes.baseline import sketch as sketches
from ullage.probes.baseline.live import EVERY, LiveReader, LiveReading
from ullage.probes.baseline.relations import Relations


@pytest.fixture(params=["torch", "compiled"])
def engine(request: pytest.FixtureRequest, family_dir: Callable[[str], Path]) -> Engine:
    options = EngineOptions(enforce_eager=request.param == "torch")
    found = tappable(family_dir("llama"), options)
    assert found is not None
    return found


def tokens_of(engine: Engine, new_tokens: int = 40) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}

    def keep(report: Any) -> None:
        for one in report.outputs:
            if one.token_id is not None:
                found.setdefault(one.request.id, []).append(one.token_id)

    answer(engine, OTHERS, new_tokens, each_step=keep)
    engine.reset_prefix_cache()
    return found


def test_answers_are_the_same_to_the_token(engine: Engine) -> None:
    alone = tokens_of(engine)
    relations = Relations(sketches.take(engine.decoder), 2.0**-24)
    engine.reader = LiveReader(engine, lambda _: None, relations, every=1, all_rows=True)
    assert tokens_of(engine) == alone


def test_one_row_of_every_so_manieth_step_each_sequence_in_its_turn(engine: Engine) -> None:
    seen: list[LiveReading] = []
    reader = engine.reader = LiveReader(engine, seen.append, every=4)
    tokens_of(engine)
    assert reader.rows_read == len(seen) == reader.steps // 4
    assert {one.request_id for one in seen} == {"0 ", "1 ", "2 "}
    assert all(one.residuals is None for one in seen)
    assert reader.spent_s > 0


def test_the_default_reads_four_rows_of_64_tokens(engine: Engine) -> None:
    seen: list[LiveReading] = []
    engine.reader = LiveReader(engine, seen.append)
    answer(engine, OTHERS[:1], 64)
    assert len(seen) == 64 // EVERY


def test_a_row_is_that_token_at_that_place(engine: Engine) -> None:
    seen: list[LiveReading] = []
    assert engine.tokenizer is not None
    ids = tuple(engine.tokenizer.encode(OTHERS[0]))
    engine.reader = LiveReader(engine, seen.append, every=1)
    engine.add_request("a", ids, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    made: list[int] = []
    while engine.has_work:
        made += [one.token_id for one in engine.step().outputs if one.token_id is not None]
    fed = [*ids, *made]
    assert [one.row.position for one in seen] == list(range(len(ids) - 1, len(ids) + 5))
    assert [one.row.token_id for one in seen] == fed[len(ids) - 1 : -1]
    for one, chosen in zip(seen, made, strict=True):
        assert int(np.argmax(one.row.logits_V)) == chosen
        assert int(one.attended.visible_L.max()) == one.row.position + 1


def test_of_a_prompt_in_chunks_the_end_of_each_may_be_read(
    family_dir: Callable[[str], Path],
) -> None:
    """The engine proves them before others may find them; no row between has logits."""
    options = EngineOptions(max_num_batched_tokens=16, max_num_seqs=4, enforce_eager=True)
    engine = tappable(family_dir("llama"), options)
    assert engine is not None and engine.tokenizer is not None
    seen: list[LiveReading] = []
    engine.reader = LiveReader(engine, seen.append, every=1)
    ids = tuple(engine.tokenizer.encode("A long text. " * 6))
    engine.add_request("a", ids, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    while engine.has_work:
        engine.step()
    ends = [*range(15, len(ids) - 1, 16), len(ids) - 1]
    assert [one.row.position for one in seen] == ends


@pytest.mark.parametrize("family", ["mixtral", "cohere", "olmo2", "gemma2"])
def test_a_model_that_cannot_be_read_is_refused(
    family: str, family_dir: Callable[[str], Path]
) -> None:
    engine = Engine.load(family_dir(family), EngineOptions(enforce_eager=True))
    with pytest.raises(UnsupportedModel, match="not read of"):
        LiveReader(engine, lambda _: None)


@pytest.mark.parametrize("way", ["torch", "compiled"])
@pytest.mark.parametrize(("own", "usual"), [(24, None), (24, 40), (24, 24), (40, 24), (None, 24)])
def test_blocks_that_a_window_has_passed_are_not_read(
    own: int | None, usual: int | None, way: str, family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """They are anybody's by then, and a table has no entry for them: a served model whose window is
    narrower than the baseline's ended the process, reading beside the cache."""
    options = EngineOptions(enforce_eager=way == "torch")

    def of_window(window: int | None) -> Engine:
        folder = tmp_path / str(window)
        shutil.copytree(family_dir("mistral-window"), folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "sliding_window": window}))
        found = tappable(folder, options)
        assert found is not None
        return found

    learned, engine = of_window(usual), of_window(own)
    relations = Relations(sketches.take(learned.decoder), 2.0**-24)
    seen: list[LiveReading] = []
    if own is not None and (usual is None or own < usual):
        with pytest.raises(UnsupportedModel, match=f"window of {own} tokens in layer 0; expected"):
            LiveReader(engine, seen.append, relations)
        return
    engine.reader = LiveReader(engine, seen.append, relations, every=1)
    answer(engine, ["A long text. " * 9], 20)
    assert len(seen) >= 20
    for one in seen:
        assert one.residuals is not None
        off = one.residuals.residual / one.residuals.size
        attention = [n for n, cell in enumerate(relations.cells) if cell.kind == "attention"]
        assert (bool((off[attention] < 1e-4).all())) == (own == usual)
