"""How many parameters the towers of omni models and of remote-code releases have.

Holds formulas over their own keys, as `sizes.py` does for the others, and the parts of a
configuration that are no tower at all. Facts: the modules of transformers 5.24, the releases' own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ullage.anatomy.config.keys import Section
from ullage.anatomy.towers.sizes import (
    MAX_DEPTH,
    MAX_WIDTH,
    TowerSize,
    linear,
    qwen2_5_vl,
    qwen3_vl,
)
from ullage.errors import UnsupportedModel

# Models of their own beside the language model: engines that serve text do not load them
# (vLLM 0.32 runs the thinker alone).
APART = ("talker_config", "token2wav_config", "code2wav_config")


def _audio_sizes(section: Section) -> tuple[int, int, int, int]:
    """(depth, hidden, heads, width) in the keys of Whisper's descendants."""
    return (
        section.integer("encoder_layers", maximum=MAX_DEPTH),
        section.integer("d_model", maximum=MAX_WIDTH),
        section.integer("encoder_attention_heads", maximum=MAX_WIDTH),
        section.integer("encoder_ffn_dim", maximum=MAX_WIDTH),
    )


def _audio_layer(hidden: int, width: int, key_bias: bool) -> int:
    attention = 3 * linear(hidden, hidden) + linear(hidden, hidden, key_bias)
    return attention + linear(hidden, width) + linear(width, hidden) + 4 * hidden


def _qwen2_5_omni_audio(section: Section, text_hidden: int) -> TowerSize:
    depth, hidden, heads, width = _audio_sizes(section)
    mels = section.integer("num_mel_bins", maximum=MAX_WIDTH)
    out = section.integer("output_dim", text_hidden, why="derived: hidden_size of the text")
    section.ignore("max_source_positions", "n_window")
    total = depth * _audio_layer(hidden, width, key_bias=False)
    total += linear(3 * mels, hidden) + linear(3 * hidden, hidden)
    total += 2 * out + 2 * hidden + linear(hidden, out)
    return TowerSize(depth, hidden, heads, width, total)


def _qwen3_omni_audio(section: Section, text_hidden: int) -> TowerSize:
    """Three strided 3 × 3 convolutions over the spectrogram, then the layers."""
    depth, hidden, heads, width = _audio_sizes(section)
    bins = section.integer("num_mel_bins", maximum=MAX_WIDTH)
    channels = section.integer("downsample_hidden_size", 480, why="default: 480", maximum=MAX_WIDTH)
    out = section.integer("output_dim", text_hidden, why="derived: hidden_size of the text")
    section.ignore("max_source_positions", "n_window", "n_window_infer", "conv_chunksize")
    for _ in range(3):
        bins = (bins + 1) // 2
    total = depth * _audio_layer(hidden, width, key_bias=True)
    total += linear(9, channels) + 2 * linear(9 * channels, channels)
    total += linear(channels * bins, hidden, bias=False) + 2 * hidden
    total += linear(hidden, hidden) + linear(hidden, out)
    return TowerSize(depth, hidden, heads, width, total)


def _embedder(section: Section, hidden: int, text_hidden: int) -> int:
    """Gemma-3n: a small vocabulary of soft tokens, two norms, a projection."""
    rows = section.integer("vocab_size", 128, why="default: 128", maximum=MAX_WIDTH)
    return rows * hidden + 2 * hidden + hidden * text_hidden


