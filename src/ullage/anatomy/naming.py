"""How each family names its tensors: rows of data, one per model type, each a change to another.

Holds names and layouts only; which tensors exist and their shapes is `tensors.py`. Facts were read
from the modules of transformers 5.24 and the weight mappers of vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

ExpertLayout = Literal["each", "stacked", "stacked_in_out", "stacked_split"]
"""How routed experts lie on disk.

`each`: one matrix per expert. `stacked`: [experts, out, in], gate over up in one tensor.
`stacked_in_out`: the same with [experts, in, out]. `stacked_split`: [experts, out, in] with gate
and up apart.
"""

Scope = Literal["model", "layer", "experts", "head", "mtp_layer", "mtp"]


@dataclass(frozen=True, slots=True)
class Extra:
    """A tensor that only this family has. `shape` mixes numbers and the names of sizes.

    Sizes: H hidden, V vocabulary, E experts, D head_dim of the layer, M the embedding's width.
    `scope` says how often: once per model, per layer, per layer with experts, with a masked-LM
    head, per multi-token-prediction layer, once for all of those.
    """

    scope: Scope
    path: str
    shape: tuple[int | str, ...]
    role: str = "norm"
    linear: bool = False
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One family's names, as changes to the row called `base`.

    `paths` maps a slot to a path; a path may hold {root} and the other prefix slots, {i} for the
    layer, {e} for the expert. `transposed`: linears are stored [in, out]. `parallel_norms`: how
    many norms a layer has whose attention and MLP run side by side. `encoder` names the row of an
    encoder-decoder's other stack. `mtp` is the path of a multi-token-prediction layer, None when
    it is not known; `mtp_from_end` counts those layers on from the last decoder layer.
    """

    base: str | None = "llama"
    paths: dict[str, str] = field(default_factory=dict)
    experts: ExpertLayout | None = None
    transposed: bool | None = None
    parallel_norms: int | None = None
    first_norm: bool | None = None
    key_bias: bool | None = None
    final_norm_after_mtp: bool | None = None
    extras: tuple[Extra, ...] = ()
    encoder: str | None = None
    mtp: str | None = None
    mtp_from_end: bool | None = None


@dataclass(frozen=True, slots=True)
class Naming:
    """A row with everything inherited and every prefix filled in; {i} and {e} remain."""

    key: str
    known: bool
    paths: dict[str, str]
    experts: ExpertLayout
    transposed: bool
    parallel_norms: int
    first_norm: bool
    key_bias: bool
    extras: tuple[Extra, ...]
    encoder: str | None
    mtp: str | None
    mtp_from_end: bool


