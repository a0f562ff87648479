"""Feed-forwards: dense or mixture of experts, per layer.

Reads the many ways in which configurations say which layers have experts, how wide they are and
what else runs beside them.
"""

from __future__ import annotations

from ullage.anatomy.family import Family
from ullage.anatomy.keys import Section
from ullage.anatomy.mixers import MAX_WIDTH, fact
from ullage.anatomy.spec import Dense, Experts

MAX_EXPERTS = 1 << 16


def activation(section: Section, family: Family) -> str:
    """The activation's name as the configuration or the family says it."""
    return section.text("hidden_act", family.activation or "silu", why="default: the family's")


def is_gated(section: Section, family: Family) -> bool:
    """Whether the MLP has three matrices."""
    likely = section.optional_text("hidden_act") in ("silu", "swiglu", "swigluoai", "geglu", None)
    return fact(section, family.gated, "gated", likely=likely, widens="weights")


def read_dense(section: Section, family: Family) -> Dense:
    """The MLP of the dense layers."""
    key = family.dense_width if section.knows(family.dense_width) else "intermediate_size"
    width = section.optional_integer(key, maximum=MAX_WIDTH)
    if width is None:
        width = 4 * section.integer("hidden_size", maximum=MAX_WIDTH)
        section.reading.source(section.field(key), width, "derived: 4 × hidden_size")
    return Dense(
        intermediate=width,
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
    if count == 0:
        return None
    width = section.optional_integer(family.expert_width, maximum=MAX_WIDTH)
    if width is None:
        width = section.integer("intermediate_size", maximum=MAX_WIDTH)
    top_k = section.integer("num_experts_per_tok", maximum=MAX_EXPERTS)
    if top_k > count:
        raise section.error("num_experts_per_tok", top_k, f"at most the {count} experts")
    shared = _shared_width(section, width)
    topk_method = section.optional_text("topk_method")
    return Experts(
        num_experts=count,
        top_k=top_k,
        intermediate=width,
        activation=activation(section, family),
        gated=is_gated(section, family),
        bias=family.expert_bias,
        shared_intermediate=shared,
        shared_gate=family.shared_gate and shared > 0,
        router_bias=family.router_bias,
        score_correction_bias=topk_method == "noaux_tc"
        or fact(section, family.score_bias, "score_bias", likely=False, widens="weights"),
        latent=section.optional_integer("moe_latent_size", maximum=MAX_WIDTH),
        num_groups=section.optional_integer("n_group", maximum=MAX_EXPERTS) or 1,
    )


def _shared_width(section: Section, width: int) -> int:
    """Summed width of the experts that always run."""
    stated = section.optional_integer(
        "shared_expert_intermediate_size", minimum=0, maximum=MAX_WIDTH
    )
    count = section.optional_integer("n_shared_experts", minimum=0, maximum=MAX_EXPERTS)
    if count is None:
        return stated or 0
    return count * (width if stated is None else stated)


def sparse_layers(section: Section, family: Family, n: int) -> list[bool]:
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
    listed = section.integers("moe_layers")
    step = section.optional_integer("interleave_moe_layer_step", minimum=0)
    if listed is not None:
        chosen = set(listed)
        sparse = [i in chosen for i in range(n)]
    elif step is not None:
        sparse = [step > 0 and (i + 1) % step == 0 for i in range(n)]
    step = section.optional_integer("decoder_sparse_step")
    if step is not None:
        sparse = [s and (i + 1) % step == 0 for i, s in enumerate(sparse)]
    dense_only = set(section.integers("mlp_only_layers") or ())
    if dense_only:
        sparse = [s and i not in dense_only for i, s in enumerate(sparse)]
    first = section.optional_integer("first_k_dense_replace", minimum=0)
    if first is not None:
        sparse = [s and i >= first for i, s in enumerate(sparse)]
    freq = section.find("moe_layer_freq")
    if isinstance(freq, list | tuple):
        flags = section.integers("moe_layer_freq", maximum=1) or ()
        if len(flags) < n:
            raise section.error("moe_layer_freq", list(flags), f"a list of {n}")
        sparse = [s and bool(flag) for s, flag in zip(sparse, flags, strict=False)]
    elif section.has("moe_layer_freq"):
        every = section.integer("moe_layer_freq")
        sparse = [s and i % every == 0 for i, s in enumerate(sparse)]
    return sparse
