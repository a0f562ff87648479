"""Token mixers: a configuration's keys → Attention, LatentAttention, Mamba, … of each kind.

Reads one mixer per kind of layer; which layer is of which kind is `layer_kinds.py`.
"""

from __future__ import annotations

from ullage.anatomy.family import Fact, Family
from ullage.anatomy.keys import Section, Widens
from ullage.anatomy.positions import read_rope
from ullage.anatomy.spec import (
    Attention,
    CompressedAttention,
    Indexer,
    LatentAttention,
    LinearAttention,
    Mamba,
    Mixer,
    NoMixer,
)
from ullage.errors import UnsupportedModel

MAX_HEADS = 1 << 16
MAX_WIDTH = 1 << 24


def fact(section: Section, value: Fact, field: str, *, likely: bool, widens: Widens) -> bool:
    """A family's fact: fixed, read from the key it names, or (None) undetermined."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return section.boolean(value, False, why="default: false where the key is absent")
    return section.reading.decide(
        section.field(field),
        "not said by the configuration of an unknown family",
        likely=likely,
        low=False,
        high=True,
        widens=(widens,),
    )


def read_heads(section: Section) -> tuple[int, int]:
    """(num_attention_heads, num_key_value_heads), checked to divide."""
    num_heads = section.integer("num_attention_heads", maximum=MAX_HEADS)
    num_kv_heads = section.optional_integer("num_key_value_heads", maximum=MAX_HEADS)
    if section.knows("multi_query"):  # Falcon, GPT-BigCode, ChatGLM with its own count
        multi = section.boolean("multi_query", False)
        if multi and not section.has("num_key_value_heads"):
            num_kv_heads = 1
    if num_kv_heads is None:
        num_kv_heads = num_heads
        section.reading.source(
            section.field("num_key_value_heads"), num_heads, "derived: num_attention_heads"
        )
    if num_heads % num_kv_heads:
        raise section.error(
            "num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads, {num_heads}"
        )
    return num_heads, num_kv_heads


def read_head_dim(section: Section, num_heads: int) -> int:
    """head_dim as the configuration says it, else hidden_size / num_attention_heads."""
    head_dim = section.optional_integer("head_dim", maximum=MAX_WIDTH)
    if head_dim is not None:
        return head_dim
    hidden_size = section.integer("hidden_size", maximum=MAX_WIDTH)
    if hidden_size % num_heads:
        raise section.error(
            "hidden_size", hidden_size, f"a multiple of num_attention_heads, {num_heads}"
        )
    section.reading.source(
        section.field("head_dim"),
        hidden_size // num_heads,
        "derived: hidden_size / num_attention_heads",
    )
    return hidden_size // num_heads


def _qk_norm(section: Section, family: Family) -> object:
    norm = family.qk_norm
    if family.qk_norm_if is not None and norm is not None:
        norm = norm if section.boolean(family.qk_norm_if, False) else None
    style = section.optional_text("qk_norm_type") if norm is not None else None
    if style is not None:
        styles = {"per_layer": "layer", "per_head": "head"}
        if style not in styles:
            raise section.error("qk_norm_type", style, "per_layer or per_head")
        return styles[style]
    if norm is None and family.q_bias is None:
        return section.reading.decide(
            section.field("qk_norm"),
            "not said by the configuration of an unknown family",
            likely=None,
            low=None,
            high="layer",
            widens=("weights",),
        )
    return norm


def read_attention(section: Section, family: Family, kind: str) -> Attention:
    """Softmax attention of the full, sliding or chunked layers."""
    num_heads, num_kv_heads = read_heads(section)
    head_dim = read_head_dim(section, num_heads)
    k_eq_v = False
    if kind == "full" and section.knows("global_head_dim"):  # Gemma-4's global layers
        head_dim = section.optional_integer("global_head_dim", maximum=MAX_WIDTH) or head_dim
        k_eq_v = section.boolean("attention_k_eq_v", False)
        wide = section.optional_integer("num_global_key_value_heads", maximum=MAX_HEADS)
        num_kv_heads = wide if wide is not None and k_eq_v else num_kv_heads
    window = chunk = None
    if kind == "sliding":
        window = section.integer("sliding_window", maximum=1 << 40)
    elif kind == "chunked":
        chunk = section.integer("attention_chunk_size")
    q_bias = fact(section, family.q_bias, "attention_bias", likely=False, widens="weights")
    gate = family.output_gate
    if gate is not None and family.output_gate_if is not None:
        gate = gate if section.boolean(family.output_gate_if, False) else None
    rotates = family.positions == "rope" and family.nope != "all"
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=section.optional_integer("v_head_dim", maximum=MAX_WIDTH) or head_dim,
        window=window,
        chunk=chunk,
        causal=family.kind != "encoder",
        q_bias=q_bias,
        kv_bias=q_bias
        if family.kv_bias == family.q_bias
        else fact(section, family.kv_bias, "kv_bias", likely=q_bias, widens="weights"),
        o_bias=q_bias
        if family.o_bias == family.q_bias
        else fact(section, family.o_bias, "o_bias", likely=False, widens="weights"),
        qk_norm=_qk_norm(section, family),  # type: ignore[arg-type]
        v_norm=family.v_norm,
        sinks=family.sinks,
        soft_cap=section.optional_number("attn_logit_softcapping"),
        output_gate=gate,
        k_eq_v=k_eq_v,
        rope=read_rope(
            section,
            family,
            head_dim,
            kind,
            interleaved=fact(
                section, family.rope_interleaved, "rope_interleaved", likely=False, widens="flops"
            ),
        )
        if rotates
        else None,
    )


def read_indexer(section: Section) -> Indexer | None:
    """The sparse indexer of DeepSeek-V3.2 and GLM-5, or None when index_topk is absent."""
    topk = section.optional_integer("index_topk")
    if topk is None:
        return None
    section.ignore("indexer_rope_interleave")
    return Indexer(
        num_heads=section.integer("index_n_heads", maximum=MAX_HEADS),
        head_dim=section.integer("index_head_dim", maximum=MAX_WIDTH),
        topk=topk,
    )


def read_latent(section: Section, family: Family) -> LatentAttention:
    """MLA: DeepSeek-V2/V3, Kimi-K2, GLM-5, MiniCPM-3."""
    # What head_dim says is the rotary part or the whole, by release; nothing depends on it.
    section.ignore("head_dim", "num_key_value_heads", "qk_head_dim")
    rope_dim = section.integer("qk_rope_head_dim", maximum=MAX_WIDTH)
    return LatentAttention(
        num_heads=section.integer("num_attention_heads", maximum=MAX_HEADS),
        kv_lora_rank=section.integer("kv_lora_rank", maximum=MAX_WIDTH),
        qk_nope_head_dim=section.integer("qk_nope_head_dim", maximum=MAX_WIDTH),
        qk_rope_head_dim=rope_dim,
        v_head_dim=section.integer("v_head_dim", maximum=MAX_WIDTH),
        q_lora_rank=section.optional_integer("q_lora_rank", maximum=MAX_WIDTH),
        bias=section.boolean("attention_bias", False, why="default: false"),
        rope=read_rope(
            section,
            family,
            rope_dim,
            "full",
            interleaved=section.boolean(
                "rope_interleave", True, why="default: DeepSeek's rotation"
            ),
            whole=True,
        )
        if family.nope != "all"
        else None,
        indexer=read_indexer(section),
    )


def read_compressed(section: Section, family: Family, ratio: int) -> CompressedAttention:
    """DeepSeek-V4's attention at one compression ratio (0: the window only)."""
    section.ignore("num_key_value_heads")
    head_dim = section.integer("head_dim", maximum=MAX_WIDTH)
    rope_dim = section.integer("qk_rope_head_dim", 64, why="default: DeepSeek-V4's 64 of 512")
    indexer = read_indexer(section)
    return CompressedAttention(
        num_heads=section.integer("num_attention_heads", maximum=MAX_HEADS),
        head_dim=head_dim,
        rope_head_dim=rope_dim,
        q_lora_rank=section.integer("q_lora_rank", maximum=MAX_WIDTH),
        o_groups=section.integer("o_groups", maximum=MAX_HEADS),
        o_lora_rank=section.integer("o_lora_rank", maximum=MAX_WIDTH),
        window=section.integer("sliding_window"),
        ratio=ratio,
        rope=read_rope(
            section,
            family,
            rope_dim,
            "compressed" if ratio else "sliding",
            interleaved=True,
            whole=True,
        ),
        indexer=indexer if ratio == FINE_RATIO else None,
    )