_LLAMA = {
    "root": "model",
    "layer": "{root}.layers.{i}",
    "embed": "{root}.embed_tokens",
    "positions": "{root}.embed_positions",
    "token_types": "{root}.token_type_embeddings",
    "embed_norm": "{root}.embed_layernorm",
    "project_in": "{root}.project_in",
    "project_out": "{root}.project_out",
    "final_norm": "{root}.norm",
    "lm_head": "lm_head",
    "lm_head_bias": "{lm_head}.bias",
    # inside a layer
    "pre1": "input_layernorm",
    "post1": "post_attention_layernorm",
    "pre2": "post_attention_layernorm",
    "post2": "post_feedforward_layernorm",
    "attn": "self_attn",
    "q": "{attn}.q_proj",
    "k": "{attn}.k_proj",
    "v": "{attn}.v_proj",
    "o": "{attn}.o_proj",
    "q_norm": "{attn}.q_norm",
    "k_norm": "{attn}.k_norm",
    "sinks": "{attn}.sinks",
    "head_gate": "{attn}.g_proj",
    "relative_bias": "{attn}.relative_attention_bias",
    "cross": "encoder_attn",
    "cross_norm": "encoder_attn_layer_norm",
    "cross_q": "{cross}.q_proj",
    "cross_k": "{cross}.k_proj",
    "cross_v": "{cross}.v_proj",
    "cross_o": "{cross}.out_proj",
    # latent attention and indexers
    "q_a": "{attn}.q_a_proj",
    "q_a_norm": "{attn}.q_a_layernorm",
    "q_b": "{attn}.q_b_proj",
    "kv_a": "{attn}.kv_a_proj_with_mqa",
    "kv_a_norm": "{attn}.kv_a_layernorm",
    "kv_b": "{attn}.kv_b_proj",
    "index": "{attn}.indexer",
    "index_q": "{index}.wq_b",
    "index_k": "{index}.wk",
    "index_norm": "{index}.k_norm",
    "index_weights": "{index}.weights_proj",
    "sparse_q": "{attn}.index_q_proj",
    "sparse_k": "{attn}.index_k_proj",
    "sparse_q_norm": "{attn}.index_q_norm",
    "sparse_k_norm": "{attn}.index_k_norm",
    # recurrent mixers
    "mamba": "mamba",
    "linear": "linear_attn",
    "conv": "conv",
    # feed-forward
    "mlp": "mlp",
    "gate": "{mlp}.gate_proj",
    "up": "{mlp}.up_proj",
    "down": "{mlp}.down_proj",
    "moe": "mlp",
    "router": "{moe}.gate",
    "router_bias": "{router}.e_score_correction_bias",
    "hash_table": "{router}.tid2eid",
    "experts": "{moe}.experts",
    "e_gate": "{experts}.{e}.gate_proj",
    "e_up": "{experts}.{e}.up_proj",
    "e_down": "{experts}.{e}.down_proj",
    "e_gate_up": "{experts}.gate_up_proj",
    "e_all_up": "{experts}.up_proj",
    "e_all_down": "{experts}.down_proj",
    "stacked_suffix": "",
    "stacked_bias": "_bias",
    "shared": "{moe}.shared_experts",
    "s_gate": "{shared}.gate_proj",
    "s_up": "{shared}.up_proj",
    "s_down": "{shared}.down_proj",
    "shared_gate": "{moe}.shared_expert_gate",
    "latent_in": "{moe}.fc1_latent_proj",
    "latent_out": "{moe}.fc2_latent_proj",
    "dense": "mlp",
    "dense_gate": "{dense}.gate_proj",
    "dense_up": "{dense}.up_proj",
    "dense_down": "{dense}.down_proj",
    # inputs per layer (Gemma)
    "ple_embed": "{root}.embed_tokens_per_layer",
    "ple_projection": "{root}.per_layer_model_projection",
    "ple_norm": "{root}.per_layer_projection_norm",
    "ple_gate": "per_layer_input_gate",
    "ple_out": "per_layer_projection",
    "ple_post_norm": "post_per_layer_input_norm",
}

