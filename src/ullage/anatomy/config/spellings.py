"""Spellings of configuration keys: other names of the same field, and keys without structure.

Data only. A key listed in IRRELEVANT cannot change a weight's shape, a cache's size or a layer's
work; anything that is neither read nor listed here is reported as unread.
"""

from __future__ import annotations

# Where configurations of several modalities keep their language model.
TEXT_KEYS = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "language_model_config",
    "text_model_config",
)

SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model", "n_embed", "dim", "model_dim", "embed_dim", "emb_dim"),
    "num_hidden_layers": (
        "n_layer",
        "n_layers",
        "num_layers",
        "num_decoder_layers",
        "decoder_layers",
        "layers",
    ),
    "num_attention_heads": (
        "n_head",
        "n_heads",
        "num_heads",
        "attention_heads",
        "decoder_attention_heads",
    ),
    "num_key_value_heads": (
        "num_kv_heads",
        "n_head_kv",
        "kv_n_heads",
        "num_attention_groups",
        "multi_query_group_num",
        "num_query_groups",
        "n_kv_heads",
    ),
    "head_dim": ("attention_head_dim", "kv_channels", "d_kv", "head_size", "dim_head"),
    "intermediate_size": (
        "n_inner",
        "ffn_dim",
        "d_ff",
        "dim_ff",
        "ffn_hidden_size",
        "feed_forward_hidden_size",
        "decoder_ffn_dim",
        "hidden_dim",
    ),
    "embedding_size": ("word_embed_proj_dim", "input_embedding_size"),
    "max_position_embeddings": (
        "n_positions",
        "max_seq_len",
        "seq_length",
        "max_sequence_length",
        "model_max_length",
        "n_ctx",
        "max_target_positions",
    ),
    "vocab_size": ("padded_vocab_size", "n_vocab", "tgt_vocab_size"),
    "max_source_positions": ("max_encoder_position_embeddings",),
    "norm_eps": (
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_epsilon",
        "layernorm_epsilon",
        "norm_eps",
        "layernorm_eps",
        "eps",
    ),
    "hidden_act": (
        "hidden_activation",
        "activation_function",
        "mlp_hidden_act",
        "activation",
        "hidden_activation_fn",
        "feed_forward_proj",
    ),
    "dtype": ("torch_dtype",),
    "num_experts": (
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "num_routed_experts",
    ),
    "num_experts_per_tok": (
        "num_experts_per_topk",
        "num_experts_per_token",
        "moe_k",
        "moe_topk",
        "experts_per_token",
        "top_k_experts",
        "moe_top_k",
        "num_selected_experts",
    ),
    "moe_intermediate_size": ("expert_ffn_hidden_size", "moe_ffn_hidden_size"),
    "shared_expert_intermediate_size": (
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
        "moe_shared_intermediate_size",
    ),
    "n_shared_experts": ("num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "num_nextn_predict_layers": (
        "mtp_num_hidden_layers",
        "num_mtp_modules",
        "num_mtp_layers",
    ),
    "hc_mult": ("hc_count",),
    "moe_latent_size": ("moe_hidden_size",),
    "layer_types": ("layers_block_type",),
    "attention_output_gate": ("attn_output_gate",),
    "ssm_state_size": ("mamba_d_state", "state_size", "mamba_state_dim"),
    "conv_kernel": ("mamba_d_conv", "conv1d_width", "conv_dimension"),
    "mamba_num_heads": ("mamba_n_heads", "n_mamba_heads"),
    "mamba_head_dim": ("mamba_d_head", "mamba_headdim"),
    "mamba_expand": ("expand",),
    "mamba_dt_rank": ("time_step_rank",),
    "n_groups": ("mamba_n_groups", "mamba_ngroups"),
    "chunk_size": ("mamba_chunk_size",),
    "use_conv_bias": ("mamba_conv_bias",),
    "multi_query": ("multi_query_attention",),
    "sliding_window": (
        "attention_window_size",
        "window_size",
        "local_attention",
        "attention_window",
    ),
    "final_logit_softcapping": ("logits_soft_cap",),
    "partial_rotary_factor": ("rotary_pct", "rope_pct"),
    "rope_theta": ("rotary_emb_base", "rope_base", "rope_embedding_base"),
    "type_vocab_size": (),
    "tie_word_embeddings": ("tie_embedding",),
}

# Sizes of one stack of an encoder-decoder (the decoder's also stand in for a whole model's above).
for _side in ("encoder", "decoder"):
    SPELLINGS |= {
        f"{_side}_layers": (f"num_{_side}_layers", f"{_side}_num_hidden_layers"),
        f"{_side}_attention_heads": (
            f"num_{_side}_attention_heads",
            f"{_side}_num_attention_heads",
        ),
        f"{_side}_ffn_dim": ("intermediate_size",),
    }

