"""Long contexts: some layers' attention of a row, every layer within three rows of a sequence.

What was not read is no reading anywhere; what is broken is found and placed whosever turn it is.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.probes.planted_faults import FAULTS, Fault
from tests.probes.planting import OTHERS, PROMPTS, answer, tappable
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.request import SamplingParams
from ullage.probes.attention import turns
from ullage.probes.attention.turns import FREE_POSITIONS, MOST_ROWS, MOST_SEQUENCES, Turns
from ullage.probes.baseline import sketch as sketches
from ullage.probes.baseline.baseline import Baseline
from ullage.probes.baseline.checking import Watched
from ullage.probes.baseline.judging import Judge, is_read, z_of
from ullage.probes.baseline.learning import learn
from ullage.probes.baseline.live import EVERY, LiveReader, LiveReading
from ullage.probes.baseline.relations import Relations, Residuals
from ullage.probes.baseline.verdicts import verdicts

LONG = 1_500
FEW = 12
"""Positions that count as long in tests of short texts."""
WAYS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "torch": {"enforce_eager": True},
    "int8": {"quantization": "int8"},
}


# --- whose turn it is ---


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([None, 4, 64, 1024]), min_size=1, max_size=48),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 900)), min_size=1, max_size=80),
)
def test_every_three_rows_of_a_sequence_hold_every_layer(
    windows: list[int | None], rows: list[tuple[int, int]]
) -> None:
    """Whatever the windows, however sequences take turns, and while contexts grow."""
    found, contexts = Turns(windows), dict.fromkeys(range(5), 1)
    by_sequence: dict[int, list[set[int]]] = {}
    for sequence, more in rows:
        contexts[sequence] += more
        due = found.due(str(sequence), contexts[sequence])
        layers = list(range(len(windows))) if due is None else due.tolist()
        assert layers == sorted(set(layers)) and set(layers) <= set(range(len(windows)))
        by_sequence.setdefault(sequence, []).append(set(layers))
    for seen in by_sequence.values():
        for first in range(len(seen) - MOST_ROWS + 1):
            assert set.union(*seen[first : first + MOST_ROWS]) == set(range(len(windows)))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 128), st.integers(1, 200_000))
def test_what_a_row_reads_is_bounded(layers: int, context: int) -> None:
    """Whole up to 256 positions, then no more than that until it is a third of the layers."""
    due = Turns([None] * layers).due("a", context)
    if context <= FREE_POSITIONS:
        assert due is None
        return
    count = layers if due is None else len(due)
    assert count <= max(layers * FREE_POSITIONS / context, math.ceil(layers / MOST_ROWS))


def test_layers_with_windows_that_are_short_are_all_read() -> None:
    assert Turns([256] * 30).due("a", 100_000) is None


def test_sequences_that_are_read_once_do_not_all_show_the_same() -> None:
    found = Turns([None] * 30)
    seen = [found.due(str(number), 4_000) for number in range(MOST_ROWS)]
    assert set(np.concatenate([one for one in seen if one is not None]).tolist()) == set(range(30))


def test_only_so_many_sequences_are_remembered() -> None:
    found = Turns([None] * 3)
    for number in range(2 * MOST_SEQUENCES):
        found.due(str(number), 4_000)
    assert len(found._next) == MOST_SEQUENCES


# --- rows of an engine ---


@pytest.fixture
def long_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "FREE_POSITIONS", FEW)


@pytest.fixture(params=["compiled", "torch"])
def engine(request: pytest.FixtureRequest, family_dir: Callable[[str], Path]) -> Engine:
    found = tappable(family_dir("llama"), EngineOptions(**WAYS[request.param]))
    assert found is not None
    return found


def readings(engine: Engine, **asked: Any) -> list[LiveReading]:
    found: list[LiveReading] = []
    relations = Relations(sketches.take(engine.decoder), 2.0**-24)
    engine.reader = LiveReader(engine, found.append, relations, **{"every": 1, **asked})
    answer(engine, OTHERS, 40)
    engine.reader = None
    engine.reset_prefix_cache()
    return found


@pytest.mark.parametrize("every", [1, 2, 3])
def test_of_several_sequences_each_is_read_in_every_layer(
    every: int, engine: Engine, long_is_short: None
) -> None:
    """As many sequences as layers: one turn for all of them would show each always the same."""
    by_request: dict[str, list[set[int]]] = {}
    for one in readings(engine, every=every):
        layers = set(np.flatnonzero(one.attended.read_L).tolist())
        assert layers or one.row.position < FEW
        by_request.setdefault(one.request_id, []).append(layers)
    assert len(by_request) == len(OTHERS)
    for seen in by_request.values():
        assert len(seen) >= MOST_ROWS
        assert any(len(one) == 1 for one in seen)
        for first in range(len(seen) - MOST_ROWS + 1):
            assert set.union(*seen[first : first + MOST_ROWS]) == {0, 1, 2}


def test_what_is_read_is_what_it_is_when_all_is_read(engine: Engine, long_is_short: None) -> None:
    """And what is not is no reading: no figure, no residual, no row of its layer."""
    some = readings(engine, all_rows=True)
    whole = {
        (one.request_id, one.row.position): one
        for one in readings(engine, all_rows=True, all_layers=True)
    }
    assert any(not one.attended.read_L.all() for one in some)
    cells = Relations(sketches.take(engine.decoder), 2.0**-24).cells
    for one in some:
        other = whole[one.request_id, one.row.position]
        read_L = one.attended.read_L
        assert other.attended.read_L.all() and other.figures_read is None
        for name in ("entropy_nats", "max_score", "first_mass", "band_mass"):
            mine, all_of = getattr(one.attended, name), getattr(other.attended, name)
            assert np.allclose(mine[read_L], all_of[read_L], atol=1e-5)
            assert np.isnan(mine[~read_L]).all()
        read = np.ones(len(one.figures), np.bool_) if one.figures_read is None else one.figures_read
        assert np.allclose(one.figures[read], other.figures[read], atol=1e-4, equal_nan=True)
        assert np.isnan(one.figures[~read]).all()
        assert one.residuals is not None and other.residuals is not None
        held = np.array([c.part != "attention" or bool(read_L[c.layer or 0]) for c in cells])
        assert (is_read(one.residuals) == (is_read(other.residuals) & held)).all()
        own = is_read(one.residuals)
        assert np.allclose(one.residuals.size[own], other.residuals.size[own], rtol=1e-4)


@pytest.mark.parametrize("numba", [True, False], ids=["machine-code", "numpy"])
def test_attention_that_is_not_finite_is_a_reading_whosever_turn_it_is(
    numba: bool, family_dir: Callable[[str], Path]
) -> None:
    if numba:
        pytest.importorskip("numba")
    engine = tappable(family_dir("llama"))
    assert engine is not None
    relations = Relations(sketches.take(engine.decoder), 2.0**-24)
    row = readings(engine)[-1].row
    places = {name: values.copy() for name, values in row.places.items()}
    row = replace(row, places=places, attended_L=np.array([True, False, False]))
    places["mixed"][1, -1] = np.nan
    if numba and relations._compiled is not None:
        kept = row.kept_LW.copy()
        place = int(row.offsets[list(places).index("mixed")])
        kept[1, place + places["mixed"].shape[1] - 1] = np.nan
        found = relations._compiled.of(replace(row, kept_LW=kept))
    else:
        found = relations.in_numpy(row)
    z = z_of(found, np.full(len(relations.cells), 2.0**-20))
    of_layer: dict[int, list[float]] = {}
    for cell, value in zip(relations.cells, z.tolist(), strict=True):
        if cell.part == "attention" and cell.layer is not None:
            of_layer.setdefault(cell.layer, []).append(value)
    assert np.isfinite(of_layer[0]).all()
    assert np.isnan(of_layer[1][:-1]).all() and of_layer[1][-1] == np.inf
    assert np.isnan(of_layer[2]).all()


# --- the judgement ---


@pytest.fixture(scope="module")
def baseline(family_dir: Callable[[str], Path]) -> Baseline:
    options = EngineOptions(enforce_eager=True)
    return learn(family_dir("llama"), PROMPTS, options, new_tokens=24)


@dataclass(frozen=True)
class Stream:
    """Rows as some engine might give them, some of their attention far off, and their layers."""

    residuals: list[Residuals]
    figures: list[np.ndarray[Any, Any]]
    requests: list[str]
    read_L: list[np.ndarray[Any, Any]]


def streamed(baseline: Baseline, seed: int, rows: int) -> Stream:
    random = np.random.default_rng(seed)
    count, layers = len(baseline.cells), baseline.sketch.form.layers
    found = Stream([], [], [], [])
    noise = np.nan_to_num(baseline.noise[0], nan=0.0)
    wild = random.random(count) < 0.1
    for number in range(rows):
        said = random.standard_normal(count) + 3.0
        off = random.standard_normal(count) * noise
        if number > rows // 3:
            off[wild] += random.choice([1e-5, 1e-3, 1.0]) * said[wild]
        found.residuals.append(Residuals(
            np.abs(off), np.ones(count), np.zeros(count), said + off, said, np.zeros(count),
            random.integers(0, 9, count),
        ))  # fmt: skip
        spread = random.choice([1.0, 12.0]) * baseline.usual.spread
        found.figures.append(
            baseline.usual.mean + spread * random.standard_normal(len(baseline.usual.mean))
        )
        found.requests.append(str(random.integers(3)))
        found.read_L.append(random.random(layers) < 0.5)
    return found


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 60))
def test_rows_in_which_a_layer_was_not_read_are_none_of_its_rows(
    seed: int, rows: int, baseline: Baseline
) -> None:
    """What is known of a layer is what a judge knows who sees only the rows in which it was read,
    whatever stands in its place in the others."""
    stream = streamed(baseline, seed, rows)
    in_turn, all_of = Judge(baseline), Judge(baseline)
    each = [Judge(baseline) for _ in range(baseline.sketch.form.layers)]
    cells = np.array([
        -1 if c.part != "attention" or c.layer is None else c.layer for c in in_turn.cells
    ])  # fmt: skip
    figures = np.array([
        -1 if f.kind != "entropy" or f.layer is None else f.layer for f in in_turn.figures
    ])  # fmt: skip
    random = np.random.default_rng(seed)
    for residuals, values, request, read_L in zip(
        stream.residuals, stream.figures, stream.requests, stream.read_L, strict=True
    ):
        all_of.see(residuals, values, request, compiled=False)
        for layer in np.flatnonzero(read_L).tolist():
            each[layer].see(residuals, values, request, compiled=False)
        out = (cells >= 0) & ~read_L[cells]
        masked = replace(
            residuals,
            residual=np.where(out, 0.0, residuals.residual),
            size=np.where(out, np.nan, residuals.size),
            made=np.where(out, 0.0, residuals.made),
        )
        read = (figures < 0) | read_L[figures]
        nothing = np.where(random.random(len(values)) < 0.5, np.nan, 1e9)
        in_turn.see(
            masked, np.where(read, values, nothing), request, compiled=False, figures_read=read
        )
    both = np.concatenate([cells, figures])
    for layer, judge in [(-1, all_of), *enumerate(each)]:
        own = np.flatnonzero(both == layer)
        assert (in_turn._detectors.readings[own] == judge._detectors.readings[own]).all()
        assert (in_turn._detectors.log_r[own] == judge._detectors.log_r[own]).all()
        mine, others = ({
            one.at: (one.z, one.readings, one.factor, one.channel, one.made, one.said)
            for one in of.alarms()
            if both[(*in_turn.cells, *in_turn.figures).index(one.at)] == layer
        } for of in (in_turn, judge))  # fmt: skip
        assert mine == others


def test_attention_is_clear_once_every_layer_was_read(baseline: Baseline) -> None:
    judge, stream = Judge(baseline), streamed(baseline, 1, 4)
    layers = np.array([-1 if c.part != "attention" else c.layer or 0 for c in judge.cells])

    def states() -> dict[str, str]:
        return {one.finding.id: one.finding.state for one in verdicts(judge)}

    for layer in range(3):
        assert states()["P004"] == "not_evaluable"
        residuals = stream.residuals[0]
        out = (layers >= 0) & (layers != layer)
        residuals = replace(residuals, size=np.where(out, np.nan, residuals.size))
        judge.see(residuals, baseline.usual.mean, "a", compiled=False)
    assert states()["P004"] == "clear"


# --- faults at a long context ---


@pytest.fixture(scope="module")
def long_model(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the others, of more positions."""
    found = tmp_path_factory.mktemp("long") / "llama"
    shutil.copytree(family_dir("llama"), found)
    config = json.loads((found / "config.json").read_text())
    config["max_position_embeddings"] = 2_048
    (found / "config.json").write_text(json.dumps(config))
    return found


