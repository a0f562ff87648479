"""How many parameters image and audio tokenizers have: convolutional codecs beside a text model.

Formulas over their own keys, as `sizes.py` has them for transformers. Facts: the modules of
transformers 5.24. What the library stores beside weights (running means) counts too.
"""

from __future__ import annotations

from collections.abc import Callable

from ullage.anatomy.config.keys import Section
from ullage.anatomy.towers.sizes import MAX_DEPTH, MAX_WIDTH, TowerSize, linear

MAX_CHANNELS = 1 << 14


def _conv(into: int, out: int, kernel: int, bias: bool = True) -> int:
    """A convolution of `kernel` taps (in all dimensions together)."""
    return into * out * kernel + (out if bias else 0)


def _channels(section: Section, name: str) -> int:
    return section.integer(name, maximum=MAX_CHANNELS)


def _counts(section: Section, name: str, minimum: int = 1) -> tuple[int, ...]:
    found = section.integers(name, minimum=minimum, maximum=MAX_CHANNELS)
    if not found or len(found) > 64:
        raise section.error(name, section.values.get(name), "a short list of numbers")
    return found


# --- VQGAN: Chameleon, Emu3, Apertus -------------------------------------------------------------


def _resnet(into: int, out: int, norm: Callable[[int], int]) -> int:
    total = norm(into) + norm(out) + _conv(into, out, 9) + _conv(out, out, 9)
    return total + (_conv(into, out, 1) if into != out else 0)


def _group_norm(channels: int) -> int:
    return 2 * channels


def _vqgan_encoder(section: Section, attends: Callable[[int], bool], middle: bool = True) -> int:
    """Stages of residual blocks, with attention where `attends(stage)`, a middle, an exit.

    `middle` False: the middle has no attention.
    """
    base = _channels(section, "base_channels")
    widths = [base * factor for factor in _counts(section, "channel_multiplier")]
    blocks = section.integer("num_res_blocks", maximum=MAX_DEPTH)
    total, into = _conv(_channels(section, "in_channels"), base, 9), base
    for stage, width in enumerate(widths):
        for _ in range(blocks):
            total += _resnet(into, width, _group_norm)
            total += _attention_block(width) if attends(stage) else 0
            into = width
        total += _conv(width, width, 9) if stage < len(widths) - 1 else 0
    total += 2 * _resnet(into, into, _group_norm) + _group_norm(into)
    total += _attention_block(into) if middle else 0
    latent = _channels(section, "latent_channels")
    double = section.knows("double_latent") and section.boolean("double_latent", False)
    return total + _conv(into, 2 * latent if double else latent, 9)


def _attention_block(width: int) -> int:
    return _group_norm(width) + 4 * linear(width, width)


def _attended(section: Section) -> tuple[int, ...]:
    return section.integers("attn_resolutions", maximum=1 << 20) or ()


def _at_resolutions(section: Section) -> Callable[[int], bool]:
    wanted, first = _attended(section), section.integer("resolution", maximum=1 << 20)
    return lambda stage: first >> stage in wanted


def _size(section: Section, total: int) -> TowerSize:
    stages = len(_counts(section, "channel_multiplier"))
    return TowerSize(stages, _channels(section, "base_channels"), 0, 0, total)


def _chameleon(section: Section, _: int) -> TowerSize:
    vanilla = section.text("attn_type", "vanilla", why="default: vanilla") == "vanilla"
    attends = _at_resolutions(section)
    total = _vqgan_encoder(section, lambda stage: vanilla and attends(stage), vanilla)
    width, latent = _channels(section, "embed_dim"), _channels(section, "latent_channels")
    total += section.integer("num_embeddings", maximum=MAX_WIDTH) * width
    return _size(section, total + _conv(latent, width, 1) + _conv(width, latent, 1))


def _apertus_vision(section: Section, _: int) -> TowerSize:
    total = _vqgan_encoder(section, _at_resolutions(section))
    width, latent = _channels(section, "embed_dim"), _channels(section, "latent_channels")
    section.ignore("spatial_scale_factor")
    total += section.integer("codebook_size", maximum=MAX_WIDTH) * width
    return _size(section, total + _conv(latent, width, 1))


def _emu3(section: Section, _: int) -> TowerSize:
    """Encoder and decoder over space, a few convolutions over time in both."""
    wanted = _attended(section)
    latent, width = _channels(section, "latent_channels"), _channels(section, "embed_dim")
    double = section.boolean("double_latent", False, why="default: false")
    out = 2 * latent if double else latent
    section.ignore("hidden_size", "num_attention_heads")
    total = _vqgan_encoder(section, lambda stage: stage in wanted)
    frames = section.integer("temporal_downsample_factor", 4, why="default: 4", maximum=64)
    blocks = section.integer("num_res_blocks", maximum=MAX_DEPTH)
    times = max(frames.bit_length() - 1, 0)
    total += times * _conv(out, out, 36) + blocks * _time_resnet(out, out)
    total += blocks * _time_resnet(latent, latent) + times * _conv(latent, latent, 27)
    total += _emu3_decoder(section, wanted, latent, width, blocks)
    total += section.integer("codebook_size", maximum=MAX_WIDTH) * width
    return _size(section, total + _conv(latent, width, 3) + _conv(width, latent, 3))