IRRELEVANT_ENDINGS = (
    "_token_id",
    "_token_index",
    "_dropout",
    "_pdrop",
    "dropout_rate",
    "_loss_coef",
    "_loss_alpha",
    "_multiplier",
    "_multipliers",
    "_alpha_factor",
    "_beta_factor",
    "_dropout_prob",
    "z_loss_coefficient",
    "_token_ids",
)
IRRELEVANT_STARTS = ("_", "summary_", "mask_time_", "mask_feature_")

_IRRELEVANT = (
    # what transformers writes into every file, and generation-era boilerplate
    "architectures auto_map transformers_version name_or_path id2label label2id problem_type "
    "use_cache return_dict output_attentions output_hidden_states torchscript use_bfloat16 "
    "tf_legacy_loss pruned_heads chunk_size_feed_forward is_decoder is_encoder_decoder "
    "add_cross_attention tie_encoder_decoder finetuning_task task_specific_params tokenizer_class "
    "prefix max_length min_length do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens cross_attention_hidden_size sep_token unsloth_fixed "
    # training: initialisation, dropout, losses
    "initializer_range initializer_factor init_std init_method init_device dropout "
    "residual_dropout embedding_dropout rescale_prenorm_residual time_step_min time_step_max "
    "time_step_floor time_step_init_scheme time_step_scale time_step_limit router_jitter_noise "
    "input_jitter_noise output_router_logits seq_aux aux_loss_alpha z_loss_alpha "
    "router_z_loss_coefficient max_z_loss pretraining_tp ep_size initial_context_length "
    # numbers that scale activations or pick experts without any weight or cache of their own
    "routed_scaling_factor moe_router_scaling_factor router_scaling_factor norm_topk_prob "
    "scoring_func topk_group moe_router_dtype hc_eps hc_sinkhorn_iters swiglu_limit swiglu_alpha "
    "residual_in_fp32 use_mamba_kernels num_logits_to_keep moe_shared_expert_overlap "
    "attn_temperature_tuning floor_scale attn_scale logits_scaling logit_scale moe_norm_min "
    "scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn "
    "attention_softmax_in_fp32 scale_attention_softmax_in_fp32 scale_embedding clip_qkv "
    "softmax_scale apply_residual_connection_post_layernorm slow_but_exact use_mambapy "
    "use_associative_scan mixer_rms_eps altup_active_idx altup_coef_clip altup_correct_scale "
    "activation_sparsity_pattern use_flash_attn use_dynamic_ntk use_logn_attn fp32 fp16 bf16 "
    "enable_moe_fp32_combine embedding_initializer_range initializer_cutoff_factor "
    "deterministic_flash_attn attention_value_scale route_scale route_norm score_func "
    # training of encoders, speech augmentation, pooling without weights
    "layerdrop encoder_layerdrop decoder_layerdrop apply_spec_augment use_weighted_layer_sum "
    "classifier_proj_size median_filter_width position_embedding_type classifier_pooling "
    "classifier_activation "
    "classifier_bias sparse_prediction sparse_pred_ignore_index "
    "gradient_checkpointing w_init_variance_scale _num_labels num_labels normalize_before "
    "normalize_embedding "
    # how inputs are laid out
    "dynamic_image_size force_image_size max_dynamic_patch min_dynamic_patch ps_version "
    "select_layer template use_backbone_lora use_llm_lora use_thumbnail attn_implementation "
    "z_loss_weight pad_token_id projector_hidden_act "
    "ignore_index video_placeholder image_seq_length image_seq_len image_grid_pinpoints "
    "vision_feature_layer vision_feature_select_strategy use_unified_vision_chunk "
    "vision_soft_tokens_per_image mm_tokens_per_image language_model_only "
    "use_bidirectional_attention output_gate_type cache_implementation sliding_window_size "
    "enable_audio_output enable_talker position_id_per_seconds seconds_per_chunk "
    "audio_soft_tokens_per_image pad2square is_composition use_image_newline_parameter output_past "
    "is_causal "
    "router_dtype "
    "score_function use_rmsnorm moe_capacity moe_gate moe_use_aux_free multi_gate norm_softmax "
    "tie_weights_ sinusoidal_pos_embds static_position_embeddings add_bias_logits "
    "add_final_layer_norm dual_chunk_attention_config lora_alpha lora_dropout_p "
    "lora_main_params_trainable matryoshka_dimensions use_reentrant truncate_dim"
)
IRRELEVANT: frozenset[str] = frozenset(_IRRELEVANT.split())
