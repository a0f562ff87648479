"""Rows of the family table for older decoders and captioners: CTRL, XLM, BLIP, GIT, Kosmos.

Data only; `family.py` explains the columns. Facts: the modules of transformers 5.24.
"""

from __future__ import annotations

from typing import Any

from ullage.anatomy.families.family import Family

_BIASED: dict[str, Any] = {
    "norm": "layer",
    "norm_bias": True,
    "q_bias": True,
    "kv_bias": True,
    "o_bias": True,
    "gated": False,
    "mlp_bias": True,
    "dtype": "float32",
}
_POST: dict[str, Any] = {
    **_BIASED,
    "place": "post",
    "final_norm": False,
    "positions": "learned",
    "embedding_norm": True,
    "lm_head_bias": True,
}
_XLM: dict[str, Any] = {
    **_POST,
    "kind": "encoder",
    "activation": "gelu",
    "sizes": ("n_langs",),
    "ignored": (
        "causal",
        "gelu_activation",
        "sinusoidal_embeddings",
        "embed_init_std",
        "start_n_top",
        "end_n_top",
        "lang_id",
        "mask_index",
        "unk_index",
    ),
}
_KOSMOS: dict[str, Any] = {
    **_BIASED,
    "positions": "sinusoidal",
    "stored_positions": False,
}
_HEARD: dict[str, Any] = {
    **_BIASED,
    "q_bias": "attention_bias",
    "kv_bias": "attention_bias",
    "o_bias": "attention_bias",
    "cross_attention": True,
}
# Speech and its units are parts that the text classes do not hold.
_SEAMLESS_SPEECH = """
adaptor_kernel_size adaptor_stride add_adapter conv_depthwise_kernel_size char_vocab_size
feature_projection_input_dim lang_embed_dim leaky_relu_slope left_chunk_num
left_max_position_embeddings max_new_tokens max_source_positions num_adapter_layers
num_conv_pos_embedding_groups num_conv_pos_embeddings position_embeddings_type
resblock_dilation_sizes resblock_kernel_sizes right_max_position_embeddings
rotary_embedding_base sampling_rate speech_encoder_attention_heads speech_encoder_chunk_size
speech_encoder_hidden_act speech_encoder_intermediate_size speech_encoder_layerdrop
speech_encoder_layers speech_encoder_left_chunk_num spkr_embed_dim t2u_decoder_attention_heads
t2u_decoder_ffn_dim t2u_decoder_layers t2u_encoder_attention_heads t2u_encoder_ffn_dim
t2u_encoder_layers t2u_max_new_tokens t2u_max_position_embeddings t2u_variance_pred_dropout
t2u_variance_predictor_embed_dim t2u_variance_predictor_hidden_dim
t2u_variance_predictor_kernel_size t2u_vocab_size unit_embed_dim unit_hifi_gan_vocab_size
upsample_initial_channel upsample_kernel_sizes upsample_rates var_pred_dropout
variance_predictor_kernel_size vocoder_num_langs vocoder_num_spkrs vocoder_offset
""".split()  # noqa: SIM905

OLDER_ROWS: tuple[Family, ...] = (
    Family(
        "ctrl",
        **_BIASED,
        positions="sinusoidal",
        stored_positions=False,
        activation="relu",
        dense_width="dff",
        embedding_scale="sqrt",
        lm_head_bias=True,
    ),
    Family(
        "xlm",
        **_XLM,
        requires={"asm": False, "causal": False, "is_encoder": True, "use_lang_emb": True},
    ),
    Family(
        "flaubert",
        **_XLM,
        requires={
            "asm": False,
            "causal": False,
            "is_encoder": True,
            "use_lang_emb": True,
            "pre_norm": False,
        },
    ),
    Family(
        "blip_text_model",
        **_POST,
        cross_attention=True,
        ignored=("label_smoothing", "projection_dim"),
    ),
    Family("git", **_POST, requires={"num_image_with_embedding": None}),
    Family("kosmos_2_text_model", **_KOSMOS, requires={"add_cross_attention": False}),
    Family("kosmos_2_5_text_model", **_KOSMOS),
    Family(
        "pix2struct_text_model",
        kind="encoder-decoder",
        q_bias=False,
        kv_bias=False,
        o_bias=False,
        mlp_bias=False,
        positions="relative",
        cross_attention=True,
        decoder_alone=True,
        dtype="float32",
        extra={"feed_forward_proj": "gated-gelu_new"},
    ),
    # speech recognisers whose encoder is a tower
    Family("cohere_asr", **_HEARD, positions="learned", embedding_norm=True, lm_head_bias=True),
    Family(
        "canary",
        base="canary_decoder",
        **_HEARD,
        positions="sinusoidal",
        stored_positions=False,
        embedding_norm=True,
        lm_head_bias=True,
        decoder_key="decoder_config",
        apart=("decoder_config",),
    ),
    *(
        Family(
            name,
            kind="encoder-decoder",
            **_BIASED,
            positions="sinusoidal",
            stored_positions=False,
            cross_attention=True,
            classes=(f"{prefix}ForTextToText",),
            ignored=tuple(_SEAMLESS_SPEECH),
        )
        for name, prefix in (("seamless_m4t", "SeamlessM4T"), ("seamless_m4t_v2", "SeamlessM4Tv2"))
    ),
)

OLDER_MEMBERS: dict[str, str] = {"canary_decoder": "canary"}
