"""transformers' models probed through the registry: readings are those of their own weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.families import COMMON, FAMILIES, OLDER_WIDE
from tests.probes.materialised import assert_reading, attention_weights
from ullage.errors import BadUsage, UnsupportedModel
from ullage.probes.attention import registry
from ullage.probes.attention.embedded import read_prompt as read_embedded
from ullage.probes.attention.embedded import spread_rows
from ullage.probes.attention.entropy import RowReadings
from ullage.probes.attention.registry import Choose, Place, probing
from ullage.probes.attention.through_transformers import load_model, read_model, read_prompt

MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
SPECIAL_IDS = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
# What the embedded engine does not run: learned sinks, MLA, chunks, both directions.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": (
        "GptOssConfig",
        {
            **COMMON,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "deepseek-v2": ("DeepseekV2Config", {**COMMON, **MLA}),
    "deepseek-v3": ("DeepseekV3Config", {**COMMON, **MLA}),
    "llama4": (
        "Llama4TextConfig",
        {
            **COMMON,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "attention_chunk_size": 32,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
        },
    ),
    "bert": ("BertConfig", OLDER_WIDE),
    "modernbert": (
        "ModernBertConfig",
        {
            **OLDER_WIDE,
            **SPECIAL_IDS,
            "local_attention": 24,
            "global_attn_every_n_layers": 3,
        },
    ),
}
ENCODERS = ("bert", "modernbert")
SHARED = ("llama", "gemma2", "gemma3", "gpt2-scaled", "mistral-window", "mixtral", "opt", "cohere2")
OWN_CODE = ("bloom", "mpt", "gpt_neo", "falcon-7b")
PROMPT = tuple(torch.randint(3, 300, (70,), generator=torch.Generator().manual_seed(5)).tolist())


def made(name: str) -> Any:
    """A random model whose biases and sinks are not zero."""
    import transformers

    if name in CONFIGS:
        kind, settings = CONFIGS[name]
        config = getattr(transformers, kind)(**settings)
    else:
        config = FAMILIES[name]()
    kind = "AutoModel" if name in ENCODERS else "AutoModelForCausalLM"
    torch.manual_seed(3)
    model = getattr(transformers, kind).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "sinks" in parameter_name or "bias" in parameter_name:
                parameter.normal_()
    return model


def eager_weights(model: Any, **inputs: Any) -> list[torch.Tensor]:
    with registry.attention_of(model, "eager"):
        return attention_weights(model, PROMPT, **inputs)


@contextmanager
def everything_taken(model: Any) -> Iterator[list[tuple[Place, RowReadings]]]:
    taken: list[tuple[Place, RowReadings]] = []
    with probing(model, range, lambda *one: taken.append(one)):
        yield taken


@pytest.mark.parametrize("rows", [None, 20])
@pytest.mark.parametrize("name", [*CONFIGS, *SHARED])
def test_every_head_reads_as_the_models_own_weights(name: str, rows: int | None) -> None:
    """All rows come from the pass that computes attention, some from one beside SDPA."""
    model = made(name)
    reading = read_model(model, PROMPT, rows=rows)
    assert_reading(reading, eager_weights(model), spread_rows(len(PROMPT), rows))
    assert reading.source == "transformers"
    sinks = [head.learned_sink_mass is not None for _, head in reading.heads()]
    assert sinks == [name == "gpt-oss"] * len(sinks)


@pytest.mark.parametrize("choose", [range, lambda count: (0, count // 2)])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "deepseek-v3", "modernbert"])
def test_the_models_output_is_its_own_while_it_is_watched_and_its_attention_afterwards(
    name: str, choose: Choose
) -> None:
    model = made(name)
    ids = torch.tensor([PROMPT])
    before = model.config._attn_implementation
    taken: list[int] = []
    with torch.inference_mode():
        with registry.attention_of(model, "eager"):
            own = model(ids)[0]
        with probing(model, choose, lambda place, _: taken.append(len(place.positions))):
            watched = model(ids)[0]
    assert taken and set(taken) == {len(choose(len(PROMPT)))}
    torch.testing.assert_close(watched, own, atol=2e-3, rtol=2e-3)
    assert model.config._attn_implementation == before
    assert not registry._PROBES


def test_attention_is_given_back_after_an_error_too() -> None:
    model = made("llama")
    with pytest.raises(RuntimeError, match="mine"), everything_taken(model):
        raise RuntimeError("mine")
    assert model.config._attn_implementation == "sdpa"
    assert not registry._PROBES


@pytest.mark.parametrize("name", ["llama", "gemma2", "llama4", "gpt-oss"])
def test_a_batch_padded_on_the_left_reads_as_each_sequence_alone(name: str) -> None:
    """The first token is the first that is none of the padding."""
    model = made(name)
    short = PROMPT[:41]
    padding = len(PROMPT) - len(short)
    ids = torch.tensor([PROMPT, (0,) * padding + short])
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    with torch.inference_mode(), everything_taken(model) as taken:
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    with torch.inference_mode(), everything_taken(model) as alone:
        model(torch.tensor([short]))
    of_short = {place.layer: one for place, one in alone}
    num_layers = 0
    for place, found in taken:
        if place.sequence != 1:
            continue
        tokens = torch.tensor(place.positions) >= 0
        wanted = of_short[place.layer]
        for name_of in ("entropy_nats", "first_mass", "band_mass", "band_entropy_nats"):
            x, y = getattr(found, name_of)[tokens], getattr(wanted, name_of)
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4, equal_nan=True)
        assert torch.equal(found.visible[tokens], wanted.visible)
        num_layers += 1
    assert num_layers == len(of_short) == model.config.num_hidden_layers


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral-window", "deepseek-v3"])
def test_decoding_with_a_cache_reads_as_the_whole_at_once(name: str) -> None:
    model = made(name)
    weights = eager_weights(model)
    entropy = [-torch.special.xlogy(w, w).sum(-1) for w in weights]
    first = [w[..., 0] for w in weights]
    with torch.inference_mode(), everything_taken(model) as taken:
        cache = None
        for start, end in ((0, 40), (40, 60), *((t, t + 1) for t in range(60, 70))):
            out = model(torch.tensor([PROMPT[start:end]]), cache=cache, use_cache=True)
            cache = out.cache
    rows: dict[int, list[int]] = {}
    for place, found in taken:
        at = list(place.positions)
        for readings, expected in ((found.entropy_nats, entropy), (found.first_mass, first)):
            wanted = expected[place.layer][:, at].T.float()
            torch.testing.assert_close(readings, wanted, atol=1e-4, rtol=0)
        rows.setdefault(place.layer, []).extend(place.positions)
    assert rows == {layer: list(range(70)) for layer in range(len(weights))}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_generation_goes_on_alike_while_its_newest_row_is_read(name: str) -> None:
    """As docs/probes.md shows it."""
    model = made(name)
    inputs = {
        "input_ids": torch.tensor([PROMPT]),
        "attention_mask": torch.ones(1, len(PROMPT), dtype=torch.int64),
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
    }
    plain = model.generate(**inputs)
    positions: list[tuple[int, ...]] = []
    with probing(
        model, choose=lambda count: [count - 1], take=lambda p, _: positions.append(p.positions)
    ):
        watched = model.generate(**inputs)
    assert torch.equal(plain, watched)
    layers = model.config.num_hidden_layers
    assert positions == [(t,) for t in range(69, 74) for _ in range(layers)]


def test_gradients_pass_through_a_watched_model() -> None:
    model = made("llama")
    ids = torch.tensor([PROMPT])
    with registry.attention_of(model, "eager"):
        model(ids)[0].square().mean().backward()
    own = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with everything_taken(model) as taken:
        model(ids)[0].square().mean().backward()
    assert not taken[0][1].entropy_nats.requires_grad
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, own[name], atol=1e-3, rtol=1e-2)
    capped = made("gemma2")
    with everything_taken(capped), pytest.raises(UnsupportedModel, match="no_grad"):
        capped(ids)


def test_dropout_is_the_models_own_and_in_no_reading() -> None:
    """Readings are of the weights before any is dropped."""
    model = made("gpt2-scaled")
    ids = torch.tensor([PROMPT])
    with torch.no_grad(), everything_taken(model) as still:
        model(ids)
    for part in model.modules():
        # The first layer's input stays as it was; only its attention drops.
        part.training = type(part).__name__ == "GPT2Attention"
    torch.manual_seed(0)
    with torch.no_grad(), everything_taken(model) as taken:
        first = model(ids)[0]
        second = model(ids)[0]
    assert not torch.equal(first, second)
    torch.testing.assert_close(taken[0][1].entropy_nats, still[0][1].entropy_nats)


def test_a_model_is_probed_once_at_a_time() -> None:
    model = made("llama")
    with everything_taken(model):
        with pytest.raises(BadUsage, match="already"), everything_taken(model):
            pass
        model(torch.tensor([PROMPT]))


def test_layers_and_rows_that_were_asked_for_are_read() -> None:
    model = made("llama")
    reading = read_model(model, PROMPT, rows=5, layers=(1,), name="mine")
    assert (reading.model, reading.rows, reading.tokens) == ("mine", 5, 70)
    assert [layer.layer for layer in reading.layers] == [1]
    assert all(head.rows == 5 for _, head in reading.heads())


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_both_ways_to_read_a_checkpoint_agree(
    family: str, family_dir: Callable[[str], Path]
) -> None:
    embedded = read_embedded(family_dir(family), PROMPT)
    through = read_prompt(family_dir(family), PROMPT)
    for (layer, one), (other_layer, other) in zip(embedded.heads(), through.heads(), strict=True):
        assert (layer, one.head) == (other_layer, other.head)
        for name in ("entropy_normalized", "sink_mass", "band_mass", "max_score"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [None, 20])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "gpt-oss", "deepseek-v3"])
def test_lower_precisions_are_read_too_and_near(
    name: str, rows: int | None, dtype: torch.dtype
) -> None:
    exact = read_model(made(name), PROMPT, rows=rows)
    lower = read_model(made(name).to(dtype), PROMPT, rows=rows)
    for (_, one), (_, other) in zip(exact.heads(), lower.heads(), strict=True):
        assert one.entropy_normalized == pytest.approx(other.entropy_normalized, abs=0.1)


# --- what is not understood is refused -----------------------------------------------------------


@pytest.mark.parametrize("name", OWN_CODE)
def test_a_model_with_attention_of_its_own_code_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModel, match="code of its own"):
        read_model(made(name), PROMPT)


def test_arguments_that_would_change_scores_are_refused() -> None:
    """A sparse attention's indices, T5's bias: SDPA would drop them without a word."""
    model = made("llama")
    module = model.model.layers[0].self_attn
    q = torch.randn(1, 4, 5, 16)
    k = torch.randn(1, 2, 5, 16)
    with probing(model, range, lambda *_: None):
        for extra in ("indices", "position_bias", "sinks", "a_name_of_tomorrow"):
            with pytest.raises(UnsupportedModel, match=extra):
                registry._attend(module, q, k, k, None, **{extra: torch.zeros(1, 4, 5, 5)})


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.tensor([[[[0.0, -0.5], [0.0, 0.0]]]]), "bias"),
        (torch.ones(2, 2), "shape"),
        (torch.tensor([[[[True, False]] * 2], [[[False, True]] * 2]]).transpose(0, 1), "shape"),
    ],
)
def test_masks_that_are_more_than_who_sees_what_are_refused(mask: torch.Tensor, said: str) -> None:
    model = made("llama")
    q, k = torch.randn(1, 4, 2, 16), torch.randn(1, 2, 2, 16)
    with (
        probing(model, range, lambda *_: None),
        pytest.raises(UnsupportedModel, match=said),
    ):
        registry._attend(model.model.layers[0].self_attn, q, k, k, mask)


def test_attention_other_than_the_one_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The readings would be of something that the model does not compute."""
    plain = registry._inner
    monkeypatch.setattr(registry, "_inner", lambda *asked: plain(*asked) * 1.01)
    model = made("opt")
    said = "layer 0's attention is not the one that was read"
    with (
        torch.inference_mode(),
        probing(model, lambda _: (5, 60), lambda *_: None),
        pytest.raises(UnsupportedModel, match=said),
    ):
        model(torch.tensor([PROMPT]))


