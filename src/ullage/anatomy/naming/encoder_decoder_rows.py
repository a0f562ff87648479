"""How encoder-decoders that are seldom served name their tensors: rows of data.

Changes to the rows of `rows.py`, which lists these too. Facts: the modules of transformers 5.24.
"""

from __future__ import annotations

from ullage.anatomy.naming import heads
from ullage.anatomy.naming.heads import layer_norm, linear
from ullage.anatomy.naming.row import Extra, Row

_QKV = {"q": "{attn}.query", "k": "{attn}.key", "v": "{attn}.value"}
_STORED_HEAD = (Extra("head", "lm_head.weight", ("V", "H"), "lm_head"),)
_NLLB = {
    "mlp": "ffn",
    "up": "{mlp}.fc1",
    "down": "{mlp}.fc2",
    "pre2": "ff_layer_norm",
    "moe": "ffn",
    "router": "{moe}.router.classifier",
    "e_up": "{experts}.expert_{e}.fc1",
    "e_down": "{experts}.expert_{e}.fc2",
}
_SWITCH = {
    "up_plain": "{mlp}.wi",
    "router": "{moe}.router.classifier",
    "e_up": "{experts}.expert_{e}.wi",
    "e_down": "{experts}.expert_{e}.wo",
}
_PROPHET = {
    "positions": "{root}.position_embeddings",
    "embed_norm": "{root}.embeddings_layer_norm",
    "q": "{attn}.query_proj",
    "k": "{attn}.key_proj",
    "v": "{attn}.value_proj",
    "mlp": "feed_forward",
    "up": "{mlp}.intermediate",
    "down": "{mlp}.output",
    "post2": "feed_forward_layer_norm",
}
_DIA = {
    "attn": "self_attention",
    "pre1": "pre_sa_norm",
    "gate_up": "{mlp}.gate_up_proj",
}
_T5GEMMA = {
    "pre1": "pre_self_attn_layernorm",
    "post1": "post_self_attn_layernorm",
    "pre2": "pre_feedforward_layernorm",
    "post2": "post_feedforward_layernorm",
}


def _relative(path: str) -> tuple[Extra, ...]:
    """UDOP's two further tables of relative positions, across and down the page."""
    return tuple(
        Extra(
            "model",
            f"{path}.relative_bias.biases.{i}.relative_attention_bias.weight",
            ("relative_attention_num_buckets", "num_heads"),
            "attn_bias_table",
        )
        for i in (1, 2)
    )


def _patches(path: str) -> tuple[Extra, ...]:
    shape = ("H", "num_channels", "patch_size", "patch_size")
    return (
        Extra("model", f"{path}.proj.weight", shape, "conv"),
        Extra("model", f"{path}.proj.bias", ("H",), "bias"),
    )


