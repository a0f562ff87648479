"""The verdict on PEFT is what the real PEFT does, adapter by adapter."""

from __future__ import annotations

import json
import re
import warnings
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from tests.adapters.cases import ALL, BASES, Case, names, pairs, text, write
from tests.adapters.live import headers
from tests.adapters.peft_adapters import CASES, make_adapter, make_base, make_model, save_base
from ullage.adapters.check import check
from ullage.adapters.verdict import Judgement, ServeOptions, State
from ullage.anatomy import load, read_config
from ullage.anatomy.adapters.read import read_adapter
from ullage.anatomy.spec import ModelSpec
from ullage.errors import BadInput

USED = (State.APPLIED, State.WRONG_SCALE, State.SHAPE_MISMATCH, State.ALTERED)
IDS = torch.tensor([[3, 9, 27, 81, 5, 15, 45]])
OPTIONS = ServeOptions(engine="peft")
# Each verdict has to come up, or the comparison would show nothing.
EXPECTED = {
    "plain": "works", "dora": "works", "rslora": "works", "patterns": "works", "gpt2": "works",
    "moe experts": "works", "modules_to_save": "works", "vision-language": "works",
    "name kept": "works", "vera": "works", "prompt tuning": "works", "compiled": "no_effect",
    "fsdp layers": "no_effect", "one model short": "no_effect", "no prefix": "no_effect",
}  # fmt: skip


@lru_cache
def spec_of(kind: str) -> ModelSpec:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return load(save_base(kind, Path(folder) / "base")).anatomy.spec


def loaded(base: Any, path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(7)
        return peft.PeftModel.from_pretrained(base, str(path)).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # prefixes, by PEFT's own forward
        return model(input_ids=IDS).logits


@cache
def base_logits(kind: str) -> torch.Tensor:
    return logits(make_base(kind).eval())


def changed(model: Any, base: Any, path: Path) -> set[str]:
    """The parameters that loading gave other values than a new adapter of this configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.PeftConfig.from_pretrained(path)
        torch.manual_seed(7)
        fresh = peft.get_peft_model(base, config).state_dict()
    state = model.state_dict()
    return {
        name
        for name, value in state.items()
        # A alone changes nothing: a new B is zero.
        if not torch.equal(value, fresh[name]) and ".lora_A." not in name
    }


def same_words(message: str, error: str) -> bool:
    """Whether PEFT's text begins as the message says; the order of a printed set is chance."""
    words, given = re.findall(r"[\w.:]+", message), re.findall(r"[\w.:]+", error)
    return bool(words) and sorted(words) == sorted(given[: len(words)])


def agree(judged: Judgement, loads: set[str]) -> None:
    """What is applied has a parameter that loading changed, what is not has none."""
    for module in judged.modules:
        if module.target is None:
            continue
        target = re.sub(r"(\.experts)\.(gate_up|down)_proj$", r"\1.", module.target)
        prefix = f"base_model.model.{target}" if target else ""
        found = [name for name in loads if name.startswith(prefix)]
        assert bool(found) == (module.state in USED), module


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_is_what_peft_does(name: str, tmp_path: Path) -> None:
    kind = CASES[name].base
    path = make_adapter(name, tmp_path)
    judged = check(read_adapter(path), spec_of(kind), OPTIONS)
    assert judged.basis == "verified"
    assert judged.verdict == EXPECTED.get(name, judged.verdict)
    try:
        model = loaded(make_base(kind), path)
    except Exception as error:
        assert judged.verdict == "rejected", (name, error)
        assert same_words(judged.message or "", str(error))
        return
    got = logits(model)
    trained, base = logits(make_model(name)), base_logits(kind)
    same_as_trained = trained.shape == got.shape and torch.allclose(got, trained, atol=1e-4)
    assert same_as_trained == (judged.verdict == "works")
    if judged.verdict == "no_effect":
        assert torch.allclose(got, base, atol=1e-5)
    if CASES[name].method not in ("PromptTuningConfig", "PrefixTuningConfig",
                                  "PromptEncoderConfig"):  # fmt: skip
        agree(judged, changed(model, make_base(kind), path))


# Blocks that a configuration turns on, and layers of two kinds.
GEMMA4 = {
    "hidden_size_per_layer_input": 0, "global_head_dim": 16, "num_global_key_value_heads": 2,
    "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}  # fmt: skip
GEMMA4_MOE = {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
              "moe_intermediate_size": 32}  # fmt: skip
LATENT = {
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 32, "num_key_value_heads": 4, "qk_head_dim": 32,
    "rope_interleave": True,
}  # fmt: skip
CHOSEN: dict[str, dict[str, Any]] = {
    "gemma4-moe": text("Gemma4ForCausalLM", "gemma4_text", **GEMMA4_MOE),
    "gemma4-dense": text("Gemma4ForCausalLM", "gemma4_text", **GEMMA4),
    "gemma4-equal": text("Gemma4ForCausalLM", "gemma4_text",
                         **{**GEMMA4_MOE, "attention_k_eq_v": True}),
    "deepseek-mixed": text("DeepseekV3ForCausalLM", "deepseek_v3", **LATENT, q_lora_rank=32,
                           first_k_dense_replace=1),
    "deepseek-direct": text("DeepseekV3ForCausalLM", "deepseek_v3", **LATENT, q_lora_rank=None,
                            first_k_dense_replace=2),
    "qwen3-mixed": text(
        "Qwen3MoeForCausalLM", "qwen3_moe", num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[0], norm_topk_prob=True,
    ),
    "qwen2-mixed": text(
        "Qwen2MoeForCausalLM", "qwen2_moe", num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, decoder_sparse_step=1,
        mlp_only_layers=[0], num_key_value_heads=4,
    ),
}  # fmt: skip


def of_library(base: str) -> Any:
    """The case's base model as the library builds it."""
    return built({**BASES, **CHOSEN}[base])


def built(given: Any) -> Any:
    """A model of the configuration, with fixed random weights."""
    config = {key: value for key, value in given.items() if key not in ("torch_dtype", "dtype")}
    name = config.pop("architectures")[0]
    if "text_config" in config:
        config["text_config"] = {k: v for k, v in config["text_config"].items()
                                 if k not in ("torch_dtype", "dtype")}  # fmt: skip
    for part in (config, config.get("text_config", {})):
        part.setdefault("pad_token_id", 0)
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config)).eval()


