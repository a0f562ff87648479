"""Softmax mixers: a configuration's keys → Attention, LatentAttention, CompressedAttention.

Reads one mixer per kind of layer; which layer is of which kind is `layer_kinds.py`, mixers with a
recurrent state are `recurrent.py`.
"""

from __future__ import annotations

from ullage.anatomy.config.indexers import block_index, read_indexer
from ullage.anatomy.config.keys import MAX_HEADS, MAX_WIDTH, Section, Widens
from ullage.anatomy.config.positions import read_rope, uses_alibi
from ullage.anatomy.families.family import Fact, Family, QkNorm
from ullage.anatomy.spec import (
    Attention,
    CompressedAttention,
    LatentAttention,
)

_QK_NORM_WORDS: dict[str, QkNorm] = {"per_layer": "layer", "per_head": "head"}


def fact(section: Section, value: Fact, field: str, *, likely: bool, widens: Widens) -> bool:
    """A family's fact: fixed, read from the key it names, or (None) undetermined.

    A key of the same name that agrees with what the family fixes counts as read; one that
    contradicts it stays unread, and so is reported.
    """
    if isinstance(value, bool):
        if section.values.get(field) in (value, None):
            section.ignore(field)
        return value
    if isinstance(value, str):
        if value.startswith("not "):
            return not section.boolean(value[4:], True, why="default: true")
        return section.boolean(value, False, why="default: false where the key is absent")
    if isinstance(section.values.get(field), bool):
        return section.boolean(field)
    return section.reading.decide(
        section.field(field),
        "not said by the configuration of an unknown family",
        likely=likely,
        low=False,
        high=True,
        widens=(widens,),
    )


def maybe_size(section: Section, name: str) -> int:
    """A size that may be absent (0), a flag (1 or 0), a list (its length), one of its numbers
    (`key[0]`), or `key=word` (1 or 0).

    Raises MalformedConfig for anything else.
    """
    if name.endswith("]"):
        key, _, index = name[:-1].partition("[")
        listed = section.integers(key, maximum=MAX_WIDTH) or ()
        return listed[int(index)] if int(index) < len(listed) else 0
    key, equals, word = name.partition("=")
    if equals:
        return int(section.optional_text(key) == word)
    value = section.find(key, null_counts=True)
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, list | tuple):
        return len(value)
    return section.optional_integer(key, minimum=0, maximum=MAX_WIDTH) or 0


def cheaper_window(section: Section, family: Family) -> int | None:
    """The window that brackets the work of attention which the family's code approximates.

    Between attending to one token and to all; weights and caches do not depend on it.
    """
    condition = family.cheaper_if
    if condition is None or (condition != "always" and not maybe_size(section, condition)):
        return None
    return section.reading.decide(
        section.field("attention"),
        "an approximation of full attention, priced between one token and all",
        likely=None,
        low=1,
        high=None,
        widens=("flops",),
    )


def read_heads(section: Section) -> tuple[int, int]:
    """(num_attention_heads, num_key_value_heads), checked to divide."""
    num_heads = section.integer("num_attention_heads", maximum=MAX_HEADS)
    num_kv_heads = section.optional_integer("num_key_value_heads", maximum=MAX_HEADS)
    if section.knows("multi_query"):  # Falcon before its new decoder, GPT-BigCode
        multi = section.boolean("multi_query", False)
        grouped = section.knows("new_decoder_architecture") and section.boolean(
            "new_decoder_architecture", False
        )
        if not section.knows("new_decoder_architecture"):  # ChatGLM counts its groups
            grouped = section.has("num_key_value_heads")
        if multi and not grouped:
            num_kv_heads = 1
        elif not multi and not grouped:
            num_kv_heads = num_heads
    elif section.has("attn_type"):  # MPT
        kinds = {"multihead_attention": num_heads, "multiquery_attention": 1}
        kind = section.text("attn_type")
        if kind in kinds:
            num_kv_heads = kinds[kind]
        elif kind != "grouped_query_attention":
            raise section.error("attn_type", kind, "a known kind of attention")
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


def read_head_dim(section: Section, num_heads: int, reads: int = 1) -> int:
    """head_dim as the configuration says it, else `reads` × hidden_size / num_attention_heads."""
    head_dim = section.optional_integer("head_dim", maximum=MAX_WIDTH)
    if head_dim is not None:
        return head_dim
    hidden_size = reads * section.integer("hidden_size", maximum=MAX_WIDTH)
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