ENCODER_DECODER_ROWS: dict[str, Row] = {
    "bigbird_pegasus": Row(
        "bart",
        {"final_norm": "{root}.layernorm_embedding"},
        encoder="bigbird_pegasus_encoder",
    ),
    "bigbird_pegasus_encoder": Row(
        "bart_encoder",
        {
            **_QKV,
            "attn": "self_attn.self",
            "o": "self_attn.output",
            "final_norm": "{root}.layernorm_embedding",
        },
    ),
    # the library ties this class's head to nothing
    "BigBirdPegasusForCausalLM": Row(
        "bart_decoder",
        {"final_norm": "{root}.layernorm_embedding"},
        own_head=True,
        extras=_STORED_HEAD,
    ),
    "led": Row("bart", {"root": "led.decoder", "embed": "led.shared"}, encoder="led_encoder"),
    "led_encoder": Row(
        "bart_encoder",
        {
            **_QKV,
            "root": "led.encoder",
            "attn": "self_attn.longformer_self_attn",
            "o": "self_attn.output",
        },
        extras=tuple(
            extra
            for leaf, role in (("query", "q"), ("key", "k"), ("value", "v"))
            for extra in linear(
                "layer", f"self_attn.longformer_self_attn.{leaf}_global", "H", "H", role
            )
        ),
    ),
    "pegasus_x": Row("bart_plain", encoder="pegasus_x_encoder"),
    "pegasus_x_encoder": Row(
        "bart_encoder",
        extras=(
            Extra("model", "{root}.embed_global.weight", ("num_global_tokens", "H"), "position"),
            *layer_norm("layer", "global_self_attn_layer_norm", "H"),
        ),
    ),
    "speech_to_text": Row(
        "bart_plain", {"embed": "{root}.embed_tokens"}, encoder="speech_to_text_encoder"
    ),
    "speech_to_text_encoder": Row(
        "bart_encoder",
        extras=(
            Extra(
                "model",
                "{root}.conv.conv_layers.0.weight",
                (
                    "conv_channels",
                    "input_feat_per_channel*input_channels",
                    "conv_kernel_sizes[0]",
                ),
                "conv",
            ),
            Extra("model", "{root}.conv.conv_layers.0.bias", ("conv_channels",), "bias"),
            Extra(
                "model",
                "{root}.conv.conv_layers.1.weight",
                ("2H", "conv_channels/2", "conv_kernel_sizes[1]"),
                "conv",
            ),
            Extra("model", "{root}.conv.conv_layers.1.bias", ("2H",), "bias"),
        ),
    ),
    "fsmt": Row(
        "bart_plain",
        {"embed": "{root}.embed_tokens", "lm_head": "{root}.output_projection"},
        encoder="fsmt_encoder",
    ),
    "fsmt_encoder": Row(
        "bart_encoder",
        extras=(Extra("model", "{root}.embed_tokens.weight", ("src_vocab_size", "H"), "embed"),),
    ),
    "prophetnet": Row(
        "bart_plain",
        {
            **_PROPHET,
            "root": "prophetnet.decoder",
            "embed": "prophetnet.word_embeddings",
            "cross": "cross_attn",
            "cross_norm": "cross_attn_layer_norm",
            "cross_q": "{cross}.query_proj",
            "cross_k": "{cross}.key_proj",
            "cross_v": "{cross}.value_proj",
        },
        encoder="prophetnet_encoder",
        extras=(
            Extra("model", "{root}.ngram_embeddings.weight", ("ngram", "H"), "position"),
            *linear(
                "layer",
                "self_attn.relative_pos_embeddings",
                "num_buckets*decoder_attention_heads",
                "H",
                "attn_bias_table",
            ),
        ),
    ),
    "prophetnet_encoder": Row("bart_encoder", {**_PROPHET, "root": "prophetnet.encoder"}),
    "trocr": Row("bart_decoder", {"lm_head": "output_projection"}),
    "nllb-moe": Row(
        "bart_plain",
        {**_NLLB, "cross": "cross_attention", "cross_norm": "cross_attention_layer_norm"},
        encoder="nllb_moe_encoder",
    ),
    "nllb_moe_encoder": Row("bart_encoder", _NLLB),
    "moonshine": Row(
        paths={
            "root": "model.decoder",
            "gate_up": "{mlp}.fc1",
            "down": "{mlp}.fc2",
            "cross_norm": "post_attention_layernorm",
            "cross_o": "{cross}.o_proj",
            "pre2": "final_layernorm",
            "lm_head": "proj_out",
        },
        encoder="moonshine_encoder",
    ),
    "moonshine_encoder": Row(
        paths={
            "root": "model.encoder",
            "up_plain": "{mlp}.fc1",
            "down": "{mlp}.fc2",
            "final_norm": "{root}.layer_norm",
        },
        extras=(
            Extra("model", "{root}.conv1.weight", ("H", 1, 127), "conv"),
            Extra("model", "{root}.conv2.weight", ("2H", "H", 7), "conv"),
            Extra("model", "{root}.conv2.bias", ("2H",), "bias"),
            Extra("model", "{root}.conv3.weight", ("H", "2H", 3), "conv"),
            Extra("model", "{root}.conv3.bias", ("H",), "bias"),
            *layer_norm("model", "{root}.groupnorm", "H"),
        ),
    ),
    "longt5": Row("t5", encoder="longt5_encoder"),
    # `encoder_attention_type` is part of its names
    "longt5_encoder": Row(
        "t5_encoder",
        {"attn": "layer.0.LocalSelfAttention"},
        unnamed=True,
        extras=(
            Extra(
                "layer",
                "layer.0.SelfAttention.global_input_layer_norm.weight",
                ("H*encoder_attention_type=transient-global",),
            ),
            Extra(
                "layer",
                "layer.0.SelfAttention.global_relative_attention_bias.weight",
                (
                    "relative_attention_num_buckets*first*encoder_attention_type=transient-global",
                    "heads",
                ),
                "attn_bias_table",
            ),
        ),
    ),
    "pop2piano": Row(
        "t5",
        own_head=True,
        extras=(
            *_STORED_HEAD,
            Extra(
                "model",
                "mel_conditioner.embedding.weight",
                ("composer_vocab_size", "H"),
                "position",
            ),
        ),
    ),
    "switch_transformers": Row(
        "t5",
        {**_SWITCH, "mlp": "layer.2.mlp", "moe": "layer.2.mlp"},
        encoder="switch_transformers_encoder",
    ),
    "switch_transformers_encoder": Row(
        "t5_encoder", {**_SWITCH, "mlp": "layer.1.mlp", "moe": "layer.1.mlp"}
    ),
    "udop": Row(
        "t5",
        encoder="udop_encoder",
        extras=(
            *_patches("patch_embed"),
            *_patches("decoder.embed_patches"),
            *_relative("decoder"),
        ),
    ),
    "udop_encoder": Row(
        "t5_encoder",
        extras=(
            *_relative("encoder"),
            *(
                Extra(
                    "model",
                    f"encoder.cell_2d_embedding.{axis}_position_embeddings.weight",
                    ("max_2d_position_embeddings", "H"),
                    "position",
                )
                for axis in "xy"
            ),
        ),
    ),
    "dia": Row(
        paths={
            **_DIA,
            "root": "model.decoder",
            "embed": "{root}.embeddings.embed",
            "pre2": "pre_mlp_norm",
            "cross": "cross_attention",
            "cross_o": "{cross}.o_proj",
            "cross_norm": "pre_ca_norm",
        },
        encoder="dia_encoder",
        embed_extra="V*num_channels-1",
        own_head=True,
        extras=(
            Extra("head", "logits_dense.weight", ("num_channels*V", "H"), "lm_head", linear=True),
        ),
    ),
    "dia_encoder": Row(
        paths={**_DIA, "root": "model.encoder", "pre2": "post_sa_norm"},
        extras=(Extra("model", "{root}.embedding.weight", ("encoder_vocab_size", "H"), "embed"),),
    ),
    "t5gemma": Row(
        paths={
            **_T5GEMMA,
            "root": "model.decoder",
            "cross": "cross_attn",
            "cross_norm": "pre_cross_attn_layernorm",
            "cross_o": "{cross}.o_proj",
            "lm_head": "lm_head.out_proj",
        },
        encoder="t5gemma_encoder",
        extras=(Extra("cross", "post_cross_attn_layernorm.weight", ("H",)),),
        judges=heads.PROJECTED,
    ),
    "t5gemma_encoder": Row(
        paths={**_T5GEMMA, "root": "model.encoder"},
        extras=(
            Extra("model", "{root}.embed_tokens.weight", ("encoder_vocab_size", "H"), "embed"),
        ),
    ),
}