@pytest.fixture(scope="module")
def healthy(long_model: Path) -> Callable[[str], tuple[Engine, Baseline]]:
    @cache
    def made(way: str) -> tuple[Engine, Baseline]:
        options = EngineOptions(max_model_len=2_048, **WAYS[way])
        engine = tappable(long_model, options)
        assert engine is not None
        return engine, learn(long_model, PROMPTS, options, new_tokens=24)

    return made


def watched(
    engine: Engine, baseline: Baseline, every: int = EVERY, tokens: int = 64
) -> Iterator[Watched]:
    """Before each step of the answer to a prompt of 1,500 tokens; the last time when it is over."""
    assert engine.tokenizer is not None
    found = Watched(engine, baseline, every=every)
    ids = tuple(engine.tokenizer.encode(" ".join(OTHERS) * 100))[:LONG]
    assert len(ids) == LONG
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    engine.add_request("long", ids, params)
    while engine.has_work:
        yield found
        report = engine.step()
        found.tokens += sum(one.token_id is not None for one in report.outputs)
    engine.reader = None
    engine.reset_prefix_cache()
    yield found


def places(found: Watched) -> set[tuple[str, tuple[int, ...]]]:
    fired = [one for one in found.findings() if one.finding.state == "fired"]
    return {(one.kind, one.layers) for one in fired}