def _qk_norm(section: Section, family: Family) -> QkNorm:
    norm = family.qk_norm
    if family.qk_norm_if is None and section.values.get("use_qk_norm") is (norm is not None):
        section.ignore("use_qk_norm")
    if family.qk_norm_if is not None and norm is not None:
        norm = norm if section.boolean(family.qk_norm_if, False) else None
    style = section.optional_text("qk_norm_type") if norm is not None else None
    if style is not None:
        styles = family.qk_norm_words or _QK_NORM_WORDS
        if style not in styles:
            raise section.error("qk_norm_type", style, " or ".join(styles))
        return styles[style]
    if norm is None and family.q_bias is None:
        return _unsaid_qk_norm(section)
    return norm


def _unsaid_qk_norm(section: Section) -> QkNorm:
    """QK-norm of an unknown family: a key may say that it is there, hardly ever how wide it is."""
    says = None
    for key in ("use_qk_norm", "qk_layernorm", "qk_norm"):
        if isinstance(section.values.get(key), bool):
            says = section.boolean(key)
    if says is False:
        return None
    likely: QkNorm = "head" if says else None
    return section.reading.decide(
        section.field("qk_norm"),
        "not said by the configuration of an unknown family",
        likely=likely,
        low=likely,
        high="layer",
        widens=("weights",),
    )


def _query_set_heads(section: Section) -> tuple[int, int]:
    """JetMoe: each chosen set has as many heads as there are KV heads."""
    num_kv_heads = section.integer("num_key_value_heads", maximum=MAX_HEADS)
    num_heads = num_kv_heads * section.integer("num_experts_per_tok", maximum=MAX_HEADS)
    stated = section.optional_integer("num_attention_heads", maximum=MAX_HEADS)
    if stated not in (None, num_heads):
        raise section.error("num_attention_heads", stated, f"KV heads × experts, {num_heads}")
    return num_heads, num_kv_heads


def _sizes(section: Section, family: Family, kind: str) -> tuple[int, int, int, int]:
    """(heads, KV heads, head_dim, v_head_dim) of the layers of one kind."""
    heads = _query_set_heads(section) if family.query_sets else read_heads(section)
    num_heads, num_kv_heads = heads
    if family.head_floor and not section.knows("head_dim"):
        head_dim = section.integer("hidden_size", maximum=MAX_WIDTH) // num_heads
        section.reading.source(
            section.field("head_dim"), head_dim, "derived: hidden_size / heads, rounded down"
        )
    else:
        head_dim = read_head_dim(section, num_heads, 2 if family.reads_twice else 1)
    stated = section.optional_integer("v_head_dim", minimum=0, maximum=MAX_WIDTH) or None
    if kind == "full":
        section.ignore("num_sliding_attention_heads")
    if kind == "sliding":  # MiMo-V2 and Step-3.5 give these layers sizes of their own
        for name in ("swa_num_attention_heads", "num_sliding_attention_heads"):
            num_heads = section.optional_integer(name, maximum=MAX_HEADS) or num_heads
        nested = section.section("attention_other_setting")
        if nested is not None:
            nested.ignore("attention_type", "true_head_dim")
            num_heads = nested.optional_integer("num_attention_heads") or num_heads
            num_kv_heads = nested.optional_integer("num_key_value_heads") or num_kv_heads
            head_dim = nested.optional_integer("head_dim") or head_dim
            stated = head_dim
        num_kv_heads = (
            section.optional_integer("swa_num_key_value_heads", maximum=MAX_HEADS) or num_kv_heads
        )
        head_dim = section.optional_integer("swa_head_dim", maximum=MAX_WIDTH) or head_dim
        stated = section.optional_integer("swa_v_head_dim", maximum=MAX_WIDTH) or stated
        if num_heads % num_kv_heads:
            raise section.error("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads}")
    return num_heads, num_kv_heads, head_dim, head_dim if stated is None else stated


def _has_sinks(section: Section, family: Family, kind: str) -> bool:
    key = f"add_{'swa' if kind == 'sliding' else 'full'}_attention_sink_bias"
    if section.knows(key):
        return section.boolean(key, False, why="default: false")
    return family.sinks


