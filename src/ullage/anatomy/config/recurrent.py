"""Mixers with a state instead of a growing cache: Mamba, delta-nets, RG-LRU, convolutions.

Reads their sizes from the spellings of the families that have them. Softmax mixers are `mixers.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from ullage.anatomy.config.keys import MAX_HEADS, MAX_WIDTH, Section
from ullage.anatomy.config.mixers import fact, read_head_dim, read_heads
from ullage.anatomy.families.family import Family
from ullage.anatomy.spec import LinearAttention, Mamba, ShortConv

MAX_KERNEL = 1 << 10


def _proj_bias(section: Section) -> bool:
    """use_bias (Mamba, Nemotron-H) or mamba_proj_bias (Bamba, Jamba, Falcon-H1)."""
    if section.knows("use_bias"):
        value = section.boolean("use_bias", False, why="default: false")
        if section.values.get("mamba_proj_bias") in (None, value):
            section.ignore("mamba_proj_bias")
        return value
    return section.boolean("mamba_proj_bias", False, why="default: false")


def _inner_width(section: Section) -> int:
    """Channels inside a Mamba layer: stated, else expand × hidden_size."""
    stated = section.optional_integer("mamba_d_ssm", maximum=MAX_WIDTH)
    if stated is not None:
        section.ignore("mamba_expand")
        return stated
    hidden_size = section.integer("hidden_size", maximum=MAX_WIDTH)
    expand = section.number("mamba_expand", 2.0, why="default: 2", maximum=64.0)
    width = int(expand * hidden_size)
    section.reading.source(section.field("d_inner"), width, "derived: expand × hidden_size")
    return width


def read_mamba1(section: Section, family: Family) -> Mamba:
    """Mamba-1: d_inner channels × d_state, in the spellings of Mamba, Falcon-Mamba and Jamba."""
    hidden_size = section.integer("hidden_size", maximum=MAX_WIDTH)
    d_inner = section.optional_integer("intermediate_size", maximum=MAX_WIDTH)
    if d_inner is None or family.plan != "mamba":  # Jamba's intermediate_size is its MLP's
        d_inner = _inner_width(section)
    section.ignore("mamba_expand", "expand")
    if section.optional_text_or_integer("mamba_dt_rank") in ("auto", None):
        dt_rank = -(-hidden_size // 16)
    else:
        dt_rank = section.integer("mamba_dt_rank", maximum=MAX_WIDTH)
    return Mamba(
        version=1,
        d_inner=d_inner,
        d_state=section.integer("ssm_state_size", 16, why="default: 16", maximum=MAX_WIDTH),
        d_conv=section.integer("conv_kernel", 4, why="default: 4", maximum=MAX_KERNEL),
        dt_rank=dt_rank,
        conv_bias=section.boolean("use_conv_bias", True, why="default: true"),
        proj_bias=_proj_bias(section),
        inner_norm=fact(section, family.mamba_norm, "mamba_norm", likely=False, widens="weights"),
        state_dtype=section.optional_text("mamba_ssm_cache_dtype"),
    )


def read_mamba2(section: Section, family: Family) -> Mamba:
    """Mamba-2 in the spellings of Mamba-2, Nemotron-H, Bamba, Granite-4 and Falcon-H1."""
    heads_key, dim_key = "mamba_num_heads", "mamba_head_dim"
    if family.plan == "mamba":  # Mamba-2 itself has no other heads to be told from
        heads_key, dim_key = "num_heads", "head_dim"
    num_heads = section.integer(heads_key, maximum=MAX_HEADS)
    if section.optional_text_or_integer(dim_key) in ("auto", None):
        d_inner = _inner_width(section)
        if d_inner % num_heads:
            raise section.error(heads_key, num_heads, f"a divisor of the {d_inner} channels")
        head_dim = d_inner // num_heads
    else:
        head_dim = section.integer(dim_key, maximum=MAX_WIDTH)
        d_inner = num_heads * head_dim
        stated = section.optional_integer("mamba_d_ssm", maximum=MAX_WIDTH)
        if stated is not None and stated != d_inner:
            raise section.error("mamba_d_ssm", stated, f"heads × head_dim, {d_inner}")
        section.ignore("mamba_expand", "expand")
    section.ignore("time_step_rank", "mamba_hidden_act", "mamba_norm_before_gate", "rms_norm")
    return Mamba(
        version=2,
        d_inner=d_inner,
        d_state=section.integer("ssm_state_size", maximum=MAX_WIDTH),
        d_conv=section.integer("conv_kernel", 4, why="default: 4", maximum=MAX_KERNEL),
        num_heads=num_heads,
        head_dim=head_dim,
        n_groups=section.integer("n_groups", 1, why="default: 1", maximum=MAX_HEADS),
        conv_bias=section.boolean("use_conv_bias", True, why="default: true"),
        proj_bias=_proj_bias(section),
        inner_norm=fact(section, family.mamba_norm, "mamba_norm", likely=True, widens="weights"),
        state_dtype=section.optional_text("mamba_ssm_cache_dtype"),
        chunk_size=section.integer("chunk_size", 256, why="default: 256"),
    )


def read_delta_net(section: Section, family: Family) -> LinearAttention:  # noqa: ARG001
    """Gated delta-net of Qwen3-Next, Qwen3.5 and OLMo-Hybrid."""
    return LinearAttention(
        kind="gated_delta_net",
        num_k_heads=section.integer("linear_num_key_heads", maximum=MAX_HEADS),
        num_v_heads=section.integer("linear_num_value_heads", maximum=MAX_HEADS),
        k_head_dim=section.integer("linear_key_head_dim", maximum=MAX_WIDTH),
        v_head_dim=section.integer("linear_value_head_dim", maximum=MAX_WIDTH),
        d_conv=section.integer("linear_conv_kernel_dim", maximum=MAX_KERNEL),
        state_dtype=section.optional_text("mamba_ssm_dtype"),
    )


def read_kda(section: Section, family: Family) -> LinearAttention:
    """Kimi Delta Attention: linear_attn_config of Kimi Linear, or transformers' flat keys."""
    nested = section.section("linear_attn_config")
    if nested is not None:
        heads = nested.integer("num_heads", maximum=MAX_HEADS)
        dim = nested.integer("head_dim", maximum=MAX_WIDTH)
        d_conv = nested.integer("short_conv_kernel_size", maximum=MAX_KERNEL)
    else:
        heads = section.integer("linear_num_heads", maximum=MAX_HEADS)
        dim = section.integer("linear_head_dim", maximum=MAX_WIDTH)
        d_conv = section.integer("linear_conv_kernel_dim", maximum=MAX_KERNEL)
    return LinearAttention("kda", heads, heads, dim, dim, d_conv, full_gates=family.full_gates)


