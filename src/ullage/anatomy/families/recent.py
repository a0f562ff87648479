"""Rows of the family table: decoders of 2025 and 2026, hybrids, looped and shared layers.

Data only; `family.py` explains the columns. Facts: the modules of transformers 5.24.
"""

from __future__ import annotations

from typing import Any

from ullage.anatomy.families.family import Family

_NO_BIAS: dict[str, Any] = {"q_bias": False, "kv_bias": False, "o_bias": False}
_MLA: dict[str, Any] = {"mixer": "latent", "mlp_bias": False, "score_bias": True}

RECENT_ROWS: tuple[Family, ...] = (
    # --- plain attention with tensors of the family's own
    Family(
        "doge",
        qk_norm="head",
        experts_if="is_moe",
        requires={"is_moe": False},
        ignored=("hidden_dropout", "keep_window_size"),
    ),
    Family(
        "lfm3",
        qk_norm="head",
        sandwich_if="use_sandwich_norm",
        output_gate="head",
        output_gate_if="use_attention_gate",
        mlp_bias=False,
        o_bias=False,
    ),
    Family(
        "muse_glimmer_text",
        place="sandwich",
        output_gate="element",
        nope="thetas",
        mlp_bias=False,
        activation="silu",
        ignored=("output_multiplier", "post_norm_eps", "qk_scale_factor"),
    ),
    Family(
        "muse_spark_text",
        place="sandwich",
        output_gate="element",
        nope="thetas",
        mlp_bias=False,
        score_bias=True,
        ignored=(
            "output_multiplier",
            "post_norm_eps",
            "qk_scale_factor",
            "residual_gate_temperature",
        ),
    ),
    Family(
        "modernbert-decoder",
        norm="layer",
        norm_bias="norm_bias",
        gated=True,
        embedding_norm=True,
        lm_head_bias="decoder_bias",
        window_twice="local_attention",
        windows="every_first",
        pattern=3,
        ignored=("cls_token_id",),
    ),
    Family(
        "cpmant",
        **_NO_BIAS,
        mlp_bias=False,
        activation="gelu",
        positions="none",
        nope="all",
        sizes=(
            "num_attention_heads",
            "position_bias_num_buckets",
            "prompt_length",
            "prompt_types",
            "segment_types",
        ),
        ignored=("dropout_p", "position_bias_max_distance"),
    ),
    Family(
        "moshi",
        **_NO_BIAS,
        mlp_bias=False,
        windows="all",
        width_rule="half",
        classes=("MoshiForCausalLM", "MoshiModel"),
        apart=("audio_encoder_config", "depth_decoder_config"),
        ignored=("audio_vocab_size", "num_codebooks"),
    ),
    Family(
        "jetmoe",
        **_NO_BIAS,
        mlp_bias=False,
        query_sets=True,
        expert_width="intermediate_size",
        ignored=("aux_loss_coef",),
    ),
    Family(
        "zaya",
        q_bias="attention_bias",
        kv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias=False,
        lm_head_bias="lm_head_bias",
        score_bias=True,
        words={"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"},
        sizes=("cca_time0", "cca_time1", "router_hidden_size"),
        requires={"attention_bias": False},
        tail="Q*cca_time0-1+K*cca_time0-1+Q*cca_time1-1+K*cca_time1-1+half_v",
        extra={"zero_expert_num": 1},
    ),
    # --- latent attention
    Family("hy_v4", **_MLA, ignored=("hc_magnitude", "learnable_sink_init", "qk_head_dim")),
    Family("axk2", **_MLA, sizes=("gated_norm_rank",)),
    Family(
        "bailing_hybrid",
        **_MLA,
        linear="kda",
        full_gates=True,
        plan="group_size",
        ignored=(
            "kda_lower_bound",
            "kda_safe_gate",
            "moe_renormalize",
            "mtp_loss_scaling_factor",
            "num_expert_group",
        ),
    ),
    Family(
        "glm5_next_text",
        **_MLA,
        linear="kda",
        sizes=("index_head_dim", "index_kpool"),
        ignored=("linear_lower_bound",),
    ),
    # --- layers that run more than once
    Family(
        "dory",
        **_NO_BIAS,
        mlp_bias=False,
        affine=False,
        place="sandwich",
        output_gate="element",
        plan="halves",
        loop="middle",
        ignored=("ngpt_alpha_init",),
    ),
    Family(
        "hrm_text",
        affine=False,
        final_norm=False,
        output_gate="element",
        plan="two_stacks",
        loop="cycles",
        maybe_sizes=("num_layers_per_stack",),
        ignored=("L_bp_cycles", "embedding_scale", "prefix_lm"),
    ),
    Family(
        "zamba",
        **_NO_BIAS,
        mlp_bias=False,
        plan="shared_blocks",
        loop="shared_blocks",
        mamba=1,
        reads_twice=True,
        positions="none",
        nope="all",
        ignored=("attention_hidden_size", "hidden_mamba_act", "n_mamba_heads"),
    ),
    Family(
        "zamba2",
        **_NO_BIAS,
        mlp_bias=False,
        plan="shared_blocks",
        loop="shared_blocks",
        mamba_norm=True,
        reads_twice=True,
        requires={"add_bias_linear": False},
        sizes=("adapter_rank",),
        maybe_sizes=("use_shared_attention_adapter",),
        ignored=(
            "attention_hidden_size",
            "kv_channels",
            "use_long_context",
            "use_mem_eff_path",
            "use_mem_rope",
        ),
    ),
)

# Model types whose family has another name.
RECENT_MEMBERS: dict[str, str] = {
    "gemma4_unified_text": "gemma4",
}