def _time_resnet(into: int, out: int) -> int:
    """Batch norms store a mean, a variance and a count beside their two weights."""
    total = 4 * into + 4 * out + 2 + _conv(into, out, 27) + _conv(out, out, 27)
    return total + (_conv(into, out, 1) if into != out else 0)


def _emu3_decoder(
    section: Section, wanted: tuple[int, ...], latent: int, quant: int, blocks: int
) -> int:
    def norm(channels: int) -> int:  # steered by the quantised values
        return 2 * channels + 2 * _conv(quant, channels, 1)

    def attention(channels: int) -> int:
        return norm(channels) + 4 * linear(channels, channels)

    base = _channels(section, "base_channels")
    widths = [base * factor for factor in _counts(section, "channel_multiplier")]
    into = widths[-1]
    total = _conv(latent, into, 9) + 2 * _resnet(into, into, norm) + attention(into)
    for stage in range(len(widths) - 1, -1, -1):
        width = widths[stage]
        for _ in range(blocks + 1):
            total += _resnet(into, width, norm)
            total += attention(width) if stage in wanted else 0
            into = width
        total += _conv(width, width, 9) if stage else 0
    out = section.integer("out_channels", 3, why="default: 3", maximum=64)
    return total + norm(into) + _conv(into, out, 9)


# --- audio ---------------------------------------------------------------------------------------


def _vibevoice_encoder(section: Section, *, both: bool) -> int:
    """Depthwise convolutions with MLPs between strided ones; with a mirror when `both`."""
    filters, kernel = _channels(section, "num_filters"), section.integer("kernel_size", maximum=256)
    ratios, depths = _counts(section, "downsampling_ratios"), _counts(section, "depths")
    if len(depths) != len(ratios) + 1:
        raise section.error("depths", list(depths), f"a list of {len(ratios) + 1}")
    expansion = section.integer("ffn_expansion", maximum=64)
    channels, hidden = _channels(section, "channels"), _channels(section, "hidden_size")
    section.ignore("layer_scale_init_value", "vae_std")

    def block(width: int) -> int:
        inner = expansion * width
        total = 4 * width + linear(width, inner) + linear(inner, width)
        return total + width * kernel + width

    widths = [filters << i for i in range(len(depths))]
    blocks = sum(depth * block(width) for width, depth in zip(widths, depths, strict=True))
    steps = list(zip(widths[:-1], widths[1:], ratios, strict=True))
    down = _conv(channels, filters, kernel) + blocks + _conv(widths[-1], hidden, kernel)
    down += sum(_conv(into, out, 2 * ratio) for into, out, ratio in steps)
    if not both:
        return down
    up = _conv(hidden, widths[-1], kernel) + blocks + _conv(filters, channels, kernel)
    return down + up + sum(_conv(out, into, 2 * ratio) for into, out, ratio in steps)


def _connector(section: Section, text_hidden: int) -> int:
    width = _channels(section, "hidden_size")
    return linear(width, text_hidden) + text_hidden + linear(text_hidden, text_hidden)


def _vibevoice_tokenizer(section: Section, text_hidden: int) -> TowerSize:
    total = _vibevoice_encoder(section, both=False) + _connector(section, text_hidden)
    return TowerSize(sum(_counts(section, "depths")), 0, 0, 0, total)


def _vibevoice_codec(section: Section, text_hidden: int) -> TowerSize:
    """With its decoder, and the two numbers that latents are scaled by."""
    total = _vibevoice_encoder(section, both=True) + _connector(section, text_hidden) + 2
    return TowerSize(sum(_counts(section, "depths")), 0, 0, 0, total)


def _vibevoice_diffusion(section: Section, text_hidden: int) -> TowerSize:
    """The head that makes speech from the text model's states: gated MLPs, modulated."""
    hidden = section.integer("hidden_size", maximum=MAX_WIDTH)
    latent = _channels(section, "latent_size")
    depth = section.integer("num_hidden_layers", maximum=MAX_DEPTH)
    width = section.integer("intermediate_size", maximum=MAX_WIDTH)
    bias = section.boolean("mlp_bias", False, why="default: false")
    steps = section.integer("frequency_embedding_size", maximum=MAX_WIDTH)
    section.ignore("diffusion_max_period")
    layer = 2 * linear(hidden, width, bias) + linear(width, hidden, bias)
    layer += hidden + 3 * hidden * hidden
    total = latent * hidden + text_hidden * hidden + steps * hidden + hidden * hidden
    total += depth * layer + 2 * hidden * hidden + hidden * latent
    return TowerSize(depth, hidden, 0, width, total)


