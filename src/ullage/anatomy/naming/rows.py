"""How each family names its tensors: rows of data, each a change to another row.

Holds names and layouts only; which tensors exist and their shapes is
`tensors/expected.py`. Facts were read from the modules of transformers 5.24 and the weight
mappers of vLLM 0.32.
"""

from __future__ import annotations

from ullage.anatomy.naming import heads
from ullage.anatomy.naming.encoder_decoder_rows import ENCODER_DECODER_ROWS
from ullage.anatomy.naming.encoder_rows import ENCODER_ROWS
from ullage.anatomy.naming.older_rows import OLDER_ALIASES, OLDER_NAMES
from ullage.anatomy.naming.paths import (
    BART_STACK,
    BERT,
    DEEPSEEK_MTP,
    FEED_FORWARD,
    FUSED_QKV_H,
    GEMMA3N,
    GEMMA4_MOE,
    HYBRID_HEAD,
    LLAMA,
    MIXTRAL,
    POOLER,
    QWEN_MTP,
    SANDWICH,
    T5_STACK,
    TRANSFORMER_H,
    W123,
    WHISPER_CONVOLUTIONS,
    mlm_head,
)
from ullage.anatomy.naming.recent_rows import RECENT_ALIASES, RECENT_NAMES
from ullage.anatomy.naming.row import Extra, Row

