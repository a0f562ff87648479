"""Adapters that nobody reported: what engines make of them, by their code, on bases of many kinds.

Each was thought out beforehand from the engine's source (or asked of a running one where said).
"""

from __future__ import annotations

import peft
import pytest
import transformers

from tests.adapters.cases import BASES as WRAPPERS
from tests.adapters.cases import QV, SIDES, Case, names, pairs, text, write
from ullage.adapters.check import check
from ullage.adapters.rewriting.fix import fix
from ullage.adapters.rewriting.placing import FixRefused
from ullage.adapters.verdict import Judgement, ServeOptions
from ullage.anatomy import load, read_config
from ullage.anatomy.adapters.read import read_adapter
from ullage.errors import BadUsage

LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 2, "n_routed_experts": 4,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
}  # fmt: skip
DENSE_ONLY = {**LATENT, "num_hidden_layers": 2}
LATENT_SIDES = {
    **SIDES, "q_a_proj": (64, 32), "q_b_proj": (32, 4 * 192), "kv_a_proj_with_mqa": (64, 576),
    "kv_b_proj": (512, 4 * 256), "o_proj": (4 * 128, 64),
}  # fmt: skip
INDEXED = {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 16}
BASES = {
    "deepseek-v2": text("DeepseekV2ForCausalLM", "deepseek_v2", **DENSE_ONLY),
    "deepseek-v3.2": text("DeepseekV32ForCausalLM", "deepseek_v32", **DENSE_ONLY, **INDEXED),
    "nemotron-h": text(
        "NemotronHForCausalLM",
        "nemotron_h",
        hybrid_override_pattern="M*",
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=16,
        conv_kernel=4,
        expand=2,
        use_conv_bias=True,
        mlp_hidden_act="relu2",
    ),
    "nobody": text("NobodysOwnForCausalLM", "nobodys_own"),
    "llama": text("LlamaForCausalLM", "llama"),
}

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 256, "max_position_embeddings": 64,
}  # fmt: skip


def judged(base: str, shapes, folder, **options) -> Judgement:
    spec = read_config(BASES[base], file=base).spec
    case = Case(base, shapes, "", 0, 0, config=options.pop("config", {}))
    return check(read_adapter(write(case, folder / "adapter")), spec, ServeOptions(**options))


def fates(judgement: Judgement) -> dict[str, str]:
    return {m.module.rpartition(".")[2]: m.state.value for m in judgement.modules}


def latent(*leaves: str):
    return pairs(names(*(f"self_attn.{leaf}" for leaf in leaves)), sides=LATENT_SIDES)


@pytest.mark.parametrize("base", ["deepseek-v2", "deepseek-v3.2"])
def test_vllm_serves_latent_attention_without_the_adapter_of_kv_b_proj(base, tmp_path):
    """Asked of vLLM 0.32 on a CPU: log probabilities of the base, to the last digit shown."""
    alone = judged(base, latent("kv_b_proj"), tmp_path)
    assert (alone.verdict, fates(alone)) == ("no_effect", {"kv_b_proj": "ignored"})
    every = judged(base, latent("q_b_proj", "kv_b_proj", "o_proj"), tmp_path)
    assert every.verdict == "partial"
    assert fates(every) == {"q_b_proj": "applied", "kv_b_proj": "ignored", "o_proj": "applied"}


@pytest.mark.parametrize("engine", ["sglang", "peft"])
def test_engines_that_correct_for_it_apply_kv_b_proj(engine, tmp_path):
    """SGLang 0.5.23: srt/lora/deepseek_mla_correction.py."""
    shapes = latent("kv_b_proj", "o_proj")
    config = {"target_modules": ["kv_b_proj", "o_proj"]}
    assert judged("deepseek-v2", shapes, tmp_path, engine=engine, config=config).verdict == "works"