FINE_RATIO = 4  # the compressed-sparse layers; only these have an indexer


def read_mamba2(section: Section, family: Family) -> Mamba:
    """Mamba-2, in the spellings of Nemotron-H, Bamba, Falcon-H1, Granite-4, Mamba-2 itself."""
    num_heads = section.integer("mamba_num_heads", maximum=MAX_HEADS)
    head_dim = section.integer("mamba_head_dim", maximum=MAX_WIDTH)
    section.ignore("expand", "mamba_expand", "time_step_rank", "mamba_hidden_act")
    return Mamba(
        version=2,
        d_inner=num_heads * head_dim,
        d_state=section.integer("ssm_state_size", maximum=MAX_WIDTH),
        d_conv=section.integer("conv_kernel", maximum=1 << 10),
        num_heads=num_heads,
        head_dim=head_dim,
        n_groups=section.integer("n_groups", maximum=MAX_HEADS),
        conv_bias=section.boolean("use_conv_bias", True, why="default: true"),
        proj_bias=section.boolean("mamba_proj_bias", False, why="default: false"),
        inner_norm=True,
        state_dtype=section.optional_text("mamba_ssm_cache_dtype"),
        chunk_size=section.integer("chunk_size", 256, why="default: 256"),
    )


def read_delta_net(section: Section, family: Family) -> LinearAttention:
    """Gated delta-net of Qwen3-Next and Qwen3.5."""
    return LinearAttention(
        kind="gated_delta_net",
        num_k_heads=section.integer("linear_num_key_heads", maximum=MAX_HEADS),
        num_v_heads=section.integer("linear_num_value_heads", maximum=MAX_HEADS),
        k_head_dim=section.integer("linear_key_head_dim", maximum=MAX_WIDTH),
        v_head_dim=section.integer("linear_value_head_dim", maximum=MAX_WIDTH),
        d_conv=section.integer("linear_conv_kernel_dim", maximum=1 << 10),
        state_dtype=section.optional_text("mamba_ssm_dtype"),
    )


def read_mixer(section: Section, family: Family, kind: str) -> Mixer:
    """The mixer of the layers of one kind."""
    if kind == "none":
        return NoMixer()
    if kind in ("full", "sliding", "chunked"):
        if family.mixer == "latent" and kind == "full":
            return read_latent(section, family)
        return read_attention(section, family, kind)
    if kind == "mamba":
        return read_mamba2(section, family)
    if kind == "linear" and family.linear == "gated_delta_net":
        return read_delta_net(section, family)
    raise UnsupportedModel(
        f"layers of kind {kind!r} in the family {family.name}",
        file=section.reading.file,
        field=section.field("layer_types"),
        expected="a kind of layer that is understood",
    )
