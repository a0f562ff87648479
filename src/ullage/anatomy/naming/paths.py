"""Paths and extra tensors that several rows of the naming table share.

Holds the base row's every slot and the sets of changes that recur; the rows are `rows.py`.
"""

from __future__ import annotations

from ullage.anatomy.naming.row import Extra

LLAMA = {
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
    "q_inner_norm": "{attn}.inter_norm",
    "q_wide": "{attn}.wq",
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
    "forget": "{linear}",
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
    # hyper-connections; what lies in each is written behind it
    "hyper_attn": "hc_attn_",
    "hyper_ffn": "hc_ffn_",
    "hyper_head": "hc_head_",
    # inputs per layer (Gemma)
    "ple_embed": "{root}.embed_tokens_per_layer",
    "ple_projection": "{root}.per_layer_model_projection",
    "ple_norm": "{root}.per_layer_projection_norm",
    "ple_gate": "per_layer_input_gate",
    "ple_out": "per_layer_projection",
    "ple_post_norm": "post_per_layer_input_norm",
}

MIXTRAL = {
    "moe": "block_sparse_moe",
    "e_gate": "{experts}.{e}.w1",
    "e_up": "{experts}.{e}.w3",
    "e_down": "{experts}.{e}.w2",
}
FUSED_QKV_H = {
    "qkv": "{attn}.query_key_value",
    "o": "{attn}.dense",
    "up": "{mlp}.dense_h_to_4h",
    "down": "{mlp}.dense_4h_to_h",
}
TRANSFORMER_H = {
    "root": "transformer",
    "layer": "{root}.h.{i}",
    "embed": "{root}.wte",
    "positions": "{root}.wpe",
    "final_norm": "{root}.ln_f",
    "pre1": "ln_1",
    "pre2": "ln_2",
    "attn": "attn",
}
BERT = {
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
BART_STACK = {
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
T5_STACK = {
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
HYBRID_HEAD = {
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
FEED_FORWARD = {"mlp": "feed_forward", "moe": "feed_forward", "pre2": "pre_ff_layernorm"}
W123 = {"gate": "{mlp}.w1", "up": "{mlp}.w3", "down": "{mlp}.w2"}
SANDWICH = {"pre2": "pre_feedforward_layernorm"}

DEEPSEEK_MTP = (
    Extra("mtp_layer", "enorm.weight", ("H",)),
    Extra("mtp_layer", "hnorm.weight", ("H",)),
    Extra("mtp_layer", "eh_proj.weight", ("H", "2H"), "mtp"),
    Extra("mtp_layer", "shared_head.norm.weight", ("H",)),
    Extra("mtp_layer", "shared_head.head.weight", ("V", "H"), "lm_head"),
    Extra("mtp_layer", "embed_tokens.weight", ("V", "H"), "embed"),
)
QWEN_MTP = (
    Extra("mtp", "mtp.fc.weight", ("H", "2H"), "mtp"),
    Extra("mtp", "mtp.norm.weight", ("H",)),
    Extra("mtp", "mtp.pre_fc_norm_embedding.weight", ("H",)),
    Extra("mtp", "mtp.pre_fc_norm_hidden.weight", ("H",)),
)
GEMMA4_MOE = (
    Extra("layer", "layer_scalar", (1,), "scale"),
    Extra("experts", "router.scale", ("H",), "scale"),
    Extra("experts", "router.per_expert_scale", ("E",), "scale"),
    Extra("experts", "post_feedforward_layernorm_1.weight", ("H",)),
    Extra("experts", "post_feedforward_layernorm_2.weight", ("H",)),
    Extra("experts", "pre_feedforward_layernorm_2.weight", ("H",)),
)


def mlm_head(path: str, norm: str, dense: str = "dense") -> tuple[Extra, ...]:
    return (
        Extra("head", f"{path}{dense}.weight", ("M", "H"), "lm_head", linear=True),
        Extra("head", f"{path}{dense}.bias", ("M",), "bias"),
        Extra("head", f"{path}{norm}.weight", ("M",)),
        Extra("head", f"{path}{norm}.bias", ("M",)),
    )


# What a bare BERT keeps above its first token.
POOLER = (
    Extra("bare", "{root}.pooler.dense.weight", ("H", "H"), "lm_head", linear=True),
    Extra("bare", "{root}.pooler.dense.bias", ("H",), "bias"),
)
GEMMA3N = (
    Extra("layer", "altup.correct_output_scale", ("H",), "scale"),
    Extra("layer", "altup.correction_coefs.weight", ("altup_num_inputs",) * 2, "hyper"),
    Extra(
        "layer",
        "altup.prediction_coefs.weight",
        ("altup_num_inputs^2", "altup_num_inputs"),
        "hyper",
    ),
    Extra("layer", "altup.modality_router.weight", ("altup_num_inputs", "H"), "hyper"),
    Extra("layer", "altup.router_norm.weight", ("H",)),
    Extra("layer", "laurel.linear_left.weight", ("laurel_rank", "H"), "hyper", linear=True),
    Extra("layer", "laurel.linear_right.weight", ("H", "laurel_rank"), "hyper", linear=True),
    Extra("layer", "laurel.post_laurel_norm.weight", ("H",)),
    Extra(
        "model",
        "{root}.altup_projections.{e}.weight",
        ("H", "H"),
        "hyper",
        linear=True,
        copies="altup_num_inputs-1",
    ),
    Extra(
        "model",
        "{root}.altup_unembed_projections.{e}.weight",
        ("H", "H"),
        "hyper",
        linear=True,
        copies="altup_num_inputs-1",
    ),
)
WHISPER_CONVOLUTIONS = (
    Extra("model", "{root}.conv1.weight", ("H", "num_mel_bins", 3), "conv"),
    Extra("model", "{root}.conv1.bias", ("H",), "bias"),
    Extra("model", "{root}.conv2.weight", ("H", "H", 3), "conv"),
    Extra("model", "{root}.conv2.bias", ("H",), "bias"),
)
