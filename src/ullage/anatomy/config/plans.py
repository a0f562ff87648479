# ruff: noqa: ARG001 - every plan has one signature
"""Plans: how families say which kind each layer is where layer_types does not, or not plainly.

One small reader per family's way of saying it; `layer_kinds.py` picks among them.
"""

from __future__ import annotations

from collections.abc import Callable

from ullage.anatomy.config.keys import Section
from ullage.anatomy.config.kind_words import (
    MAX_LAYERS,
    WORDS,
    Kind,
    from_words,
    num_layers,
    read_single,
    rope_layers,
)
from ullage.anatomy.families.family import Family


def _nemotron_h(section: Section, family: Family) -> list[Kind]:
    kinds = read_single(section, "layer_types", "hybrid_override_pattern")
    if kinds is None:
        raise section.reading.error(
            "missing",
            field=section.field("hybrid_override_pattern"),
            expected="the kinds of the layers (or layers_block_type)",
        )
    stated = section.optional_integer("num_hidden_layers", maximum=MAX_LAYERS)
    if stated is not None and stated != len(kinds):
        raise section.error("num_hidden_layers", stated, f"{len(kinds)}, the layers listed")
    return kinds


def _interval(section: Section, family: Family) -> list[Kind]:
    """Every full_attention_interval-th layer is full, the others linear (Qwen3-Next, Qwen3.5)."""
    n = num_layers(section)
    interval = section.integer("full_attention_interval", 4, why=f"default: {section.label}")
    return [("full" if (i + 1) % interval == 0 else "linear", None) for i in range(n)]


def _compress_ratios(section: Section, family: Family) -> list[Kind]:
    return [("compressed", None)] * num_layers(section)


def _mamba(section: Section, family: Family) -> list[Kind]:
    section.ignore("layer_types")
    return [("mamba", "none")] * num_layers(section)


def _hybrid(section: Section, family: Family) -> list[Kind]:
    return [("hybrid", None)] * num_layers(section)


def _pattern_flags(section: Section, family: Family) -> list[Kind]:
    """MiMo-V2: hybrid_layer_pattern, 1 where a window applies."""
    n = num_layers(section)
    flags = section.integers("hybrid_layer_pattern", length=n, maximum=1)
    if flags is None:  # transformers' own default: every sixth layer is full, and the first
        return [("full" if i % 6 == 0 else "sliding", None) for i in range(n)]
    return [("sliding" if flag else "full", None) for flag in flags]


def _every_n(section: Section, family: Family) -> list[Kind]:
    """AFMoE: every global_attn_every_n_layers-th layer is full."""
    every = section.integer("global_attn_every_n_layers")
    return [
        ("full" if (i + 1) % every == 0 else "sliding", None) for i in range(num_layers(section))
    ]


def sparse_freq(section: Section, family: Family) -> list[Kind]:
    """MiniMax-M3: sparse_attention_freq, 1 where the block indexer picks keys."""
    n = num_layers(section)
    nested = section.section("sparse_attention_config")
    if nested is None:
        return [("full", None)] * n
    nested.ignore(
        "sparse_disable_index_value",
        "sparse_init_block",
        "sparse_local_block",
        "sparse_score_type",
        "use_sparse_attention",
    )
    flags = nested.integers("sparse_attention_freq", length=n, maximum=1) or (1,) * n
    return [("indexed" if flag else "full", None) for flag in flags]


def _cross(section: Section, family: Family) -> list[Kind]:
    """Llama-3.2-Vision: cross_attention_layers look at the image instead of the text."""
    n = num_layers(section)
    listed = section.integers("cross_attention_layers")
    cross = set(range(3, n, 5)) if listed is None else set(listed)
    return [("cross" if i in cross else "full", None) for i in range(n)]


def _period(section: Section, family: Family) -> list[Kind]:
    """Jamba: attention where i mod attn_layer_period is attn_layer_offset, Mamba elsewhere."""
    period = section.integer("attn_layer_period")
    offset = section.integer("attn_layer_offset", minimum=0)
    return [("full" if i % period == offset else "mamba", None) for i in range(num_layers(section))]


