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


def _patch(section: Section, channels: str = "num_channels") -> int:
    side = section.integer("patch_size", maximum=1 << 10)
    return section.integer(channels, 3, why="default: 3", maximum=64) * side * side


def _plain(section: Section) -> tuple[int, int, int, int]:
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
    depth, hidden, heads, width = _plain(section)
    frames = section.integer("patch_temporal", 2, why="default: 2", maximum=64)
    rows = section.integer("pos_emb_height", maximum=1 << 12)
    rows *= section.integer("pos_emb_width", maximum=1 << 12)
    section.ignore("layer_types", "max_position_embeddings", "merge_size", "rope_parameters")
    total = depth * biased_layer(hidden, width) + _patch(section) * frames * hidden
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
    depth, hidden, heads, width = _plain(section)
    out = section.integer("out_hidden_size", text_hidden, why="derived: hidden_size of the text")
    inner = section.integer("projection_intermediate_size", maximum=MAX_WIDTH)
    frames = section.integer("temporal_patch_size", 2, why="default: 2", maximum=64)
    merge = section.integer("spatial_merge_size", 2, why="default: 2", maximum=64)
    bias = section.boolean("attention_bias", False, why="default: false")
    section.ignore("image_size", "swiglu_limit", "rope_parameters")
    layer = linear(hidden, 3 * hidden, bias) + linear(hidden, hidden, bias)
    layer += 2 * linear(hidden, width, bias) + linear(width, hidden, bias)
    layer += 2 * hidden + 2 * (hidden // heads)
    total = depth * layer + linear(_patch(section, "in_channels") * frames, hidden) + hidden
    total += linear(hidden * merge * merge, out) + out * out + 2 * out + 3 * out * inner
    return TowerSize(depth, hidden, heads, width, total)


def _lfm3_vl(section: Section, _: int) -> TowerSize:
    """Gated convolutions in the plane between attention with QK-norms, gated MLPs."""
    depth, hidden, heads, width = _plain(section)
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
    total += _patch(section, "in_channels") * frames * hidden + hidden
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
    depth, hidden, heads, width = _plain(section)
    rows = section.integer("posemb_grid_size", maximum=1 << 12) ** 2
    middle = section.integer("projection_hidden_dim", maximum=MAX_WIDTH)
    merge = section.integer("spatial_merge_size", 2, why="default: 2", maximum=64)
    bias = section.boolean("projector_bias", False, why="default: false")
    section.ignore("layer_scale_init_value", "mlp_ratio", "rope_parameters", "text_hidden_size")
    total = depth * (biased_layer(hidden, width) + 2 * hidden)
    total += _patch(section) * hidden + rows * hidden + 4 * hidden
    total += linear(merge * merge * hidden, middle, bias) + linear(middle, text_hidden, bias)
    return TowerSize(depth, hidden, heads, width, total)


def _sam(section: Section) -> TowerSize:
    """Segment-Anything's encoder with the neck and the two convolutions of DeepSeek-OCR."""
    depth, hidden, heads, _ = (
        section.integer("num_hidden_layers", maximum=MAX_DEPTH),
        section.integer("hidden_size", maximum=MAX_WIDTH),
        section.integer("num_attention_heads", maximum=MAX_WIDTH),
        0,
    )
    width = section.integer("mlp_dim", maximum=MAX_WIDTH)
    side = section.integer("image_size", maximum=1 << 16)
    side //= section.integer("patch_size", maximum=1 << 10)
    window = section.integer("window_size", maximum=1 << 12)
    deep = len(section.integers("global_attn_indexes") or ())
    neck = section.integer("output_channels", maximum=MAX_WIDTH)
    bias = section.boolean("qkv_bias", True, why="default: true")
    layer = linear(hidden, 3 * hidden, bias) + linear(hidden, hidden) + 4 * hidden
    layer += linear(hidden, width) + linear(width, hidden)
    total = depth * layer + linear(_patch(section), hidden)
    if section.boolean("use_abs_pos", True, why="default: true"):
        total += side * side * hidden
    if section.boolean("use_rel_pos", True, why="default: true"):
        head = hidden // heads
        total += deep * 2 * (2 * side - 1) * head + (depth - deep) * 2 * (2 * window - 1) * head
    total += hidden * neck + 9 * neck * neck + 4 * neck
    seen = neck
    for channels in section.integers("downsample_channels", minimum=1, maximum=MAX_WIDTH) or ():
        total += 9 * seen * channels
        seen = channels
    section.ignore("mlp_ratio", "scale")
    return TowerSize(depth, hidden, heads, width, total)


def _unlimited_ocr(section: Section, text_hidden: int) -> TowerSize | None:
    """Segment-Anything's features through a CLIP encoder without patches of its own."""
    sam, clip = section.section("sam_config"), section.section("encoder_config")
    if sam is None or clip is None:
        return None
    first = _sam(sam)
    depth, hidden, heads, width = _plain(clip)
    side = clip.integer("image_size", maximum=1 << 16) // clip.integer("patch_size", maximum=1024)
    clip.ignore("num_channels", "initializer_factor")
    total = first.parameters + depth * biased_layer(hidden, width)
    total += hidden + (side * side + 1) * hidden + 2 * hidden
    # both kinds of features side by side, a separator of views and a newline
    total += linear(2 * hidden, text_hidden) + 2 * text_hidden
    return TowerSize(first.num_layers + depth, hidden, heads, width, total)


def _deepseek_ocr2(section: Section, text_hidden: int) -> TowerSize | None:
    """Segment-Anything's features through a Qwen-2 stack with learned queries."""
    sam, stack = section.section("sam_config"), section.section("encoder_config")
    if sam is None or stack is None:
        return None
    first = _sam(sam)
    depth, hidden, heads, width = _plain(stack)
    kv_heads = stack.optional_integer("num_key_value_heads", maximum=MAX_WIDTH) or heads
    kv = kv_heads * (hidden // heads)
    layer = linear(hidden, hidden) + 2 * linear(hidden, kv) + hidden * hidden
    layer += 3 * hidden * width + 2 * hidden
    total = first.parameters + depth * layer + hidden
    queries = (144 + 256) * hidden  # one table for views, one for pages
    total += queries + linear(hidden, text_hidden) + text_hidden
    return TowerSize(first.num_layers + depth, hidden, heads, width, total)


def _ernie_vl(section: Section, text_hidden: int) -> TowerSize:
    """ERNIE-4.5-VL: a plain tower, then a resampler over patches and over pairs of frames."""
    depth, hidden, heads, width = _plain(section)
    merge = section.integer("spatial_merge_size", 2, why="default: 2", maximum=64)
    frames = section.integer("temporal_merge_size", 2, why="default: 2", maximum=64)
    seen = hidden * merge * merge
    total = depth * biased_layer(hidden, width) + _patch(section, "in_channels") * hidden
    total += 2 * hidden
    total += linear(seen, seen) + linear(seen, seen) + 2 * seen
    total += linear(frames * seen, seen) + linear(seen, seen) + 2 * seen
    total += linear(seen, text_hidden) + text_hidden
    return TowerSize(depth, hidden, heads, width, total)


def _molmo2_vision(section: Section, _: int) -> TowerSize:
    """A plain transformer whose positions are counted, with no norm after its layers."""
    depth, hidden, heads, width = _plain(section)
    kv_heads = section.integer("num_key_value_heads", heads, why="default: the heads")
    head_dim = section.integer("head_dim", maximum=MAX_WIDTH)
    bias = section.boolean("attention_bias", True, why="default: true")
    rows = section.integer("num_position_embeddings", maximum=MAX_WIDTH)
    section.ignore("image_size")
    layer = linear(hidden, heads * head_dim, bias) + linear(heads * head_dim, hidden, bias)
    layer += 2 * linear(hidden, kv_heads * head_dim, bias)
    layer += linear(hidden, width) + linear(width, hidden) + 4 * hidden
    total = depth * layer + linear(_patch(section), hidden) + rows * hidden
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


def _davit_block(width: int, inner: int, qkv_bias: bool) -> int:
    """Two depthwise convolutions, attention and an MLP: over space once, over channels once."""
    total = 2 * (9 * width + width) + 4 * width + linear(width, 3 * width, qkv_bias)
    return total + linear(width, width) + linear(width, inner) + linear(inner, width)


def _florence(section: Section, text_hidden: int) -> TowerSize:
    """DaViT: stages of convolutions and of pairs of blocks; positions, a norm, a projection."""
    widths = section.integers("embed_dim", minimum=1, maximum=MAX_WIDTH) or ()
    depths = section.integers("depths", length=len(widths), maximum=MAX_DEPTH) or ()
    patches = section.integers("patch_size", length=len(widths), minimum=1, maximum=1 << 10) or ()
    early = section.find("patch_prenorm")
    if not widths or not depths or not patches or not isinstance(early, list | tuple):
        raise section.error("embed_dim", section.values.get("embed_dim"), "one width per stage")
    ratio = section.number("mlp_ratio", 4.0, why="default: 4", maximum=64.0)
    bias = section.boolean("qkv_bias", True, why="default: true")
    seen = section.integer("in_channels", 3, why="default: 3", maximum=64)
    total = 0
    for width, depth, patch, before in zip(widths, depths, patches, early, strict=True):
        total += linear(seen * patch * patch, width) + 2 * (seen if before else width)
        total += 2 * depth * _davit_block(width, int(width * ratio), bias)
        seen = width
    out = section.integer("projection_dim", text_hidden, why="derived: hidden_size of the text")
    rows = section.integer("max_position_embeddings", maximum=MAX_WIDTH)
    times = section.integer("max_temporal_embeddings", maximum=MAX_WIDTH)
    section.ignore(
        "drop_path_rate", "num_groups", "num_heads", "patch_padding", "patch_stride", "window_size"
    )
    total += seen * out + 2 * out + rows * seen + times * seen
    return TowerSize(sum(depths), seen, 0, int(seen * ratio), total)


def _idefics_vision(section: Section, _: int) -> TowerSize:
    """CLIP's encoder."""
    hidden = section.integer("embed_dim", maximum=MAX_WIDTH)
    depth = section.integer("num_hidden_layers", maximum=MAX_DEPTH)
    heads = section.integer("num_attention_heads", maximum=MAX_WIDTH)
    width = section.integer("intermediate_size", maximum=MAX_WIDTH)
    side = section.integer("image_size", maximum=1 << 16)
    side //= section.integer("patch_size", maximum=1 << 10)
    section.ignore("initializer_factor")
    total = depth * biased_layer(hidden, width) + _patch(section) * hidden + hidden
    total += (side * side + 1) * hidden + 4 * hidden
    return TowerSize(depth, hidden, heads, width, total)


def _idefics_perceiver(section: Section, _: int) -> TowerSize | None:
    """A resampler that the default goes without; its size is not told by its own keys."""
    if section.boolean("use_resampler", False, why="default: false"):
        return None
    for key in tuple(section.values):
        section.ignore(key)
    return TowerSize(0, 0, 0, 0, 0)


def _transcribe_layer(hidden: int, width: int, heads: int, *, normed: bool) -> int:
    total = 3 * hidden * hidden + linear(hidden, hidden) + 4 * hidden
    total += linear(hidden, width) + linear(width, hidden)
    return total + (4 * (hidden // heads) if normed else 0)


def _transcribe_encoder(section: Section, *, normed: bool) -> tuple[TowerSize, int]:
    """An encoder over stacked mel frames, norms around it; and how many mel numbers it reads."""
    depth, hidden, heads, width = _plain(section)
    mels = section.integer("num_mel_bins", maximum=MAX_WIDTH)
    mels *= section.integer("subsampling_factor", maximum=64)
    section.ignore("num_key_value_heads", "max_position_embeddings", "rope_parameters")
    total = depth * _transcribe_layer(hidden, width, heads, normed=normed)
    total += mels * hidden + 4 * hidden
    return TowerSize(depth, hidden, heads, width, total), mels


def _transcribe_audio(section: Section, text_hidden: int) -> TowerSize | None:
    """Nemotron's recogniser beside its diarisation, joined by two norms and a projection."""
    asr, diarization = section.section("asr_config"), section.section("diarization_config")
    if asr is None or diarization is None:
        return None
    audio, head = diarization.section("audio_config"), diarization.section("head_config")
    if audio is None or head is None:
        return None
    size, _ = _transcribe_encoder(asr, normed=True)
    second, _ = _transcribe_encoder(audio, normed=False)
    inner = head.integer("hidden_size", maximum=MAX_WIDTH)
    speakers = head.integer("num_speakers", maximum=1024)
    factor = head.integer("subsampling_factor", maximum=64)
    head.ignore("audio_hidden_size")
    diarization.ignore(*diarization.values)
    section.ignore("speaker_activity_threshold")
    total = size.parameters + second.parameters + second.hidden_size
    total += linear(second.hidden_size, inner) + linear(3 * inner, factor * inner)
    total += linear(inner, inner) + linear(inner, speakers)
    total += 2 * size.hidden_size + 2 * speakers + linear(size.hidden_size, text_hidden)
    return TowerSize(size.num_layers, size.hidden_size, size.num_heads, size.intermediate, total)


def _transcribe_timestamps(section: Section, _: int) -> TowerSize:
    """Word timestamps from the recogniser's states: an upsampler, an encoder, a vocabulary."""
    depth, hidden, heads, width = _plain(section)
    rows = section.integer("vocab_size", maximum=1 << 24)
    factor = section.integer("upsampling_factor", maximum=64)
    section.ignore(
        "num_key_value_heads", "max_position_embeddings", "residual_scale", "rope_parameters"
    )
    total = depth * _transcribe_layer(hidden, width, heads, normed=True) + 4 * hidden
    total += hidden * hidden * factor + hidden + linear(hidden, rows)
    return TowerSize(depth, hidden, heads, width, total)


def _protein(section: Section, _: int) -> TowerSize:
    """Evolla's protein encoder; it stores the frequencies of its rotation."""
    depth, hidden, heads, width = _plain(section)
    rows = section.integer("vocab_size", maximum=MAX_WIDTH)
    before = section.boolean("emb_layer_norm_before", False, why="default: false")
    kind = section.text("position_embedding_type", "rotary", why="default: rotary")
    if hidden % (2 * heads):
        raise section.error("num_attention_heads", heads, f"a divisor of {hidden // 2}")
    positions = hidden // heads // 2
    if kind != "rotary":
        positions = section.integer("max_position_embeddings", maximum=MAX_WIDTH) * hidden
    section.ignore("mask_token_id", "max_position_embeddings", "rope_theta", "token_dropout")
    total = depth * biased_layer(hidden, width) + rows * hidden + positions
    return TowerSize(depth, hidden, heads, width, total + (4 if before else 2) * hidden)


def _evolla(root: Section, hidden: int, text: int) -> int:
    """Latents that attend to the protein, then a projection and a norm."""
    inner = root.integer("resampler_dim_head", maximum=MAX_WIDTH)
    inner *= root.integer("resampler_heads", maximum=1 << 12)
    depth = root.integer("resampler_depth", maximum=MAX_DEPTH)
    wide = root.integer("resampler_ff_mult", maximum=64) * hidden
    layer = 4 * hidden * inner + 2 * hidden * wide + 6 * hidden
    total = root.integer("resampler_num_latents", maximum=MAX_WIDTH) * hidden
    return total + depth * layer + linear(hidden, text) + 2 * text


RECENT_WHOLE: dict[str, Callable[[Section, int], TowerSize | None]] = {
    "muse_spark_audio": _muse_audio,
    "glm5_next_vision": _glm5_next,
    "inkling_audio": _inkling_audio,
    "inkling_vision": _inkling_vision,
    "inkling2_vision": _inkling2_vision,
    "inkling2_loop_vision": _inkling2_vision,
    "unlimited_ocr_vision": _unlimited_ocr,
    "deepseek_ocr2_vision": _deepseek_ocr2,
    "ernie4_5_vl_moe_vision": _ernie_vl,
    "molmo2_vision": _molmo2_vision,
    "qwen4_exp_vision": qwen3_vl,
    "molmo2_adapter": _molmo2_adapter,
    "florence_vision": _florence,
    "idefics_vision": _idefics_vision,
    "idefics_perciever": _idefics_perceiver,
    "nemotron3_5_transcribe_audio": _transcribe_audio,
    "nemotron3_5_transcribe_word_timestamp": _transcribe_timestamps,
}
RECENT_ENCODERS: dict[str, Callable[[Section, int], TowerSize]] = {
    "muse_glimmer_vision": _muse_vision,
    "muse_spark_vision": _muse_vision,
    "lfm3_vl_vision": _lfm3_vl,
    "evolla ": _protein,  # its configuration names no type of its own
}
RECENT_PROJECTORS: dict[str, Callable[[Section, int, int], int]] = {
    "muse_glimmer": _muse_projector,
    "muse_spark": _muse_projector,
    "lfm3_vl": _lfm3_projector,
    "evolla": _evolla,
}
