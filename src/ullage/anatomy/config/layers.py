"""The stack of layers: kinds × mixers × feed-forwards, with what differs from layer to layer.

Equal parts are one object, so that a deep model stays small. What one mixer or MLP looks like is
`mixers.py`, `recurrent.py` and `feed_forward.py`; pruned stacks are `blocks.py`.
"""

from __future__ import annotations

from dataclasses import replace

from ullage.anatomy.config.blocks import read_blocks
from ullage.anatomy.config.feed_forward import read_dense, read_experts, sparse_layers
from ullage.anatomy.config.keys import MAX_WIDTH, Section
from ullage.anatomy.config.kind_words import Kind, read_single, rope_layers
from ullage.anatomy.config.layer_kinds import read_kinds
from ullage.anatomy.config.loops import run_order
from ullage.anatomy.config.mixers import FINE_RATIO, read_attention, read_compressed, read_latent
from ullage.anatomy.config.recurrent import LINEAR, MAMBA, read_short_conv
from ullage.anatomy.config.sharing import own_heads, shared_indexers, shared_kv
from ullage.anatomy.families.family import Family
from ullage.anatomy.spec import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    LatentAttention,
    LayerSpec,
    Mixer,
    NoFeedForward,
    NoMixer,
    Parallel,
)
from ullage.anatomy.tensors.sizes import layer_sizes, size_of
from ullage.errors import UnsupportedModel

_LATENT_KEYS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def is_latent(section: Section, family: Family) -> bool:
    """Whether the softmax layers are MLA; an unknown family is when it has all of MLA's keys."""
    if family.mixer == "latent":  # DeepSeek-VL2-Tiny writes a rank of null: plain attention
        return not ("kv_lora_rank" in section.values and section.values["kv_lora_rank"] is None)
    if family.mixer is not None:
        return False
    return all(section.has(key) for key in _LATENT_KEYS)


def read_mixer(section: Section, family: Family, kind: str) -> Mixer:
    """The mixer of the layers of one kind.

    Raises:
        UnsupportedModel: the family has layers of a kind that is not understood.
    """
    if kind in ("none", "cross"):
        return NoMixer()
    if kind in ("full", "sliding", "chunked", "indexed"):
        if kind == "full" and is_latent(section, family):
            return read_latent(section, family)
        if family.mixer == "latent":
            section.ignore(*_LATENT_KEYS, "q_lora_rank")
        return read_attention(section, family, kind)
    if kind == "mamba":
        return MAMBA[family.mamba](section, family)
    if kind == "hybrid":
        mamba = MAMBA[family.mamba](section, family)
        return Parallel((read_attention(section, family, "full"), mamba))
    if kind == "conv":
        return read_short_conv(section)
    if kind == "linear":
        name = family.linear
        if name is None and section.has("linear_num_value_heads"):
            name = "gated_delta_net"
        if name in LINEAR:
            return LINEAR[name](section, family)
    raise UnsupportedModel(
        f"layers of kind {kind!r} in the family {family.name}",
        file=section.reading.file,
        field=section.field("layer_types"),
        expected="a kind of layer that is understood",
    )


def read_layers(
    text: Section, family: Family
) -> tuple[tuple[LayerSpec, ...], Dense | None, Experts | None]:
    """All layers of the decoder (or encoder), and the MLPs that MTP layers may reuse."""
    if family.plan == "blocks":
        return read_blocks(text, family), None, None
    kinds = read_kinds(text, family)
    n = len(kinds)
    experts = read_experts(text, family)
    sparse = sparse_layers(text, n) if experts is not None else [False] * n
    if experts is None:
        sparse_layers(text, n)  # a dense sibling of a sparse model may keep the keys
    mixers = _mixers(text, family, [kind for kind, _ in kinds])
    if text.knows("enable_moe_block") or text.knows("use_double_wide_mlp"):
        return _gemma4(text, family, kinds, mixers, experts)
    needs_dense = any(
        kind == "dense" or (kind is None and not s)
        for (_, kind), s in zip(kinds, sparse, strict=True)
    )
    dense = read_dense(text, family) if needs_dense else None
    if not needs_dense:
        text.ignore(family.dense_width, *text.names("intermediate_size"))
    widths = _widths(text, n)
    hash_layers = text.optional_integer("num_hash_layers", minimum=0) or 0
    hashed = replace(experts, hash_routed=True, score_correction_bias=False) if experts else None
    cross = _cross_attention(text, family)
    layers = []
    for i, (kind, ffn) in enumerate(kinds):
        part: FeedForward = NoFeedForward()
        if ffn == "moe" or (ffn is None and sparse[i]):
            if experts is None or hashed is None:
                raise text.error("num_experts", None, "the number of experts")
            part = hashed if i < hash_layers else experts
        elif ffn != "none" and dense is not None:
            part = dense if widths is None else replace(dense, intermediate=widths[i])
        beside = dense if family.plan == "double" and isinstance(part, Experts) else None
        layers.append(
            LayerSpec(
                i,
                mixers[i],
                part,
                cross_attention=cross if kind == "cross" or family.cross_attention else None,
                parallel_dense=beside,
            )
        )
    return _runs(text, family, layers), dense, experts