def _indices(section: Section, family: Family) -> list[Kind]:
    """Bamba: attn_layer_indices lists the attention layers."""
    full = set(section.integers("attn_layer_indices") or ())
    return [("full" if i in full else "mamba", None) for i in range(num_layers(section))]


def _full_attn_idxs(section: Section, family: Family) -> list[Kind]:
    """LFM2's older key: full_attn_idxs lists the attention layers."""
    n = num_layers(section)
    listed = section.integers("full_attn_idxs")
    full = set(range(n)) if listed is None else set(listed)
    return [("full" if i in full else "conv", None) for i in range(n)]


def _block_types(section: Section, family: Family) -> list[Kind]:
    """RecurrentGemma: block_types is repeated over the depth."""
    words = section.texts("block_types") or ("recurrent", "recurrent", "attention")
    if not words:
        raise section.error("block_types", [], "at least one kind")
    table = {"recurrent": ("linear", None), "attention": ("sliding", None)}
    cycle = from_words(section, "block_types", words, table)  # type: ignore[arg-type]
    return [cycle[i % len(cycle)] for i in range(num_layers(section))]


def _attn_type_list(section: Section, family: Family) -> list[Kind]:
    """MiniMax-Text-01: 1 full, 0 lightning."""
    n = num_layers(section)
    flags = section.integers("attn_type_list", length=n, maximum=1)
    if flags is None:
        return [("linear" if i % 2 else "full", None) for i in range(n)]
    return [("full" if flag else "linear", None) for flag in flags]


def _gpt_neo(section: Section, family: Family) -> list[Kind]:
    """GPT-Neo: attention_types [[["global", "local"], 12]] unrolled."""
    raw = section.find("attention_types")
    kinds: list[Kind] = []
    if not isinstance(raw, list | tuple):
        raise section.error("attention_types", raw, "a list")
    for item in raw:
        if not (
            isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], list | tuple)
        ):
            raise section.error("attention_types", raw, "pairs of kinds and a count")
        words, count = item
        if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= MAX_LAYERS:
            raise section.error("attention_types", raw, "pairs of kinds and a count")
        if any(not isinstance(w, str) for w in words) or len(words) * count > MAX_LAYERS:
            raise section.error("attention_types", raw, "pairs of kinds and a count")
        kinds += from_words(section, "attention_types", tuple(words), WORDS) * count
    n = num_layers(section)
    if len(kinds) != n:
        raise section.error("attention_types", raw, f"{n} layers")
    return kinds


def _kimi_linear(section: Section, family: Family) -> list[Kind]:
    """Kimi Linear: linear_attn_config names its full and KDA layers, counted from 1."""
    n = num_layers(section)
    nested = section.section("linear_attn_config")
    if nested is None:
        return [("full" if i and i % 4 == 0 else "linear", None) for i in range(n)]
    kda = set(nested.integers("kda_layers") or ())
    full = set(nested.integers("full_attn_layers") or ())
    kinds: list[Kind] = []
    for i in range(1, n + 1):
        if (i in kda) == (i in full):
            raise nested.error("kda_layers", sorted(kda), f"layer {i} in exactly one of the lists")
        kinds.append(("linear" if i in kda else "full", None))
    return kinds


def _llama4(section: Section, family: Family) -> list[Kind]:
    """Llama-4: chunked where RoPE is used, full where it is not."""
    n = num_layers(section)
    chunk = section.optional_integer("attention_chunk_size")
    return [
        ("chunked" if chunk is not None and rotates else "full", None)
        for rotates in rope_layers(section, n)
    ]


def _fourier(section: Section, family: Family) -> list[Kind]:
    """FNet: a Fourier transform over tokens and channels, which has no weight, mixes them."""
    section.ignore("num_attention_heads")
    section.reading.unknown(
        section.field("fourier"), "mixing by Fourier transforms, not priced", "flops"
    )
    return [("none", None)] * num_layers(section)


