"""The embedded engine probed: its readings are those of transformers' attention weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.driving import generate, greedy_params
from tests.engine.families import VARIATIONS
from tests.engine.references import smollm2_reference_dir
from tests.probes.materialised import assert_reading, attention_weights, eager_model
from ullage.anatomy import load
from ullage.engine.attention import ATTENTION_PATHS
from ullage.engine.batch import Batch
from ullage.engine.engine import Engine
from ullage.engine.kv_formats import KV_FORMATS
from ullage.engine.options import EngineOptions
from ullage.engine.text.loading import load_tokenizer
from ullage.errors import BadUsage
from ullage.probes.attention.embedded import ProbedAttention, Sampled, read_prompt, spread_rows
from ullage.probes.attention.entropy import RowReadings
from ullage.probes.attention.through_transformers import read_model

# One of each way of attending: groups of heads, one KV head, windows, caps, slopes, own scales,
# learned positions, rotary pairs of two kinds, experts.
KINDS = (
    *("llama", "llama-tied-mha", "mistral-window", "gemma2", "gemma3", "qwen3", "gpt2-scaled"),
    *("opt", "bloom-odd-heads", "mpt", "falcon-7b", "gpt_neo", "gpt_neox", "cohere", "granite"),
    *("phi3-longrope", "mixtral", "qwen2-moe"),
)
PROMPT = tuple(torch.randint(3, 300, (70,), generator=torch.Generator().manual_seed(5)).tolist())
CHUNKED = {"max_num_batched_tokens": 32, "max_num_seqs": 8}

Directory = Callable[[str], Path]


@pytest.mark.parametrize(
    "family",
    [
        *KINDS,
        *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(VARIATIONS - set(KINDS))),
    ],
)
def test_every_head_of_a_family_reads_as_transformers_weights(
    family: str, family_dir: Directory
) -> None:
    """In chunks of 32 tokens, so that keys come from the cache, and windows have passed blocks.

    All rows come from the pass that attends, some from one beside the engine's path.
    """
    weights = attention_weights(eager_model(family_dir(family)), PROMPT)
    options = EngineOptions(attention="gathered", **CHUNKED)
    for rows in (None, 23):
        reading = read_prompt(family_dir(family), PROMPT, rows=rows, options=options)
        assert_reading(reading, weights, spread_rows(len(PROMPT), rows))
        assert (reading.tokens, reading.source) == (len(PROMPT), "embedded engine")


def test_chunks_of_many_rows_through_the_engines_own_product(
    family_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a processor where that outruns torch's; what is multiplied by it is counted."""
    pytest.importorskip("numba")
    from ullage.engine.kernels import product

    multiplied: list[int] = []
    own = product.float_product

    def counting(x: np.ndarray, *rest: np.ndarray | None) -> None:
        multiplied.append(len(x))
        own(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(product, "OUTRUNS_TORCH", True)
    monkeypatch.setattr(product, "float_product", counting)
    prompt = tuple(torch.randint(3, 300, (210,), generator=torch.manual_seed(5)).tolist())
    weights = attention_weights(eager_model(family_dir("llama")), prompt)
    options = EngineOptions(attention="gathered", max_num_batched_tokens=128, max_num_seqs=8)
    reading = read_prompt(family_dir("llama"), prompt, options=options)
    assert_reading(reading, weights, range(210))
    assert set(multiplied) == {128, 82}


@pytest.mark.parametrize("path", ATTENTION_PATHS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_any_path_is_watched_alike(family: str, path: str, family_dir: Directory) -> None:
    if path == "paged":
        pytest.importorskip("numba")
    weights = attention_weights(eager_model(family_dir(family)), PROMPT)
    options = EngineOptions(attention=path, block_size=4, **CHUNKED)
    for rows in (None, 69):
        reading = read_prompt(family_dir(family), PROMPT, rows=rows, options=options)
        assert_reading(reading, weights, spread_rows(70, rows))


@pytest.mark.parametrize("stored", sorted(KV_FORMATS))
def test_keys_are_those_that_the_cache_gives_back(stored: str, family_dir: Directory) -> None:
    """Lossy storage moves the entropy by little, and by something, as it moves attention."""
    exact = read_prompt(family_dir("llama"), PROMPT)
    lossy = read_prompt(
        family_dir("llama"),
        PROMPT,
        options=EngineOptions(attention="gathered", kv_cache_dtype=stored),
    )
    moved = max(
        abs(one.entropy_nats.mean - other.entropy_nats.mean)
        for (_, one), (_, other) in zip(exact.heads(), lossy.heads(), strict=True)
        if one.entropy_nats is not None and other.entropy_nats is not None
    )
    assert moved == 0.0 if KV_FORMATS[stored].is_exact else 1e-6 < moved < 0.2


def test_rows_and_layers_that_were_asked_for_are_read(family_dir: Directory) -> None:
    rows = spread_rows(len(PROMPT), 9)
    assert len(set(rows)) == 9 and rows[-1] == len(PROMPT) - 1
    reading = read_prompt(family_dir("llama"), PROMPT, rows=9, layers=(2,))
    assert [layer.layer for layer in reading.layers] == [2]
    weights = attention_weights(eager_model(family_dir("llama")), PROMPT)
    whole = read_prompt(family_dir("llama"), PROMPT, rows=9)
    assert_reading(whole, weights, rows)
    assert reading.layers[0] == whole.layers[2]


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (1, 5), (7, 3), (4096, 64), (5, None)])
def test_spread_rows_are_distinct_in_order_and_end_at_the_last(
    tokens: int, count: int | None
) -> None:
    rows = spread_rows(tokens, count)
    assert len(rows) == min(tokens, count or tokens)
    assert list(rows) == sorted(set(rows)) and rows[0] >= 0 and rows[-1] == tokens - 1
    gaps = [b - a for a, b in zip((-1, *rows), rows, strict=False)]
    assert max(gaps) - min(gaps) <= 1


