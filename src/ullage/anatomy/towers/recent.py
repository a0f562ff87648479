"""How many parameters the towers of models of 2025 and 2026 have: formulas over their own keys.

As `sizes.py` does for the others, and in its words. Facts: the modules of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import ceil, log

from ullage.anatomy.config.keys import Section
from ullage.anatomy.towers.sizes import (
    MAX_DEPTH,
    MAX_WIDTH,
    TowerSize,
    biased_layer,
    linear,
    qwen3_vl,
)


def patch_elements(section: Section, channels: str = "num_channels") -> int:
    side = section.integer("patch_size", maximum=1 << 10)
    return section.integer(channels, 3, why="default: 3", maximum=64) * side * side


def plain_sizes(section: Section) -> tuple[int, int, int, int]:
    """(depth, hidden, heads, width) in the usual words."""
    depth = "depth" if section.knows("depth") else "num_hidden_layers"
    heads = "num_heads" if section.knows("num_heads") else "num_attention_heads"
    return (
        section.integer(depth, maximum=MAX_DEPTH),
        section.integer("hidden_size", maximum=MAX_WIDTH),
        section.integer(heads, maximum=MAX_WIDTH),
        section.integer("intermediate_size", maximum=MAX_WIDTH),
    )


def _muse_vision(section: Section, _: int) -> TowerSize:
    """Patches of several frames without a bias, a grid of positions, norms around the layers."""
    depth, hidden, heads, width = plain_sizes(section)
    frames = section.integer("patch_temporal", 2, why="default: 2", maximum=64)
    rows = section.integer("pos_emb_height", maximum=1 << 12)
    rows *= section.integer("pos_emb_width", maximum=1 << 12)
    section.ignore("layer_types", "max_position_embeddings", "merge_size", "rope_parameters")
    total = depth * biased_layer(hidden, width) + patch_elements(section) * frames * hidden
    return TowerSize(depth, hidden, heads, width, total + rows * hidden + 4 * hidden)


def _muse_projector(root: Section, hidden: int, text: int) -> int:  # noqa: ARG001
    merged = root.integer("out_hidden_size", maximum=MAX_WIDTH)
    width = root.integer("projector_hidden_size", maximum=MAX_WIDTH)
    return merged * width + width * width + width * text


def _muse_audio(section: Section, text_hidden: int) -> TowerSize:
    """Stages of patches and depthwise convolutions with an MLP each, then one projection."""
    widths = section.integers("hidden_sizes", minimum=1, maximum=MAX_WIDTH) or ()
    depths = section.integers("depths", length=len(widths), maximum=MAX_DEPTH) or ()
    patches = section.integers("patch_sizes", length=len(widths), minimum=1, maximum=1 << 12) or ()
    if not widths or not depths or not patches:
        raise section.error("hidden_sizes", section.values.get("hidden_sizes"), "one per stage")
    ratio = section.number("mlp_ratio", 4.0, why="default: 4", maximum=64.0)
    kernel = section.integer("conv_kernel_size", 7, why="default: 7", maximum=1 << 10)
    out = section.integer("out_hidden_size", text_hidden, why="derived: hidden_size of the text")
    total, seen = 0, 1
    for width, depth, patch in zip(widths, depths, patches, strict=True):
        inner = int(width * ratio)
        block = width * kernel + width + width + linear(width, inner) + linear(inner, width)
        total += linear(seen * patch, width) + width + depth * block
        seen = width
    total += seen + linear(seen, out) + out
    section.ignore("num_hidden_layers")
    return TowerSize(sum(depths), seen, 0, int(seen * ratio), total)


def _glm5_next(section: Section, text_hidden: int) -> TowerSize:
    """GLM-4V's tower with QK-norms, biases, and widths of its own for MLP and merger."""
    depth, hidden, heads, width = plain_sizes(section)
    out = section.integer("out_hidden_size", text_hidden, why="derived: hidden_size of the text")
    inner = section.integer("projection_intermediate_size", maximum=MAX_WIDTH)
    frames = section.integer("temporal_patch_size", 2, why="default: 2", maximum=64)
    merge = section.integer("spatial_merge_size", 2, why="default: 2", maximum=64)
    bias = section.boolean("attention_bias", False, why="default: false")
    section.ignore("image_size", "swiglu_limit", "rope_parameters")
    layer = linear(hidden, 3 * hidden, bias) + linear(hidden, hidden, bias)
    layer += 2 * linear(hidden, width, bias) + linear(width, hidden, bias)
    layer += 2 * hidden + 2 * (hidden // heads)
    total = depth * layer + linear(patch_elements(section, "in_channels") * frames, hidden) + hidden
    total += linear(hidden * merge * merge, out) + out * out + 2 * out + 3 * out * inner
    return TowerSize(depth, hidden, heads, width, total)


def _lfm3_vl(section: Section, _: int) -> TowerSize:
    """Gated convolutions in the plane between attention with QK-norms, gated MLPs."""
    depth, hidden, heads, width = plain_sizes(section)
    kv_heads = section.optional_integer("num_key_value_heads", maximum=MAX_WIDTH) or heads
    kernel = section.integer("conv_kernel_size", 3, why="default: 3", maximum=1 << 8)
    frames = section.integer("temporal_patch_size", 2, why="default: 2", maximum=64)
    section.ignore("rope_parameters", "spatial_merge_size")
    words = section.texts("layer_types", length=depth)
    if words is None or any(word not in ("conv", "full_attention") for word in words):
        raise section.error("layer_types", section.values.get("layer_types"), "conv or attention")
    if hidden % heads:
        raise section.error("num_attention_heads", heads, f"a divisor of {hidden}")
    head = hidden // heads
    attention = 2 * hidden * hidden + 2 * hidden * kv_heads * head + 2 * head
    convolution = 4 * hidden * hidden + kernel * kernel * hidden
    convolutions = sum(word == "conv" for word in words)
    total = convolutions * convolution + (depth - convolutions) * attention
    total += depth * (3 * hidden * width + 2 * hidden)
    total += patch_elements(section, "in_channels") * frames * hidden + hidden
    return TowerSize(depth, hidden, heads, width, total)


def _lfm3_projector(root: Section, hidden: int, text: int) -> int:
    width = root.integer("projector_hidden_size", maximum=MAX_WIDTH)
    bias = root.boolean("projector_bias", True, why="default: true")
    return 2 * hidden + linear(4 * hidden, width, bias) + linear(width, text, bias)


def _inkling_audio(section: Section, text_hidden: int) -> TowerSize:
    """A table of soft tokens, one row per mel bin and level, and a norm."""
    rows = section.integer("n_mel_bins", maximum=MAX_WIDTH)
    rows *= section.integer("mel_vocab_size", maximum=MAX_WIDTH)
    section.ignore("text_hidden_size")
    return TowerSize(1, text_hidden, 0, 0, rows * text_hidden + text_hidden)


def _factors(number: int) -> list[int]:
    """Prime factors, the greatest first."""
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1 if factor * factor <= number else number - factor
        factor = max(factor, 2)
    return found[::-1]


def _folds(section: Section) -> list[tuple[int, int, int]]:
    """(frames, side, channels) after each possible fold of a patch, from one pixel to all of it."""
    frames = section.integer("temporal_patch_size", maximum=64)
    side = section.integer("patch_size", maximum=1 << 10)
    channels = section.integer("num_channels", 3, why="default: 3", maximum=64)
    scales, seen = [(1, 1, channels)], 1
    for factor in _factors(side):
        seen *= factor
        scales.append((1, seen, ceil(seen**2 * channels / 64) * 64))
    deep = 1
    for factor in _factors(frames):
        deep *= factor
        # transformers 5.24 rounds spatial scales to 64 channels, but takes 64 times temporal ones
        scales.append((deep, seen, seen**2 * channels * deep * 64))
    return scales


def _inkling_vision(section: Section, text_hidden: int) -> TowerSize | None:
    """A patch folded into channels layer by layer: each takes the scale nearest to an even growth.

    None where there are fewer layers than scales, which the library then assigns by optimisation.
    """
    depth = section.integer("n_layers", maximum=MAX_DEPTH)
    section.ignore("hidden_size", "num_attention_heads", "text_hidden_size")
    scales = _folds(section)
    if depth < len(scales):
        return None
    sizes = [log(frames * side * side) for frames, side, _ in scales]
    frames, side, channels = scales[-1][0], scales[-1][1], scales[0][2]
    whole = log(frames * side * side * channels)
    picked = [
        min(range(len(scales)), key=lambda k: abs(whole * i / depth - sizes[k]))
        for i in range(depth + 1)
    ]
    picked[0], picked[-1] = 0, len(scales) - 1
    total = 0
    for i, (before, after) in enumerate(pairwise(picked)):
        (t0, s0, c0), (t1, s1, c1) = scales[before], scales[after]
        last = i == depth - 1
        out = text_hidden if last else c1
        total += c0 * (t1 // t0) * (s1 // s0) ** 2 * out + (0 if last else out)
    return TowerSize(depth, text_hidden, 0, 0, total + text_hidden)


def _inkling2_vision(section: Section, text_hidden: int) -> TowerSize:
    """Layer scales, biases, a class token with a position of its own, a grid of 2-D positions."""
    depth, hidden, heads, width = plain_sizes(section)
    rows = section.integer("posemb_grid_size", maximum=1 << 12) ** 2
    middle = section.integer("projection_hidden_dim", maximum=MAX_WIDTH)
    merge = section.integer("spatial_merge_size", 2, why="default: 2", maximum=64)
    bias = section.boolean("projector_bias", False, why="default: false")
    section.ignore("layer_scale_init_value", "mlp_ratio", "rope_parameters", "text_hidden_size")
    total = depth * (biased_layer(hidden, width) + 2 * hidden)
    total += patch_elements(section) * hidden + rows * hidden + 4 * hidden
    total += linear(merge * merge * hidden, middle, bias) + linear(middle, text_hidden, bias)
    return TowerSize(depth, hidden, heads, width, total)


def _ernie_vl(section: Section, text_hidden: int) -> TowerSize:
    """ERNIE-4.5-VL: a plain tower, then a resampler over patches and over pairs of frames."""
    depth, hidden, heads, width = plain_sizes(section)
    merge = section.integer("spatial_merge_size", 2, why="default: 2", maximum=64)
    frames = section.integer("temporal_merge_size", 2, why="default: 2", maximum=64)
    seen = hidden * merge * merge
    total = depth * biased_layer(hidden, width) + patch_elements(section, "in_channels") * hidden
    total += 2 * hidden
    total += linear(seen, seen) + linear(seen, seen) + 2 * seen
    total += linear(frames * seen, seen) + linear(seen, seen) + 2 * seen
    total += linear(seen, text_hidden) + text_hidden
    return TowerSize(depth, hidden, heads, width, total)


def _molmo2_vision(section: Section, _: int) -> TowerSize:
    """A plain transformer whose positions are counted, with no norm after its layers."""
    depth, hidden, heads, width = plain_sizes(section)
    kv_heads = section.integer("num_key_value_heads", heads, why="default: the heads")
    head_dim = section.integer("head_dim", maximum=MAX_WIDTH)
    bias = section.boolean("attention_bias", True, why="default: true")
    rows = section.integer("num_position_embeddings", maximum=MAX_WIDTH)
    section.ignore("image_size")
    layer = linear(hidden, heads * head_dim, bias) + linear(heads * head_dim, hidden, bias)
    layer += 2 * linear(hidden, kv_heads * head_dim, bias)
    layer += linear(hidden, width) + linear(width, hidden) + 4 * hidden
    total = depth * layer + linear(patch_elements(section), hidden) + rows * hidden
    return TowerSize(depth, hidden, heads, width, total)


def _molmo2_adapter(section: Section, text_hidden: int) -> TowerSize:
    """Attention that pools several of the tower's layers, then a gated MLP into the text."""
    hidden = section.integer("hidden_size", maximum=MAX_WIDTH)
    heads = section.integer("num_attention_heads", maximum=MAX_WIDTH)
    kv_heads = section.integer("num_key_value_heads", heads, why="default: the heads")
    head_dim = section.integer("head_dim", maximum=MAX_WIDTH)
    width = section.integer("intermediate_size", maximum=MAX_WIDTH)
    out = section.integer("text_hidden_size", text_hidden, why="derived: hidden_size of the text")
    bias = section.boolean("attention_bias", True, why="default: true")
    mlp_bias = section.boolean("mlp_bias", False, why="default: false")
    layers = section.find("vision_feature_layer")
    seen = hidden * (len(layers) if isinstance(layers, list | tuple) else 2)
    total = linear(seen, heads * head_dim, bias) + 2 * linear(seen, kv_heads * head_dim, bias)
    total += linear(heads * head_dim, hidden, bias) + 2 * linear(hidden, width, mlp_bias)
    return TowerSize(1, hidden, heads, width, total + linear(width, out, mlp_bias))


RECENT_WHOLE: dict[str, Callable[[Section, int], TowerSize | None]] = {
    "muse_spark_audio": _muse_audio,
    "glm5_next_vision": _glm5_next,
    "inkling_audio": _inkling_audio,
    "inkling_vision": _inkling_vision,
    "inkling2_vision": _inkling2_vision,
    "inkling2_loop_vision": _inkling2_vision,
    "ernie4_5_vl_moe_vision": _ernie_vl,
    "molmo2_vision": _molmo2_vision,
    "qwen4_exp_vision": qwen3_vl,
    "molmo2_adapter": _molmo2_adapter,
}
RECENT_ENCODERS: dict[str, Callable[[Section, int], TowerSize]] = {
    "muse_glimmer_vision": _muse_vision,
    "muse_spark_vision": _muse_vision,
    "lfm3_vl_vision": _lfm3_vl,
}
RECENT_PROJECTORS: dict[str, Callable[[Section, int, int], int]] = {
    "muse_glimmer": _muse_projector,
    "muse_spark": _muse_projector,
    "lfm3_vl": _lfm3_projector,
}