def _runs(text: Section, family: Family, layers: list[LayerSpec]) -> tuple[LayerSpec, ...]:
    """The layers as they run, each with the convolution tails that its family keeps."""
    if family.tail is not None:
        sizes = {"H": text.integer("hidden_size", maximum=MAX_WIDTH)}
        for key in family.sizes:
            size = text.integer(key, maximum=MAX_WIDTH)
            sizes |= {key: size, f"{key}-1": size - 1}
        layers = [
            replace(x, conv_tail=size_of(family.tail, sizes | layer_sizes(x, first=False)) or 0)
            for x in layers
        ]
    return run_order(text, family.loop, layers)


def _gemma4(
    text: Section,
    family: Family,
    kinds: list[Kind],
    mixers: list[Mixer],
    experts: Experts | None,
) -> tuple[tuple[LayerSpec, ...], Dense | None, Experts | None]:
    """Gemma-4: a dense MLP in every layer, experts beside it when enable_moe_block is set."""
    dense = read_dense(text, family)
    if not text.boolean("enable_moe_block", False):
        experts = None
        text.ignore("num_experts", *text.names("num_experts_per_tok"), "moe_intermediate_size")
    elif experts is None:
        raise text.error("num_experts", None, "the number of experts")
    # Layers that borrow their KV may have MLPs of twice the width.
    wide = replace(dense, intermediate=2 * dense.intermediate)
    double = text.boolean("use_double_wide_mlp", False, why="default: false")
    layers = []
    for i in range(len(kinds)):
        mixer = mixers[i]
        shares = isinstance(mixer, Attention) and mixer.kv_shared_from is not None
        own = wide if double and shares else dense
        layers.append(LayerSpec(i, mixer, experts or own, parallel_dense=own if experts else None))
    return tuple(layers), dense, experts


def _cross_attention(text: Section, family: Family) -> Attention | None:
    """Attention to image tokens: the same sizes, no RoPE.

    Llama-3.2-Vision has it, with QK-norm, instead of attention in some layers, BLIP in all.
    """
    if family.kind == "encoder-decoder" or not (family.cross_attention or family.plan == "cross"):
        return None
    own = read_attention(text, family, "full")
    if family.cross_attention:
        return replace(own, causal=False, rope=None)
    return replace(own, causal=False, rope=None, qk_norm="head")


def _widths(text: Section, n: int) -> list[int] | None:
    """Gemma-3n lists an MLP width per layer."""
    raw = text.values.get("intermediate_size")
    if not isinstance(raw, list | tuple) or len(raw) != n:
        return None
    return list(text.integers("intermediate_size", length=n, minimum=1, maximum=MAX_WIDTH) or ())


def _mixers(text: Section, family: Family, kinds: list[str]) -> list[Mixer]:
    n = len(kinds)
    if family.mixer == "compressed":
        return _compressed_mixers(text, family, n)
    made = {kind: read_mixer(text, family, kind) for kind in dict.fromkeys(kinds)}
    mixers: list[Mixer] = [made[kind] for kind in kinds]
    rotates = _rotating(text, family, kinds)
    if rotates is not None:
        still = {k: replace(m, rope=None) for k, m in made.items() if isinstance(m, Attention)}
        mixers = [
            m if rotates[i] or kinds[i] not in still else still[kinds[i]]
            for i, m in enumerate(mixers)
        ]
    if not any(isinstance(m, Attention | LatentAttention | Parallel) for m in made.values()):
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
            text.ignore(*text.names(name))
        text.ignore("attention_bias", "rope_theta", "rope_parameters", "rope_scaling")
    mixers = own_heads(text, mixers)
    return shared_kv(text, kinds, shared_indexers(text, mixers))