@pytest.mark.parametrize("leaf", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"])
def test_the_other_projections_of_latent_attention_are_applied(leaf, tmp_path):
    judgement = judged("deepseek-v2", latent(leaf), tmp_path)
    assert judgement.verdict == "works"
    assert not [f.id for f in judgement.findings if f.state == "fired" and f.severity >= 2]


def test_a_class_that_nothing_is_known_of_is_not_said_to_work(tmp_path):
    judgement = judged("nobody", pairs(names(*QV)), tmp_path)
    assert judgement.verdict == "unknown"
    assert any("NobodysOwnForCausalLM" in note for note in judgement.notes)


def test_what_decides_an_unknown_verdict_is_named(tmp_path):
    config = {"rank_pattern": {"q_proj": 4}}
    judgement = judged("llama", pairs(names(*QV)), tmp_path, version="0.20", config=config)
    assert judgement.verdict == "unknown"
    assert any("rank_pattern" in note for note in judgement.notes)


def test_no_rewriting_is_advised_where_none_helps(tmp_path):
    judgement = judged("nobody", pairs(names("attn.c_attn", tree="transformer.h.{i}.")), tmp_path)
    said = [f.remedy for f in judgement.findings if f.state == "fired" and "L0" in f.id]
    assert said
    assert not any("adapter fix" in remedy for remedy in said)


def test_a_tower_of_the_language_models_sizes_is_not_put_into_the_language_model(tmp_path):
    """Its layer's number and its role would lead there; only what stands before says otherwise."""
    shapes = pairs(["model.vision_tower.encoder.layers.0.self_attn.q_proj"])
    adapter = read_adapter(write(Case("gemma3", shapes, "", 0, 0), tmp_path / "made"))
    spec = read_config(WRAPPERS["gemma3"], file="base").spec
    with pytest.raises(FixRefused, match=r"towers"):
        fix(adapter, spec, ServeOptions(), tmp_path / "fixed")
    assert not (tmp_path / "fixed").exists()


def test_matrices_without_values_change_nothing(tmp_path):
    shapes = pairs(names(*QV), rank=0)
    assert judged("llama", shapes, tmp_path).verdict == "no_effect"


def test_a_convolution_that_a_mixer_only_reads_is_left_out(tmp_path):
    """vLLM 0.32: layers/mamba/mamba_mixer2.py gives conv1d.weight to causal_conv1d_fn."""
    shapes = pairs(["backbone.layers.0.mixer.conv1d", "backbone.layers.0.mixer.out_proj"], sides={
        "conv1d": (4, 192), "out_proj": (128, 64)})  # fmt: skip
    assert fates(judged("nemotron-h", shapes, tmp_path)) == {
        "conv1d": "ignored", "out_proj": "applied",
    }  # fmt: skip


def test_a_rewritten_adapter_does_not_go_into_the_original(tmp_path):
    made = write(Case("llama", pairs(names(*QV)), "", 0, 0), tmp_path / "made")
    spec = read_config(BASES["llama"], file="base").spec
    with pytest.raises(BadUsage, match=r"lies inside the adapter"):
        fix(read_adapter(made), spec, ServeOptions(), made / "fixed")
    assert not (made / "fixed").exists()


def test_the_embedded_engine_refuses_a_tower_in_words(tmp_path):
    made = write(Case("gemma3", pairs(names(*QV)), "", 0, 0), tmp_path / "made")
    spec = read_config(WRAPPERS["gemma3"], file="base").spec
    judgement = check(read_adapter(made), spec, ServeOptions(engine="ullage"))
    assert judgement.verdict == "rejected"
    assert judgement.message is not None
    assert "the vision tower is not run by the embedded engine" in judgement.message


@pytest.mark.parametrize("kind", ["Bert", "Qwen3"])
def test_an_adapter_of_a_model_without_a_head_works_under_peft(kind, tmp_path):
    """Encoders and embedding models: AutoModel's own tree, as the real peft saves it."""
    heads = {} if kind == "Bert" else {"num_key_value_heads": 2, "head_dim": 16}
    base = getattr(transformers, f"{kind}Model")(
        getattr(transformers, f"{kind}Config")(**TINY, **heads)
    )
    targets = ["query", "value"] if kind == "Bert" else ["q_proj", "v_proj"]
    base.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    peft.get_peft_model(base, settings).save_pretrained(tmp_path / "made")
    adapter, spec = read_adapter(tmp_path / "made"), load(tmp_path / "base").anatomy.spec
    for engine in ("vllm", "peft"):
        judgement = check(adapter, spec, ServeOptions(engine=engine))
        assert (judgement.verdict, judgement.matched) == ("works", 4), engine


def test_names_of_the_class_with_a_head_lead_nowhere_without_it(tmp_path):
    spec = read_config({**BASES["llama"], "architectures": ["LlamaModel"]}, file="base").spec
    made = write(Case("llama", pairs(names(*QV)), "", 0, 0), tmp_path / "made")
    assert check(read_adapter(made), spec, ServeOptions(engine="peft")).verdict == "no_effect"


def test_parts_that_an_engine_takes_are_not_called_foreign(tmp_path):
    made = write(Case("phi3", pairs(names(*QV)), "", 0, 0), tmp_path / "made")
    spec = read_config(WRAPPERS["phi3"], file="base").spec
    judgement = check(read_adapter(made), spec, ServeOptions(engine="sglang"))
    assert judgement.verdict == "works"
    assert not [f.id for f in judgement.findings if f.state == "fired" and f.severity >= 2]


def test_a_router_that_the_runner_holds_too_is_left_out_of_classes_not_built_too(tmp_path):
    """vLLM 0.32: deepseek_v2.py gives gate=self.gate to the experts; V3.2 uses it too."""
    base = {**BASES["deepseek-v3.2"], "first_k_dense_replace": 0}
    spec = read_config(base, file="base").spec
    shapes = pairs(names("mlp.gate"), sides={"gate": (64, 4)})
    made = write(Case("deepseek-v3.2", shapes, "", 0, 0), tmp_path / "made")
    assert check(read_adapter(made), spec, ServeOptions()).verdict == "no_effect"
    alone = ServeOptions(lora_target_modules=("gate",))
    assert check(read_adapter(made), spec, alone).verdict == "works"