def _seanet(section: Section, *, decodes: bool) -> tuple[int, int]:
    """(weights, channels out of all convolutions) of an EnCodec stack of strided convolutions."""
    filters = _channels(section, "num_filters")
    kernel = section.integer("kernel_size", maximum=256)
    last = section.integer("last_kernel_size", maximum=256)
    inner_kernel = section.integer("residual_kernel_size", maximum=256)
    blocks = section.integer("num_residual_layers", maximum=64)
    compress = section.integer("compress", maximum=64)
    shortcut = section.boolean("use_conv_shortcut", False, why="default: false")
    hidden, audio = _channels(section, "hidden_size"), _channels(section, "audio_channels")
    ratios = _counts(section, "upsampling_ratios")
    section.ignore("dilation_growth_rate", "pad_mode", "trim_right_ratio", "use_causal_conv")
    convolutions: list[tuple[int, int, int]] = []
    width = filters
    for ratio in reversed(ratios):
        for _ in range(blocks):
            inner = width // compress
            convolutions += [(width, inner, inner_kernel), (inner, width, 1)]
            convolutions += [(width, width, 1)] if shortcut else []
        # strided down from width to twice as many, or up the other way
        convolutions.append((width, 2 * width, 2 * ratio))
        width *= 2
    first = (audio, filters, last if decodes else kernel)
    final = (width, hidden, kernel if decodes else last)
    convolutions += [first, final]
    weights = sum(a * b * k for a, b, k in convolutions)
    outs = sum(b for _, b, _ in convolutions)
    if decodes:  # the outer and the strided ones run the other way
        outs += audio - filters + width - hidden
        outs -= sum(filters << i for i in range(len(ratios)))
    return weights, outs


def _mimi(section: Section, _: int) -> TowerSize:
    """Kyutai's codec: both EnCodec stacks, a transformer in each, two residual quantisers."""
    hidden = _channels(section, "hidden_size")
    depth = section.integer("num_hidden_layers", maximum=MAX_DEPTH)
    heads = section.integer("num_attention_heads", maximum=MAX_CHANNELS)
    kv_heads = section.integer("num_key_value_heads", maximum=MAX_CHANNELS)
    head_dim = section.optional_integer("head_dim", maximum=MAX_CHANNELS) or hidden // heads
    width = section.integer("intermediate_size", maximum=MAX_WIDTH)
    layer = 2 * hidden * (heads + kv_heads) * head_dim + 2 * hidden * width + 6 * hidden
    total = sum(sum(_seanet(section, decodes=decodes)) for decodes in (False, True))
    total += 2 * depth * layer
    rate = section.integer("sampling_rate", maximum=1 << 24)
    stride = 1
    for ratio in _counts(section, "upsampling_ratios"):
        stride *= ratio
    coarse = 2 * int(rate / stride / _MIMI_FRAMES)
    if rate / stride != _MIMI_FRAMES:
        groups = section.integer("upsample_groups", maximum=MAX_CHANNELS)
        total += hidden * hidden * coarse + hidden * hidden // groups * coarse
    size, dim = (
        section.integer("codebook_size", maximum=MAX_WIDTH),
        _channels(section, "codebook_dim"),
    )
    books = section.integer("num_quantizers", maximum=1024)
    inner = _channels(section, "vector_quantization_hidden_dimension")
    total += books * (1 + size + size * dim) + (4 * hidden * inner if inner != hidden else 0)
    section.ignore(
        "attention_bias", "layer_scale_initial_scale", "max_position_embeddings",
        "num_semantic_quantizers", "rope_parameters", "sliding_window", "use_streaming",
        "tie_word_embeddings",
    )  # fmt: skip
    return TowerSize(2 * depth, hidden, heads, width, total)


_MIMI_FRAMES = 12.5  # a second; MimiConfig of transformers 5.24 where nothing else is said


def _wavtokenizer(section: Section, _: int) -> TowerSize:
    """EnCodec's encoder with weight norms (one more number per channel), an LSTM, one codebook."""
    weights, outs = _seanet(section, decodes=False)
    hidden = _channels(section, "hidden_size")
    lstm = section.integer("num_lstm_layers", minimum=0, maximum=64)
    total = weights + 2 * outs + lstm * (8 * hidden * hidden + 8 * hidden)
    size, dim = (
        section.integer("codebook_size", maximum=MAX_WIDTH),
        _channels(section, "codebook_dim"),
    )
    for key in tuple(section.values):  # the decoder is not part of the model
        if key.startswith(("decoder_", "adanorm_")):
            section.ignore(key)
    section.ignore("norm_type", "sampling_rate")
    return TowerSize(lstm, hidden, 0, 0, total + 1 + size + 2 * size * dim)


CODECS: dict[str, Callable[[Section, int], TowerSize | None]] = {
    "chameleon_vqgan": _chameleon,
    "apertus1p5_vision_tokenizer": _apertus_vision,
    "emu3_vqgan": _emu3,
    "vibevoice_acoustic_tokenizer": _vibevoice_codec,
    "vibevoice_acoustic_tokenizer_encoder": _vibevoice_tokenizer,
    "vibevoice_diffusion": _vibevoice_diffusion,
    "mimi": _mimi,
    "wavtokenizer_encoder": _wavtokenizer,
}