_MIXTRAL = {
    "moe": "block_sparse_moe",
    "e_gate": "{experts}.{e}.w1",
    "e_up": "{experts}.{e}.w3",
    "e_down": "{experts}.{e}.w2",
}
_FUSED_QKV_H = {
    "qkv": "{attn}.query_key_value",
    "o": "{attn}.dense",
    "up": "{mlp}.dense_h_to_4h",
    "down": "{mlp}.dense_4h_to_h",
}
_TRANSFORMER_H = {
    "root": "transformer",
    "layer": "{root}.h.{i}",
    "embed": "{root}.wte",
    "positions": "{root}.wpe",
    "final_norm": "{root}.ln_f",
    "pre1": "ln_1",
    "pre2": "ln_2",
    "attn": "attn",
}
_BERT = {
    "root": "bert",
    "layer": "{root}.encoder.layer.{i}",
    "embed": "{root}.embeddings.word_embeddings",
    "positions": "{root}.embeddings.position_embeddings",
    "token_types": "{root}.embeddings.token_type_embeddings",
    "embed_norm": "{root}.embeddings.LayerNorm",
    "attn": "attention.self",
    "q": "{attn}.query",
    "k": "{attn}.key",
    "v": "{attn}.value",
    "o": "attention.output.dense",
    "post1": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "post2": "output.LayerNorm",
    "lm_head": "cls.predictions.decoder",
    "lm_head_bias": "cls.predictions.bias",
}
_BART_STACK = {
    "embed": "model.shared",
    "layer": "{root}.layers.{i}",
    "embed_norm": "{root}.layernorm_embedding",
    "final_norm": "{root}.layer_norm",
    "o": "{attn}.out_proj",
    "pre1": "self_attn_layer_norm",
    "post1": "self_attn_layer_norm",
    "up": "fc1",
    "down": "fc2",
    "pre2": "final_layer_norm",
    "post2": "final_layer_norm",
}
_T5_STACK = {
    "embed": "shared",
    "layer": "{root}.block.{i}",
    "final_norm": "{root}.final_layer_norm",
    "attn": "layer.0.SelfAttention",
    "q": "{attn}.q",
    "k": "{attn}.k",
    "v": "{attn}.v",
    "o": "{attn}.o",
    "pre1": "layer.0.layer_norm",
    "gate": "{mlp}.wi_0",
    "up": "{mlp}.wi_1",
    "up_plain": "{mlp}.wi",
    "down": "{mlp}.wo",
}
_HYBRID_HEAD = {
    "root": "backbone",
    "embed": "{root}.embeddings",
    "final_norm": "{root}.norm_f",
    "pre1": "norm",
    "pre2": "norm",
    "attn": "mixer",
    "mamba": "mixer",
    "mlp": "mixer",
    "moe": "mixer",
}
_FEED_FORWARD = {"mlp": "feed_forward", "moe": "feed_forward", "pre2": "pre_ff_layernorm"}
_W123 = {"gate": "{mlp}.w1", "up": "{mlp}.w3", "down": "{mlp}.w2"}
_SANDWICH = {"pre2": "pre_feedforward_layernorm"}

_DEEPSEEK_MTP = (
    Extra("mtp_layer", "enorm.weight", ("H",)),
    Extra("mtp_layer", "hnorm.weight", ("H",)),
    Extra("mtp_layer", "eh_proj.weight", ("H", "2H"), "mtp", linear=True),
    Extra("mtp_layer", "shared_head.norm.weight", ("H",)),
    Extra("mtp_layer", "shared_head.head.weight", ("V", "H"), "lm_head"),
    Extra("mtp_layer", "embed_tokens.weight", ("V", "H"), "embed"),
)
_QWEN_MTP = (
    Extra("mtp", "mtp.fc.weight", ("H", "2H"), "mtp", linear=True),
    Extra("mtp", "mtp.norm.weight", ("H",)),
    Extra("mtp", "mtp.pre_fc_norm_embedding.weight", ("H",)),
    Extra("mtp", "mtp.pre_fc_norm_hidden.weight", ("H",)),
)
_GEMMA4_MOE = (
    Extra("layer", "layer_scalar", (1,), "scale"),
    Extra("experts", "router.scale", ("H",), "scale"),
    Extra("experts", "router.per_expert_scale", ("E",), "scale"),
    Extra("experts", "post_feedforward_layernorm_1.weight", ("H",)),
    Extra("experts", "post_feedforward_layernorm_2.weight", ("H",)),
    Extra("experts", "pre_feedforward_layernorm_2.weight", ("H",)),
)


def _mlm_head(path: str, norm: str, dense: str = "dense") -> tuple[Extra, ...]:
    return (
        Extra("head", f"{path}{dense}.weight", ("M", "H"), "lm_head", linear=True),
        Extra("head", f"{path}{dense}.bias", ("M",), "bias"),
        Extra("head", f"{path}{norm}.weight", ("M",)),
        Extra("head", f"{path}{norm}.bias", ("M",)),
    )