def read_lightning(section: Section, family: Family) -> LinearAttention:  # noqa: ARG001
    """MiniMax-Text-01's lightning attention: all heads, no convolution, float32 state."""
    num_heads, _ = read_heads(section)
    head_dim = read_head_dim(section, num_heads)
    return LinearAttention("lightning", num_heads, num_heads, head_dim, head_dim)


def read_rg_lru(section: Section, family: Family) -> LinearAttention:  # noqa: ARG001
    """RecurrentGemma's gated linear recurrence: one number of state per channel of lru_width."""
    num_heads = section.integer("num_attention_heads", maximum=MAX_HEADS)
    width = section.optional_integer("lru_width", maximum=MAX_WIDTH)
    if width is None:
        width = section.integer("hidden_size", maximum=MAX_WIDTH)
    if width % num_heads:
        raise section.error("lru_width", width, f"a multiple of the {num_heads} heads")
    d_conv = section.integer("conv_kernel", 4, why="default: 4", maximum=MAX_KERNEL)
    return LinearAttention("rg_lru", 0, num_heads, 1, width // num_heads, d_conv, "float32")


def read_short_conv(section: Section) -> ShortConv:
    """LFM2's gated convolution over all hidden channels."""
    return ShortConv(
        channels=section.integer("hidden_size", maximum=MAX_WIDTH),
        d_conv=section.integer("conv_L_cache", maximum=MAX_KERNEL),
        bias=section.boolean("conv_bias", False, why="default: false"),
    )


LINEAR: dict[str, Callable[[Section, Family], LinearAttention]] = {
    "gated_delta_net": read_delta_net,
    "kda": read_kda,
    "lightning": read_lightning,
    "rg_lru": read_rg_lru,
}
MAMBA: dict[int, Callable[[Section, Family], Mamba]] = {1: read_mamba1, 2: read_mamba2}
