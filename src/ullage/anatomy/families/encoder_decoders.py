"""Rows of the family table for encoder-decoders: T5, BART, Whisper and their kin.

Data only; `family.py` explains the columns. Facts: the modules of transformers 5.24.
"""

from __future__ import annotations

from typing import Any

from ullage.anatomy.families.family import Family

_BART: dict[str, Any] = {
    "kind": "encoder-decoder",
    "norm": "layer",
    "norm_bias": True,
    "q_bias": True,
    "kv_bias": True,
    "o_bias": True,
    "gated": False,
    "mlp_bias": True,
    "positions": "learned",
    "cross_attention": True,
    "dtype": "float32",
}
_T5: dict[str, Any] = {
    "kind": "encoder-decoder",
    "q_bias": False,
    "kv_bias": False,
    "o_bias": False,
    "mlp_bias": False,
    "positions": "relative",
    "cross_attention": True,
    "dtype": "float32",
    "extra": {"tie_word_embeddings": True},
}


ENCODER_DECODER_ROWS: tuple[Family, ...] = (
    Family("bart", **_BART, place="post", final_norm=False, embedding_norm=True, position_offset=2),
    Family("blenderbot-small", **_BART, place="post", final_norm=False, embedding_norm=True),
    Family("mbart", **_BART, embedding_norm=True, position_offset=2),
    Family("pegasus", **{**_BART, "positions": "sinusoidal"}),
    Family(
        "marian",
        **{**_BART, "positions": "sinusoidal"},
        place="post",
        final_norm=False,
        requires={"share_encoder_decoder_embeddings": True},
    ),
    Family("m2m_100", **{**_BART, "positions": "sinusoidal"}, stored_positions=False),
    Family("blenderbot", **_BART),
    Family("whisper", **_BART, sizes=("num_mel_bins",)),
    Family("t5", **_T5),
    Family("mt5", **_T5),
    Family("umt5", **_T5),
    # --- seldom served; sparse attention in the encoder costs less than the full one
    Family(
        "bigbird_pegasus",
        **{**_BART, "q_bias": "use_bias", "kv_bias": "use_bias", "o_bias": "use_bias"},
        cheaper_if="attention_type=block_sparse",
        ignored=("attention_type", "block_size", "num_random_blocks"),
    ),
    Family(
        "led",
        **_BART,
        place="post",
        final_norm=False,
        embedding_norm=True,
        cheaper_if="always",
        ignored=("attention_window",),
    ),
    Family(
        "pegasus_x",
        **{**_BART, "q_bias": False, "kv_bias": False, "o_bias": False, "positions": "sinusoidal"},
        stored_positions=False,
        cheaper_if="always",
        sizes=("num_global_tokens",),
        ignored=("block_size", "stagger_local_blocks"),
    ),
    Family(
        "speech_to_text",
        **{**_BART, "positions": "sinusoidal"},
        stored_positions=False,
        sizes=("conv_channels", "input_feat_per_channel", "input_channels"),
        maybe_sizes=("conv_kernel_sizes[0]", "conv_kernel_sizes[1]"),
        requires={"num_conv_layers": 2},
        ignored=("max_source_positions",),
    ),
    Family(
        "fsmt",
        **{**_BART, "positions": "sinusoidal"},
        place="post",
        final_norm=False,
        position_offset=2,
        sizes=("src_vocab_size",),
        ignored=("langs",),
    ),
    Family(
        "prophetnet",
        **_BART,
        place="post",
        final_norm=False,
        embedding_norm=True,
        sizes=("ngram", "num_buckets", "decoder_attention_heads"),
        ignored=("relative_max_distance", "disable_ngram_loss", "eps"),
    ),
    Family(
        "trocr",
        **_BART,
        place="post",
        final_norm=False,
        embedding_norm=True,
        position_offset=2,
        requires={"use_learned_position_embeddings": True, "layernorm_embedding": True},
    ),
    Family(
        "nllb-moe",
        **{**_BART, "positions": "sinusoidal"},
        stored_positions=False,
        extra={"num_experts_per_tok": 2},
        ignored=(
            "expert_capacity",
            "router_ignore_padding_tokens",
            "second_expert_policy",
            "normalize_router_prob_before_dropping",
            "batch_prioritized_routing",
            "moe_eval_capacity_token_fraction",
            "moe_token_dropout",
        ),
    ),
    Family(
        "moonshine",
        kind="encoder-decoder",
        o_bias=False,
        norm="layer",
        gated=True,
        mlp_bias=True,
        cross_attention=True,
        rotary=True,
        dtype="float32",
        requires={"pad_head_dim_to_multiple_of": None},
    ),
    Family(
        "longt5",
        **_T5,
        cheaper_if="always",
        sizes=("relative_attention_num_buckets",),
        maybe_sizes=("encoder_attention_type=transient-global",),
        ignored=("local_radius", "global_block_size", "scale_decoder_outputs"),
    ),
    Family(
        "pop2piano",
        **_T5,
        sizes=("composer_vocab_size",),
        ignored=("scale_decoder_outputs",),
    ),
    Family(
        "switch_transformers",
        **{**_T5, "extra": {"tie_word_embeddings": True, "num_experts_per_tok": 1}},
        ignored=(
            "expert_capacity",
            "num_sparse_encoder_layers",
            "num_sparse_decoder_layers",
            "router_ignore_padding_tokens",
            "add_router_probs",
        ),
    ),
    Family(
        "udop",
        **_T5,
        sizes=(
            "num_channels",
            "patch_size",
            "max_2d_position_embeddings",
            "num_heads",
            "relative_attention_num_buckets",
        ),
        requires={
            "relative_bias_args": [{"type": "1d"}, {"type": "horizontal"}, {"type": "vertical"}]
        },
        ignored=("image_size",),
    ),
    # a decoder over several channels of audio codes
    Family(
        "dia",
        kind="encoder-decoder",
        base="dia_decoder",
        mlp_bias=False,
        q_bias=False,
        kv_bias=False,
        o_bias=False,
        cross_attention=True,
        sizes=("num_channels",),
        encoder_key="encoder_config",
        decoder_key="decoder_config",
        apart=("encoder_config", "decoder_config"),
        ignored=("cross_hidden_size",),
    ),
    Family(
        "t5gemma",
        kind="encoder-decoder",
        base="t5_gemma_module",
        unit_offset=True,
        embedding_scale="sqrt",
        mlp_bias=False,
        place="sandwich",
        windows="even",
        cross_attention=True,
        encoder_key="encoder",
        decoder_key="decoder",
    ),
)

ENCODER_DECODER_MEMBERS: dict[str, str] = {
    "plbart": "bart",
    "mvp": "bart",
    "t5_gemma_module": "t5gemma",
    "dia_decoder": "dia",
}
