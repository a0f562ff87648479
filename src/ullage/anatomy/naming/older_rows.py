"""How older decoders and captioners name their tensors: rows of data.

Changes to the rows of `rows.py`, which lists these too. Facts: the modules of transformers 5.24.
"""

from __future__ import annotations

from ullage.anatomy.naming import heads
from ullage.anatomy.naming.heads import layer_norm
from ullage.anatomy.naming.paths import mlm_head
from ullage.anatomy.naming.row import Extra, Row

_KOSMOS = {
    "root": "text_model.model",
    "lm_head": "text_model.lm_head",
    "o": "{attn}.out_proj",
    "pre1": "self_attn_layer_norm",
    "pre2": "final_layer_norm",
    "up": "ffn.fc1",
    "down": "ffn.fc2",
    "final_norm": "{root}.layer_norm",
}
_SEAMLESS = {"up": "ffn.fc1", "down": "ffn.fc2", "pre2": "ffn_layer_norm"}

OLDER_NAMES: dict[str, Row] = {
    "ctrl": Row(
        paths={
            "root": "transformer",
            "layer": "{root}.h.{i}",
            "embed": "{root}.w",
            "attn": "multi_head_attention",
            "q": "{attn}.Wq",
            "k": "{attn}.Wk",
            "v": "{attn}.Wv",
            "o": "{attn}.dense",
            "up": "ffn.0",
            "down": "ffn.2",
            "pre1": "layernorm1",
            "pre2": "layernorm2",
            "final_norm": "{root}.layernorm",
        },
        judges=heads.NONE,
    ),
    # its layers' parts lie in four lists, so the names below only count
    "xlm": Row(
        paths={
            "root": "transformer",
            "layer": "{root}.attentions.{i}",
            "embed": "{root}.embeddings",
            "positions": "{root}.position_embeddings",
            "embed_norm": "{root}.layer_norm_emb",
            "lm_head": "pred_layer.proj",
        },
        unnamed=True,
        judges=heads.NONE,
        extras=(
            Extra(
                "model",
                "{root}.lang_embeddings.weight",
                ("n_langs", "H"),
                "position",
                unless=("n_langs", "1"),
            ),
        ),
    ),
    "blip_text_model": Row(
        "bert_names",
        {
            "root": "text_decoder.bert",
            "cross": "crossattention",
            "cross_q": "{cross}.self.query",
            "cross_k": "{cross}.self.key",
            "cross_v": "{cross}.self.value",
            "cross_o": "{cross}.output.dense",
            "cross_norm": "{cross}.output.LayerNorm",
            "lm_head": "text_decoder.cls.predictions.decoder",
            "lm_head_bias": "text_decoder.cls.predictions.bias",
        },
        extras=mlm_head("text_decoder.cls.predictions.transform.", "LayerNorm"),
    ),
    "git": Row(
        "bert_names", {"root": "git", "lm_head": "output", "lm_head_bias": "{lm_head}.bias"}
    ),
    "kosmos_2_text_model": Row(
        paths=_KOSMOS,
        extras=(
            *layer_norm("attention", "self_attn.inner_attn_ln", "H"),
            *layer_norm("dense", "ffn.ffn_layernorm", "I"),
        ),
    ),
    "kosmos_2_5_text_model": Row(
        paths=_KOSMOS,
        extras=(
            Extra("model", "{root}.segment_emb.weight", (2, "H"), "position"),
            *layer_norm("dense", "ffn.ffn_layernorm", "I"),
        ),
    ),
    "pix2struct_text_model": Row(
        paths={
            "root": "decoder",
            "layer": "{root}.layer.{i}",
            "attn": "self_attention.attention",
            "q": "{attn}.query",
            "k": "{attn}.key",
            "v": "{attn}.value",
            "o": "{attn}.output",
            "pre1": "self_attention.layer_norm",
            "cross": "encoder_decoder_attention.attention",
            "cross_q": "{cross}.query",
            "cross_k": "{cross}.key",
            "cross_v": "{cross}.value",
            "cross_o": "{cross}.output",
            "cross_norm": "encoder_decoder_attention.layer_norm",
            "mlp": "mlp.DenseReluDense",
            "gate": "{mlp}.wi_0",
            "up": "{mlp}.wi_1",
            "down": "{mlp}.wo",
            "pre2": "mlp.layer_norm",
            "final_norm": "{root}.final_layer_norm",
            "lm_head": "{root}.lm_head",
        },
    ),
    "cohere_asr": Row(
        paths={
            "root": "model.decoder",
            "positions": "{root}.pos_emb",
            "embed_norm": "{root}.embedding_layernorm",
            "up": "{mlp}.fc1",
            "down": "{mlp}.fc2",
            "cross_norm": "post_attention_layernorm",
            "cross_o": "{cross}.o_proj",
            "pre2": "final_layernorm",
            "lm_head": "proj_out",
        },
    ),
    "seamless_m4t": Row(
        "bart_plain",
        {
            **_SEAMLESS,
            "root": "text_decoder",
            "embed": "shared",
            "cross": "cross_attention",
            "cross_norm": "cross_attention_layer_norm",
        },
        encoder="seamless_m4t_encoder",
    ),
    "seamless_m4t_encoder": Row("bart_encoder", {**_SEAMLESS, "root": "text_encoder"}),
}

OLDER_ALIASES: dict[str, str] = {
    "flaubert": "xlm",
    "seamless_m4t_v2": "seamless_m4t",
    "canary": "cohere_asr",
}