EACH = ("w1", "w2", "w3")
OLD_MIXTRAL = pairs(names(*(f"block_sparse_moe.experts.{e}.{w}" for e in range(4) for w in EACH)))
QWEN_SIDES = {"gate_proj": (64, 32), "up_proj": (64, 32), "down_proj": (32, 64)}
OLD_QWEN = pairs(
    names(*(f"mlp.experts.{e}.{p}" for e in range(4) for p in QWEN_SIDES)), sides=QWEN_SIDES
)
QV = names("self_attn.q_proj", "self_attn.v_proj")
# What transformers 4 trained, on the library of today; and what PEFT's own settings do.
OLDER: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]], str]] = {
    "experts one by one": ("mixtral", {"target_modules": EACH}, OLD_MIXTRAL, "works"),
    "all of them by all-linear": (
        "mixtral", {"target_modules": "all-linear"}, OLD_MIXTRAL, "works"),
    "rsLoRA doubles its rank": (
        "mixtral", {"target_modules": EACH, "use_rslora": True}, OLD_MIXTRAL, "partial"),
    "half of what is fused": (
        "mixtral", {"target_modules": ["w1", "w2"]}, OLD_MIXTRAL, "rejected"),
    "an expert short": (
        "mixtral", {"target_modules": EACH},
        {k: v for k, v in OLD_MIXTRAL.items() if "experts.3" not in k}, "rejected"),
    "Qwen's experts": ("qwen3-moe", {"target_modules": list(QWEN_SIDES)}, OLD_QWEN, "works"),
    "Qwen's experts by expression": (
        "qwen3-moe", {"target_modules": r".*mlp\.experts.*_proj"}, OLD_QWEN, "works"),
    "the router": (
        "mixtral", {"target_modules": ["gate"]}, pairs(names("block_sparse_moe.gate")), "works"),
    "no prefix where keys are converted": ("mixtral", {}, pairs(QV, stem=""), "works"),
    "the tree before the language model had its own": ("llava", {}, pairs(
        names("self_attn.q_proj", "self_attn.v_proj", tree="language_model.model.layers.{i}.")
    ), "works"),
    "a head that is asked for and not stored": (
        "llama", {"modules_to_save": ["lm_head"]}, pairs(QV), "rejected"),
    "a classifier without its head": (
        "llama-classes", {"task_type": "SEQ_CLS"}, pairs(QV), "rejected"),
    "layers by number": ("llama", {"layers_to_transform": [1]}, pairs(QV), "partial"),
    "layers by number and name": (
        "llama", {"layers_to_transform": [0, 1], "layers_pattern": "layers"}, pairs(QV), "works"),
    "an exclusion": ("llama", {"exclude_modules": ["layers.0.self_attn.q_proj"]}, pairs(QV),
                     "partial"),
    "an expression": ("llama", {"target_modules": r".*\.1\..*(q|v)_proj"}, pairs(QV), "partial"),
    "an expression of a name alone": ("llama", {"target_modules": "q_proj"}, pairs(QV),
                                      "rejected"),
    "no targets": ("llama", {"target_modules": ["w1"]}, pairs(QV), "rejected"),
    "a router that is no parameter's target": (
        "gpt-oss", {"target_modules": ["router"]}, pairs(names("mlp.router"),
                                                         sides={"router": (64, 4)}), "rejected"),
    "a path that its own prefix completes": ("llava", {}, pairs(
        names("self_attn.q_proj", "self_attn.v_proj", tree="language_model.layers.{i}.")
    ), "no_effect"),
    "no targets named": ("llama", {"target_modules": None}, pairs(QV), "works"),
    "names without their ending": ("llama", {}, pairs(QV, leaf=".lora_{}"), "no_effect"),
    "no alpha": ("llama", {"lora_alpha": None}, pairs(QV), "rejected"),
    "no rank": ("llama", {"r": None}, pairs(QV), "rejected"),
    "stacked experts by their older path": ("mixtral", {
        "target_modules": [], "target_parameters": [
            "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}, {
        f"base_model.model.model.layers.{i}.block_sparse_moe.experts.{inner}lora_{m}.weight": shape
        for i in range(2) for inner, sides in (("base_layer.", (64, 256)), ("", (128, 64)))
        for m, shape in (("A", (32, sides[0])), ("B", (sides[1], 32)))}, "works"),
    "a head": ("llama", {"target_modules": ["lm_head", "q_proj", "v_proj"]},
               pairs(["lm_head", *QV]), "works"),
    "all-linear leaves the head": ("llama", {"target_modules": "all-linear"},
                                   pairs(["lm_head", *QV]), "partial"),
    "a larger vocabulary's embedding": ("llama", {"target_modules": ["embed_tokens"]}, {
        "base_model.model.model.embed_tokens.lora_embedding_A": (8, 256),
        "base_model.model.model.embed_tokens.lora_embedding_B": (64, 8),
        "base_model.model.model.embed_tokens.base_layer.weight": (258, 64)}, "rejected"),
    "a tower": ("qwen2.5-vl", {"target_modules": ["qkv"]},
                pairs(names("attn.qkv", tree="model.visual.blocks.{i}.")), "works"),
    "a Conv1D": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True},
                 pairs(names("attn.c_attn", tree="transformer.h.{i}.")), "works"),
    "a mixture stacked as it was trained": ("gpt-oss", {
        "target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}, {
        f"base_model.model.model.layers.{i}.mlp.experts.lora_{m}.weight": shape
        for i in range(2) for m, shape in (("A", (32, 128)), ("B", (64, 32)))}, "works"),
}  # fmt: skip