def _gemma3n_audio(section: Section, text_hidden: int) -> TowerSize:
    """A conformer: half-step feed-forwards around attention and a light convolution."""
    hidden = section.integer("hidden_size", maximum=MAX_WIDTH)
    depth = section.integer("conf_num_hidden_layers", maximum=MAX_DEPTH)
    heads = section.integer("conf_num_attention_heads", maximum=MAX_WIDTH)
    kernel = section.integer("conf_conv_kernel_size", maximum=1 << 10)
    bins = section.integer("input_feat_size", maximum=MAX_WIDTH)
    channels = section.integers("sscp_conv_channel_size", length=2, minimum=1) or (128, 32)
    if hidden % heads:
        raise section.error("conf_num_attention_heads", heads, f"a divisor of {hidden}")
    feed_forward = 8 * hidden * hidden + 2 * hidden
    attention = 5 * hidden * hidden + 2 * hidden + hidden // heads
    convolution = 3 * hidden * hidden + kernel * hidden + 2 * hidden
    layer = 2 * feed_forward + attention + convolution + hidden
    first, second = channels
    total = depth * layer + 10 * first + 9 * first * second + second
    total += second * (bins // 4) * hidden + _embedder(section, hidden, text_hidden)
    return TowerSize(depth, hidden, heads, 4 * hidden, total)


# The convolutional encoder that Gemma-3n names; what is left of the stored totals of E2B
# (5,439,438,272) and E4B (7,849,978,192) without everything else, the same for both.
_MOBILENETS = {"mobilenetv5_300m_enc": 294_126_912}


def _gemma3n_vision(section: Section, text_hidden: int) -> TowerSize | None:
    name = section.text("architecture", "mobilenetv5_300m_enc", why="default: Gemma-3n's encoder")
    size = _MOBILENETS.get(name)
    if size is None:
        return None
    hidden = section.integer("hidden_size", 2048, why="default: 2048", maximum=MAX_WIDTH)
    return TowerSize(0, hidden, 0, 0, size + _embedder(section, hidden, text_hidden))


def _intern_vit(section: Section, _: int) -> TowerSize:
    """InternViT: fused QKV, layer scales, QK-norms over the whole width in the 6B."""
    hidden = section.integer("hidden_size", maximum=MAX_WIDTH)
    depth = section.integer("num_hidden_layers", maximum=MAX_DEPTH)
    heads = section.integer("num_attention_heads", maximum=MAX_WIDTH)
    width = section.integer("intermediate_size", maximum=MAX_WIDTH)
    patch = section.integer("patch_size", maximum=1 << 10)
    side = section.integer("image_size", maximum=1 << 16) // patch
    bias = section.boolean("qkv_bias", False, why="default: false")
    norms = section.boolean("qk_normalization", True, why="default: true")
    norm = 1 if section.text("norm_type", "rms_norm", why="default: rms_norm") == "rms_norm" else 2
    layer = linear(hidden, 3 * hidden, bias) + linear(hidden, hidden)
    layer += linear(hidden, width) + linear(width, hidden)
    layer += 2 * norm * hidden + 2 * hidden + (2 * hidden if norms else 0)
    total = depth * layer + linear(3 * patch * patch, hidden) + hidden + (side * side + 1) * hidden
    return TowerSize(depth, hidden, heads, width, total)


def _moon_vit(section: Section, _: int) -> TowerSize:
    """Kimi-VL: a patch convolution, a learned grid of positions, layers with every bias."""
    hidden = section.integer("hidden_size", maximum=MAX_WIDTH)
    depth = section.integer("num_hidden_layers", maximum=MAX_DEPTH)
    heads = section.integer("num_attention_heads", maximum=MAX_WIDTH)
    width = section.integer("intermediate_size", maximum=MAX_WIDTH)
    patch = section.integer("patch_size", maximum=1 << 10)
    rows = section.integer("init_pos_emb_height", 64, why="default: 64", maximum=1 << 14)
    columns = section.integer("init_pos_emb_width", 64, why="default: 64", maximum=1 << 14)
    section.ignore("merge_kernel_size")
    layer = _audio_layer(hidden, width, key_bias=True)
    total = depth * layer + linear(3 * patch * patch, hidden) + rows * columns * hidden + 2 * hidden
    return TowerSize(depth, hidden, heads, width, total)


# Phi-4-multimodal's towers, fixed in its code: SigLIP at 448 pixels with its pooling, and a
# conformer of 24 blocks. Together with the projections and the LoRA adapters they make up the
# release's 5,574,460,384 stored elements.
_PHI4_IMAGE = TowerSize(27, 1152, 16, 4304, 428_565_440)
_PHI4_AUDIO = TowerSize(24, 1024, 16, 1536, 441_238_304)


def phi4_towers(embeddings: Section, text_hidden: int) -> list[tuple[str, TowerSize]]:
    """The towers that Phi-4-multimodal's `embd_layer` names, with their projections."""
    found = []
    projections = linear(1152, text_hidden) + linear(text_hidden, text_hidden) + 2 * 1152
    if embeddings.section("image_embd_layer") is not None:
        size = _PHI4_IMAGE
        found.append(("vision", replace(size, parameters=size.parameters + projections)))
    projections = 2 * (linear(1024, text_hidden) + linear(text_hidden, text_hidden))
    if embeddings.section("audio_embd_layer") is not None:
        size = _PHI4_AUDIO
        found.append(("audio", replace(size, parameters=size.parameters + projections)))
    return found


def _timm_vit(section: Section, _: int) -> TowerSize:
    """DeepSeek-VL2's SigLIP, in timm's words; its pooling by attention is stored too."""
    hidden = section.integer("width", maximum=MAX_WIDTH)
    depth = section.integer("layers", maximum=MAX_DEPTH)
    width = int(hidden * section.number("mlp_ratio", 4.0, why="default: 4", maximum=64.0))
    patch = section.integer("patch_size", maximum=1 << 10)
    side = section.integer("image_size", 384, why="default: 384", maximum=1 << 16) // patch
    section.ignore("model_name")
    layer = _audio_layer(hidden, width, key_bias=True)
    total = depth * layer + linear(3 * patch * patch, hidden) + side * side * hidden + 2 * hidden
    return TowerSize(depth, hidden, 16, width, total + layer - hidden)


def _deepseek_vl2(root: Section, hidden: int, text: int) -> int:
    """Patches two by two through two matrices, a newline and a separator between views."""
    root.ignore("candidate_resolutions", "global_view_pos", "projector_config", "tile_tag")
    return linear(4 * hidden, text) + linear(text, text) + 2 * text


# Encoders that timm builds by name: depth, width, heads, MLP, and what timm 1.0.31 stores of them
# without a classifier.
_TIMM = {
    "fastvit_mci3": TowerSize(0, 3072, 0, 0, 122_749_964),
    "vit_pe_core_large_patch14_336": TowerSize(24, 1024, 16, 4096, 316_102_656),
    "vit_pe_lang_large_patch14_448": TowerSize(23, 1024, 16, 4096, 291_415_040),
    "vit_pe_lang_gigantic_patch14_448": TowerSize(47, 1536, 16, 8960, 1_740_922_624),
    "resnet50": TowerSize(0, 2048, 0, 0, 23_561_205),
}


def _timm_wrapper(section: Section, _: int) -> TowerSize:
    """A tower that is only named. Arguments of its own change it: then its plain layers count."""
    name = section.text("architecture", "resnet50", why="default: resnet50")
    known = _TIMM.get(name)
    if known is None:
        raise UnsupportedModel(
            f"a tower of timm, {name[:80]}, whose size is not known",
            file=section.reading.file,
            field=section.field("architecture"),
            expected="one of " + ", ".join(_TIMM),
        )
    section.ignore("do_pooling", "global_pool", "hidden_size", "num_classes", "label_names")
    arguments = section.section("model_args")
    if arguments is None or set(arguments.values) <= {"inference_mode"}:
        return known
    depth = arguments.optional_integer("depth", maximum=MAX_DEPTH) or known.num_layers
    width = arguments.optional_integer("embed_dim", maximum=MAX_WIDTH) or known.hidden_size
    inner = int(width * arguments.number("mlp_ratio", known.intermediate / known.hidden_size,
                                         why="default: the tower's", maximum=64.0))  # fmt: skip
    plain = depth * (4 * width * width + 2 * width * inner)
    return replace(known, num_layers=depth, hidden_size=width, intermediate=inner, parameters=plain)


def _fast_vlm(root: Section, hidden: int, text: int) -> int:
    tower = root.section("vision_config")
    arguments = None if tower is None else tower.section("model_args")
    if arguments is not None and set(arguments.values) - {"inference_mode"}:
        raise arguments.error("model_args", arguments.values, "inference_mode alone")
    bias = root.boolean("multimodal_projector_bias", True, why="default: true")
    return linear(hidden, text, bias) + linear(text, text, bias)


# Towers that include what joins them to the text; None: one of a size that is not known.
OMNI_WHOLE: dict[str, Callable[[Section, int], TowerSize | None]] = {
    "qwen2_5_omni_audio_encoder": _qwen2_5_omni_audio,
    "qwen2_5_omni_vision_encoder": qwen2_5_vl,
    "qwen3_omni_moe_audio_encoder": _qwen3_omni_audio,
    "qwen3_omni_moe_vision_encoder": qwen3_vl,
    "gemma3n_audio": _gemma3n_audio,
    "gemma3n_vision": _gemma3n_vision,
}
REMOTE_ENCODERS: dict[str, Callable[[Section, int], TowerSize]] = {
    "intern_vit_6b": _intern_vit,
    "moonvit": _moon_vit,
    "timm_wrapper": _timm_wrapper,
    "deepseek_vl_v2 vision": _timm_vit,
}


def _kimi_vl(root: Section, hidden: int, text: int) -> int:  # noqa: ARG001
    merged = 4 * hidden
    return 2 * hidden + linear(merged, merged) + linear(merged, text)


def _cohere2_vision(root: Section, hidden: int, text: int) -> int:
    """A gated projector: its middle is halved by the gate."""
    factor = root.integer("downsample_factor", 2, why="default: 2", maximum=64)
    width = root.integer("alignment_intermediate_size", maximum=MAX_WIDTH)
    return linear(hidden * factor * factor, width) + linear(width // 2, text)


def _lfm2_vl(root: Section, hidden: int, text: int) -> int:
    factor = root.integer("downsample_factor", 2, why="default: 2", maximum=64)
    width = root.integer("projector_hidden_size", maximum=MAX_WIDTH)
    bias = root.boolean("projector_bias", True, why="default: true")
    seen = hidden * factor * factor
    norm = 2 * seen if root.boolean("projector_use_layernorm", True, why="default: true") else 0
    return norm + linear(seen, width, bias) + linear(width, text, bias)


REMOTE_PROJECTORS: dict[str, Callable[[Section, int, int], int]] = {
    "kimi_vl": _kimi_vl,
    "fast_vlm": _fast_vlm,
    "deepseek_vl_v2": _deepseek_vl2,
    "cohere2_vision": _cohere2_vision,
    "lfm2_vl": _lfm2_vl,
}
