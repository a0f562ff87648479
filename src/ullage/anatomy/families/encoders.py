"""Rows of the family table for encoders and encoder-decoders: BERT, ModernBERT, T5, BART, Whisper.

Data only; `family.py` explains the columns.
"""

from __future__ import annotations

from typing import Any

from ullage.anatomy.families.family import Family

_BERT: dict[str, Any] = {
    "kind": "encoder",
    "norm": "layer",
    "norm_bias": True,
    "place": "post",
    "q_bias": True,
    "kv_bias": True,
    "o_bias": True,
    "gated": False,
    "mlp_bias": True,
    "positions": "learned",
    "embedding_norm": True,
    "final_norm": False,
    "masked_lm": True,
    "lm_head_bias": True,
    "dtype": "float32",
    "extra": {"tie_word_embeddings": True},
}
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

ENCODER_ROWS: tuple[Family, ...] = (
    Family("bert", **_BERT, token_types=True),
    Family("roberta", **_BERT, token_types=True),
    Family(
        "megatron-bert",
        **{**_BERT, "place": "pre", "final_norm": True, "embedding_norm": False},
        token_types=True,
    ),
    Family(
        "roberta-prelayernorm",
        **{**_BERT, "place": "pre", "final_norm": True},
        token_types=True,
    ),
    Family(
        "xlm-roberta-xl",
        **{**_BERT, "place": "pre", "final_norm": True, "embedding_norm": False},
        token_types=True,
    ),
    Family("distilbert", **_BERT),
    Family("electra", **_BERT, token_types=True),
    Family("mpnet", **_BERT, sizes=("relative_attention_num_buckets", "num_attention_heads")),
    Family("deberta-v2", **{**_BERT, "positions": "disentangled"}, token_types=True),
    Family("albert", **_BERT, token_types=True),
    Family(
        "jina_bert",
        base="bert",
        **{**_BERT, "gated": True, "mlp_bias": False},
        token_types=True,
        ignored=("emb_pooler", "feed_forward_type"),
    ),
    Family(
        "gte",
        **{**_BERT, "positions": "rope", "gated": True, "mlp_bias": False},
        token_types=True,
        ignored=(
            "logn_attention_clip1",
            "logn_attention_scale",
            "pack_qkv",
            "unpad_inputs",
            "use_memory_efficient_attention",
            "layer_norm_type",
        ),
    ),
    Family("jina_embeddings_v3", **{**_BERT, "positions": "rope"}, token_types=True),
    Family(
        "nomic_bert",
        **{
            **_BERT,
            "positions": "rope",
            "gated": True,
            "q_bias": "qkv_proj_bias",
            "kv_bias": "qkv_proj_bias",
            "o_bias": "qkv_proj_bias",
            "mlp_bias": "mlp_fc1_bias",
            "extra": {
                "tie_word_embeddings": True,
                "qkv_proj_bias": False,
                "mlp_fc1_bias": False,
            },
        },
        ignored=(
            "causal",
            "dense_seq_output",
            "fused_bias_fc",
            "fused_dropout_add_ln",
            "max_trained_positions",
            "mlp_fc2_bias",
            "pad_vocab_size_multiple",
            "parallel_block",
            "parallel_block_tied_norm",
            "prenorm",
            "rotary_emb_fraction",
            "rotary_emb_interleaved",
            "use_rms_norm",
            "use_xentropy",
        ),
        token_types=True,
    ),
    Family(
        "modernbert",
        kind="encoder",
        norm="layer",
        norm_bias="norm_bias",
        mlp_bias="mlp_bias",
        embedding_norm=True,
        masked_lm=True,
        lm_head_bias="decoder_bias",
        windows="every_first",
        pattern=3,
    ),
    Family("bart", **_BART, place="post", final_norm=False, embedding_norm=True, position_offset=2),
    Family("blenderbot-small", **_BART, place="post", final_norm=False, embedding_norm=True),
    Family("mbart", **_BART, embedding_norm=True, position_offset=2),
    Family("pegasus", **{**_BART, "positions": "sinusoidal"}),
    Family("marian", **{**_BART, "positions": "sinusoidal"}, place="post", final_norm=False),
    Family("m2m_100", **{**_BART, "positions": "sinusoidal"}, stored_positions=False),
    Family("blenderbot", **_BART),
    Family("whisper", **_BART, sizes=("num_mel_bins",)),
    Family("t5", **_T5),
    Family("mt5", **_T5),
    Family("umt5", **_T5),
)

ENCODER_MEMBERS: dict[str, str] = {
    "xlm-roberta": "roberta",
    "xlm_roberta": "roberta",
    "camembert": "roberta",
    "ernie": "bert",
    "new": "gte",
    "data2vec-text": "roberta",
    "plbart": "bart",
    "mvp": "bart",
}
