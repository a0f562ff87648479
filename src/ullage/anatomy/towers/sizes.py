"""How many parameters vision and audio towers have, by type: formulas over their own keys.

Follows the modules of transformers 5.24. Which towers a model has is `read.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ullage.anatomy.config.keys import Section

MAX_WIDTH = 1 << 20
MAX_DEPTH = 1024


def linear(rows_in: int, rows_out: int, bias: bool = True) -> int:
    """Parameters of one matrix [rows_out, rows_in], with its bias or without."""
    return rows_in * rows_out + (rows_out if bias else 0)


@dataclass(frozen=True, slots=True)
class Vit:
    """How a plain vision transformer's parameters add up.

    `positions`: extra rows of the learned table beyond the patches (None: no table).
    `norm`: parameters per channel of a norm (2: layer norm, 1: RMS); `norms` of them per layer.
    `around`: how many norms lie outside the layers. `scales`: layer-scale vectors per layer.
    `head`: the key that keeps SigLIP's pooling head. `patches`: the key that counts patches where
    there is no image_size.
    """

    patch_bias: bool = True
    class_token: bool = False
    positions: int | None = 0
    norm: int = 2
    norms: int = 2
    around: int = 1
    qkv_bias: bool | str = True
    out_bias: bool = True
    gated: bool = False
    mlp_bias: bool = True
    scales: int = 0
    head: str | None = None
    patches: str | None = None


_SIGLIP = Vit(head="vision_use_head")
VITS: dict[str, Vit] = {
    "siglip_vision_model": _SIGLIP,
    "idefics3_vision": Vit(),
    "smolvlm_vision": Vit(),
    "idefics2_vision": Vit(),
    "siglip2_vision_model": Vit(patches="num_patches", head="vision_use_head"),
    "clip_vision_model": Vit(patch_bias=False, class_token=True, positions=1, around=2),
    "pixtral": Vit(
        patch_bias=False,
        positions=None,
        norm=1,
        qkv_bias=False,
        out_bias=False,
        gated=True,
        mlp_bias=False,
    ),
    "internvl_vision": Vit(
        class_token=True, positions=1, around=0, qkv_bias="attention_bias", scales=2
    ),
    "vit": Vit(class_token=True, positions=1, qkv_bias="qkv_bias"),
}
# Names under which the same towers appear.
VIT_NAMES = {
    "siglip": "siglip_vision_model",
    "clip": "clip_vision_model",
    "idefics3": "idefics3_vision",
    "smolvlm": "smolvlm_vision",
}


@dataclass(frozen=True, slots=True)
class TowerSize:
    """What a tower's own keys say; `parameters` without the projector."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate: int
    parameters: int


def _pair(section: Section, name: str) -> int:
    """A side given as one number, or as two equal ones."""
    return section.integer(name, maximum=1 << 16)


def _patch(section: Section) -> int:
    side = _pair(section, "patch_size")
    channels = section.integer("num_channels", 3, why="default: 3", maximum=64)
    return channels * side * side