def _probed(
    engine: Engine, choose: Callable[[Batch], list[Sampled]]
) -> list[tuple[int, Sampled, RowReadings]]:
    taken: list[tuple[int, Sampled, RowReadings]] = []
    engine._attention = ProbedAttention(
        engine._attention, engine.kv, choose, lambda *one: taken.append(one)
    )
    return taken


def test_a_serving_engine_answers_alike_while_every_row_is_watched(family_dir: Directory) -> None:
    """Ragged batches of prompts and decodes: same tokens, and each reading is its sequence's."""
    prompts = [PROMPT[:40], PROMPT[10:33], PROMPT[50:]]
    options = EngineOptions(enforce_eager=True, block_size=8, **CHUNKED)
    plain = generate(Engine.load(family_dir("llama"), options), prompts, greedy_params(6))
    engine = Engine.load(family_dir("llama"), options)
    taken = _probed(
        engine,
        lambda batch: [
            Sampled(span, tuple(range(span.start, span.context)))
            for span in batch.decodes + batch.prefills
        ],
    )
    watched = generate(engine, prompts, greedy_params(6))
    assert [one.output_ids for one in watched] == [one.output_ids for one in plain]
    assert any(len(one.span.tables) and one.span.count == 1 for _, one, _ in taken)
    model = eager_model(family_dir("llama"))
    by_length = {}
    for request in watched:
        ids = [*request.prompt_ids, *request.output_ids]
        by_length[len(request.prompt_ids)] = attention_weights(model, ids[:-1])
    num_rows = 0
    for layer, sampled, readings in taken:
        found = readings.entropy_nats[-1].double()
        last = sampled.positions[-1]
        expected = [
            -torch.special.xlogy(w[layer][:, last], w[layer][:, last]).sum(-1)
            for w in by_length.values()
            if last < w[layer].shape[1]
        ]
        assert min(float((found - one).abs().max()) for one in expected) < 1e-4
        num_rows += len(sampled.positions)
    # Every token but the last of each answer ran once in each of three layers.
    assert num_rows == 3 * sum(len(prompt) + 6 - 1 for prompt in prompts)