def test_a_model_whose_own_attention_says_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A soft cap in the model's own code that the registry is not told of."""
    model = made("llama")
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.eager_attention_forward

    def capped(module: Any, q: torch.Tensor, *rest: Any, **settings: Any) -> Any:
        return plain(module, torch.tanh(q), *rest, **settings)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", capped)
    with pytest.raises(UnsupportedModel, match="own attention gives other outputs"):
        read_model(model, PROMPT)


def test_two_stacks_are_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.T5Config(
        vocab_size=320, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4
    )
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        read_model(model, PROMPT)
    config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        load_model(tmp_path)


def test_pickled_weights_are_not_loaded(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    import transformers

    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((family_dir("llama") / name).read_bytes())
    model = transformers.AutoModelForCausalLM.from_pretrained(family_dir("llama"))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="safetensors"):
        load_model(tmp_path)


def test_weights_that_transformers_does_not_load_are_a_sentence(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Not a traceback from inside: a shape that is not the configuration's."""
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_bytes((family_dir("llama") / "config.json").read_bytes())
    tensors = load_file(family_dir("llama") / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="transformers does not load it"):
        load_model(tmp_path)


def test_not_finite_numbers_are_told_by_the_reading_not_refused() -> None:
    model = made("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[20, 3] = torch.nan
    reading = read_model(model, PROMPT)
    bad = reading.layers[1].heads[1]
    assert bad.not_finite == bad.rows and bad.entropy_nats is None
    assert all(head.not_finite == 0 for head in reading.layers[0].heads)