def _halves(section: Section, family: Family) -> list[Kind]:
    """Dory: attention and MLP of a layer may be listed one after the other."""
    words = section.texts("layer_types")
    n = num_layers(section)
    if words is None:
        return [("full" if (i + 1) % 4 == 0 else "sliding", None) for i in range(n)]
    if len(words) != n:
        raise section.error("layer_types", list(words), f"a list of {n}")
    if "mlp" in words:
        for i, word in enumerate(words[1::2]):
            if word != "mlp":
                raise section.error(f"layer_types[{2 * i + 1}]", word, "mlp")
        words = words[::2]
    return from_words(section, "layer_types", words, WORDS)


def _two_stacks(section: Section, family: Family) -> list[Kind]:
    """HRM: two stacks of num_layers_per_stack; num_hidden_layers counts the runs where both are."""
    own = section.optional_integer("num_layers_per_stack", maximum=MAX_LAYERS // 2)
    if own is None:
        own = section.integer("num_hidden_layers", maximum=MAX_LAYERS // 2)
    section.ignore("num_hidden_layers")
    return [("full", None)] * (2 * own)


def _shared_blocks(section: Section, family: Family) -> list[Kind]:
    """Zamba: a hybrid layer is a transformer layer whose output a Mamba layer reads."""
    n = num_layers(section)
    words = section.texts("layer_types", length=n)
    if words is None:
        period = section.optional_integer("attn_layer_period")
        if period is None:
            raise section.error("layers_block_type", None, f"the kinds of the {n} layers")
        offset = section.integer("attn_layer_offset", minimum=0)
        words = tuple(_zamba_word(i, period, offset) for i in range(n))
    section.ignore("attn_layer_period", "attn_layer_offset", "hybrid_layer_ids")
    kinds: list[Kind] = []
    for i, word in enumerate(words):
        if word not in ("mamba", "linear_attention", "hybrid"):
            raise section.error(f"layers_block_type[{i}]", word, "mamba or hybrid")
        if word == "hybrid":
            kinds.append(("full", "dense"))
        kinds.append(("mamba", "none"))
    return kinds


def _zamba_word(i: int, period: int, offset: int) -> str:
    """Zamba's own default: two Mamba layers and a hybrid, then one hybrid in each period."""
    return "hybrid" if i == 2 or (i > 2 and (i - 3) % period == offset) else "mamba"


def _group_size(section: Section, family: Family) -> list[Kind]:
    """Ring hybrids: the last layer of each layer_group_size is full."""
    size = section.integer("layer_group_size")
    return [("linear" if (i + 1) % size else "full", None) for i in range(num_layers(section))]


def _double(section: Section, family: Family) -> list[Kind]:
    """LongCat-Flash: each of num_layers holds two attentions and two MLPs; its experts run beside
    the first MLP. It is told as two layers."""
    section.ignore("num_hidden_layers")
    n = section.integer("num_layers", maximum=MAX_LAYERS // 2)
    return [("full", "moe"), ("full", "dense")] * n


PLANS: dict[str, Callable[[Section, Family], list[Kind]]] = {
    "interval": _interval,
    "compress_ratios": _compress_ratios,
    "period": _period,
    "indices": _indices,
    "full_attn_idxs": _full_attn_idxs,
    "block_types": _block_types,
    "attn_type_list": _attn_type_list,
    "gpt_neo": _gpt_neo,
    "kimi_linear": _kimi_linear,
    "llama4": _llama4,
    "group_size": _group_size,
    "hybrid": _hybrid,
    "hybrid_layer_pattern": _pattern_flags,
    "every_n": _every_n,
    "sparse_freq": sparse_freq,
    "cross": _cross,
    "fourier": _fourier,
    "double": _double,
}


# Plans that read layer_types in a way of their own, or not at all.
OWN_LISTS: dict[str | None, Callable[[Section, Family], list[Kind]]] = {
    "nemotron_h": _nemotron_h,
    "mamba": _mamba,
    "halves": _halves,
    "two_stacks": _two_stacks,
    "shared_blocks": _shared_blocks,
}