_PLANTED = ("scores times 1/head_dim", "theta times 5", "v of one head times 1.1", "o times 1.02")


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "fault", [one for one in FAULTS if one.name in _PLANTED], ids=lambda fault: fault.name
)
def test_behind_1500_tokens_a_fault_is_found_where_it_is_within_64(
    fault: Fault, way: str, layer: int, healthy: Callable[[str], tuple[Engine, Baseline]]
) -> None:
    engine, baseline = healthy(way)
    with ExitStack() as stack:
        *_, found = watched(fault.plant(engine, stack, layer), baseline)
    assert places(found), "nothing was found"
    for kind, layers in places(found):
        assert kind in fault.kinds and (fault.everywhere or layers == (layer,))
    assert found.judge.rows == 64 // EVERY
    assert found.first_alarm is not None and found.first_alarm[1] <= 64


@pytest.mark.parametrize("way", WAYS)
def test_behind_1500_tokens_a_healthy_model_raises_nothing(
    way: str, healthy: Callable[[str], tuple[Engine, Baseline]]
) -> None:
    *_, found = watched(*healthy(way), every=1, tokens=200)
    assert found.judge.rows >= 200 and not places(found)
    state = {one.finding.id: one.finding.state for one in found.findings()}
    assert state["P004"] == state["P008"] == "clear"


@pytest.mark.parametrize("step", [5, 6, 7])
@pytest.mark.parametrize("way", ["compiled", "torch"])
def test_where_attention_is_nan_is_told_whosever_turn_it_is(
    way: str, step: int, healthy: Callable[[str], tuple[Engine, Baseline]]
) -> None:
    """One value of an old token in the cache of layer 1: three rows, of which one reads it."""
    engine, baseline = healthy(way)
    of_layer = engine.kv.values[1]
    kept = of_layer.clone()
    with torch.inference_mode():
        for number, one in enumerate(watched(engine, baseline, every=1)):
            found = one
            if number == step:
                written = torch.nonzero(of_layer.view(-1))
                of_layer.view(-1)[written[0]] = torch.nan
        of_layer.copy_(kept)
    assert places(found) == {("attention", (1,))}
