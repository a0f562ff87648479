"""What differs or is shared from layer to layer: heads of their own, indexers, keys and values.

Changes to mixers that are read already; one mixer's own reading is `mixers.py`.
"""

from __future__ import annotations

from dataclasses import replace

from ullage.anatomy.config.keys import MAX_WIDTH, Section
from ullage.anatomy.spec import Attention, LatentAttention, Mixer


def own_heads(text: Section, mixers: list[Mixer]) -> list[Mixer]:
    """Layers with head counts of their own: lists per layer, or per_layer_config."""
    n = len(mixers)
    heads = text.integers("num_attention_heads_per_layer", length=n, minimum=1)
    kv_heads = text.integers("num_key_value_heads_per_layer", length=n, minimum=1)
    own: dict[int, dict[str, int]] = {}
    for i in range(n):
        if heads is not None:
            own.setdefault(i, {})["num_heads"] = heads[i]
        if kv_heads is not None:
            own.setdefault(i, {})["num_kv_heads"] = kv_heads[i]
    nested = text.section("per_layer_config")
    if nested is not None:
        fields = {
            "num_attention_heads": "num_heads",
            "num_key_value_heads": "num_kv_heads",
            "head_dim": "head_dim",
            "v_head_dim": "v_head_dim",
        }
        for key in nested.values:
            layer = nested.section(key)
            if layer is None:
                continue
            if not (key.isascii() and key.isdigit() and len(key) < 6 and int(key) < n):
                raise nested.error(key, layer.values, f"a layer below {n}")
            for name in layer.values:
                if name in fields:
                    own.setdefault(int(key), {})[fields[name]] = layer.integer(
                        name, maximum=MAX_WIDTH
                    )
                elif name not in ("sliding_window", "rope_parameters", "layer_type"):
                    text.reading.unknown(layer.field(name), "not understood", "weights", "kv")
    if not own:
        return mixers
    made: dict[tuple[int, tuple[tuple[str, int], ...]], Mixer] = {}
    out = list(mixers)
    for i, sizes in own.items():
        mixer = mixers[i]
        if not isinstance(mixer, Attention):
            continue
        found = (id(mixer), tuple(sorted(sizes.items())))
        if found not in made:
            if "head_dim" in sizes and mixer.v_head_dim == mixer.head_dim:
                sizes.setdefault("v_head_dim", sizes["head_dim"])
            changed = replace(mixer, **sizes)  # type: ignore[arg-type]
            if mixer.rope is not None:  # the same share of another head turns
                turned = mixer.rope.rotary_dim * changed.head_dim // mixer.head_dim
                changed = replace(changed, rope=replace(mixer.rope, rotary_dim=turned))
            if changed.num_heads % changed.num_kv_heads:
                raise text.error("num_key_value_heads", changed.num_kv_heads, "a divisor of heads")
            made[found] = changed
        out[i] = made[found]
    return out


def shared_indexers(text: Section, mixers: list[Mixer]) -> list[Mixer]:
    """GLM-5.2: indexer_types says which layers reuse an earlier layer's choice of keys."""
    types = text.texts("indexer_types", length=len(mixers))
    text.ignore(
        "index_share_for_mtp_iteration",
        "index_skip_topk_offset",
        "index_topk_freq",
        "index_topk_pattern",
    )
    if types is None:
        return mixers
    shared: dict[int, Mixer] = {}
    out: list[Mixer] = []
    for i, (word, mixer) in enumerate(zip(types, mixers, strict=True)):
        if word not in ("full", "shared"):
            raise text.error(f"indexer_types[{i}]", word, "full or shared")
        if word == "shared" and isinstance(mixer, LatentAttention) and mixer.indexer is not None:
            if id(mixer) not in shared:
                shared[id(mixer)] = replace(mixer, indexer=replace(mixer.indexer, shared=True))
            mixer = shared[id(mixer)]
        out.append(mixer)
    return out


def shared_kv(text: Section, kinds: list[str], mixers: list[Mixer]) -> list[Mixer]:
    """Gemma-3n and -4: the last layers read the KV of the last layer of their kind before them."""
    mixers = _cross_layer(text, mixers)
    count = text.optional_integer("num_kv_shared_layers", minimum=0) or 0
    n = len(mixers)
    if count == 0:
        return mixers
    if count == n:  # a draft whose every layer reads its target's cache
        foreign = {id(m): replace(m, kv_shared_from=-1) for m in mixers if isinstance(m, Attention)}
        return [foreign.get(id(m), m) for m in mixers]
    if count > n:
        raise text.error("num_kv_shared_layers", count, f"at most the {n} layers")
    first = n - count
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    out = list(mixers)
    for i in range(first, n):
        mixer = mixers[i]
        if kinds[i] not in last or not isinstance(mixer, Attention):
            raise text.error("num_kv_shared_layers", count, "a layer of each kind to read from")
        out[i] = replace(mixer, kv_shared_from=last[kinds[i]])
    return out


def _cross_layer(text: Section, mixers: list[Mixer]) -> list[Mixer]:
    """Hunyuan-Large's use_cla: groups of cla_share_factor layers with one K and V.

    Whether an engine caches it once or per layer is its own choice, so that is a range.
    """
    if not text.knows("use_cla") or not text.boolean("use_cla", False):
        text.ignore("cla_share_factor", "use_cla")
        return mixers
    factor = text.integer("cla_share_factor", 2, why="default: 2", maximum=1 << 16)
    shared = [
        replace(m, kv_shared_from=i - i % factor) if isinstance(m, Attention) and i % factor else m
        for i, m in enumerate(mixers)
    ]
    return text.reading.decide(
        text.field("use_cla"),
        "layers that share K and V",
        likely=shared,
        low=shared,
        high=mixers,
        widens=("weights", "kv"),
    )
