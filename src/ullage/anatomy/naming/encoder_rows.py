"""How encoders that are seldom served name their tensors: rows of data.

Changes to the rows of `rows.py`, which lists these too. Facts: the modules of transformers 5.24.
"""

from __future__ import annotations

from ullage.anatomy.naming import heads
from ullage.anatomy.naming.heads import layer_norm, linear
from ullage.anatomy.naming.paths import BERT, POOLER, mlm_head
from ullage.anatomy.naming.row import Extra, Row

# The pooler that a masked-LM class keeps although it does not use it.
KEPT_POOLER = linear("model", "{root}.pooler.dense", "H", "H", "lm_head")
_CLS = mlm_head("cls.predictions.transform.", "LayerNorm")
_TABLES = "{root}.embeddings."
_ENTITY = "{root}.entity_embeddings."
_SELF = "attention.self."


def _table(path: str, rows: int | str, columns: int | str) -> Extra:
    return Extra("model", f"{path}.weight", (rows, columns), "position")


ENCODER_ROWS: dict[str, Row] = {
    "cls_head": Row("bert_names", extras=_CLS),
    "big_bird": Row(
        "cls_head",
        extras=(
            *linear("head", "{root}.pooler", "H", "H", "lm_head"),
            *linear("bare", "{root}.pooler", "H", "H", "lm_head"),
        ),
        judges=heads.BIG_BIRD,
    ),
    "layoutlm": Row(
        "cls_head",
        {"root": "layoutlm"},
        extras=(
            *KEPT_POOLER,
            *(
                _table(f"{_TABLES}{side}_position_embeddings", "max_2d_position_embeddings", "H")
                for side in "xyhw"
            ),
        ),
        judges=heads.CLASSIFIED,
    ),
    "nystromformer": Row(
        "cls_head",
        {"root": "nystromformer"},
        extras=(
            Extra("layer", f"{_SELF}conv.weight", ("heads", 1, "conv_kernel_size", 1), "conv"),
        ),
        judges=heads.DENSE,
    ),
    "yoso": Row(
        "cls_head",
        {"root": "yoso"},
        extras=(Extra("layer", f"{_SELF}conv.weight", ("heads", 1, "conv_window", 1), "conv"),),
        judges=heads.DENSE,
    ),
    "mra": Row(
        "cls_head",
        {"root": "mra"},
        extras=(
            Extra(
                "model",
                f"{_TABLES}position_ids",
                (1, "max_position_embeddings"),
                "position",
                dtype="int64",
            ),
        ),
        judges=heads.DENSE,
    ),
    "roc_bert": Row(
        "cls_head",
        {"root": "roc_bert"},
        extras=(
            _table(
                f"{_TABLES}pronunciation_embed",
                "pronunciation_vocab_size",
                "pronunciation_embed_dim",
            ),
            _table(f"{_TABLES}shape_embed", "shape_vocab_size", "shape_embed_dim"),
            Extra(
                "model",
                f"{_TABLES}map_inputs_layer.weight",
                (
                    "H*concat_input",
                    "H+pronunciation_embed_dim*enable_pronunciation+shape_embed_dim*enable_shape",
                ),
                "embed",
                linear=True,
            ),
            Extra("model", f"{_TABLES}map_inputs_layer.bias", ("H*concat_input",), "bias"),
        ),
        judges=heads.POOLED,
    ),
    "roformer": Row(
        "bert_names",
        {"root": "roformer", "project_in": "{root}.embeddings_project"},
        extras=(
            Extra("head", "cls.predictions.transform.dense.weight", ("M", "H"), "lm_head", True),
            Extra("head", "cls.predictions.transform.dense.bias", ("M",), "bias"),
            *layer_norm("head", "cls.predictions.transform.LayerNorm", "M"),
            _table(
                "{root}.encoder.embed_positions",
                "max_position_embeddings",
                "H/num_attention_heads",
            ),
        ),
        judges=heads.DENSE,
    ),
    "rembert": Row(
        "bert_names",
        {"root": "rembert", "project_in": "{root}.encoder.embedding_hidden_mapping_in"},
        own_head=True,
        extras=(
            *linear("head", "cls.predictions.dense", "output_embedding_size", "H", "lm_head"),
            *layer_norm("head", "cls.predictions.LayerNorm", "output_embedding_size"),
            Extra(
                "head", "cls.predictions.decoder.weight", ("V", "output_embedding_size"), "lm_head"
            ),
            Extra("head", "cls.predictions.decoder.bias", ("V",), "bias"),
        ),
        judges=heads.POOLED,
    ),
    "fnet": Row(
        "cls_head",
        {"root": "fnet"},
        extras=(
            *KEPT_POOLER,
            *linear("model", f"{_TABLES}projection", "H", "H", "embed"),
            *layer_norm("layer", "fourier.output.LayerNorm", "H"),
        ),
        judges=heads.CLASSIFIED,
    ),
    "roberta_names": Row(
        paths=BERT
        | {"root": "roberta", "lm_head": "lm_head.decoder", "lm_head_bias": "lm_head.bias"},
        extras=mlm_head("lm_head.", "layer_norm"),
        judges=heads.DENSE,
    ),
    "longformer": Row(
        "roberta",
        {"root": "longformer"},
        extras=tuple(
            extra
            for leaf, role in (("query", "q"), ("key", "k"), ("value", "v"))
            for extra in linear("layer", f"{_SELF}{leaf}_global", "H", "H", role)
        ),
        judges=heads.DENSE,
    ),
    "luke": Row(
        "roberta_names",
        {"root": "luke"},
        own_head=True,
        extras=(
            *linear("head", "{root}.pooler.dense", "H", "H", "lm_head"),
            Extra(
                "model",
                f"{_ENTITY}entity_embeddings.weight",
                ("entity_vocab_size", "entity_emb_size"),
                "embed",
            ),
            Extra(
                "model",
                f"{_ENTITY}entity_embedding_dense.weight",
                ("H", "entity_emb_size"),
                "embed",
                linear=True,
                unless=("H", "entity_emb_size"),
            ),
            _table(f"{_ENTITY}position_embeddings", "max_position_embeddings", "H"),
            _table(f"{_ENTITY}token_type_embeddings", "type_vocab_size", "H"),
            *layer_norm("model", f"{_ENTITY}LayerNorm", "H"),
            *(
                extra
                for leaf in ("w2e", "e2w", "e2e")
                for extra in linear(
                    "layer", f"{_SELF}{leaf}_query", "H*use_entity_aware_attention", "H", "q"
                )
            ),
            Extra("head", "lm_head.decoder.weight", ("V", "H"), "lm_head"),
            Extra("head", "lm_head.decoder.bias", ("V",), "bias"),
            *linear(
                "head", "entity_predictions.transform.dense", "entity_emb_size", "H", "lm_head"
            ),
            *layer_norm("head", "entity_predictions.transform.LayerNorm", "entity_emb_size"),
            Extra("head", "entity_predictions.bias", ("entity_vocab_size",), "bias"),
        ),
        judges=heads.POOLED,
    ),
    "xmod": Row(
        "roberta_names",
        {
            "pre1": "attention.output.LayerNorm",
            "pre2": "output.LayerNorm",
            "final_norm": "{root}.encoder.LayerNorm",
        },
        unnamed=True,
        extras=(
            *POOLER,
            Extra("layer", "output.adapter_layer_norm.weight", ("H*adapter_layer_norm",)),
            Extra("layer", "output.adapter_layer_norm.bias", ("H*adapter_layer_norm",)),
            *(
                Extra(
                    "layer",
                    f"output.adapter_modules.{{e}}.{leaf}",
                    shape,
                    "up" if "weight" in leaf else "bias",
                    linear="weight" in leaf,
                    copies="languages",
                )
                for leaf, shape in (
                    ("dense1.weight", ("H/adapter_reduction_factor", "H")),
                    ("dense1.bias", ("H/adapter_reduction_factor",)),
                    ("dense2.weight", ("H", "H/adapter_reduction_factor")),
                    ("dense2.bias", ("H",)),
                )
            ),
        ),
    ),
    "esm": Row(
        "roberta_names",
        {
            "root": "esm",
            "pre1": "attention.LayerNorm",
            "pre2": "LayerNorm",
            "embed_norm": "{root}.embeddings.layer_norm",
            "final_norm": "{root}.encoder.emb_layer_norm_after",
        },
        extras=(
            Extra(
                "model",
                "{root}.contact_head.regression.weight",
                (1, "num_hidden_layers*num_attention_heads"),
                "lm_head",
                True,
            ),
            Extra("model", "{root}.contact_head.regression.bias", (1,), "bias"),
            Extra(
                "model",
                "{root}.rotary_embeddings.inv_freq",
                ("H*position_embedding_type=rotary/num_attention_heads/2",),
                "position",
            ),
        ),
        judges=heads.DENSE,
    ),
    "esmc": Row(
        paths={"root": "esmc", "lm_head": "lm_head.decoder"},
        # of its norms only the layers' and the head's have biases
        extras=(
            *mlm_head("lm_head.", "layer_norm"),
            Extra("layer", "input_layernorm.bias", ("H",)),
            Extra("layer", "post_attention_layernorm.bias", ("H",)),
        ),
        judges=heads.ESMC,
    ),
    "ultrabert": Row(
        paths={"root": "ultrabert", "lm_head": "cls"},
        extras=(
            *linear("head", "head.linear1", "prediction_head_size", "H", "lm_head", bias=False),
            *linear("head", "head.linear2", "H", "prediction_head_size", "lm_head", bias=False),
        ),
        judges=heads.CLASSIFIED,
    ),
}