ROWS: dict[str, Row] = {
    "llama": Row(None, LLAMA, judges=heads.SCORED),
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
    "phi3small": Row(
        paths={
            "qkv": "{attn}.query_key_value",
            "o": "{attn}.dense",
            "gate_up": "{mlp}.up_proj",
            "final_norm": "{root}.final_layernorm",
        }
    ),
    "gemma2": Row(paths=SANDWICH),
    "glm": Row(paths={"gate_up": "{mlp}.gate_up_proj"}),
    "glm4": Row("glm", {"post1": "post_self_attn_layernorm", "post2": "post_mlp_layernorm"}),
    "starcoder2": Row(paths={"up": "{mlp}.c_fc", "down": "{mlp}.c_proj"}),
    "gpt2": Row(
        paths=TRANSFORMER_H
        | {"qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
        transposed=True,
        judges=heads.SCORED_CLASSIFIED,
    ),
    "gpt_bigcode": Row("gpt2", transposed=False),
    "gpt_neo": Row(
        paths=TRANSFORMER_H
        | {"attn": "attn.attention", "o": "{attn}.out_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    ),
    "gptj": Row(
        paths=TRANSFORMER_H | {"o": "attn.out_proj", "up": "mlp.fc_in", "down": "mlp.fc_out"}
    ),
    "codegen": Row("gptj", {"qkv": "attn.qkv_proj"}),
    "gpt_neox": Row(
        paths=FUSED_QKV_H
        | {
            "root": "gpt_neox",
            "embed": "{root}.embed_in",
            "lm_head": "embed_out",
            "attn": "attention",
            "final_norm": "{root}.final_layer_norm",
        },
        parallel_norms=2,
        judges=heads.SCORED_CLASSIFIED,
    ),
    "persimmon": Row(
        paths=FUSED_QKV_H
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
        paths=FUSED_QKV_H
        | {
            "root": "transformer",
            "layer": "{root}.h.{i}",
            "attn": "self_attention",
            "embed": "{root}.word_embeddings",
            "embed_norm": "{root}.word_embeddings_layernorm",
            "final_norm": "{root}.ln_f",
        },
        judges=heads.SCORED_CLASSIFIED,
    ),
    "falcon": Row("bloom", {"pre1_beside": "ln_attn", "pre2_beside": "ln_mlp"}),
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
            "q_norm": "attn.q_ln",
            "k_norm": "attn.k_ln",
            "o": "attn.out_proj",
            "mlp": "ffn",
            "final_norm": "{root}.norm_f",
        },
        judges=heads.SCORED_CLASSIFIED,
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
        paths=W123
        | {
            "embed": "{root}.tok_embeddings",
            "lm_head": "output",
            "pre1": "attention_norm",
            "pre2": "ffn_norm",
            "qkv": "attention.wqkv",
            "o": "attention.wo",
            "mlp": "feed_forward",
        },
        judges=heads.VALUED,
    ),
    "baichuan": Row(paths={"qkv": "{attn}.W_pack"}),
    "chatglm": Row(
        paths=FUSED_QKV_H
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
            Extra("mtp_layer", "input_proj.weight", ("H", "2H"), "mtp"),
            Extra("mtp_layer", "final_layernorm.weight", ("H",)),
        ),
    ),
    "qwen": Row(
        paths=TRANSFORMER_H
        | {
            "qkv": "attn.c_attn",
            "o": "attn.c_proj",
            "gate": "mlp.w2",
            "up": "mlp.w1",
            "down": "mlp.c_proj",
        }
    ),
    "exaone": Row("gpt_neo", {"gate": "mlp.c_fc_0", "up": "mlp.c_fc_1"}),
    "aria_text": Row(
        paths={"router": "{moe}.router"},
        experts="stacked_in_out",
    ),
    "eurobert": Row(judges=heads.EUROBERT),
    "bitnet": Row(
        extras=(
            Extra("layer", "self_attn.attn_sub_norm.weight", ("H",)),
            Extra("layer", "mlp.ffn_sub_norm.weight", ("intermediate_size",)),
        )
    ),
    "kolibri1": Row(
        paths={"post1": "post_self_attn_layernorm", "post2": "post_mlp_layernorm"},
    ),
    "axk1": Row("deepseek_v3", extras=(Extra("experts", "mlp.post_mlp_layernorm.weight", ("H",)),)),
    "beam": Row(
        paths=SANDWICH | {"element_gate": "{attn}.gate_proj"},
        extras=(Extra("layer", "self_attn.gate_bias", ("num_attention_heads",), "bias"),),
    ),
    "openai-gpt": Row(
        "gpt2",
        {
            "embed": "{root}.tokens_embed",
            "positions": "{root}.positions_embed",
            "post1": "ln_1",
            "post2": "ln_2",
        },
    ),
    "nanochat": Row(paths={"up": "{mlp}.fc1", "down": "{mlp}.fc2"}),
    "biogpt": Row(
        "opt",
        {"root": "biogpt", "final_norm": "{root}.layer_norm", "lm_head": "output_projection"},
        judges=heads.SCORED_CLASSIFIED,
    ),
    "xglm": Row("opt", {"root": "model", "final_norm": "{root}.layer_norm"}),
    "hunyuan_v1_dense": Row(
        paths={"q_norm": "{attn}.query_layernorm", "k_norm": "{attn}.key_layernorm"}
    ),
    "glm4v": Row("glm4", {"root": "model.language_model"}),
    "mllama": Row(
        paths={
            "root": "language_model.model",
            "lm_head": "language_model.lm_head",
            "cross": "cross_attn",
            "cross_o": "{cross}.o_proj",
        },
        embed_extra=8,
        extras=(
            Extra("cross", "cross_attn_attn_gate", (1,), "scale"),
            Extra("cross", "cross_attn_mlp_gate", (1,), "scale"),
        ),
    ),
    # mixtures of experts
    "mixtral": Row(paths=MIXTRAL),
    "minimax": Row("mixtral", {"linear": "self_attn"}),
    "minimax_m2": Row(
        "mixtral",
        {"router_bias": "{moe}.e_score_correction_bias"},
        router_held="float32",
        qk_norm_cut=True,
    ),
    "minimax_m3": Row(
        "minimax_m2",
        {"shared": "{moe}.shared_experts"},
        mtp="model.mtp.layers.{i}",
        mtp_from_end=False,
        extras=(
            Extra("mtp_layer", "enorm.weight", ("H",)),
            Extra("mtp_layer", "hnorm.weight", ("H",)),
            Extra("mtp_layer", "eh_proj.weight", ("H", "2H"), "mtp"),
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
        extras=QWEN_MTP,
        sequence_parallel=True,
    ),
    "qwen3_5_text": Row(
        "qwen2_moe",
        experts="stacked",
        mtp="mtp.layers.{i}",
        mtp_from_end=False,
        extras=QWEN_MTP,
        sequence_parallel=True,
    ),
    "qwen3_5": Row("qwen3_5_text", {"root": "model.language_model"}),
    "qwen3_vl": Row(paths={"root": "model.language_model"}),
    "qwen3_vl_moe_text": Row("qwen2_moe", experts="stacked_in_out"),
    "qwen3_vl_moe": Row("qwen3_vl_moe_text", {"root": "model.language_model"}),
    "deepseek_v2": Row(sequence_parallel=True),
    "deepseek_v3": Row(
        "deepseek_v2",
        mtp="model.layers.{i}",
        mtp_from_end=True,
        extras=DEEPSEEK_MTP,
        sequence_parallel=True,
    ),
    "kimi_k25": Row(
        "deepseek_v3",
        {"root": "language_model.model", "lm_head": "language_model.lm_head"},
        mtp="language_model.model.layers.{i}",
    ),
    "glm4_moe": Row("deepseek_v3", router_held="float32", sequence_parallel=False),
    "kimi_linear": Row(
        "mixtral", {"linear": "self_attn", "mlp": "mlp", "shared": "{moe}.shared_experts"}
    ),
    "ernie4_5_moe": Row(
        paths={"router_bias": "{moe}.moe_statics.e_score_correction_bias"},
        router_bias_row=True,
        router_held="float32",
    ),
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
        sequence_parallel=True,
    ),
    "llama4": Row(
        "llama4_text", {"root": "language_model.model", "lm_head": "language_model.lm_head"}
    ),
    # The stored totals of E2B and E4B hold K and V of every layer, and vLLM 0.32 loads them.
    "gemma3n_text": Row("gemma2", extras=GEMMA3N, idle_kv=True),
    "gemma3n": Row("gemma3n_text", {"root": "model.language_model"}, towers_whole=True),
    "gemma4_text": Row(
        "gemma2",
        {"experts": "experts", "router": "router.proj"},
        experts="stacked",
        extras=GEMMA4_MOE,
    ),
    "gemma4": Row("gemma4_text", {"root": "model.language_model"}, towers_whole=True),
    "gemma3": Row("gemma2", {"root": "language_model.model", "lm_head": "language_model.lm_head"}),
    "step3_text": Row(
        paths={
            "moe": "moe",
            "router": "moe.gate",
            "experts": "moe",
            "e_gate_up": "moe.gate_proj",
            "stacked_suffix": ".weight",
            "shared": "share_expert",
        },
        experts="stacked_split",
    ),
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
            Extra("mtp_layer", "eh_proj.weight", ("H", "2H"), "mtp"),
            Extra("mtp_layer", "transformer.shared_head.norm.weight", ("H",)),
            Extra("mtp_layer", "transformer.shared_head.output.weight", ("V", "H"), "lm_head"),
        ),
        router_held="float32",
    ),
    "deepseek_v4": Row(
        paths=MIXTRAL
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
        sequence_parallel=True,
    ),
    "exaone_moe": Row(paths={"router_bias": "{moe}.e_score_correction_bias"}),
    "hy_v3": Row(
        paths={
            "router": "{moe}.router.gate",
            "router_bias": "{moe}.expert_bias",
            "shared": "{moe}.shared_mlp",
        },
        router_held="float32",
    ),
    "hunyuan_v1_moe": Row(
        "hunyuan_v1_dense", {"router": "{moe}.gate.wg", "shared": "{moe}.shared_mlp"}
    ),
    "afmoe": Row(
        paths={
            "router": "{moe}.router.gate",
            "router_bias": "{moe}.expert_bias",
            "element_gate": "{attn}.gate_proj",
            "pre2": "pre_mlp_layernorm",
            "post2": "post_mlp_layernorm",
        },
        router_held="float32",
    ),
    "laguna": Row("qwen2_moe", {"router_bias": "{experts}.e_score_correction_bias"}),
    "bailing_moe": Row(
        paths={
            "embed": "{root}.word_embeddings",
            "attn": "attention",
            "qkv": "{attn}.query_key_value",
            "o": "{attn}.dense",
            "q_norm": "{attn}.query_layernorm",
            "k_norm": "{attn}.key_layernorm",
            "router_bias": "{router}.expert_bias",
        }
    ),
    "glm4v_moe": Row("deepseek_v3", {"root": "model.language_model"}),
    # recurrent and hybrid
    "recurrent_gemma": Row(
        paths={
            "pre1": "temporal_pre_norm",
            "pre2": "channel_pre_norm",
            "attn": "temporal_block",
            "linear": "temporal_block",
            "mlp": "mlp_block",
            "final_norm": "{root}.final_norm",
        }
    ),
    "mamba": Row(paths=HYBRID_HEAD),
    "nemotron_h": Row(
        "mamba",
        {"latent_in": "{moe}.fc1_latent_proj"},
        mtp="mtp.layers.{i}",
        mtp_from_end=False,
        sequence_parallel=True,
    ),
    "jamba": Row(
        paths=FEED_FORWARD | {"router": "{moe}.router", "final_norm": "{root}.final_layernorm"}
    ),
    "lfm2": Row(
        paths=W123
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
    "lfm2_moe": Row("lfm2", MIXTRAL | {"moe": "feed_forward", "router_bias": "{moe}.expert_bias"}),
    # a language model inside another: only the prefix differs
    "qwen2_vl": Row(),
    "llava": Row(paths={"root": "language_model.model", "lm_head": "language_model.lm_head"}),
    # encoders and encoder-decoders
    "deberta-v2": Row(
        "bert_names",
        {
            "root": "deberta",
            "q": "{attn}.query_proj",
            "k": "{attn}.key_proj",
            "v": "{attn}.value_proj",
        },
        extras=(
            *mlm_head("cls.predictions.transform.", "LayerNorm"),
            Extra(
                "model",
                "{root}.encoder.rel_embeddings.weight",
                ("relative_rows", "H"),
                "embed",
                linear=True,
            ),
            Extra("model", "{root}.encoder.LayerNorm.weight", ("relative_norm",)),
            Extra("model", "{root}.encoder.LayerNorm.bias", ("relative_norm",)),
            Extra("model", "{root}.encoder.conv.conv.weight", ("H", "H", "conv_kernel"), "conv"),
            Extra("model", "{root}.encoder.conv.conv.bias", ("conv_width",), "bias"),
            Extra("model", "{root}.encoder.conv.LayerNorm.weight", ("conv_width",)),
            Extra("model", "{root}.encoder.conv.LayerNorm.bias", ("conv_width",)),
            Extra(
                "layer",
                "attention.self.pos_key_proj.weight",
                ("relative_keys", "H"),
                "k",
                linear=True,
            ),
            Extra("layer", "attention.self.pos_key_proj.bias", ("relative_keys",), "bias"),
            Extra(
                "layer",
                "attention.self.pos_query_proj.weight",
                ("relative_queries", "H"),
                "q",
                linear=True,
            ),
            Extra("layer", "attention.self.pos_query_proj.bias", ("relative_queries",), "bias"),
        ),
        judges=heads.POOLED_APART,
    ),
    "albert": Row(
        "bert_names",
        {
            "root": "albert",
            "layer": "{root}.encoder.albert_layer_groups.{i}.albert_layers.0",
            "project_in": "{root}.encoder.embedding_hidden_mapping_in",
            "attn": "attention",
            "o": "{attn}.dense",
            "post1": "{attn}.LayerNorm",
            "up": "ffn",
            "down": "ffn_output",
            "post2": "full_layer_layer_norm",
            "lm_head": "predictions.decoder",
            "lm_head_bias": "predictions.bias",
        },
        extras=(
            *mlm_head("predictions.", "LayerNorm"),
            Extra("bare", "{root}.pooler.weight", ("H", "H"), "lm_head", linear=True),
            Extra("bare", "{root}.pooler.bias", ("H",), "bias"),
        ),
        judges=heads.POOLED_PLAIN,
    ),
    "mpnet": Row(
        "bert_names",
        {
            "root": "mpnet",
            "attn": "attention.attn",
            "q": "{attn}.q",
            "k": "{attn}.k",
            "v": "{attn}.v",
            "o": "{attn}.o",
            "post1": "attention.LayerNorm",
            "lm_head": "lm_head.decoder",
            "lm_head_bias": "lm_head.bias",
        },
        extras=(
            *mlm_head("lm_head.", "layer_norm"),
            *POOLER,
            Extra(
                "model",
                "{root}.encoder.relative_attention_bias.weight",
                ("relative_attention_num_buckets", "num_attention_heads"),
                "attn_bias_table",
            ),
        ),
        judges=heads.DENSE,
    ),
    "gte": Row(
        "bert_names",
        {
            "root": "gte",
            "layer": "{root}.layers.{i}",
            "attn": "self_attn",
            "q": "{attn}.q_proj",
            "k": "{attn}.k_proj",
            "v": "{attn}.v_proj",
            "o": "{attn}.o_proj",
            "post1": "post_attention_layernorm",
            "post2": "post_mlp_layernorm",
            "gate": "{mlp}.gate_proj",
            "up": "{mlp}.up_proj",
            "down": "{mlp}.down_proj",
            "lm_head": "lm_head.decoder",
            "lm_head_bias": "{lm_head}.bias",
        },
        extras=(
            *mlm_head("lm_head.", "norm"),
            Extra("layer", "mlp.down_proj.bias", ("H",), "bias"),
        ),
        judges=heads.POOLED,
    ),
    "new": Row(
        "bert_names",
        {
            "root": "new",
            "layer": "{root}.encoder.layer.{i}",
            "attn": "attention",
            "qkv": "{attn}.qkv_proj",
            "o": "{attn}.o_proj",
            "post1": "attn_ln",
            "post2": "mlp_ln",
            "gate_up": "{mlp}.up_gate_proj",
            "down": "{mlp}.down_proj",
            "lm_head": "lm_head.decoder",
            "lm_head_bias": "{lm_head}.bias",
        },
        extras=(
            *mlm_head("lm_head.", "norm"),
            Extra("layer", "mlp.down_proj.bias", ("H",), "bias"),
        ),
    ),
    "jina_bert": Row(
        "bert",
        {
            "gate_up": "mlp.up_gated_layer",
            "down": "mlp.down_layer",
            "post2": "layer_norm_2",
            "post1": "layer_norm_1",
        },
        extras=(Extra("layer", "mlp.down_layer.bias", ("H",), "bias"),),
    ),
    "jina_embeddings_v3": Row(
        "roberta",
        {
            "layer": "{root}.layers.{i}",
            "attn": "self_attn",
            "q": "{attn}.q_proj",
            "k": "{attn}.k_proj",
            "v": "{attn}.v_proj",
            "o": "{attn}.o_proj",
            "post1": "post_attention_layernorm",
            "post2": "post_mlp_layernorm",
            "up": "{mlp}.fc1",
            "down": "{mlp}.fc2",
        },
    ),
    "nomic_bert": Row(
        paths=BERT
        | {
            "root": "nomic_bert",
            "layer": "{root}.encoder.layers.{i}",
            "embed_norm": "{root}.emb_ln",
            "attn": "attn",
            "qkv": "attn.Wqkv",
            "o": "attn.out_proj",
            "post1": "norm1",
            "post2": "norm2",
            "mlp": "mlp",
            "gate": "{mlp}.fc12",
            "up": "{mlp}.fc11",
            "down": "{mlp}.fc2",
        },
        extras=mlm_head("cls.predictions.transform.", "layer_norm"),
        judges=heads.POOLED,
    ),
    "bert_names": Row(paths=BERT, judges=heads.NONE),
    "bert": Row(
        "bert_names",
        extras=(*mlm_head("cls.predictions.transform.", "LayerNorm"), *POOLER),
        judges=heads.POOLED,
    ),
    "roberta": Row(
        paths=BERT
        | {"root": "roberta", "lm_head": "lm_head.decoder", "lm_head_bias": "lm_head.bias"},
        extras=(*mlm_head("lm_head.", "layer_norm"), *POOLER),
        judges=heads.DENSE,
    ),
    "megatron-bert": Row(
        "bert",
        {"pre1": "attention.ln", "pre2": "ln", "final_norm": "{root}.encoder.ln"},
    ),
    "roberta-prelayernorm": Row(
        "roberta",
        {
            "root": "roberta_prelayernorm",
            "pre1": "attention.LayerNorm",
            "pre2": "intermediate.LayerNorm",
            "final_norm": "{root}.LayerNorm",
        },
    ),
    "xlm-roberta-xl": Row(
        "roberta",
        {
            "pre1": "attention.self_attn_layer_norm",
            "pre2": "LayerNorm",
            "final_norm": "{root}.encoder.LayerNorm",
        },
    ),
    "data2vec-text": Row("roberta", {"root": "data2vec_text"}),
    "distilbert": Row(
        paths=BERT
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
        extras=mlm_head("", "vocab_layer_norm", "vocab_transform"),
        judges=heads.PREPARED,
    ),
    "electra": Row(
        paths=BERT
        | {
            "root": "electra",
            "project_in": "{root}.embeddings_project",
            "lm_head": "generator_lm_head",
            "lm_head_bias": "{lm_head}.bias",
        },
        extras=mlm_head("generator_predictions.", "LayerNorm"),
        judges=heads.DENSE,
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
        judges=heads.MODERN,
    ),
    "bart_plain": Row(
        paths=BART_STACK | {"root": "model.decoder"},
        encoder="bart_encoder",
        judges=heads.BART_CLASSIFIED,
    ),
    "bart": Row("bart_plain", extras=(Extra("head", "final_logits_bias", (1, "V"), "bias"),)),
    # the decoder saved alone
    "bart_decoder": Row("bart_plain", {"embed": "{root}.embed_tokens"}),
    "bart_encoder": Row(paths=BART_STACK | {"root": "model.encoder"}),
    "whisper": Row(
        "bart_plain",
        {"embed": "{root}.embed_tokens", "lm_head": "proj_out"},
        encoder="whisper_encoder",
        key_bias=False,
    ),
    "whisper_encoder": Row("bart_encoder", key_bias=False, extras=WHISPER_CONVOLUTIONS),
    "t5": Row(
        paths=T5_STACK
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
        judges=heads.BART_CLASSIFIED,
    ),
    "umt5": Row("t5", encoder="umt5_encoder", relative_everywhere=True),
    "umt5_encoder": Row("t5_encoder", relative_everywhere=True),
    "t5_encoder": Row(
        paths=T5_STACK
        | {"root": "encoder", "mlp": "layer.1.DenseReluDense", "pre2": "layer.1.layer_norm"},
        judges=heads.CLASSIFIED,
    ),
}
ROWS |= RECENT_NAMES
ROWS |= ENCODER_ROWS | ENCODER_DECODER_ROWS | OLDER_NAMES