def read_attention(section: Section, family: Family, kind: str) -> Attention:
    """Softmax attention of the full, sliding or chunked layers."""
    num_heads, num_kv_heads, head_dim, v_head_dim = _sizes(section, family, kind)
    k_eq_v = False
    if kind == "full" and section.knows("global_head_dim"):  # Gemma-4's global layers
        head_dim = section.optional_integer("global_head_dim", maximum=MAX_WIDTH) or head_dim
        v_head_dim = head_dim
        k_eq_v = section.boolean("attention_k_eq_v", False)
        wide = section.optional_integer("num_global_key_value_heads", maximum=MAX_HEADS)
        num_kv_heads = wide if wide is not None and k_eq_v else num_kv_heads
        if num_heads % num_kv_heads:
            raise section.error(
                "num_global_key_value_heads", num_kv_heads, f"a divisor of {num_heads}"
            )
    elif kind == "full" and section.knows("attention_k_eq_v"):  # its sizes lie in per_layer_config
        k_eq_v = section.boolean("attention_k_eq_v", False)
    window = chunk = None
    if kind == "sliding":
        window = _window(section, family)
    elif kind == "chunked":
        chunk = section.integer("attention_chunk_size")
    else:
        window = cheaper_window(section, family)
    q_bias = fact(section, family.q_bias, "attention_bias", likely=False, widens="weights")
    gate = family.output_gate
    if gate is not None and family.output_gate_if is not None:
        gate = gate if section.boolean(family.output_gate_if, False) else None
    rotates = family.positions == "rope" and family.nope != "all"
    rotates = rotates and not uses_alibi(section, family)
    interleaved = fact(
        section, family.rope_interleaved, "rope_interleaved", likely=False, widens="flops"
    )
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
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
        qk_norm=_qk_norm(section, family),
        v_norm=family.v_norm,
        sinks=_has_sinks(section, family, kind),
        soft_cap=section.optional_number(family.soft_cap_key),
        scale=_scale(section),
        output_gate=gate,
        k_eq_v=k_eq_v,
        rope=read_rope(section, head_dim, kind, interleaved=interleaved) if rotates else None,
        sparse_index=block_index(section, kind),
        q_lora_rank=section.optional_integer("share_q_dim", maximum=MAX_WIDTH),
        input_size=2 * section.integer("hidden_size", maximum=MAX_WIDTH)
        if family.reads_twice
        else None,
        query_sets=section.integer("num_experts") if family.query_sets else 0,
    )


def _window(section: Section, family: Family) -> int:
    if family.window_twice is not None and section.knows(family.window_twice):
        section.ignore("sliding_window")
        return section.integer(family.window_twice, minimum=2) // 2
    return section.integer(family.window_key)


def _scale(section: Section) -> float | None:
    """The factor on Q·K where the configuration gives one; None is 1/√head_dim."""
    scalar = section.optional_number("query_pre_attn_scalar", minimum=1e-9)  # Gemma
    if scalar is not None:
        return float(scalar**-0.5)
    return section.optional_number("attention_multiplier")  # Granite


def _value_dim(section: Section) -> int:
    """v_head_dim, or hidden_size / num_attention_heads where it is not said (MiniCPM-3)."""
    stated = section.optional_integer("v_head_dim", maximum=MAX_WIDTH)
    if stated is not None:
        return stated
    num_heads = section.integer("num_attention_heads", maximum=MAX_HEADS)
    hidden_size = section.integer("hidden_size", maximum=MAX_WIDTH)
    if hidden_size % num_heads:
        raise section.error("v_head_dim", None, "the width of a value head")
    section.reading.source(
        section.field("v_head_dim"),
        hidden_size // num_heads,
        "derived: hidden_size / num_attention_heads",
    )
    return hidden_size // num_heads


def read_latent(section: Section, family: Family) -> LatentAttention:
    """MLA: DeepSeek-V2/V3, Kimi-K2, GLM-5, MiniCPM-3."""
    # What head_dim says is the rotary part or the whole, by release; nothing depends on it.
    section.ignore("head_dim", "qk_head_dim", "attn_type", *section.names("num_key_value_heads"))
    rope_dim = section.integer("qk_rope_head_dim", minimum=0, maximum=MAX_WIDTH)
    return LatentAttention(
        num_heads=section.integer("num_attention_heads", maximum=MAX_HEADS),
        kv_lora_rank=section.integer("kv_lora_rank", maximum=MAX_WIDTH),
        qk_nope_head_dim=section.integer("qk_nope_head_dim", maximum=MAX_WIDTH),
        qk_rope_head_dim=rope_dim,
        v_head_dim=_value_dim(section),
        q_lora_rank=section.optional_integer("q_lora_rank", maximum=MAX_WIDTH),
        bias=section.boolean("attention_bias", False, why="default: false"),
        rope=read_rope(
            section,
            rope_dim,
            "full",
            interleaved=section.boolean(
                "rope_interleave", True, why="default: DeepSeek's rotation"
            ),
            whole=True,
        )
        if family.nope != "all" and rope_dim
        else None,
        indexer=read_indexer(section),
    )


def read_compressed(section: Section, family: Family, ratio: int) -> CompressedAttention:
    """DeepSeek-V4's attention at one compression ratio (0: the window only)."""
    section.ignore("num_key_value_heads")
    if fact(section, family.q_bias, "attention_bias", likely=False, widens="weights"):
        raise section.error("attention_bias", True, "false")
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
            rope_dim,
            "compressed" if ratio else "sliding",
            interleaved=True,
            whole=True,
        ),
        indexer=indexer if ratio == FINE_RATIO else None,
    )


FINE_RATIO = 4  # the compressed-sparse layers; only these have an indexer
