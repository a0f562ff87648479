"""How many parameters towers of document readers, recognisers and protein readers have.

Formulas over their own keys, as `recent.py` has them for general models. Facts: the modules of
transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable

from ullage.anatomy.config.keys import Section
from ullage.anatomy.towers.recent import patch_elements, plain_sizes
from ullage.anatomy.towers.sizes import (
    MAX_DEPTH,
    MAX_WIDTH,
    TowerSize,
    biased_layer,
    linear,
)


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
    total = depth * layer + linear(patch_elements(section), hidden)
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
    depth, hidden, heads, width = plain_sizes(clip)
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
    depth, hidden, heads, width = plain_sizes(stack)
    kv_heads = stack.optional_integer("num_key_value_heads", maximum=MAX_WIDTH) or heads
    kv = kv_heads * (hidden // heads)
    layer = linear(hidden, hidden) + 2 * linear(hidden, kv) + hidden * hidden
    layer += 3 * hidden * width + 2 * hidden
    total = first.parameters + depth * layer + hidden
    queries = (144 + 256) * hidden  # one table for views, one for pages
    total += queries + linear(hidden, text_hidden) + text_hidden
    return TowerSize(first.num_layers + depth, hidden, heads, width, total)


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
    norms = list(early) if isinstance(early, list | tuple) else []
    if not widths or not depths or not patches or len(norms) != len(widths):
        raise section.error("embed_dim", section.values.get("embed_dim"), "one width per stage")
    ratio = section.number("mlp_ratio", 4.0, why="default: 4", maximum=64.0)
    bias = section.boolean("qkv_bias", True, why="default: true")
    seen = section.integer("in_channels", 3, why="default: 3", maximum=64)
    total = 0
    for width, depth, patch, before in zip(widths, depths, patches, norms, strict=True):
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
    total = depth * biased_layer(hidden, width) + patch_elements(section) * hidden + hidden
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
    depth, hidden, heads, width = plain_sizes(section)
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
    depth, hidden, heads, width = plain_sizes(section)
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
    depth, hidden, heads, width = plain_sizes(section)
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


READER_WHOLE: dict[str, Callable[[Section, int], TowerSize | None]] = {
    "unlimited_ocr_vision": _unlimited_ocr,
    "deepseek_ocr2_vision": _deepseek_ocr2,
    "florence_vision": _florence,
    "idefics_vision": _idefics_vision,
    "idefics_perciever": _idefics_perceiver,
    "nemotron3_5_transcribe_audio": _transcribe_audio,
    "nemotron3_5_transcribe_word_timestamp": _transcribe_timestamps,
}
READER_ENCODERS: dict[str, Callable[[Section, int], TowerSize]] = {
    "evolla ": _protein,  # its configuration names no type of its own
}
READER_PROJECTORS: dict[str, Callable[[Section, int, int], int]] = {
    "evolla": _evolla,
}
