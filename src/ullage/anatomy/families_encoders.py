"""Rows of the family table for encoders and encoder-decoders: BERT, ModernBERT, T5, BART, Whisper.

Data only; `family.py` explains the columns.
"""

from __future__ import annotations

from typing import Any

from ullage.anatomy.family import Family

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
    Family("distilbert", **_BERT),
    Family("electra", **_BERT, token_types=True),
    Family("mpnet", **_BERT),
    Family("deberta-v2", **{**_BERT, "positions": "relative"}, token_types=True),
    Family(
        "nomic_bert",
        **{**_BERT, "positions": "rope", "gated": True, "mlp_bias": False},
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
}
