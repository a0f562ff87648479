"""GGUF metadata and tensors → the configuration that a config.json of that model would hold.

Holds the translation, with the source of every key. Rows of architectures are in
`architectures.py`, names of tensors in `names.py`, how they are stored in `stored_types.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ullage.anatomy.checkpoint import open_regular
from ullage.anatomy.gguf.adjustments import ADJUSTMENTS
from ullage.anatomy.gguf.architectures import COMMON_KEYS
from ullage.anatomy.gguf.facts import Facts
from ullage.anatomy.gguf.header import GgufHeader
from ullage.anatomy.gguf.rope import rope_scaling
from ullage.anatomy.spec import Anatomy, FieldSource
from ullage.errors import MalformedCheckpoint


@dataclass(frozen=True, slots=True)
class GgufConfig:
    """A configuration in the spelling of config.json, and where each of its keys came from.

    `sources` has the same keys and gives each the source of a FieldSource (`header:
    llama.block_count`, `derived: …`, `default: …`).
    """

    config: Mapping[str, object]
    sources: Mapping[str, str]


def config_from_gguf(headers: Sequence[GgufHeader]) -> GgufConfig:
    """The configuration that the headers of one model (all its parts, in order) prove.

    Raises UnsupportedModel for an architecture without a row or a per-layer value that the row
    cannot express, MalformedCheckpoint when metadata and tensors contradict each other.
    """
    facts = Facts(headers)
    row = facts.row
    facts.put("model_type", row.model_type, "header: general.architecture")
    facts.put("architectures", [row.architecture], "header: general.architecture")
    facts.put(
        "dtype",
        "float16",
        "default: what llama.cpp and vLLM compute GGUF models in; GGUF names none",
    )
    for key, constant in row.constants.items():
        facts.put(key, constant, f"default: GGUF architecture {facts.architecture}")
    _put_sizes(facts)
    for suffix, key in {**COMMON_KEYS, **row.keys}.items():
        value = facts.scalar(suffix)
        if value is not None:
            facts.put(key, value, f"header: {facts.architecture}.{suffix}")
    epsilon = facts.scalar("attention.layer_norm_epsilon")
    if epsilon is not None:
        facts.put(
            row.layer_norm_key,
            epsilon,
            f"header: {facts.architecture}.attention.layer_norm_epsilon",
        )
    _put_heads(facts)
    _put_rope(facts)
    _put_presences(facts)
    _put_experts(facts)
    _put_windows(facts)
    _put_tokens(facts)
    adjust = ADJUSTMENTS.get(facts.architecture)
    if adjust is not None:
        adjust(facts)
    return GgufConfig(facts.config, facts.sources)


def _put_sizes(facts: Facts) -> None:
    """Layers, width and vocabulary: what the metadata claim must be what the tensors show."""
    embedding = facts.shape("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise MalformedCheckpoint(
            "no matrix token_embd.weight", file=facts.file, expected="a file that holds a model"
        )
    hidden = facts.required("embedding_length")
    if embedding[1] != hidden:
        raise facts.contradiction(
            "embedding_length", f"{hidden}", f"{embedding[1]}, the width of token_embd.weight"
        )
    layers = {name.split(".", 2)[1] for name in facts.tensors if name.startswith("blk.")}
    claimed = facts.num_layers()
    if len(layers) != claimed or any(str(layer) not in layers for layer in range(claimed)):
        raise facts.contradiction(
            "block_count", f"{claimed}", f"{len(layers)}, the layers that have tensors"
        )
    extra = facts.whole("nextn_predict_layers") or 0
    if extra >= claimed:
        raise facts.contradiction("nextn_predict_layers", f"{extra}", f"less than {claimed} layers")
    source = f"header: {facts.architecture}.block_count"
    if "nextn_predict_layers" in facts.row.keys:
        facts.put("num_nextn_predict_layers", 0, "header: no nextn_predict_layers")
    facts.put("num_hidden_layers", claimed - extra, source + (" less MTP layers" if extra else ""))
    facts.put("vocab_size", embedding[0], "header: rows of token_embd.weight")


def _put_heads(facts: Facts) -> None:
    """head_dim, and V's where it differs; a shape proves it where no key tells."""
    heads = facts.whole("attention.head_count")
    if not heads:
        return
    kv_heads = facts.whole("attention.head_count_kv")
    if kv_heads is None and "num_key_value_heads" not in facts.config:
        facts.put("num_key_value_heads", heads, "default: attention.head_count, as llama.cpp")
    key_length = facts.whole("attention.key_length")
    if key_length:
        facts.put("head_dim", key_length, f"header: {facts.architecture}.attention.key_length")
    else:
        rows = facts.layer_shape("attn_q.weight")
        if rows is not None and rows[0] and rows[0] % heads == 0:
            facts.put("head_dim", rows[0] // heads, "header: rows of attn_q.weight / head_count")
        elif (facts.layer_shape("attn_qkv.weight") or (0,))[0]:
            fused = (facts.layer_shape("attn_qkv.weight") or (0,))[0]
            split = heads + 2 * (kv_heads or heads)
            if fused % split:
                raise facts.contradiction(
                    "attention.head_count", f"{heads}", f"a divisor of {fused} rows of attn_qkv"
                )
            facts.put("head_dim", fused // split, "header: rows of attn_qkv.weight / heads")
    value_length = facts.whole("attention.value_length")
    if value_length and value_length != facts.config.get("head_dim"):
        facts.put(
            "v_head_dim", value_length, f"header: {facts.architecture}.attention.value_length"
        )


def _put_rope(facts: Facts) -> None:
    rotary, head_dim = facts.whole("rope.dimension_count"), facts.config.get("head_dim")
    if (
        rotary
        and isinstance(head_dim, int)
        and (rotary != head_dim or facts.row.rotary_key.endswith("_dim"))
    ):
        key = facts.row.rotary_key
        facts.put(
            key,
            rotary if key.endswith("_dim") else rotary / head_dim,
            f"header: {facts.architecture}.rope.dimension_count",
        )
    prefix = f"{facts.architecture}.rope.scaling."
    scaling = {
        key.removeprefix(prefix): value
        for key, value in facts.metadata.items()
        if key.startswith(prefix)
    }
    theta = facts.scalar("rope.freq_base")
    found = rope_scaling(scaling, lambda name: _small_table(facts, name), float(theta or 10000.0))
    if found is not None:
        facts.put("rope_scaling", found[0], found[1])
        original = found[0].get("original_max_position_embeddings")
        if found[0]["rope_type"] == "longrope" and original is not None:
            facts.put("original_max_position_embeddings", original, "header: rope.scaling.*")
    sections = facts.raw("rope.dimension_sections")
    if isinstance(sections, tuple) and any(sections):
        held = facts.config.setdefault("rope_scaling", {"rope_type": "default"})
        if isinstance(held, dict):
            held["mrope_section"] = [size for size in sections if size]
        facts.sources["rope_scaling"] = f"header: {facts.architecture}.rope.dimension_sections"


def _small_table(facts: Facts, name: str) -> tuple[float, ...] | None:
    """The values of a small float32 vector; None when the file has no such tensor."""
    tensor = facts.tensors.get(name)
    if tensor is None:
        return None
    if tensor.dtype != "F32" or tensor.num_elements > 4096:
        raise MalformedCheckpoint(
            f"{tensor.dtype} {list(tensor.shape)}",
            file=tensor.file,
            field=name,
            expected="a short vector of F32",
        )
    with open_regular(Path(tensor.file)) as (stream, _):
        stream.seek(tensor.start)
        raw = stream.read(tensor.num_bytes)
    if len(raw) != tensor.num_bytes:
        raise MalformedCheckpoint("the file shrank while it was read", file=tensor.file)
    values = struct.unpack(f"{'>' if facts.big_endian else '<'}{tensor.num_elements}f", raw)
    if not all(0 < value < 1e9 for value in values):
        raise MalformedCheckpoint("values that are no factors", file=tensor.file, field=name)
    return values


def _put_presences(facts: Facts) -> None:
    """What the presence of a tensor proves: an own output matrix, biases."""
    tied = "output.weight" not in facts.tensors
    facts.put(
        "tie_word_embeddings", tied, f"header: {'no ' if tied else ''}output.weight is stored"
    )
    row = facts.row
    if row.bias_key is not None:
        name = "attn_q.bias" if facts.layer_shape("attn_q.weight") else "attn_qkv.bias"
        present = facts.layer_shape(name) is not None
        facts.put(row.bias_key, present, f"header: {'' if present else 'no '}{name} is stored")
    if row.mlp_bias_key is not None:
        present = facts.layer_shape("ffn_up.bias") is not None
        facts.put(row.mlp_bias_key, present, f"header: {'' if present else 'no '}ffn_up.bias")


def _put_experts(facts: Facts) -> None:
    """Widths of experts that no key tells, from the shape [experts, width, hidden] of the stack."""
    keys = {**facts.row.keys}
    stacked = facts.layer_shape("ffn_up_exps.weight")
    width_key = keys.get("expert_feed_forward_length")
    if stacked is None or len(stacked) != 3:
        return
    count = facts.whole("expert_count")
    if count != stacked[0]:
        raise facts.contradiction("expert_count", f"{count}", f"{stacked[0]}, as ffn_up_exps has")
    if width_key is not None and facts.raw("expert_feed_forward_length") is None:
        facts.put(width_key, stacked[1], "header: rows of ffn_up_exps.weight")
    shared = facts.layer_shape("ffn_up_shexp.weight")
    shared_key = keys.get("expert_shared_feed_forward_length")
    if shared is not None and shared_key and shared_key not in facts.config:
        facts.put(shared_key, shared[0], "header: rows of ffn_up_shexp.weight")


def _put_windows(facts: Facts) -> None:
    """Which layers have a window, where the file lists them."""
    if "sliding_window" not in facts.config:
        # Said outright, since the classes of some configurations assume a window otherwise.
        facts.put("sliding_window", None, "header: no attention.sliding_window")
    pattern = facts.raw("attention.sliding_window_pattern")
    source = f"header: {facts.architecture}.attention.sliding_window_pattern"
    if isinstance(pattern, tuple):
        kinds = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
        facts.put("layer_types", kinds[: facts.num_layers()], source)
        facts.drop("sliding_window_pattern")
    elif isinstance(pattern, int) and not isinstance(pattern, bool):
        facts.put("sliding_window_pattern", pattern, source)


_TOKEN_KEYS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
    "unk_token_id": "tokenizer.ggml.unknown_token_id",
}


def _put_tokens(facts: Facts) -> None:
    for key, name in _TOKEN_KEYS.items():
        value = facts.metadata.get(name)
        if type(value) is int:
            facts.put(key, value, f"header: {name}")


def as_headers_say(anatomy: Anatomy, found: GgufConfig) -> Anatomy:
    """The anatomy that was read from `found.config`, with the header's sources."""

    def source(field: FieldSource) -> FieldSource:
        key = field.source.removeprefix("config: ")
        return replace(field, source=found.sources.get(key, field.source))

    return replace(anatomy, sources=tuple(source(field) for field in anatomy.sources))