@pytest.mark.parametrize("name", OLDER)
def test_older_trees_and_targets_do_what_is_said(name: str, tmp_path: Path) -> None:
    base, config, shapes, verdict = OLDER[name]
    case = Case(base, shapes, verdict, 0, 0, config=config)
    assert as_peft_does(case, tmp_path / "adapter").verdict == verdict


def stacked(owner: str, width: int) -> dict[str, tuple[int, ...]]:
    """Pairs of both parameters of four stacked experts, in both layers."""
    return {
        f"base_model.model.model.layers.{i}.{owner}.{inner}lora_{m}.weight": shape
        for i in range(2) for inner, sides in (("base_layer.", (64, 2 * width)), ("", (width, 64)))
        for m, shape in (("A", (32, sides[0])), ("B", (sides[1], 32)))
    }  # fmt: skip


def of(layer: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {key: shape for key, shape in shapes.items() if f".layers.{layer}." in key}


ROUTER = pairs(names("router.proj"), sides={"router.proj": (64, 4), "proj": (64, 4)})
DENSE = pairs(names("mlp.gate_proj", "mlp.down_proj"))
SHARED_SIDES = {"gate_proj": (64, 32), "up_proj": (64, 32), "down_proj": (32, 64)}
SHARED = pairs(names(*(f"mlp.shared_experts.{p}" for p in SHARED_SIDES)), sides=SHARED_SIDES)
SHARED_ONE = {key.replace("shared_experts", "shared_expert"): s for key, s in SHARED.items()}
BOTH = {"target_modules": ["gate_proj", "down_proj", "up_proj"]}
STACKED = {"target_modules": [], "target_parameters": ["experts.gate_up_proj",
                                                       "experts.down_proj"]}  # fmt: skip
QUERIES = pairs(names("self_attn.q_a_proj", "self_attn.q_b_proj"),
                sides={"q_a_proj": (64, 32), "q_b_proj": (32, 128)})  # fmt: skip
DIRECT = pairs(names("self_attn.q_proj"), sides={"q_proj": (64, 128)})
PICKED: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]], str]] = {
    "a router beside the MLP": ("gemma4-moe", {"target_modules": ["router.proj"]}, ROUTER,
                                "works"),
    "experts beside the MLP": ("gemma4-moe", STACKED, stacked("experts", 32), "works"),
    "the MLP beside experts": ("gemma4-moe", BOTH, DENSE, "works"),
    "experts of a dense model": (
        "gemma4-dense", {**STACKED, "target_modules": ["gate_proj", "down_proj"]},
        {**DENSE, **stacked("experts", 32)}, "partial"),
    "values in layers that have no projection of them": (
        "gemma4-equal", {"target_modules": ["q_proj", "v_proj"]}, pairs(QV), "partial"),
    "dense layers' own": ("qwen2-mixed", BOTH, of(0, DENSE), "works"),
    "dense layers' names in all": ("qwen2-mixed", BOTH, DENSE, "partial"),
    "sparse layers' shared expert": ("qwen2-mixed", BOTH, of(1, SHARED_ONE), "works"),
    "a shared expert in all": ("qwen2-mixed", BOTH, SHARED_ONE, "partial"),
    # PEFT turns these targets into ones of stacked experts in classes whose keys it converts.
    "dense layers' targets taken for experts'": ("deepseek-mixed", BOTH, of(0, DENSE),
                                                 "no_effect"),
    "shared experts' taken too": ("deepseek-mixed", BOTH, of(1, SHARED), "no_effect"),
    "Qwen's dense layer": ("qwen3-mixed", {
        "target_modules": r".*\.0\.mlp\..*_proj"}, of(0, DENSE), "no_effect"),
    "stacked experts in all": ("deepseek-mixed", STACKED, stacked("mlp.experts", 32), "partial"),
    "queries of two": ("deepseek-mixed", {"target_modules": ["q_a_proj", "q_b_proj"]}, QUERIES,
                       "works"),
    "queries of one": ("deepseek-direct", {"target_modules": ["q_proj"]}, DIRECT, "works"),
    "Qwen's sparse layer": ("qwen3-mixed", STACKED, of(1, stacked("mlp.experts", 32)), "works"),
}  # fmt: skip


