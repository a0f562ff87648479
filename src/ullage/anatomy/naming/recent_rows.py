"""How the decoders of `families/recent.py` name their tensors: rows of data.

Holds names and layouts only, as `rows.py` does for the others. Facts: the modules of
transformers 5.24.
"""

from __future__ import annotations

from ullage.anatomy.naming import heads
from ullage.anatomy.naming.paths import SANDWICH
from ullage.anatomy.naming.row import Extra, Row


def _matrix(
    scope: str, path: str, *shape: int | str, role: str = "q", column: bool = False
) -> Extra:
    return Extra(scope, f"{path}.weight", shape, role, linear=True, column=column)  # type: ignore[arg-type]


def _vector(scope: str, path: str, *shape: int | str, role: str = "scale") -> Extra:
    return Extra(scope, path, shape or ("H",), role)  # type: ignore[arg-type]


_ZAYA_ROUTER = "mlp.gate.router_mlp"
_SCALES = (
    "hidden_states_scale",
    "hidden_states_bias",
    "residual_scale",
    "residual_bias",
)
HYPER_DOTTED = {"hyper_attn": "attn_hc.", "hyper_ffn": "ffn_hc."}

# The output head has the rows of the vocabulary before it was padded, where that is said.
_UNPADDED_HEAD = (
    Extra("head", "lm_head.weight", ("unpadded_vocab_size+!unpadded_vocab_size*V", "H"), "lm_head"),
)
_REACH = "windowed*window+unbounded*rel_extent"
_LOOPED = "loop_layer_index_end-loop_layer_index_start"


_CROSSED = "num_hidden_layers/cross_layer_interval"


def _convolution(scope: str, path: str, channels: str) -> Extra:
    shape = (channels, 1, "conv_kernel_size")
    return Extra(scope, f"{path}.conv1d.weight", shape, "conv")  # type: ignore[arg-type]