ALIASES: dict[str, str] = {
    same: row
    for row, names in {
        "llama": "mistral mistral3_text ministral ministral3 qwen2 qwen3 qwen3_moe gemma granite "
        "olmo olmo2 olmo3 olmoe cohere cohere2 stablelm smollm3 seed_oss arcee nemotron deci "
        "nemotron-nas ernie4_5 exaone4 helium yi solar xverse dots1 flex_olmo "
        "cwm mellum qwen3_vl_text qwen2_vl_text qwen2_5_vl_text glm4_moe_lite "
        "solar_open cohere2_moe minicpm "
        "minicpm3 youtu sarvam_mla internlm internlm3 granite_swa hyperclovax iquestcoder jais2 "
        "stablelm_epoch qwen2_5_omni_text exaone4_5",
        "gemma2": "gemma3_text vaultgemma",
        "mixtral": "phimoe",
        "phi3": "phi4mm phi4_multimodal",
        "glm4": "glm4v_text",
        "glm4_moe": "glm4v_moe_text",
        "mllama": "mllama_text_model",
        "gpt_bigcode": "starcoder",
        "gpt2": "gpt-sw3",
        "minimax": "minimax_text_01 minimax_m1",
        "minimax_m3": "minimax_m3_vl_text",
        "bailing_moe": "bailing_moe_v2",
        "bert": "ernie",
        "jina_bert": "JinaBertModel JinaBertForMaskedLM",
        "qwen2_vl": "qwen2_5_vl Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration",
        "qwen3_5_text": "qwen3_5_moe_text lara_mini",
        "qwen3_5": "qwen3_5_moe Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration",
        "deepseek_v3": "deepseek_v32 kimi_k2 glm_moe_dsa",
        "deepseek_v4": "deepseek_ref",
        "step3p5": "step3p7 step3p5v",
        "granitemoe": "granitemoeshared granitemoehybrid granitemoe_swa",
        "mamba": "mamba2 falcon_mamba",
        "qwen2_moe": "flint",
        "apertus": "apertus1p5_text",
        "jamba": "bamba falcon_h1",
        "roberta": "xlm-roberta xlm_roberta camembert",
        "bart_plain": "m2m_100",
        "bart": "mbart pegasus marian blenderbot blenderbot-small plbart mvp",
        "bart_decoder": "BartForCausalLM MBartForCausalLM PegasusForCausalLM MarianForCausalLM "
        "BlenderbotForCausalLM BlenderbotSmallForCausalLM PLBartForCausalLM MvpForCausalLM",
        "t5": "mt5",
        # wrappers that keep their language model under another prefix, by class name
        "qwen3_vl": "Qwen3VLForConditionalGeneration",
        "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
        "kimi_k25": "KimiK25ForConditionalGeneration",
        "gemma3": "Gemma3ForConditionalGeneration",
        "gemma3n": "Gemma3nForConditionalGeneration",
        "gemma4": "Gemma4ForConditionalGeneration",
        "llama4": "Llama4ForConditionalGeneration",
        "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
        "llava": "LlavaForConditionalGeneration LlavaNextForConditionalGeneration "
        "Mistral3ForConditionalGeneration",
    }.items()
    for same in names.split()
} | RECENT_ALIASES
"""Model types and class names that name their tensors exactly as another row does."""
ALIASES |= OLDER_ALIASES