@pytest.mark.parametrize("name", PICKED)
def test_blocks_that_a_configuration_picks_are_known(name: str, tmp_path: Path) -> None:
    base, config, shapes, verdict = PICKED[name]
    case = Case(base, shapes, verdict, 0, 0, config=config)
    judged = as_peft_does(case, tmp_path / "adapter")
    assert (judged.verdict, judged.basis) == (verdict, "verified")


HYBRID = text(
    "NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="*E", mamba_num_heads=8,
    mamba_head_dim=16, n_groups=2, ssm_state_size=16, n_routed_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=32, moe_shared_expert_intermediate_size=32, n_shared_experts=1,
)  # fmt: skip
NEMOTRON = pairs(["backbone.layers.1.mixer.experts.0.up_proj"], sides={"up_proj": (64, 32)})


def test_what_the_record_cannot_tell_is_unknown_and_not_verified(tmp_path: Path) -> None:
    """Modules that the checkpoint lists under names which the library's tree has nowhere."""
    path = write(Case("x", NEMOTRON, "", 0, 0, config={"target_modules": ["up_proj"]}), tmp_path)
    spec = read_config(json.loads(json.dumps(HYBRID)), file="x").spec
    judged = check(read_adapter(path), spec, OPTIONS)
    assert (judged.verdict, judged.basis) == ("unknown", "source")


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", ALL)
def test_cases_of_the_field_do_what_is_said(name: str, which: int, tmp_path: Path) -> None:
    as_peft_does(ALL[name][which], tmp_path / "adapter")