RECENT_NAMES: dict[str, Row] = {
    "doge": Row(
        extras=(
            _vector("layer", "input_residual"),
            _vector("layer", "post_attention_residual"),
            _vector("attention", "self_attn.A", "kv_heads"),
            _matrix("attention", "self_attn.dt_proj", "kv_heads", "K"),
            Extra("attention", "self_attn.dt_proj.bias", ("attention_bias*kv_heads",), "bias"),
        )
    ),
    "lfm3": Row(
        "lfm2",
        {
            "o": "{attn}.o_proj",
            "q_norm": "{attn}.q_norm",
            "k_norm": "{attn}.k_norm",
            "post1": "post_operator_norm",
            "post2": "post_ffn_norm",
        },
    ),
    "muse_glimmer_text": Row(paths=SANDWICH | {"element_gate": "{attn}.gate_proj"}),
    "muse_spark_text": Row(
        "muse_glimmer_text",
        {
            "post1": "",
            "latent_in": "{moe}.pre_expert_proj",
            "latent_out": "{moe}.post_expert_proj",
        },
        experts="stacked",
        extras=(
            _vector("experts", "mlp.pre_expert_norm.weight", "latent", role="norm"),
            _vector("experts", "mlp.experts.post_expert_norm.weight", "latent", role="norm"),
            _vector("layer", "post_attention_residual_gate.gate"),
            _vector("layer", "post_feedforward_residual_gate.gate"),
        ),
    ),
    "modernbert-decoder": Row(
        paths={
            "embed": "{root}.embeddings.tok_embeddings",
            "embed_norm": "{root}.embeddings.norm",
            "attn": "attn",
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
            _matrix("head", "lm_head.dense", "H", "H", role="lm_head"),
            _vector("head", "lm_head.norm.weight", role="norm"),
        ),
        judges=heads.MODERN_PLAIN,
    ),
    "cpmant": Row(
        paths={
            "root": "cpmant",
            "layer": "{root}.encoder.layers.{i}",
            "embed": "{root}.input_embedding",
            "final_norm": "{root}.encoder.output_layernorm",
            "pre1": "self_att.layernorm_before_attention",
            "pre2": "ffn.layernorm_before_ffn",
            "attn": "self_att.self_attention",
            "q": "{attn}.project_q",
            "k": "{attn}.project_k",
            "v": "{attn}.project_v",
            "o": "{attn}.attention_out",
            "mlp": "ffn.ffn",
            "gate": "{mlp}.w_in.w_0",
            "up": "{mlp}.w_in.w_1",
            "down": "{mlp}.w_out",
        },
        embed_extra="prompt_types*prompt_length",
        own_head=True,
        extras=(
            Extra("model", "{root}.segment_embedding.weight", ("segment_types", "H"), "position"),
            Extra(
                "model",
                "{root}.position_bias.relative_attention_bias",
                ("position_bias_num_buckets+segment_types^2", "num_attention_heads"),
                "attn_bias_table",
            ),
            # narrower than the embedding, so never tied to it
            Extra("head", "lm_head.weight", ("V", "H"), "lm_head"),
        ),
    ),
    "moshi": Row(
        paths={
            "q": "{attn}.q_proj.linear",
            "k": "{attn}.k_proj.linear",
            "v": "{attn}.v_proj.linear",
            "o": "{attn}.o_proj.linear",
            "gate_up": "{mlp}.fc1",
            "down": "{mlp}.fc2",
        },
        embed_extra=1,
    ),
    "jetmoe": Row(
        paths={
            "attn": "self_attention",
            "router": "{moe}.router.layer",
            "experts": "{moe}",
            "e_gate_up": "{moe}.input_linear",
            "e_all_down": "{moe}.output_linear",
            "stacked_suffix": ".weight",
        },
        experts="stacked",
        extras=(_vector("experts", "mlp.bias", role="bias"),),
    ),
    "zaya": Row(
        paths={
            "q": "{attn}.qkv_proj.q_proj",
            "k": "{attn}.qkv_proj.k_proj",
            "v": "",
            "router": f"{_ZAYA_ROUTER}.out_proj",
            "router_bias": "{moe}.gate.balancing_biases",
        },
        experts="stacked",
        extras=(
            _vector("model", "{root}.input_hidden_states_scale"),
            _vector("model", "{root}.input_hidden_states_bias"),
            _matrix("attention", "self_attn.qkv_proj.v_proj_current", "half_v", "H", role="v"),
            _matrix("attention", "self_attn.qkv_proj.v_proj_delayed", "half_v", "H", role="v"),
            Extra(
                "attention",
                "self_attn.qkv_proj.conv_qk_depthwise.weight",
                ("Q+K", 1, "cca_time0"),
                "conv",
            ),
            _vector("attention", "self_attn.qkv_proj.conv_qk_depthwise.bias", "Q+K", role="bias"),
            Extra(
                "attention",
                "self_attn.qkv_proj.conv_qk_grouped.weight",
                ("Q+K", "D", "cca_time1"),
                "conv",
            ),
            _vector("attention", "self_attn.qkv_proj.conv_qk_grouped.bias", "Q+K", role="bias"),
            _vector("attention", "self_attn.qk_norm.temp", "kv_heads"),
            _matrix("experts", "mlp.gate.down_proj", "router_hidden_size", "H", role="router"),
            _vector("experts", "mlp.gate.down_proj.bias", "router_hidden_size", role="bias"),
            _vector("experts", f"{_ZAYA_ROUTER}.norm.weight", "router_hidden_size", role="norm"),
            *(
                extra
                for leaf in ("fc1", "fc2")
                for extra in (
                    _matrix(
                        "experts",
                        f"{_ZAYA_ROUTER}.{leaf}",
                        "router_hidden_size",
                        "router_hidden_size",
                        role="router",
                    ),
                    _vector("experts", f"{_ZAYA_ROUTER}.{leaf}.bias", "router_hidden_size"),
                )
            ),
            _vector("experts", "mlp.gate.router_states_scale", "later*router_hidden_size"),
            *(
                _vector("layer", f"post_{part}_residual_scale.{leaf}")
                for part in ("attention", "mlp")
                for leaf in _SCALES
            ),
        ),
    ),
    "ernie4_5_vl_moe_text": Row(
        paths={
            "root": "model.language_model",
            "shared": "{moe}.shared_experts",
            "router": "{moe}.text_moe.gate",
            "router_bias": "{router}.moe_statics.e_score_correction_bias",
            "experts": "{moe}.text_moe.experts",
        },
        experts="stacked",
        router_bias_row=True,
        extras=(
            _matrix("experts", "mlp.vision_moe.gate", "E", "H", role="router"),
            _vector(
                "experts",
                "mlp.vision_moe.gate.moe_statics.e_score_correction_bias",
                "1",
                "E",
                role="bias",
            ),
            _vector(
                "experts",
                "mlp.vision_moe.experts.gate_up_proj",
                "E",
                "2*moe_intermediate_size[1]",
                "H",
                role="expert_gate_up",
            ),
            _vector(
                "experts",
                "mlp.vision_moe.experts.down_proj",
                "E",
                "H",
                "moe_intermediate_size[1]",
                role="expert_down",
            ),
        ),
    ),
    "inkling_text": Row(
        paths={
            "embed_norm": "{root}.embed_tokens.embed_norm",
            "router": "",
            "router_bias": "{moe}.gate.e_score_correction_bias",
            "s_gate": "",
            "s_up": "",
            "s_down": "",
        },
        experts="stacked",
        own_head=True,
        extras=(
            *_UNPADDED_HEAD,
            _matrix("attention", "self_attn.r_proj", "heads*d_rel", "H"),
            _vector("attention", "self_attn.rel_logits_proj.proj", "d_rel", _REACH),
            _convolution("attention", "self_attn.k_sconv", "K"),
            _convolution("attention", "self_attn.v_sconv", "K"),
            _convolution("layer", "attn_sconv", "H"),
            _convolution("layer", "mlp_sconv", "H"),
            _vector("dense", "mlp.global_scale", 1),
            _vector("experts", "mlp.gate.global_scale", 1),
            _matrix("experts", "mlp.gate", "E+shared_expert_sink*n_shared_experts", "H"),
            *(
                _vector("experts", f"mlp.shared_experts.{leaf}", "n_shared_experts", *shape)
                for leaf, shape in (
                    ("gate_proj", ("I", "H")),
                    ("up_proj", ("I", "H")),
                    ("down_proj", ("H", "I")),
                )
            ),
        ),
    ),
    "inkling2_text": Row(
        paths={
            "embed_norm": "{root}.embed_tokens.embed_norm",
            "pre1": "",
            "q": "{attn}.q_proj.linear",
            "k": "{attn}.k_proj.linear",
            "v": "{attn}.v_proj.linear",
            "o": "{attn}.o_proj.linear",
            "q_norm": "",
            "k_norm": "",
            "element_gate": "{attn}.o_proj.gate_proj",
        },
        experts="stacked",
        own_head=True,
        extras=(
            *_UNPADDED_HEAD,
            _vector("model", "{root}.final_input.query"),
            _vector("layer", "mlp_input.query"),
            _vector("layer", "attention_input.query", "later*windowed*H"),
            _vector("layer", "attention_input.query", "3*unbounded", "H"),
            _vector("layer", "input_layernorm.weight", "windowed*H", role="norm"),
            *(
                _vector("layer", f"{leaf}_input_layernorm.weight", "unbounded*H", role="norm")
                for leaf in "qkv"
            ),
            _vector("attention", "self_attn.q_proj.norm.scale", "heads", "D"),
            *(
                extra
                for leaf in "kv"
                for extra in (
                    _convolution("attention", f"self_attn.{leaf}_proj.sconv", "windowed*K"),
                    _vector(
                        "attention",
                        f"self_attn.{leaf}_proj.sconv.static_weight",
                        "unbounded*conv_kernel_size",
                        "K",
                    ),
                    _matrix(
                        "attention",
                        f"self_attn.{leaf}_proj.sconv.weight_proj",
                        "unbounded*conv_kernel_size*kv_heads",
                        "H",
                    ),
                )
            ),
            _matrix("attention", "self_attn.sink_proj", "heads", "H"),
            _vector("attention", "self_attn.relative_position_bias.proj", "d_rel", "rel_extent"),
            _matrix("attention", "self_attn.relative_position_bias.linear", "heads*d_rel", "H"),
            _vector("attention", "self_attn.relative_position_bias.norm.scale", "heads", "d_rel"),
            _convolution("layer", "post_attention_convolution", "H"),
            _convolution("layer", "post_mlp_convolution", "H"),
        ),
    ),
    "inkling2_loop_text": Row(
        "inkling2_text",
        unnamed=True,
        extras=(
            _vector("model", "{root}.message_input.query", _LOOPED, 4, "H"),
            *(
                Extra(
                    "model",
                    f"{{root}}.layers.{{e}}.{part}_message_gate.{leaf}.weight",
                    shape,
                    "scale",
                    linear=True,
                    copies=_LOOPED,
                )
                for part in ("q", "k", "v", "mlp")
                for leaf, shape in (
                    ("down_proj", ("loop_gate_rank", "2H")),
                    ("forget_gate_proj", ("H", "loop_gate_rank")),
                    ("message_gate_proj", ("H", "loop_gate_rank")),
                )
            ),
        ),
    ),
    "chameleon": Row(
        paths={"q_norm": "", "k_norm": ""},
        extras=tuple(
            _vector("attention", f"self_attn.{leaf}_norm.{kind}", heads, "D", role=role)
            for leaf, heads in (("q", "heads"), ("k", "kv_heads"))
            for kind, role in (("weight", "norm"), ("bias", "bias"))
        ),
    ),
    "molmo2_text": Row(embed_extra="additional_vocab_size"),
    "kyutai_speech_to_text": Row(
        "moshi",
        {"embed": "{root}.embed_tokens.embed_tokens"},
        embed_extra="num_codebooks*codebook_vocab_size+1",
    ),
    "emu3_text_model": Row(paths={"root": "model.text_model"}),
    "idefics": Row(
        unnamed=True,
        extras=(
            *(
                Extra(
                    "model",
                    f"{{root}}.gated_cross_attn_layers.{{e}}.{leaf}",
                    shape,
                    role,
                    linear=len(shape) > 1,
                    copies=_CROSSED,
                )
                for leaf, shape, role in (
                    ("alpha_cross_attn", (1,), "scale"),
                    ("alpha_dense", (1,), "scale"),
                    ("cross_attn.q_proj.weight", ("H", "H"), "q"),
                    ("cross_attn.k_proj.weight", ("H", "vision_width"), "k"),
                    ("cross_attn.v_proj.weight", ("H", "vision_width"), "v"),
                    ("cross_attn.o_proj.weight", ("H", "H"), "o"),
                    ("mlp.gate_proj.weight", ("width", "H"), "gate"),
                    ("mlp.up_proj.weight", ("width", "H"), "up"),
                    ("mlp.down_proj.weight", ("H", "width"), "down"),
                    ("input_layernorm.weight", ("H",), "norm"),
                    ("post_attention_layernorm.weight", ("H",), "norm"),
                )
            ),
            Extra("model", "additional_embeddings", ("2*additional_vocab_size", "H"), "position"),
        ),
    ),
    "evolla": Row(
        unnamed=True,
        extras=tuple(
            Extra(
                "model",
                f"adapter.{{e}}.{leaf}",
                shape,
                role,
                linear=len(shape) > 1,
                copies="aligner_num_add_layers",
            )
            for leaf, shape, role in (
                ("gate_attention", (1,), "scale"),
                ("gate_ffw", (1,), "scale"),
                *(
                    part
                    for name, role in (
                        ("query", "q"),
                        ("key_protein", "k"),
                        ("value_protein", "v"),
                        ("out_proj", "o"),
                    )
                    for part in (
                        (f"{name}.weight", ("H", "H"), role),
                        (f"{name}.bias", ("aligner_enable_bias*H",), "bias"),
                    )
                ),
                ("attention_norm.weight", ("H",), "norm"),
                ("ff.norm.weight", ("H",), "norm"),
                ("ff.norm.bias", ("H",), "bias"),
                ("ff.fc1.weight", ("aligner_ffn_mult*H", "H"), "up"),
                ("ff.fc2.weight", ("H", "aligner_ffn_mult*H"), "down"),
            )
        ),
    ),
    "florence2": Row(
        "bart_plain",
        {"root": "model.language_model.decoder", "embed": "model.language_model.shared"},
        encoder="florence2_encoder",
    ),
    "florence2_encoder": Row("bart_encoder", {"root": "model.language_model.encoder"}),
    "qwen4_exp_text": Row(
        "qwen3_5_text",
        {
            "pre1": "",
            "pre2": "",
            "hyper_attn": "",
            "hyper_ffn": "",
            "hyper_head": "",
            "sparse_qk": "{attn}.indexer.index_qk_proj",
            "sparse_q_norm": "{attn}.indexer.q_layernorm",
            "sparse_k_norm": "{attn}.indexer.k_layernorm",
        },
        extras=(
            *(
                extra
                for scope, path in (
                    ("model", "{root}.hyper_connection_mixer"),
                    ("layer", "attn_hyper_connection"),
                    ("layer", "mlp_hyper_connection"),
                )
                for extra in (
                    _vector(scope, f"{path}.hc_norm.weight", "hc_count*H", role="norm"),
                    _matrix(
                        scope,
                        f"{path}.input_mix_weight_down",
                        "hc_lowrank",
                        "hc_count*H",
                        role="hyper",
                    ),
                    _matrix(
                        scope,
                        f"{path}.input_mix_weight_up",
                        "hc_count*H",
                        "hc_lowrank",
                        role="hyper",
                    ),
                )
            ),
            _matrix(
                "layer",
                "attn_hyper_connection.block_inject_weight",
                "hc_count",
                "hc_count*H",
                role="hyper",
            ),
            _matrix(
                "layer",
                "mlp_hyper_connection.block_inject_weight",
                "hc_count",
                "hc_count*H",
                role="hyper",
            ),
        ),
    ),
    "qwen4_exp": Row("qwen4_exp_text", {"root": "model.language_model"}),
    # a draft that reads its target's states and cache
    "gemma4_assistant": Row(
        "gemma4_text",
        extras=(
            _matrix("model", "pre_projection", "H", "2*backbone_hidden_size", role="mtp"),
            _matrix("model", "post_projection", "backbone_hidden_size", "H", role="mtp"),
            Extra(
                "model",
                "masked_embedding.centroids.weight",
                ("use_ordered_embeddings*num_centroids", "H"),
                "mtp",
                linear=True,
            ),
            Extra(
                "model",
                "masked_embedding.token_ordering",
                ("use_ordered_embeddings*V",),
                "hash_table",
                dtype="int64",
            ),
        ),
    ),
    # latent attention
    "hy_v4": Row(
        "mistral4",
        HYPER_DOTTED | {"hyper_head": "{root}.hc_head.hc_"},
        hyper_mixed=False,
        extras=(
            _vector("latent", "self_attn.sinks", "heads", role="sinks"),
            _matrix("latent", "self_attn.gate_proj", "O", "H", role="attn_gate", column=True),
        ),
    ),
    "axk2": Row(
        "mistral4",
        {"pre1": "input_layernorm.norm", "pre2": "", "q_b": ""},
        extras=(
            _matrix("latent", "self_attn.q_gate_proj", "Q+O", "2*q_rank", column=True),
            _vector("dense", "post_attention_layernorm.weight", role="norm"),
            _vector("experts", "post_attention_layernorm.norm.weight", role="norm"),
            *(
                extra
                for scope, norm in (
                    ("layer", "input_layernorm"),
                    ("experts", "post_attention_layernorm"),
                )
                for extra in (
                    _matrix(scope, f"{norm}.mlp.fc1", "gated_norm_rank", "H", role="scale"),
                    _matrix(scope, f"{norm}.mlp.fc2", "H", "gated_norm_rank", role="scale"),
                )
            ),
        ),
    ),
    "bailing_hybrid": Row(
        "mistral4",
        {
            "linear": "self_attn",
            "kda_conv": "{linear}.conv1d",
            "forget": "{linear}.forget_gate",
        },
        extras=(
            _matrix("latent", "self_attn.g_proj", "heads", "H", role="attn_gate", column=True),
        ),
    ),
    "glm5_next_text": Row(
        "mistral4",
        HYPER_DOTTED
        | {
            "hyper_head": "",
            "linear": "self_attn",
            "kda_conv": "{linear}.conv1d",
            "forget": "{linear}.forget_gate",
        },
        extras=(
            _vector(
                "latent",
                "self_attn.indexer.index_kpool_compress_ape",
                "indexed*index_kpool",
                "index_head_dim",
                role="indexer",
            ),
            _vector(
                "latent",
                "self_attn.indexer.index_kpool_compress_gate",
                "indexed*index_head_dim",
                "H",
                role="indexer",
            ),
        ),
    ),
    "glm5_next": Row("glm5_next_text", {"root": "model.language_model"}),
    # layers that run more than once
    "dory": Row(
        paths=SANDWICH | {"element_gate": "{attn}.gate_proj"},
        extras=(
            _vector("layer", "lambda_1"),
            _vector("layer", "lambda_2"),
            _vector("attention", "self_attn.sqk", "Q"),
            _vector("attention", "self_attn.s_gate", "Q"),
            _vector("dense", "mlp.suv_gate", "I"),
            _vector("dense", "mlp.suv_up", "I"),
            Extra("model", "lm_head.logit_scale", ("V",), "scale"),
        ),
    ),
    "hrm_text": Row(
        paths={"element_gate": "{attn}.gate_proj"},
        parts=(
            ("model.L_module.layers.{i}", "num_layers_per_stack"),
            ("model.H_module.layers.{i}", "num_layers_per_stack"),
        ),
        extras=(
            _vector("model", "{root}.z_L_init"),
            Extra("attention", "self_attn.gate_proj.bias", ("attention_bias*Q",), "bias"),
        ),
    ),
    "zamba": Row(
        paths={
            "final_norm": "{root}.final_layernorm",
            "pre2": "pre_ff_layernorm",
        },
        unnamed=True,
        extras=(Extra("run", "linear.weight", ("softmax*H", "H"), "o", linear=True),),
    ),
    "zamba2": Row(
        "zamba",
        unnamed=True,
        extras=(
            Extra("run", "mlp_adapter_in.weight", ("softmax*adapter_rank", "H"), "up"),
            Extra("run", "mlp_adapter_out.weight", ("2*I", "softmax*adapter_rank"), "up"),
            *(
                Extra("run", f"{leaf}_adapter_{end}.weight", shape, "q")
                for leaf in "qkv"
                for end, shape in (
                    ("in", ("use_shared_attention_adapter*softmax*adapter_rank", "2H")),
                    ("out", ("use_shared_attention_adapter*Q", "adapter_rank")),
                )
            ),
        ),
    ),
}
RECENT_ALIASES: dict[str, str] = {
    "gemma4_unified_text": "gemma4_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4",
    "unlimited_ocr_text": "deepseek_v2",
    "Florence2ForConditionalGeneration": "florence2",
    "Gemma4AssistantForCausalLM": "gemma4_assistant",
    "Gemma4UnifiedAssistantForCausalLM": "gemma4_assistant",
    "Qwen4ExpForConditionalGeneration": "qwen4_exp",
    "Glm5NextForConditionalGeneration": "glm5_next",
}