ROWS: dict[str, Row] = {
    "llama": Row(None, _LLAMA),
    # dense decoders
    "phi": Row(
        paths={
            "o": "{attn}.dense",
            "up": "{mlp}.fc1",
            "down": "{mlp}.fc2",
            "final_norm": "{root}.final_layernorm",
        }
    ),
    "phi3": Row(paths={"qkv": "{attn}.qkv_proj", "gate_up": "{mlp}.gate_up_proj"}),
    "gemma2": Row(paths=_SANDWICH),
    "glm": Row(paths={"gate_up": "{mlp}.gate_up_proj"}),
    "glm4": Row("glm", {"post1": "post_self_attn_layernorm", "post2": "post_mlp_layernorm"}),
    "starcoder2": Row(paths={"up": "{mlp}.c_fc", "down": "{mlp}.c_proj"}),
    "gpt2": Row(
        paths=_TRANSFORMER_H
        | {"qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
        transposed=True,
    ),
    "gpt_bigcode": Row("gpt2", transposed=False),
    "gpt_neo": Row(
        paths=_TRANSFORMER_H
        | {"attn": "attn.attention", "o": "{attn}.out_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    ),
    "gptj": Row(
        paths=_TRANSFORMER_H | {"o": "attn.out_proj", "up": "mlp.fc_in", "down": "mlp.fc_out"}
    ),
    "codegen": Row("gptj", {"qkv": "attn.qkv_proj"}),
    "gpt_neox": Row(
        paths=_FUSED_QKV_H
        | {
            "root": "gpt_neox",
            "embed": "{root}.embed_in",
            "lm_head": "embed_out",
            "attn": "attention",
            "final_norm": "{root}.final_layer_norm",
        },
        parallel_norms=2,
    ),
    "persimmon": Row(
        paths=_FUSED_QKV_H
        | {
            "q_norm": "{attn}.q_layernorm",
            "k_norm": "{attn}.k_layernorm",
            "final_norm": "{root}.final_layernorm",
        }
    ),
    "opt": Row(
        paths={
            "root": "model.decoder",
            "final_norm": "{root}.final_layer_norm",
            "o": "{attn}.out_proj",
            "pre1": "self_attn_layer_norm",
            "post1": "self_attn_layer_norm",
            "pre2": "final_layer_norm",
            "post2": "final_layer_norm",
            "up": "fc1",
            "down": "fc2",
        }
    ),
    "bloom": Row(
        paths=_FUSED_QKV_H
        | {
            "root": "transformer",
            "layer": "{root}.h.{i}",
            "attn": "self_attention",
            "embed": "{root}.word_embeddings",
            "embed_norm": "{root}.word_embeddings_layernorm",
            "final_norm": "{root}.ln_f",
        }
    ),
    "falcon": Row("bloom"),
    "falcon_grouped": Row("falcon", {"pre1": "ln_attn", "pre2": "ln_mlp"}, parallel_norms=2),
    "mpt": Row(
        paths={
            "root": "transformer",
            "layer": "{root}.blocks.{i}",
            "embed": "{root}.wte",
            "positions": "{root}.wpe",
            "pre1": "norm_1",
            "pre2": "norm_2",
            "attn": "attn",
            "qkv": "attn.Wqkv",
            "o": "attn.out_proj",
            "mlp": "ffn",
            "final_norm": "{root}.norm_f",
        }
    ),
    "apertus": Row(
        paths={"pre1": "attention_layernorm", "pre2": "feedforward_layernorm"},
        extras=(
            Extra("layer", "mlp.act_fn.alpha_p", (1,), "scale"),
            Extra("layer", "mlp.act_fn.alpha_n", (1,), "scale"),
            Extra("layer", "mlp.act_fn.beta", (), "scale"),
            Extra("layer", "mlp.act_fn.eps", (), "scale"),
        ),
    ),
    "internlm2": Row(
        paths=_W123
        | {
            "embed": "{root}.tok_embeddings",
            "lm_head": "output",
            "pre1": "attention_norm",
            "pre2": "ffn_norm",
            "qkv": "attention.wqkv",
            "o": "attention.wo",
            "mlp": "feed_forward",
        }
    ),
    "baichuan": Row(paths={"qkv": "{attn}.W_pack"}),
    "chatglm": Row(
        paths=_FUSED_QKV_H
        | {
            "root": "transformer.encoder",
            "embed": "transformer.embedding.word_embeddings",
            "lm_head": "transformer.output_layer",
            "attn": "self_attention",
            "gate_up": "{mlp}.dense_h_to_4h",
            "final_norm": "{root}.final_layernorm",
        }
    ),
    "mimo": Row(
        mtp="model.mtp_layers.{i}",
        mtp_from_end=False,
        extras=(
            Extra("mtp_layer", "token_layernorm.weight", ("H",)),
            Extra("mtp_layer", "hidden_layernorm.weight", ("H",)),
            Extra("mtp_layer", "input_proj.weight", ("H", "2H"), "mtp", linear=True),
            Extra("mtp_layer", "final_layernorm.weight", ("H",)),
        ),
    ),
    # mixtures of experts
    "mixtral": Row(paths=_MIXTRAL),
    "minimax": Row("mixtral", {"linear": "self_attn"}),
    "minimax_m2": Row("mixtral", {"router_bias": "{moe}.e_score_correction_bias"}),
    "minimax_m3": Row(
        "minimax_m2",
        {"shared": "{moe}.shared_experts"},
        mtp="model.mtp.layers.{i}",
        mtp_from_end=False,
        extras=(
            Extra("mtp_layer", "enorm.weight", ("H",)),
            Extra("mtp_layer", "hnorm.weight", ("H",)),
            Extra("mtp_layer", "eh_proj.weight", ("H", "2H"), "mtp", linear=True),
            Extra("mtp_layer", "final_layernorm.weight", ("H",)),
        ),
    ),
    "minimax_m3_vl": Row(
        "minimax_m3",
        {"root": "language_model.model", "lm_head": "language_model.lm_head"},
        mtp="language_model.model.mtp.layers.{i}",
    ),
    "qwen2_moe": Row(paths={"shared": "{moe}.shared_expert"}),
    "qwen3_next": Row(
        "qwen2_moe",
        {"in_qkvz": "{linear}.in_proj_qkvz", "in_ba": "{linear}.in_proj_ba"},
        mtp="mtp.layers.{i}",
        mtp_from_end=False,
        extras=_QWEN_MTP,
    ),
    "qwen3_5_text": Row("qwen2_moe", mtp="mtp.layers.{i}", mtp_from_end=False, extras=_QWEN_MTP),
    "qwen3_5": Row("qwen3_5_text", {"root": "model.language_model"}),
    "qwen3_vl": Row(paths={"root": "model.language_model"}),
    "qwen3_vl_moe_text": Row("qwen2_moe", experts="stacked_in_out"),
    "qwen3_vl_moe": Row("qwen3_vl_moe_text", {"root": "model.language_model"}),
    "deepseek_v3": Row(mtp="model.layers.{i}", mtp_from_end=True, extras=_DEEPSEEK_MTP),
    "kimi_k25": Row(
        "deepseek_v3",
        {"root": "language_model.model", "lm_head": "language_model.lm_head"},
        mtp="language_model.model.layers.{i}",
    ),
    "glm4_moe": Row("deepseek_v3"),
    "kimi_linear": Row(
        "mixtral", {"linear": "self_attn", "mlp": "mlp", "shared": "{moe}.shared_experts"}
    ),
    "ernie4_5_moe": Row(paths={"router_bias": "{moe}.moe_statics.e_score_correction_bias"}),
    "mistral4": Row(experts="stacked"),
    "mimo_v2_flash": Row(paths={"sinks": "{attn}.attention_sink_bias"}),
    "gpt_oss": Row(paths={"router": "{moe}.router"}, experts="stacked_in_out"),
    "granitemoe": Row(
        paths={
            "moe": "block_sparse_moe",
            "router": "{moe}.router.layer",
            "experts": "{moe}",
            "e_gate_up": "{moe}.input_linear",
            "e_all_down": "{moe}.output_linear",
            "stacked_suffix": ".weight",
            "mlp": "shared_mlp",
            "shared": "shared_mlp",
            "s_gate_up": "{shared}.input_linear",
            "s_down": "{shared}.output_linear",
            "gate_up": "{mlp}.input_linear",
            "down": "{mlp}.output_linear",
        },
        experts="stacked",
    ),
    "llama4_text": Row(
        paths={
            "mlp": "feed_forward",
            "moe": "feed_forward",
            "router": "{moe}.router",
            "shared": "{moe}.shared_expert",
        },
        experts="stacked_in_out",
    ),
    "llama4": Row(
        "llama4_text", {"root": "language_model.model", "lm_head": "language_model.lm_head"}
    ),
    "gemma4_text": Row(
        "gemma2",
        {"experts": "experts", "router": "router.proj"},
        experts="stacked",
        extras=_GEMMA4_MOE,
    ),
    "gemma4": Row("gemma4_text", {"root": "model.language_model"}),
    "gemma3": Row("gemma2", {"root": "language_model.model", "lm_head": "language_model.lm_head"}),
    "step3p5": Row(
        paths={
            "moe": "moe",
            "router": "moe.gate",
            "router_bias": "moe.router_bias",
            "experts": "moe",
            "e_gate_up": "moe.gate_proj",
            "stacked_suffix": ".weight",
            "shared": "share_expert",
        },
        experts="stacked_split",
        mtp="model.layers.{i}",
        mtp_from_end=True,
        extras=(
            Extra("mtp_layer", "enorm.weight", ("H",)),
            Extra("mtp_layer", "hnorm.weight", ("H",)),
            Extra("mtp_layer", "eh_proj.weight", ("H", "2H"), "mtp", linear=True),
            Extra("mtp_layer", "transformer.shared_head.norm.weight", ("H",)),
            Extra("mtp_layer", "transformer.shared_head.output.weight", ("V", "H"), "lm_head"),
        ),
    ),
    "deepseek_v4": Row(
        paths=_MIXTRAL
        | {
            "layer": "layers.{i}",
            "embed": "embed",
            "final_norm": "norm",
            "lm_head": "head",
            "attn": "attn",
            "moe": "ffn",
            "pre1": "attn_norm",
            "pre2": "ffn_norm",
            "sinks": "{attn}.attn_sink",
            "router_bias": "{router}.bias",
            "s_gate": "{shared}.w1",
            "s_up": "{shared}.w3",
            "s_down": "{shared}.w2",
        },
        mtp="mtp.{i}",
        mtp_from_end=False,
        extras=(
            Extra("mtp_layer", "enorm.weight", ("H",)),
            Extra("mtp_layer", "hnorm.weight", ("H",)),
            Extra("mtp_layer", "norm.weight", ("H",)),
            Extra("mtp_layer", "e_proj.weight", ("H", "H"), "mtp", linear=True),
            Extra("mtp_layer", "h_proj.weight", ("H", "H"), "mtp", linear=True),
            Extra("mtp_layer", "emb.tok_emb.weight", ("V", "H"), "embed"),
            Extra("mtp_layer", "head.weight", ("V", "H"), "lm_head"),
        ),
    ),
    # recurrent and hybrid
    "mamba": Row(paths=_HYBRID_HEAD),
    "nemotron_h": Row(
        "mamba", {"latent_in": "{moe}.fc1_latent_proj"}, mtp="mtp.layers.{i}", mtp_from_end=False
    ),
    "jamba": Row(
        paths=_FEED_FORWARD | {"router": "{moe}.router", "final_norm": "{root}.final_layernorm"}
    ),
    "lfm2": Row(
        paths=_W123
        | {
            "o": "{attn}.out_proj",
            "q_norm": "{attn}.q_layernorm",
            "k_norm": "{attn}.k_layernorm",
            "mlp": "feed_forward",
            "pre1": "operator_norm",
            "pre2": "ffn_norm",
            "final_norm": "{root}.embedding_norm",
        }
    ),
    "lfm2_moe": Row("lfm2", _MIXTRAL | {"moe": "feed_forward", "router_bias": "{moe}.expert_bias"}),
    # a language model inside another: only the prefix differs
    "qwen2_vl": Row(),
    "llava": Row(paths={"root": "language_model.model", "lm_head": "language_model.lm_head"}),
    # encoders and encoder-decoders
    "bert": Row(paths=_BERT, extras=_mlm_head("cls.predictions.transform.", "LayerNorm")),
    "roberta": Row(
        paths=_BERT
        | {"root": "roberta", "lm_head": "lm_head.decoder", "lm_head_bias": "lm_head.bias"},
        extras=_mlm_head("lm_head.", "layer_norm"),
    ),
    "distilbert": Row(
        paths=_BERT
        | {
            "root": "distilbert",
            "layer": "{root}.transformer.layer.{i}",
            "attn": "attention",
            "q": "{attn}.q_lin",
            "k": "{attn}.k_lin",
            "v": "{attn}.v_lin",
            "o": "{attn}.out_lin",
            "post1": "sa_layer_norm",
            "up": "ffn.lin1",
            "down": "ffn.lin2",
            "post2": "output_layer_norm",
            "lm_head": "vocab_projector",
            "lm_head_bias": "{lm_head}.bias",
        },
        extras=_mlm_head("", "vocab_layer_norm", "vocab_transform"),
    ),
    "electra": Row(
        paths=_BERT
        | {
            "root": "electra",
            "project_in": "{root}.embeddings_project",
            "lm_head": "generator_lm_head",
            "lm_head_bias": "{lm_head}.bias",
        },
        extras=_mlm_head("generator_predictions.", "LayerNorm"),
    ),
    "modernbert": Row(
        paths={
            "embed": "{root}.embeddings.tok_embeddings",
            "embed_norm": "{root}.embeddings.norm",
            "attn": "attn",
            "qkv": "attn.Wqkv",
            "o": "attn.Wo",
            "pre1": "attn_norm",
            "pre2": "mlp_norm",
            "gate_up": "{mlp}.Wi",
            "down": "{mlp}.Wo",
            "final_norm": "{root}.final_norm",
            "lm_head": "decoder",
        },
        first_norm=False,
        extras=(
            Extra("head", "head.dense.weight", ("H", "H"), "lm_head", linear=True),
            Extra("head", "head.norm.weight", ("H",)),
        ),
    ),
    "bart": Row(paths=_BART_STACK | {"root": "model.decoder"}, encoder="bart_encoder"),
    "bart_encoder": Row(paths=_BART_STACK | {"root": "model.encoder"}),
    "whisper": Row(
        "bart",
        {"embed": "{root}.embed_tokens", "lm_head": "proj_out"},
        encoder="whisper_encoder",
        key_bias=False,
    ),
    "whisper_encoder": Row("bart_encoder", key_bias=False),
    "t5": Row(
        paths=_T5_STACK
        | {
            "root": "decoder",
            "cross": "layer.1.EncDecAttention",
            "cross_q": "{cross}.q",
            "cross_k": "{cross}.k",
            "cross_v": "{cross}.v",
            "cross_o": "{cross}.o",
            "cross_norm": "layer.1.layer_norm",
            "mlp": "layer.2.DenseReluDense",
            "pre2": "layer.2.layer_norm",
        },
        encoder="t5_encoder",
    ),
    "t5_encoder": Row(
        paths=_T5_STACK
        | {"root": "encoder", "mlp": "layer.1.DenseReluDense", "pre2": "layer.1.layer_norm"}
    ),
}

ALIASES: dict[str, str] = {
    same: row
    for row, names in {
        "llama": "mistral mistral3_text ministral ministral3 qwen2 qwen3 qwen3_moe gemma granite "
        "olmo olmo2 olmo3 olmoe cohere cohere2 stablelm smollm3 seed_oss arcee nemotron deci "
        "nemotron-nas ernie4_5 exaone4 helium yi solar xverse deepseek_v2 dots1 flex_olmo "
        "qwen3_vl_text qwen2_vl_text qwen2_5_vl_text",
        "gemma2": "gemma3_text vaultgemma",
        "mixtral": "phimoe",
        "qwen2_vl": "qwen2_5_vl Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration",
        "qwen3_5_text": "qwen3_5_moe_text",
        "qwen3_5": "qwen3_5_moe Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration",
        "deepseek_v3": "deepseek_v32 kimi_k2 glm_moe_dsa",
        "deepseek_v4": "deepseek_ref",
        "step3p5": "step3p7",
        "granitemoe": "granitemoeshared granitemoehybrid",
        "mamba": "mamba2 falcon_mamba",
        "jamba": "bamba falcon_h1",
        "roberta": "xlm-roberta xlm_roberta camembert",
        "bart": "mbart pegasus marian",
        "t5": "mt5 umt5",
        # wrappers that keep their language model under another prefix, by class name
        "qwen3_vl": "Qwen3VLForConditionalGeneration",
        "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
        "kimi_k25": "KimiK25ForConditionalGeneration",
        "gemma3": "Gemma3ForConditionalGeneration",
        "gemma4": "Gemma4ForConditionalGeneration",
        "llama4": "Llama4ForConditionalGeneration",
        "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
        "llava": "LlavaForConditionalGeneration LlavaNextForConditionalGeneration "
        "Mistral3ForConditionalGeneration",
    }.items()
    for same in names.split()
}
"""Model types and class names that name their tensors exactly as another row does."""


def naming_for(*keys: str) -> Naming:
    """The naming of the first key that has a row; Llama's, marked not `known`, when none has."""
    for key in keys:
        row_key = ALIASES.get(key, key)
        if row_key in ROWS:
            return _resolve(row_key, known=True)
    return _resolve("llama", known=False)


def _resolve(key: str, *, known: bool) -> Naming:
    row = _inherit(key)
    paths: dict[str, str] = {}

    def fill(slot: str) -> str:
        if slot not in paths:
            text = row.paths[slot]
            while "{" in (rest := text.replace("{i}", "").replace("{e}", "")):
                inner = rest[rest.index("{") + 1 : rest.index("}")]
                text = text.replace("{" + inner + "}", fill(inner))
            paths[slot] = text
        return paths[slot]

    for slot in row.paths:
        fill(slot)
    return Naming(
        key=key,
        known=known,
        paths=paths,
        experts=row.experts or "each",
        transposed=bool(row.transposed),
        parallel_norms=row.parallel_norms or 1,
        first_norm=row.first_norm is not False,
        key_bias=row.key_bias is not False,
        extras=row.extras,
        encoder=row.encoder,
        mtp=row.mtp,
        mtp_from_end=bool(row.mtp_from_end),
    )


def _inherit(key: str) -> Row:
    row = ROWS[key]
    if row.base is None:
        return row
    base = _inherit(row.base)
    return replace(
        row,
        paths=base.paths | row.paths,
        experts=row.experts or base.experts,
        transposed=base.transposed if row.transposed is None else row.transposed,
        parallel_norms=row.parallel_norms or base.parallel_norms,
        first_norm=base.first_norm if row.first_norm is None else row.first_norm,
        key_bias=base.key_bias if row.key_bias is None else row.key_bias,
        extras=base.extras + row.extras,
        encoder=row.encoder or base.encoder,
        mtp=row.mtp or base.mtp,
        mtp_from_end=base.mtp_from_end if row.mtp_from_end is None else row.mtp_from_end,
    )