def vit_size(section: Section, vit: Vit) -> TowerSize:
    hidden = section.integer("hidden_size", maximum=MAX_WIDTH)
    depth = section.integer("num_hidden_layers", maximum=MAX_DEPTH)
    heads = section.integer("num_attention_heads", maximum=MAX_WIDTH)
    width = section.integer("intermediate_size", maximum=MAX_WIDTH)
    qkv_bias = vit.qkv_bias
    if isinstance(qkv_bias, str):
        qkv_bias = section.boolean(qkv_bias, False, why="default: false")
    layer = 3 * linear(hidden, hidden, qkv_bias) + linear(hidden, hidden, vit.out_bias)
    layer += (2 if vit.gated else 1) * linear(hidden, width, vit.mlp_bias)
    layer += linear(width, hidden, vit.mlp_bias)
    layer += (vit.norms * vit.norm + vit.scales) * hidden
    total = depth * layer + linear(_patch(section), hidden, vit.patch_bias)
    total += hidden if vit.class_token else 0
    if vit.positions is not None:
        if vit.patches is not None:
            rows = section.integer(vit.patches, maximum=MAX_WIDTH)
        else:
            rows = (_pair(section, "image_size") // _pair(section, "patch_size")) ** 2
        total += (rows + vit.positions) * hidden
    total += vit.around * vit.norm * hidden
    if vit.head is not None and section.boolean(vit.head, True, why="default: true"):
        # SigLIP's pooling: a probe, one attention, one norm, one MLP.
        total += hidden + 4 * linear(hidden, hidden) + 2 * hidden
        total += linear(hidden, width) + linear(width, hidden)
    return TowerSize(depth, hidden, heads, width, total)


def biased_layer(hidden: int, width: int, norm: int = 2) -> int:
    """Attention and a plain MLP, every matrix with a bias, two norms."""
    attention = 4 * linear(hidden, hidden)
    return attention + linear(hidden, width) + linear(width, hidden) + 2 * norm * hidden


def qwen3_vl(section: Section, text_hidden: int) -> TowerSize:
    """Qwen3-VL and Qwen3.5: patches of two frames, a merger of 2 × 2, deep-stack mergers."""
    hidden = section.integer("hidden_size", maximum=MAX_WIDTH)
    depth = section.integer("depth", maximum=MAX_DEPTH)
    width = section.integer("intermediate_size", maximum=MAX_WIDTH)
    out = section.integer("out_hidden_size", text_hidden, why="derived: hidden_size of the text")
    rows = section.integer("num_position_embeddings", maximum=MAX_WIDTH)
    merged = hidden * section.integer("spatial_merge_size", 2, why="default: 2", maximum=64) ** 2
    deep = section.integers("deepstack_visual_indexes") or ()
    frames = section.integer("temporal_patch_size", 2, why="default: 2", maximum=64)
    total = depth * biased_layer(hidden, width)
    total += linear(_patch(section) * frames, hidden) + rows * hidden
    merger = linear(merged, merged) + linear(merged, out)
    total += merger + 2 * hidden + len(deep) * (merger + 2 * merged)
    return TowerSize(depth, hidden, section.integer("num_attention_heads"), width, total)


def _qwen2_vl(section: Section, text_hidden: int) -> TowerSize:
    hidden = section.integer("embed_dim", maximum=MAX_WIDTH)
    depth = section.integer("depth", maximum=MAX_DEPTH)
    ratio = section.number("mlp_ratio", 4.0, why="default: 4", maximum=64.0)
    width = int(hidden * ratio)
    # here the merger's output, not the tower's width
    out = section.integer("hidden_size", text_hidden, why="derived: hidden_size of the text")
    frames = section.integer("temporal_patch_size", 2, why="default: 2", maximum=64)
    merged = hidden * section.integer("spatial_merge_size", 2, why="default: 2", maximum=64) ** 2
    total = depth * biased_layer(hidden, width)
    total += linear(_patch(section) * frames, hidden, bias=False)
    total += 2 * hidden + linear(merged, merged) + linear(merged, out)
    return TowerSize(depth, hidden, section.integer("num_heads"), width, total)


def qwen2_5_vl(section: Section, text_hidden: int) -> TowerSize:
    hidden = section.integer("hidden_size", maximum=MAX_WIDTH)
    depth = section.integer("depth", maximum=MAX_DEPTH)
    width = section.integer("intermediate_size", maximum=MAX_WIDTH)
    out = section.integer("out_hidden_size", text_hidden, why="derived: hidden_size of the text")
    frames = section.integer("temporal_patch_size", 2, why="default: 2", maximum=64)
    merged = hidden * section.integer("spatial_merge_size", 2, why="default: 2", maximum=64) ** 2
    layer = 4 * linear(hidden, hidden) + 2 * linear(hidden, width) + linear(width, hidden)
    total = depth * (layer + 2 * hidden) + linear(_patch(section) * frames, hidden, bias=False)
    total += hidden + linear(merged, merged) + linear(merged, out)
    section.ignore("window_size", "fullatt_block_indexes", "tokens_per_second")
    return TowerSize(depth, hidden, section.integer("num_heads"), width, total)


def _glm4v(section: Section, text_hidden: int) -> TowerSize:
    hidden = section.integer("hidden_size", maximum=MAX_WIDTH)
    depth = section.integer("depth", maximum=MAX_DEPTH)
    out = section.integer("out_hidden_size", text_hidden, why="derived: hidden_size of the text")
    width = section.integer("intermediate_size", maximum=MAX_WIDTH)
    frames = section.integer("temporal_patch_size", 2, why="default: 2", maximum=64)
    merge = section.integer("spatial_merge_size", 2, why="default: 2", maximum=64)
    bias = section.boolean("attention_bias", False, why="default: false")
    side = _pair(section, "image_size") // _pair(section, "patch_size")
    # Inside the layers the MLP is as wide as the output; the merger's is intermediate_size.
    layer = 3 * linear(hidden, hidden, bias) + linear(hidden, hidden, False)
    layer += 3 * hidden * out + 2 * hidden
    total = depth * layer + linear(_patch(section) * frames, hidden) + side * side * hidden
    total += 2 * hidden + linear(hidden * merge * merge, out)
    total += out * out + 2 * out + 3 * out * width
    return TowerSize(depth, hidden, section.integer("num_heads"), width, total)


def _kimi(section: Section, text_hidden: int) -> TowerSize:
    """Kimi-K2.5's MoonViT: biased layers, a learned grid of positions, a 2 × 2 patch merger."""
    spelled = "vt_hidden_size" in section.values

    def integer(long: str, short: str) -> int:
        return section.integer(long if spelled else short, maximum=MAX_WIDTH)

    hidden = integer("vt_hidden_size", "hidden_size")
    depth = integer("vt_num_hidden_layers", "num_hidden_layers")
    heads = integer("vt_num_attention_heads", "num_attention_heads")
    width = integer("vt_intermediate_size", "intermediate_size")
    rows = section.integer("init_pos_emb_height", 64, why="default: 64", maximum=1 << 12)
    columns = section.integer("init_pos_emb_width", 64, why="default: 64", maximum=1 << 12)
    section.ignore(
        "init_pos_emb_time", "mm_hidden_size", "text_hidden_size", "merge_type", "pos_emb_type",
        "mm_projector_type", "projector_hidden_act", "projector_ln_eps", "video_attn_type",
    )  # fmt: skip
    kernel = section.integers("merge_kernel_size") or (2, 2)
    merged = hidden
    for side in kernel[:2]:
        merged *= side
    total = depth * biased_layer(hidden, width) + linear(_patch(section), hidden)
    total += rows * columns * hidden + 2 * hidden
    total += 2 * hidden + linear(merged, merged) + linear(merged, text_hidden)
    return TowerSize(depth, hidden, heads, width, total)


def _gemma4(section: Section, text_hidden: int) -> TowerSize:
    """Gemma-4: heads of head_dim with QK-norm, gated MLP, four norms, two tables of positions."""
    hidden = section.integer("hidden_size", maximum=MAX_WIDTH)
    depth = section.integer("num_hidden_layers", maximum=MAX_DEPTH)
    heads = section.integer("num_attention_heads", maximum=MAX_WIDTH)
    kv_heads = section.optional_integer("num_key_value_heads") or heads
    head_dim = section.integer("head_dim", maximum=MAX_WIDTH)
    width = section.integer("intermediate_size", maximum=MAX_WIDTH)
    rows = section.integer("position_embedding_size", maximum=MAX_WIDTH)
    section.ignore(
        "global_head_dim", "default_output_length", "pooling_kernel_size", "use_clipped_linears",
        "rope_parameters", "attention_bias", "max_position_embeddings", "standardize",
    )  # fmt: skip
    bias = section.boolean("attention_bias", False, why="default: false")
    layer = linear(hidden, heads * head_dim, bias) + 2 * linear(hidden, kv_heads * head_dim, bias)
    layer += linear(heads * head_dim, hidden, bias) + 3 * hidden * width
    layer += 2 * head_dim + 4 * hidden
    total = depth * layer + linear(_patch(section), hidden, bias=False) + 2 * rows * hidden
    if section.boolean("standardize", False, why="default: false"):
        total += 2 * hidden  # stored as buffers
    return TowerSize(depth, hidden, heads, width, total + hidden * text_hidden)


def _llama4(section: Section, text_hidden: int) -> TowerSize:
    vit = vit_size(section, Vit(patch_bias=False, class_token=True, positions=1, around=2))
    inner = section.integer("projector_input_dim", maximum=MAX_WIDTH)
    outer = section.integer("projector_output_dim", maximum=MAX_WIDTH)
    seen = section.integer("vision_output_dim", maximum=MAX_WIDTH)
    section.ignore(
        "pixel_shuffle_ratio", "rope_theta", "rope_parameters", "multi_modal_projector_bias"
    )
    adapter = vit.intermediate * inner + inner * outer
    total = vit.parameters + adapter + seen * text_hidden
    return TowerSize(vit.num_layers, vit.hidden_size, vit.num_heads, vit.intermediate, total)


def _mllama(section: Section, text_hidden: int) -> TowerSize:
    hidden = section.integer("hidden_size", maximum=MAX_WIDTH)
    depth = section.integer("num_hidden_layers", maximum=MAX_DEPTH)
    deep = section.integer("num_global_layers", 8, why="default: 8", maximum=MAX_DEPTH)
    width = section.integer("intermediate_size", maximum=MAX_WIDTH)
    ratios = section.find("supported_aspect_ratios")
    count = 1 + (len(ratios) if isinstance(ratios, list | tuple) else 8)
    tiles = section.integer("max_num_tiles", 4, why="default: 4", maximum=1024)
    seen = section.integer("vision_output_dim", maximum=MAX_WIDTH)
    side = _pair(section, "image_size") // _pair(section, "patch_size")
    rows = side * side + 1
    section.ignore("intermediate_layers_indices", "norm_eps")
    layer = 4 * hidden * hidden + linear(hidden, width) + linear(width, hidden) + 4 * hidden
    total = depth * layer + deep * (layer + 2)
    total += hidden + linear(_patch(section), hidden, bias=False)
    total += 1 + rows * hidden + count * tiles * rows * hidden
    total += 2 * (1 + count * tiles * hidden) + 4 * hidden
    total += linear(seen, text_hidden)
    heads = section.integer("attention_heads", 16, why="default: 16")
    return TowerSize(depth + deep, hidden, heads, width, total)


def _whisper(section: Section, _: int) -> TowerSize:
    """Whisper's encoder: two convolutions, positions, layers whose K has no bias."""
    named = "d_model" in section.values or "d_model" in section.defaults
    hidden = section.integer("d_model" if named else "hidden_size", maximum=MAX_WIDTH)
    depth = section.integer("encoder_layers" if named else "num_hidden_layers", maximum=MAX_DEPTH)
    heads = section.integer("encoder_attention_heads" if named else "num_attention_heads")
    width = section.integer("encoder_ffn_dim" if named else "intermediate_size", maximum=MAX_WIDTH)
    mels = section.integer("num_mel_bins", maximum=MAX_WIDTH)
    rows = section.integer("max_source_positions", maximum=MAX_WIDTH)
    total = depth * (biased_layer(hidden, width) - hidden)
    total += linear(3 * mels, hidden) + linear(3 * hidden, hidden)
    total += rows * hidden + 2 * hidden
    return TowerSize(depth, hidden, heads, width, total)


# Towers that include what joins them to the text.
WHOLE: dict[str, Callable[[Section, int], TowerSize]] = {
    "qwen3_vl_vision": qwen3_vl,
    "qwen3_vl_moe_vision": qwen3_vl,
    "qwen3_5_vision": qwen3_vl,
    "qwen3_5_moe_vision": qwen3_vl,
    "qwen2_vl_vision": _qwen2_vl,
    "qwen2_5_vl_vision": qwen2_5_vl,
    "glm4v_vision": _glm4v,
    "glm4v_moe_vision": _glm4v,
    "kimi_k25_vision": _kimi,
    "gemma4_vision": _gemma4,
    "llama4_vision_model": _llama4,
    "mllama_vision_model": _mllama,
}
# Encoders whose projector depends on the model around them.
ENCODERS: dict[str, Callable[[Section, int], TowerSize]] = {
    "qwen2_audio_encoder": _whisper,
    "voxtral_encoder": _whisper,
    "whisper_encoder": _whisper,
}


def _llava(root: Section, hidden: int, text: int) -> int:
    bias = root.boolean("multimodal_projector_bias", True, why="default: true")
    layers = root.find("vision_feature_layer")
    seen = hidden * (len(layers) if isinstance(layers, list | tuple) else 1)
    return linear(seen, text, bias) + linear(text, text, bias)


def _vipllava(root: Section, hidden: int, text: int) -> int:
    """Several of the encoder's layers side by side, with a norm over them."""
    root.ignore("projector_layernorm_eps")
    layers = root.find("vision_feature_layers")
    count = len(layers) if isinstance(layers, list | tuple) else 5
    seen = hidden * count
    return 2 * seen + linear(seen, text) + linear(text, text)


def _llava_newline(root: Section, hidden: int, text: int) -> int:
    return _llava(root, hidden, text) + text


def _mistral3(root: Section, hidden: int, text: int) -> int:
    bias = root.boolean("multimodal_projector_bias", False, why="default: false")
    merge = root.integer("spatial_merge_size", 2, why="default: 2", maximum=64)
    total = hidden + merge * merge * hidden * hidden
    return total + linear(hidden, text, bias) + linear(text, text, bias)


def _gemma3(root: Section, hidden: int, text: int) -> int:  # noqa: ARG001
    return hidden * text + hidden


def _one_linear(root: Section, hidden: int, text: int) -> int:  # noqa: ARG001
    return linear(hidden, text)


def _internvl(root: Section, hidden: int, text: int) -> int:
    ratio = root.number("downsample_ratio", 0.5, why="default: 0.5", minimum=0.01, maximum=1.0)
    seen = hidden * round(1 / ratio) ** 2
    return 2 * seen + linear(seen, text) + linear(text, text)


def _idefics3(root: Section, hidden: int, text: int) -> int:
    factor = root.integer("scale_factor", 2, why="default: 2", maximum=64)
    return hidden * factor * factor * text


def _voxtral(root: Section, hidden: int, text: int) -> int:  # noqa: ARG001
    return 4 * hidden * text + text * text


PROJECTORS: dict[str, Callable[[Section, int, int], int]] = {
    "llava": _llava,
    "vipllava": _vipllava,
    "llava_next": _llava_newline,
    "llava_onevision": _llava_newline,
    "llava_next_video": _llava_newline,
    "mistral3": _mistral3,
    "gemma3": _gemma3,
    "paligemma": _one_linear,
    "internvl": _internvl,
    "internvl_chat": _internvl,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "qwen2_audio": _one_linear,
    "voxtral": _voxtral,
}