def as_peft_does(case: Case, folder: Path) -> Judgement:
    path = write(case, folder)
    spec = read_config(json.loads(json.dumps({**BASES, **CHOSEN}[case.base])), file="base").spec
    judged = check(read_adapter(path), spec, OPTIONS)
    base = of_library(case.base)
    try:
        model = loaded(base, path)
    except Exception as error:
        assert judged.verdict == "rejected", error
        assert same_words(judged.message or "", str(error))
        return judged
    assert judged.verdict != "rejected", judged.message
    if case.config.get("lora_alpha") == 0:  # it is loaded, and then multiplied by nothing
        assert judged.verdict == "no_effect"
        return judged
    loads = changed(model, of_library(case.base), path)
    assert bool(loads) == (judged.verdict in ("works", "partial"))
    agree(judged, loads)
    return judged


LIVE = Path(__file__).with_name("live")
ASKED = [json.loads(line) for line in (LIVE / "outcomes.jsonl").read_text().splitlines()]
# Values that are zero (told by a rule alone), a scale of zero, a file without tensors, and methods
# that want packages or settings of their own.
APART = ("zero-b", "zero-b-one", "config-alpha-0", "empty", "config-loftq", "config-bdlora")


@pytest.mark.slow
@pytest.mark.parametrize("record", ASKED, ids=lambda record: record["name"])
def test_adapters_that_were_asked_of_the_server(record: dict[str, Any], tmp_path: Path) -> None:
    """The adapters of the running server's record, here by PEFT."""
    if record["name"].partition("/")[2] in APART:
        pytest.skip("judged apart")
    config = json.loads((LIVE / "bases.json").read_text())[record["model"]]
    headers.write(record["files"], tmp_path / "adapter")
    path = tmp_path / "adapter"
    spec = read_config(json.loads(json.dumps(config)), file="base").spec
    try:
        judged = check(read_adapter(path), spec, OPTIONS)
    except BadInput:
        judged = None
    try:
        model = loaded(built(config), path)
    except Exception as error:
        assert judged is None or judged.verdict == "rejected", error
        assert judged is None or same_words(judged.message or "", str(error))
        return
    assert judged is not None
    loads = changed(model, built(config), path)
    assert bool(loads) == (judged.verdict in ("works", "partial"))
    agree(judged, loads)