def _rotating(text: Section, family: Family, kinds: list[str]) -> list[bool] | None:
    """Which layers rotate, or None where all (or none) do."""
    if family.nope == "keys":
        return rope_layers(text, len(kinds))
    if family.nope == "full" and "sliding" in kinds:
        return [kind != "full" for kind in kinds]
    if family.nope == "thetas":  # a base of 0 turns nothing
        thetas = text.find("layer_rope_theta")
        if not isinstance(thetas, list | tuple) or len(thetas) != len(kinds):
            raise text.error("layer_rope_theta", thetas, f"a list of {len(kinds)}")
        return [bool(theta) for theta in thetas]
    if family.nope == "if_nope":  # Granite-4
        nope = text.optional_text("position_embedding_type") == "nope"
        return [not nope] * len(kinds)
    return None


def _compressed_mixers(text: Section, family: Family, n: int) -> list[Mixer]:
    """DeepSeek-V4: compress_ratios lists a ratio per layer, MTP layers at the end."""
    ratios = read_ratios(text, n)
    made = {r: read_compressed(text, family, r) for r in dict.fromkeys(ratios)}
    return [made[r] for r in ratios[:n]]


def read_ratios(text: Section, n: int) -> tuple[int, ...]:
    """compress_ratios, or layer_types with compress_rates as transformers writes them."""
    ratios = text.integers("compress_ratios", maximum=1 << 20)
    if ratios is None:
        words = text.texts("layer_types")
        rates = text.section("compress_rates")
        fine = rates.integer("compressed_sparse_attention") if rates else FINE_RATIO
        coarse = rates.integer("heavily_compressed_attention") if rates else 128
        by_word = {
            "sliding_attention": 0,
            "compressed_sparse_attention": fine,
            "heavily_compressed_attention": coarse,
        }
        if words is None or any(word not in by_word for word in words):
            raise text.error("compress_ratios", None, f"a list of {n} ratios")
        ratios = tuple(by_word[word] for word in words)
    if len(ratios) < n:
        raise text.error("compress_ratios", list(ratios), f"a list of {n} ratios or more")
    text.ignore("compress_rates", "layer_types")
    return ratios


def _num_mtp(text: Section) -> int:
    """How many multi-token-prediction layers; a range where two keys disagree (MiniMax-M3: 1, 7).

    vLLM 0.32 builds num_mtp_modules of them (models/minimax_m3/nvidia/mtp.py).
    """
    count = text.optional_integer("num_nextn_predict_layers", minimum=0, maximum=64) or 0
    modules = text.optional_integer("num_mtp_modules", minimum=0, maximum=64)
    if modules is None or modules == count:
        return count
    return text.reading.decide(
        text.field("num_mtp_modules"),
        f"{modules}, while num_nextn_predict_layers is {count}",
        likely=modules,
        low=min(modules, count),
        high=max(modules, count),
        widens=(),
    )


def read_mtp(
    text: Section,
    family: Family,
    layers: tuple[LayerSpec, ...],
    dense: Dense | None,
    experts: Experts | None,
) -> tuple[LayerSpec, ...]:
    """Multi-token-prediction layers: one full layer each unless the configuration lists kinds."""
    count = _num_mtp(text)
    each = text.optional_integer("mtp_transformer_layers", minimum=0, maximum=64)
    if text.has("use_mtp") and not text.boolean("use_mtp"):
        count = 0
    text.ignore("mtp_use_dedicated_embeddings")
    listed = read_single(text, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    if count == 0 or not layers:
        return ()
    if listed is not None:
        if count * len(listed) > 256:
            raise text.error("num_nextn_predict_layers", count, "fewer layers")
        pairs = []
        for mixer_kind, ffn in listed * count:
            part: FeedForward = NoFeedForward()
            if ffn == "moe" and experts is not None:
                part = experts
            elif ffn == "dense" and dense is not None:
                part = dense
            pairs.append((read_mixer(text, family, mixer_kind), part))
        return tuple(LayerSpec(i, m, f) for i, (m, f) in enumerate(pairs))
    model = next(
        (x for x in reversed(layers) if isinstance(x.mixer, Attention | LatentAttention)),
        layers[-1],
    )
    mixer: Mixer = model.mixer
    if family.mixer == "compressed":
        ratios = read_ratios(text, len(layers))
        mixer = read_compressed(
            text, family, ratios[-1] if len(ratios) > len(layers) else FINE_RATIO
        )
    return tuple(
        LayerSpec(i, mixer, layers[-1].feed_forward, parallel_dense=model.parallel_dense)
        for i in range(count * (each or 1))
    )
