"""How many parameters the towers of older captioners and page readers have.

Holds formulas over their own keys, as `sizes.py` does for the others. Facts: the modules of
transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable

from ullage.anatomy.config.keys import Section
from ullage.anatomy.towers.sizes import (
    MAX_DEPTH,
    MAX_WIDTH,
    PROJECTORS,
    VITS,
    TowerSize,
    Vit,
    linear,
    vit_size,
)

OLDER_VITS: dict[str, Vit] = {
    "blip_vision_model": Vit(class_token=True, positions=1),
    "git_vision_model": Vit(patch_bias=False, class_token=True, positions=1, around=2),
    "kosmos_2_vision_model": Vit(patch_bias=False, class_token=True, positions=1, around=2),
}


def _flexible_patches(section: Section, _: int) -> TowerSize:
    """Pix2Struct's and Kosmos-2.5's encoder: T5 layers over patches, tables of rows and columns."""
    hidden = section.integer("hidden_size", maximum=MAX_WIDTH)
    depth = section.integer("num_hidden_layers", maximum=MAX_DEPTH)
    heads = section.integer("num_attention_heads", maximum=MAX_WIDTH)
    inner = heads * section.integer("head_dim", maximum=MAX_WIDTH)
    width = section.integer("intermediate_size", maximum=MAX_WIDTH)
    patch = section.integer("patch_embed_hidden_size", maximum=MAX_WIDTH)
    key = "seq_len" if section.knows("seq_len") else "max_num_patches"
    rows = section.integer(key, maximum=MAX_WIDTH)
    section.ignore("relative_attention_num_buckets", "relative_attention_max_distance")
    section.ignore("dense_act_fn")
    layer = 4 * hidden * inner + 3 * hidden * width + 2 * hidden
    total = depth * layer + linear(patch, hidden) + 2 * rows * hidden + hidden
    return TowerSize(depth, hidden, heads, width, total)


def _parakeet(section: Section, _: int) -> TowerSize:
    """A FastConformer: strided convolutions, then half-step feed-forwards around attention and a
    depthwise convolution, whose batch norm keeps its statistics."""
    hidden = section.integer("hidden_size", maximum=MAX_WIDTH)
    depth = section.integer("num_hidden_layers", maximum=MAX_DEPTH)
    heads = section.integer("num_attention_heads", maximum=MAX_WIDTH)
    width = section.integer("intermediate_size", maximum=MAX_WIDTH)
    channels = section.integer("subsampling_conv_channels", maximum=MAX_WIDTH)
    side = section.integer("subsampling_conv_kernel_size", maximum=1 << 10)
    stride = section.integer("subsampling_conv_stride", minimum=2, maximum=1 << 10)
    factor = section.integer("subsampling_factor", maximum=1 << 10)
    mels = section.integer("num_mel_bins", maximum=MAX_WIDTH)
    kernel = section.integer("conv_kernel_size", maximum=1 << 10)
    bias = section.boolean("attention_bias", True, why="default: true")
    mixed = section.boolean("convolution_bias", True, why="default: true")
    if section.optional_integer("num_key_value_heads") not in (None, heads):
        raise section.error(
            "num_key_value_heads", section.values["num_key_value_heads"], f"{heads}"
        )
    section.ignore("max_position_embeddings", "scale_input", "dropout_positions")
    steps = factor.bit_length() - 1
    taps = side * side
    total = linear(taps, channels) + (steps - 1) * (
        linear(taps, channels) + linear(channels, channels)
    )
    total += linear(channels * (mels // stride**steps), hidden)
    feed_forward = linear(hidden, width, bias) + linear(width, hidden, bias)
    attention = 4 * linear(hidden, hidden, bias) + hidden * hidden + 2 * hidden
    convolution = linear(hidden, 2 * hidden, mixed) + linear(kernel, hidden, mixed)
    convolution += linear(hidden, hidden, mixed) + 4 * hidden + 1
    layer = 2 * feed_forward + attention + convolution + 10 * hidden
    return TowerSize(depth, hidden, heads, width, total + depth * layer)


def _images_and_videos(section: Section, _: int) -> TowerSize:
    """Video-LLaVA: one tower for images and another for videos, from one description."""
    one = vit_size(section, VITS["clip_vision_model"])
    layers, parameters = 2 * one.num_layers, 2 * one.parameters
    return TowerSize(layers, one.hidden_size, one.num_heads, one.intermediate, parameters)


OLDER_ENCODERS: dict[str, Callable[[Section, int], TowerSize]] = {
    "pix2struct_vision_model": _flexible_patches,
    "kosmos_2_5_vision_model": _flexible_patches,
    "parakeet_encoder": _parakeet,
    "video_llava clip_vision_model": _images_and_videos,
}


def _nothing(root: Section, hidden: int, text: int) -> int:  # noqa: ARG001
    """Read by cross-attention, whose matrices lie in the decoder."""
    root.ignore("projection_dim", "logit_scale_init_value", "image_text_hidden_size", "is_vqa")
    root.ignore("label_smoothing")
    return 0


def _one_linear(root: Section, hidden: int, text: int) -> int:  # noqa: ARG001
    return linear(hidden, text)


def _git(root: Section, hidden: int, text: int) -> int:  # noqa: ARG001
    return linear(hidden, text) + 2 * text


def _kosmos(root: Section, hidden: int, text: int) -> int:
    """Latent queries, a matrix into the text's width, one attention."""
    queries = root.integer("latent_query_num", maximum=MAX_WIDTH)
    return queries * text + linear(hidden, text) + 4 * linear(text, text)


OLDER_PROJECTORS: dict[str, Callable[[Section, int, int], int]] = {
    "blip": _nothing,
    "canary": _nothing,
    "cohere_asr": _one_linear,
    "pix2struct": _nothing,
    "git": _git,
    "kosmos-2": _kosmos,
    "kosmos-2.5": _kosmos,
    "video_llava": PROJECTORS["llava"],
}