def test_steps_that_are_looked_at_are_not_left_to_the_compiled_decoder(
    family_dir: Directory,
) -> None:
    """Whole decode steps run in machine code, where no path is asked: every third is watched."""
    pytest.importorskip("numba")
    options = EngineOptions(block_size=8, **CHUNKED)
    engine = Engine.load(family_dir("llama"), options)
    assert engine.compiled
    plain = generate(engine, [PROMPT[:40]], greedy_params(12))
    asked: list[Batch] = []

    def every_third(batch: Batch) -> list[Sampled]:
        asked.append(batch)
        if len(asked) % 3:
            return []
        return [Sampled(s, (s.context - 1,)) for s in batch.decodes + batch.prefills]

    engine.reset_prefix_cache()
    taken = _probed(engine, every_third)
    watched = generate(engine, [PROMPT[:40]], greedy_params(12))
    assert [one.output_ids for one in watched] == [one.output_ids for one in plain]
    # Two chunks of the prompt and eleven steps more, each asked about once.
    assert len(asked) == 13
    read = [(layer, one.positions[0]) for layer, one, _ in taken]
    assert read == [(layer, last) for last in (40, 43, 46, 49) for layer in range(3)]


def test_a_step_of_which_nothing_is_chosen_is_the_inner_paths_own(family_dir: Directory) -> None:
    """Off is zero: no call more per layer."""
    engine = Engine.load(family_dir("llama"), EngineOptions(enforce_eager=True, **CHUNKED))

    class Counted:
        def __init__(self) -> None:
            self.step = object()

        def prepare(self, batch: Batch) -> object:
            return self.step

    inner = Counted()
    path = ProbedAttention(inner, engine.kv, lambda batch: [], lambda *one: None)  # type: ignore[arg-type]
    assert path.prepare(None) is inner.step  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [((), "no tokens"), ((5, 320), "token 320"), ((5,) * 513, "513 tokens")],
)
def test_a_prompt_that_the_model_cannot_take_is_a_sentence(
    prompt: tuple[int, ...], said: str, family_dir: Directory
) -> None:
    with pytest.raises(BadUsage, match=said):
        read_prompt(family_dir("llama"), prompt)


def test_numbers_that_are_not_finite_are_counted_and_in_no_figure(
    family_dir: Directory, tmp_path: Path
) -> None:
    """A NaN in one head's query projection: that head says so, its neighbours are read as ever."""
    from safetensors.torch import load_file, save_file

    for file in family_dir("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][20, 3] = torch.nan  # head 1 of 16 wide
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    layers = read_prompt(tmp_path, PROMPT).layers
    assert all(head.not_finite == 0 for head in layers[0].heads)
    bad = layers[1].heads[1]
    assert bad.not_finite == bad.rows and bad.entropy_nats is None and bad.max_score is None
    assert [head.not_finite for head in layers[1].heads if head.head != 1] == [0, 0, 0]


def test_some_layers_of_a_whole_prompt_read_as_among_all(family_dir: Directory) -> None:
    """All rows are read by the pass that attends: the other layers attend all the same."""
    whole = read_prompt(family_dir("llama"), PROMPT)
    some = read_prompt(family_dir("llama"), PROMPT, layers=(0, 2))
    assert some.layers == (whole.layers[0], whole.layers[2])


@pytest.mark.slow
def test_real_weights_read_as_transformers_weights_both_ways(smollm2: Path) -> None:
    """SmolLM2, whose heads range from one key to nearly all, over a text of 600 tokens."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    prompt = tuple(load_tokenizer(load(smollm2)).encode(text)[:600])
    model = eager_model(smollm2_reference_dir(smollm2))
    weights = attention_weights(model, prompt)
    embedded = read_prompt(smollm2, prompt)
    assert_reading(embedded, weights, range(600), atol=5e-4)
    assert_reading(read_model(model, prompt), weights, range(600), atol=5e-4)
    entropies = [head.entropy_normalized or 0.0 for _, head in embedded.heads()]
    assert min(entropies) < 0.02 and max(entropies) > 0.9
