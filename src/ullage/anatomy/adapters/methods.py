"""The parameter-efficient methods beside LoRA: the words of their parameters, by PEFT type.

Holds the table alone. It lets a key name the method that it is of; nothing here is evaluated.
"""

from __future__ import annotations

# PEFT 0.21.2, tuners/*/layer.py: adapter_layer_names, and the buffers that are saved with them;
# `oft_r`, `oft_s`, `bone_block` are of older releases.
_WORDS = {
    "ADALORA": (
        "lora_E",
        "ranknum",
    ),
    "ADAMSS": (
        "adamss_A",
        "adamss_B",
    ),
    "ADAPTION_PROMPT": (
        "adaption_gate",
        "adaption_prompt",
    ),
    "BEFT": ("beft_bias",),
    "BOFT": (
        "boft_R",
        "boft_s",
    ),
    "BONE": ("bone_block",),
    "C3A": ("c3a_kernel",),
    "DEFT": (
        "deft_P",
        "deft_R",
    ),
    "DELORA": (
        "delora_A",
        "delora_B",
        "delora_lambda",
        "delora_w_norm",
    ),
    "FOURIERFT": ("fourierft_spectrum",),
    "FROD": (
        "frod_lambda_l",
        "frod_lambda_s_values",
        "frod_V",
        "frod_U",
        "frod_s_indices",
        "frod_s_size",
    ),
    "GLORA": (
        "glora_A",
        "glora_B",
        "glora_C",
        "glora_D",
        "glora_E",
    ),
    "GRALORA": (
        "gralora_A",
        "gralora_B",
        "gralora_A_general",
        "gralora_B_general",
    ),
    "HIRA": (
        "hira_A",
        "hira_B",
        "hira_embedding_A",
        "hira_embedding_B",
    ),
    "HRA": ("hra_u",),
    "IA3": ("ia3_l",),
    "LILY": (
        "lily_A",
        "lily_B",
        "lily_router",
    ),
    "LN_TUNING": ("ln_tuning_layers",),
    "LOHA": (
        "hada_w1_a",
        "hada_w1_b",
        "hada_w2_a",
        "hada_w2_b",
        "hada_t1",
        "hada_t2",
    ),
    "LOKR": (
        "lokr_w1",
        "lokr_w1_a",
        "lokr_w1_b",
        "lokr_w2",
        "lokr_w2_a",
        "lokr_w2_b",
        "lokr_t2",
    ),
    "LORA": (
        "lora_diag",
        "lora_monteclora_sampler",
    ),
    "MISS": ("miss_block",),
    "MULTITASK_PROMPT_TUNING": (
        "prefix_task_cols",
        "prefix_task_rows",
    ),
    "OFT": (
        "oft_R",
        "oft_embedding_R",
        "oft_r",
        "oft_s",
    ),
    "OSF": ("osf_svd_params",),
    "PEANUT": (
        "peanut_A",
        "peanut_B",
        "peanut_encoders",
        "peanut_decoders",
    ),
    "POLY": (
        "poly_lora_A",
        "poly_lora_B",
        "poly_router",
    ),
    "PROMPT_LEARNING": ("prompt_embeddings",),
    "PSOFT": (
        "psoft_R",
        "psoft_A",
        "psoft_B",
        "psoft_alpha",
        "psoft_beta",
    ),
    "PVERA": (
        "pvera_A",
        "pvera_B",
        "pvera_lambda_b",
        "pvera_lambda_d",
    ),
    "RANDLORA": (
        "randlora_A",
        "randlora_B",
        "randlora_lambda",
        "randlora_gamma",
    ),
    "ROAD": (
        "road_theta",
        "road_alpha",
    ),
    "SHADOW": (
        "shadow_down",
        "shadow_up",
        "shadow_update_transform",
        "shadow_update_gate",
        "shadow_backbone",
    ),
    "SHIRA": (
        "shira_weight",
        "shira_indices",
    ),
    "SUPERTUNING": (
        "supertuning_values",
        "supertuning_lora_A",
        "supertuning_lora_B",
        "supertuning_indices",
    ),
    "TINYLORA": (
        "tinylora_v",
        "tinylora_A",
        "tinylora_B",
        "tinylora_P",
    ),
    "UNILORA": (
        "unilora_theta_d",
        "unilora_indices_A",
        "unilora_indices_B",
        "unilora_scales_A",
        "unilora_scales_B",
    ),
    "VBLORA": (
        "vblora_logits_A",
        "vblora_logits_A_topk_indices",
        "vblora_logits_A_topk_weights",
        "vblora_logits_B",
        "vblora_logits_B_topk_indices",
        "vblora_logits_B_topk_weights",
        "vblora_vector_bank",
    ),
    "VERA": (
        "vera_A",
        "vera_B",
        "vera_lambda_b",
        "vera_lambda_d",
    ),
    "WAVEFT": ("waveft_spectrum",),
    "XLORA": ("internal_xlora_classifier",),
}
OTHER_PARAMETERS = {word: kind for kind, words in _WORDS.items() for word in words}
