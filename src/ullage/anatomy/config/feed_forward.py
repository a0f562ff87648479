"""Feed-forwards: dense or mixture of experts, per layer.

Reads the many ways in which configurations say which layers have experts, how wide they are and
what else runs beside them.
"""

from __future__ import annotations

from collections.abc import Callable

from ullage.anatomy.config.keys import MAX_WIDTH, Section
from ullage.anatomy.config.mixers import fact, maybe_size
from ullage.anatomy.families.family import Family
from ullage.anatomy.spec import Dense, Experts

MAX_EXPERTS = 1 << 16


def activation(section: Section, family: Family) -> str:
    """The activation's name as the configuration or the family says it."""
    return section.text("hidden_act", family.activation or "silu", why="default: the family's")


# Every class of transformers 5.24 with one of these activations has a gate; others vary.
_GATED = ("silu", "swiglu", "swigluoai", "geglu")


def is_gated(section: Section, family: Family) -> bool:
    """Whether the MLP has three matrices."""
    act = section.optional_text("hidden_act")
    if family.gated is None and act in _GATED:
        section.reading.source(section.field("gated"), True, f"derived: hidden_act {act}")
        return True
    return fact(section, family.gated, "gated", likely=act is None, widens="weights")


def _dense_width(section: Section, family: Family) -> int:
    key = family.dense_width if section.knows(family.dense_width) else "intermediate_size"
    if family.width_rule == "expansion" and section.has("expansion_ratio"):
        hidden_size = section.integer("hidden_size", maximum=MAX_WIDTH)
        return int(section.number("expansion_ratio", maximum=1024.0) * hidden_size)
    if family.width_rule == "rounded" and section.has("block_ff_dim"):
        key = "block_ff_dim"
        section.ignore("intermediate_size")
    width = section.optional_integer(key, maximum=MAX_WIDTH)
    if width is None:
        width = 4 * section.integer("hidden_size", maximum=MAX_WIDTH)
        section.reading.source(section.field(key), width, "derived: 4 × hidden_size")
    if family.width_rule == "half":  # Qwen-1 and RecurrentGemma count gate and up together
        return width // 2
    if family.width_rule == "rounded" and section.boolean("block_auto_adjust_ff_dim", False):
        multiplier = section.optional_number("block_ffn_dim_multiplier", maximum=64.0)
        width = int(2 * width / 3)
        width = width if multiplier is None else int(multiplier * width)
        step = section.integer("block_multiple_of", 256, why="default: 256", maximum=MAX_WIDTH)
        width = -(-width // step) * step
    return width


def read_dense(section: Section, family: Family) -> Dense:
    """The MLP of the dense layers."""
    return Dense(
        intermediate=_dense_width(section, family),
        activation=activation(section, family),
        gated=is_gated(section, family),
        bias=fact(section, family.mlp_bias, "mlp_bias", likely=False, widens="weights"),
    )


def num_experts(section: Section) -> int:
    """How many routed experts a sparse layer has; 0 when the model has none."""
    return section.optional_integer("num_experts", minimum=0, maximum=MAX_EXPERTS) or 0


def read_experts(section: Section, family: Family) -> Experts | None:
    """The mixture of experts of the sparse layers, or None for a dense model."""
    count = num_experts(section)
    if family.experts_if is not None and not section.boolean(family.experts_if, False):
        section.ignore(*section.names("num_experts"), *section.names("num_experts_per_tok"))
        return None
    if count == 0:
        if section.has("num_experts"):  # a dense sibling of a sparse model says 0
            section.ignore(*section.names("num_experts_per_tok"), family.expert_width)
        return None
    width = None
    if family.expert_width.endswith("]"):
        width = maybe_size(section, family.expert_width)
    elif family.expert_width != "intermediate_size":
        width = section.optional_integer(family.expert_width, maximum=MAX_WIDTH)
    own_dense = family.dense_width != "intermediate_size" and section.has(family.dense_width)
    if own_dense and not section.has(family.expert_width):
        width = None  # then intermediate_size is the experts'
    if width is None:
        width = section.integer("intermediate_size", maximum=MAX_WIDTH)
    top_k = section.integer("num_experts_per_tok", maximum=MAX_EXPERTS)
    if top_k > count:
        raise section.error("num_experts_per_tok", top_k, f"at most the {count} experts")
    shared = _shared_width(section, width)
    if family.name == "llama4":  # one shared expert as wide as the routed ones
        shared = width
    topk_method = section.optional_text("topk_method")
    mlp_bias = fact(section, family.mlp_bias, "mlp_bias", likely=False, widens="weights")
    return Experts(
        num_experts=count,
        top_k=top_k,
        intermediate=width,
        activation=activation(section, family),
        gated=is_gated(section, family),
        # A key that says so is meant for plain MLPs, the shared expert among them: no class of
        # transformers 5.24 has a bias in routed experts for its sake.
        bias=family.expert_bias or (mlp_bias and not isinstance(family.mlp_bias, str)),
        shared_intermediate=shared,
        shared_bias=mlp_bias and isinstance(family.mlp_bias, str),
        shared_gate=family.shared_gate and shared > 0,
        router_bias=family.router_bias,
        score_correction_bias=topk_method == "noaux_tc"
        or fact(section, family.score_bias, "score_bias", likely=False, widens="weights"),
        latent=section.optional_integer("moe_latent_size", maximum=MAX_WIDTH),
        router_width=section.optional_integer("router_hidden_size", maximum=MAX_WIDTH),
        zero_experts=section.optional_integer("zero_expert_num", minimum=0, maximum=MAX_EXPERTS)
        or 0,
        num_groups=section.optional_integer("n_group", maximum=MAX_EXPERTS) or 1,
    )


def _shared_width(section: Section, width: int) -> int:
    """Summed width of the experts that always run.

    A stated width is one expert's when the number of shared experts is given too (Nemotron-3,
    MiniMax-M3, Step-3), else the sum (Qwen2-MoE, Granite).
    """
    stated = section.optional_integer(
        "shared_expert_intermediate_size", minimum=0, maximum=MAX_WIDTH
    )
    count = section.optional_integer("n_shared_experts", minimum=0, maximum=MAX_EXPERTS)
    if count is None:
        return stated or 0
    return count * (width if stated is None else stated)


def sparse_layers(section: Section, n: int) -> list[bool]:
    """Which of the n layers have experts (when the model has any)."""
    words = section.texts("mlp_layer_types")
    if words is not None:
        if len(words) < n:
            raise section.error("mlp_layer_types", list(words), f"a list of {n}")
        for i, word in enumerate(words):
            if word not in ("dense", "sparse", "moe", "hash_moe"):
                raise section.error(f"mlp_layer_types[{i}]", word, "dense or sparse")
        section.ignore("first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step")
        return [word != "dense" for word in words[:n]]
    sparse = [True] * n
    for read in _RULES:
        rule = read(section, n)
        if rule is not None:
            sparse = [a and b for a, b in zip(sparse, rule, strict=True)]
    return sparse


# --- which layers are sparse: one small reader per spelling; all that apply must agree -----------

Flags = list[bool] | None


def _listed(section: Section, n: int) -> Flags:
    """Llama-4: moe_layers, or every interleave_moe_layer_step-th layer."""
    listed = section.integers("moe_layers")
    step = section.optional_integer("interleave_moe_layer_step", minimum=0)
    if listed is not None:
        return _members(listed, n)
    if step is not None:
        return [step > 0 and (i + 1) % step == 0 for i in range(n)]
    return None


def _members(listed: tuple[int, ...], n: int) -> list[bool]:
    chosen = set(listed)
    return [i in chosen for i in range(n)]


def _enumerated(section: Section, n: int) -> Flags:
    """Step-3: moe_layers_enum, a list or a string of indices."""
    value = section.find("moe_layers_enum")
    if not isinstance(value, str):
        listed = section.integers("moe_layers_enum")
        return None if listed is None else _members(listed, n)
    words = [word.strip() for word in value[: 1 << 16].split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 7 for word in words if word):
        raise section.error("moe_layers_enum", value, "layer numbers with commas")
    return _members(tuple(int(word) for word in words if word), n)


def _sparse_step(section: Section, n: int) -> Flags:
    """Qwen: every decoder_sparse_step-th layer except mlp_only_layers."""
    step = section.optional_integer("decoder_sparse_step")
    dense_only = set(section.integers("mlp_only_layers") or ())
    if step is None and not dense_only:
        return None
    return [(i + 1) % (step or 1) == 0 and i not in dense_only for i in range(n)]


def _after_first(section: Section, n: int) -> Flags:
    """DeepSeek, GLM, Kimi: dense up to first_k_dense_replace; LFM2, AFMoE: num_dense_layers."""
    for key in ("first_k_dense_replace", "num_dense_layers"):
        first = section.optional_integer(key, minimum=0)
        if first is not None:
            return [i >= first for i in range(n)]
    return None


def _frequency(section: Section, n: int) -> Flags:
    """moe_layer_freq: every so many layers, or one flag per layer."""
    if isinstance(section.find("moe_layer_freq"), list | tuple):
        flags = section.integers("moe_layer_freq", maximum=1) or ()
        if len(flags) < n:
            raise section.error("moe_layer_freq", list(flags), f"a list of {n}")
        return [bool(flag) for flag in flags[:n]]
    every = section.optional_integer("moe_layer_freq")
    return None if every is None else [i % every == 0 for i in range(n)]


def _between(section: Section, n: int) -> Flags:
    """ERNIE-4.5: moe_layer_start_index to moe_layer_end_index, every moe_layer_interval-th."""
    start = section.optional_integer("moe_layer_start_index", minimum=0)
    if start is None:
        return None
    end = section.optional_integer("moe_layer_end_index", minimum=-1)
    end = n - 1 if end is None or end == -1 else end
    every = section.optional_integer("moe_layer_interval") or 1
    return [start <= i <= end and (i + 1) % every == 0 for i in range(n)]


def _expert_period(section: Section, n: int) -> Flags:
    """Jamba: experts where i mod expert_layer_period is expert_layer_offset."""
    period = section.optional_integer("expert_layer_period")
    if period is None:
        return None
    offset = section.optional_integer("expert_layer_offset", minimum=0) or 0
    return [i % period == offset for i in range(n)]


_RULES: tuple[Callable[[Section, int], Flags], ...] = (
    _listed,
    _enumerated,
    _sparse_step,
    _after_first,
    _frequency,
    _between,
    _expert_period,
)
