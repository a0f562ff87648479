"""Rows of the family table for decoders that are seldom served, each a change to a known kind.

Data only; `family.py` explains the columns. Facts: the modules of transformers 5.24.
"""

from __future__ import annotations

from typing import Any

from ullage.anatomy.families.family import Family

_NO_BIAS: dict[str, Any] = {"q_bias": False, "kv_bias": False, "o_bias": False}
_ALL_BIAS: dict[str, Any] = {"q_bias": True, "kv_bias": True, "o_bias": True}
_LAYER_NORM: dict[str, Any] = {"norm": "layer", "norm_bias": True}

RARE_ROWS: tuple[Family, ...] = (
    # Step-3: no class of transformers; vLLM 0.32 (step3_text.py) has neither biases nor QK-norms.
    Family(
        "step3_text",
        **_NO_BIAS,
        mlp_bias=False,
        activation="silu",
        ignored=("max_position_embedding", "norm_expert_weight"),
        extra={"tie_word_embeddings": False},
    ),
    Family(
        "longcat_flash",
        mixer="latent",
        mlp_bias=False,
        score_bias=True,
        activation="silu",
        plan="double",
        ignored=(
            "attention_method",
            "mla_scale_kv_lora",
            "mla_scale_q_lora",
            "router_bias",
            "zero_expert_type",
        ),
    ),
    Family("cwm", **_NO_BIAS),
    Family("eurobert", kind="encoder", lm_head_bias="mlp_bias"),
    Family("aria_text"),
    Family("apertus1p5_text", gated=False, activation="xielu", qk_norm="head", mlp_bias=False),
    Family(
        "bitnet",
        sizes=("intermediate_size",),
        mlp_bias=False,
        activation="relu2",
    ),
    Family(
        "nanochat",
        affine=False,
        mlp_bias=False,
        gated=False,
        activation="relu2",
    ),
    Family("mellum", qk_norm="head", mlp_bias=False),
    Family("flint", qk_norm="head", sinks=True, mlp_bias=False),
    Family("granitemoe_swa", sinks=True, expert_width="intermediate_size", embedding_scale="key"),
    Family("lara_mini", qk_norm="head", linear="gated_delta_net", mlp_bias=False),
    Family(
        "exaone_moe",
        **_NO_BIAS,
        mlp_bias=False,
        qk_norm="head",
        score_bias=True,
        windows="every",
        pattern=4,
        nope="full",
    ),
    Family(
        "kolibri1", **_NO_BIAS, mlp_bias=False, qk_norm="head", score_bias=True, place="sandwich"
    ),
    Family("axk1", mixer="latent", mlp_bias=False, score_bias=True),
    Family(
        "beam",
        qk_norm="head",
        place="sandwich",
        output_gate="element",
        score_bias=True,
        mlp_bias=False,
        sizes=("num_attention_heads",),
    ),
    Family(
        "openai-gpt",
        **_LAYER_NORM,
        **_ALL_BIAS,
        place="post",
        final_norm=False,
        gated=False,
        mlp_bias=True,
        activation="gelu",
        positions="learned",
        dtype="float32",
        ignored=("afn",),
    ),
)
