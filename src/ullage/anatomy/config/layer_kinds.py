"""Which kind each layer is: full, sliding, chunked, linear, mamba, conv, …, none; and its MLP.

Picks the plan that a configuration follows and reads windows. Words are `kind_words.py`, plans
`plans.py`; what a layer of a kind looks like is `mixers.py` and `feed_forward.py`.
"""

from __future__ import annotations

from ullage.anatomy.config.keys import Section
from ullage.anatomy.config.kind_words import WORDS, Kind, from_words, num_layers
from ullage.anatomy.config.plans import OWN_LISTS, PLANS, sparse_freq
from ullage.anatomy.families.family import Family


def _windowed(section: Section, family: Family, n: int) -> list[Kind]:
    """Layers of a stack without layer_types: full, or under the family's window rule."""
    rule = family.windows
    if family.window_if is not None and not section.boolean(family.window_if, False):
        section.ignore("max_window_layers", "sliding_window")
        return [("full", None)] * n
    if family.name == "generic":
        return _generic_windows(section, n)
    if rule == "never":
        if not section.has("sliding_window"):
            section.ignore("sliding_window", "use_sliding_window", "max_window_layers")
        return [("full", None)] * n
    window = section.optional_integer("sliding_window", minimum=0) or None
    if window is None:
        section.ignore("max_window_layers", "sliding_window_pattern")
        return [("full", None)] * n
    if rule == "all":
        return [("sliding", None)] * n
    if rule == "top":
        first = section.integer("max_window_layers", 0, minimum=0, why="default: 0")
        return [("sliding" if i >= first else "full", None) for i in range(n)]
    if rule == "even":
        return [("full" if i % 2 else "sliding", None) for i in range(n)]
    pattern = section.find("sliding_window_pattern")
    if isinstance(pattern, str):  # Exaone-4 spells it LLLG
        if not pattern or any(c not in "LG" for c in pattern):
            raise section.error("sliding_window_pattern", pattern, "letters L and G")
        return [
            ("sliding" if pattern[i % len(pattern)] == "L" and i < n - 1 else "full", None)
            for i in range(n)
        ]
    key = "global_attn_every_n_layers" if rule == "every_first" else "sliding_window_pattern"
    every = section.integer(key, family.pattern, why=f"default: {section.label}")
    if rule == "every_first":  # ModernBERT: layers 0, 3, 6, … are full
        return [("sliding" if i % every else "full", None) for i in range(n)]
    return [("full" if (i + 1) % every == 0 else "sliding", None) for i in range(n)]


def _reference_windows(section: Section, n: int) -> list[Kind]:
    """Unlimited-OCR: the whole prompt stays visible, of the answer only a window."""
    full: list[Kind] = [("full", None)] * n
    sliding: list[Kind] = [("sliding", None)] * n
    return section.reading.decide(
        section.field("layer_types"),
        "windows beside the whole prompt, whose length is the request's",
        likely=full,
        low=sliding,
        high=full,
        widens=("kv", "flops"),
    )


def _generic_windows(section: Section, n: int) -> list[Kind]:
    """An unknown family that names a window: perhaps on every layer, perhaps on none."""
    full: list[Kind] = [("full", None)] * n
    if not section.has("sliding_window") or section.values.get("use_sliding_window") is False:
        section.ignore("sliding_window", "use_sliding_window", "max_window_layers")
        return full
    sliding: list[Kind] = [("sliding", None)] * n
    return section.reading.decide(
        section.field("sliding_window"),
        "which layers it limits is not said",
        likely=full,
        low=sliding,
        high=full,
        widens=("kv", "flops"),
    )


def read_kinds(section: Section, family: Family) -> list[Kind]:
    """The kind of every layer, in order."""
    kinds = _read_kinds(section, family)
    if family.last_full and kinds:
        kinds[-1] = ("full", kinds[-1][1])
    return kinds


def _read_kinds(section: Section, family: Family) -> list[Kind]:
    if family.plan in OWN_LISTS:
        return OWN_LISTS[family.plan](section, family)
    words = section.texts("layer_types")
    if words is not None:
        n = num_layers(section)
        extra = section.optional_integer("num_nextn_predict_layers", minimum=0) or 0
        if len(words) not in (n, n + extra):
            raise section.error("layer_types", list(words), f"a list of {n}")
        section.ignore(
            "full_attention_interval",
            "sliding_window_pattern",
            "max_window_layers",
            "use_sliding_window",
            "attn_layer_indices",
            "attn_layer_period",
            "attn_layer_offset",
            "full_attn_idxs",
            "attn_type_list",
            "block_types",
            "no_rope_layer_interval",
            "global_attn_every_n_layers",
        )
        if "reference_sliding_attention" in words:
            return _reference_windows(section, n)
        own = {word: WORDS[meant] for word, meant in family.words.items()}
        kinds = from_words(section, "layer_types", words[:n], WORDS | own)
        if all(kind != "sliding" for kind, _ in kinds):
            section.ignore("sliding_window")
        if all(kind != "conv" for kind, _ in kinds):
            section.ignore("conv_bias", "conv_L_cache")
        if family.linear == "mamba":
            kinds = [("mamba", ffn) if kind == "linear" else (kind, ffn) for kind, ffn in kinds]
        if family.plan == "sparse_freq" and section.has("sparse_attention_config"):
            return sparse_freq(section, family)
        return kinds
    if family.plan is None and set(section.integers("attn_type_list") or ()) - {1}:
        raise section.error("attn_type_list", section.values.get("attn_type_list"), "only ones")
    if family.plan is not None:
        if not section.has("sliding_window"):
            section.ignore("use_sliding_window", "max_window_layers")
        return PLANS[family.plan](section, family)
    return _windowed(section, family, num_layers(section))
