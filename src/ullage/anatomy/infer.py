"""A model without a configuration: what the shapes of its tensors prove, and what they leave open.

Holds the inference for plain decoders in Llama's naming. It is believed only when every stored
tensor is then explained; anything else is refused with a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ullage.anatomy.checkpoint import CheckpointIndex
from ullage.anatomy.compare import FLOAT_DTYPES, compare
from ullage.anatomy.config.read import read_config
from ullage.anatomy.spec import Anatomy, FieldSource, Unknown
from ullage.anatomy.stored import StoredGroup, stored_groups
from ullage.errors import UnsupportedModel

MAX_LAYERS = 10_000
# Sizes of heads that are looked for: from 32 to 256, in steps that kernels support.
_HEAD_DIMS = range(32, 257, 8)
_LIKELY_HEAD_DIMS = (128, 64, 96, 80, 256)
# No header tells how long a context the model was made for.
_SHORTEST, _LONGEST = 1024, 2**20
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_EMBEDDING = "embed_tokens.weight"

# Which family's reader takes the plain decoder, by what its layers hold: a pattern below the layer
# that must be there, then model_type and architecture. The first that applies wins.
_FAMILIES = (
    ("block_sparse_moe.experts.{e}.w1.weight", "mixtral", "MixtralForCausalLM"),
    ("mlp.experts.{e}.gate_proj.weight", "qwen3_moe", "Qwen3MoeForCausalLM"),
    ("self_attn.q_norm.weight", "qwen3", "Qwen3ForCausalLM"),
    ("self_attn.o_proj.bias", "llama", "LlamaForCausalLM"),
    ("self_attn.q_proj.bias", "qwen2", "Qwen2ForCausalLM"),
    ("self_attn.q_proj.weight", "llama", "LlamaForCausalLM"),
)


@dataclass(frozen=True, slots=True)
class Inferred:
    """The configuration that the shapes prove, and the anatomy with its open ends."""

    config: Mapping[str, object]
    anatomy: Anatomy


def anatomy_from_headers(index: CheckpointIndex) -> Inferred:
    """What a checkpoint without a configuration is, as far as its headers prove it.

    Layers, widths, vocabulary, and the rows of K and V (so the bytes of KV per token) are proved;
    the split of those rows into heads, experts per token, context length, windows, rotary numbers
    and eps are not: they are `unknowns`, and `low` and `high` bracket those that cost something.
    Raises UnsupportedModel: not a plain decoder in Llama's naming, incomplete, or quantised.
    """
    if not index.is_complete or index.format != "safetensors":
        raise _refusal(index, "an incomplete checkpoint without a configuration")
    groups, _ = stored_groups(index)
    proved = _Proved(index, groups)
    config = proved.config()
    heads = proved.head_dims()
    top_k = proved.top_k()
    likely = next((d for d in _LIKELY_HEAD_DIMS if d in heads), heads[-1])
    anatomies = [
        read_config({**config, **proved.alternative(d, k, longest)}, file=_first_file(index))
        for d, k, longest in (
            (likely, top_k[0], _SHORTEST),
            (heads[-1], top_k[0], _SHORTEST),
            (heads[0], top_k[-1], _LONGEST),
        )
    ]
    spec, low, high = (anatomy.spec for anatomy in anatomies)
    comparison = compare(spec, index)
    if not comparison.agrees:
        differences = (
            *comparison.unexpected,
            *comparison.missing,
            *comparison.wrong_shape,
            *comparison.wrong_dtype,
        )
        found = differences[0].name if differences else comparison.reason
        raise _refusal(index, f"tensors that no plain decoder explains ({found})")
    unknowns = proved.unknowns(heads, top_k)
    sources = tuple(
        FieldSource(s.field, s.value, f"header: {proved.source_of(s.field)}")
        for s in anatomies[0].sources
        if s.source.startswith("config: ") and s.field in config
    )
    return Inferred(
        config,
        Anatomy(
            spec=replace(spec, unknowns=unknowns),
            low=replace(low, unknowns=unknowns),
            high=replace(high, unknowns=unknowns),
            sources=sources,
        ),
    )


def _first_file(index: CheckpointIndex) -> str:
    return index.files[0] if index.files else "checkpoint"


def _refusal(index: CheckpointIndex, found: str) -> UnsupportedModel:
    return UnsupportedModel(found, file=_first_file(index), expected="a config.json beside it")


class _Proved:
    """Shapes of a plain decoder's tensors, by their names below the layer."""

    def __init__(self, index: CheckpointIndex, groups: dict[str, StoredGroup]) -> None:
        self.index = index
        embeddings = [name for name in groups if name.endswith(_EMBEDDING)]
        if len(embeddings) != 1:
            raise _refusal(index, f"{len(embeddings)} tensors called {_EMBEDDING}")
        self.prefix = embeddings[0].removesuffix(_EMBEDDING)
        self.embedding = groups[embeddings[0]]
        self.groups = groups
        self.num_layers = self.count_layers()
        self.first = {
            name.removeprefix(f"{self.prefix}layers.0."): group
            for name, group in groups.items()
            if name.startswith(f"{self.prefix}layers.0.")
        }
        row = next(((m, a) for name, m, a in _FAMILIES if name in self.first), None)
        if row is None:
            raise _refusal(index, "layers without self_attn.q_proj")
        self.model_type, self.architecture = row

    def count_layers(self) -> int:
        start = self.prefix + "layers."
        numbers = {n[len(start) :].partition(".")[0] for n in self.groups if n.startswith(start)}
        count = len(numbers)
        if not 0 < count <= MAX_LAYERS or numbers != {str(n) for n in range(count)}:
            raise _refusal(self.index, f"{count} layers that are not numbered from 0")
        return count

    def matrix(self, name: str) -> tuple[int, int]:
        """Rows and columns of `name` in layer 0; refused when it is not such a matrix."""
        group = self.first.get(name)
        if group is None or group.shape is None or len(group.shape) != 2 or 0 in group.shape:
            raise _refusal(self.index, f"layers without a matrix {name}")
        if group.dtype not in FLOAT_DTYPES:
            raise _refusal(self.index, f"quantised weights ({group.dtype} {name})")
        return group.shape[0], group.shape[1]

    def config(self) -> dict[str, object]:
        """The keys that shapes prove, in the family's spelling."""
        shape = self.embedding.shape
        if shape is None or len(shape) != 2 or 0 in shape:
            raise _refusal(self.index, f"{_EMBEDDING} is not a matrix")
        found: dict[str, object] = {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "vocab_size": shape[0],
            "hidden_size": shape[1],
            "num_hidden_layers": self.num_layers,
            "dtype": _DTYPES[self.first["self_attn.q_proj.weight"].dtype]
            if self.matrix("self_attn.q_proj.weight")
            else None,
            "tie_word_embeddings": not any(n.endswith("lm_head.weight") for n in self.groups),
        }
        if self.model_type == "mixtral":
            name = "block_sparse_moe.experts.{e}.w1.weight"
            found["num_local_experts"] = self.first[name].count
            found["intermediate_size"] = self.matrix(name)[0]
        elif self.model_type == "qwen3_moe":
            name = "mlp.experts.{e}.gate_proj.weight"
            found["num_experts"] = self.first[name].count
            found["moe_intermediate_size"] = self.matrix(name)[0]
        else:
            found["intermediate_size"] = self.matrix("mlp.up_proj.weight")[0]
        if self.model_type == "llama":
            found["attention_bias"] = "self_attn.o_proj.bias" in self.first
            found["mlp_bias"] = "mlp.up_proj.bias" in self.first
        return found

    def head_dims(self) -> list[int]:
        """The head sizes that the rows of Q and K allow, ascending; one when a norm proves it."""
        q_rows = self.matrix("self_attn.q_proj.weight")[0]
        k_rows = self.matrix("self_attn.k_proj.weight")[0]
        if self.matrix("self_attn.v_proj.weight")[0] != k_rows:
            raise _refusal(self.index, "K and V of different widths")
        norm = self.first.get("self_attn.q_norm.weight")
        sizes = list(_HEAD_DIMS) if norm is None else [norm.num_elements]
        fitting = [d for d in sizes if d and q_rows % d == 0 and k_rows % d == 0]
        if q_rows % k_rows or not fitting:
            raise _refusal(self.index, f"{q_rows} rows of Q and {k_rows} of K, which are no heads")
        return fitting

    def top_k(self) -> list[int]:
        """The least and the greatest number of experts per token; [0] without experts."""
        if self.model_type not in ("mixtral", "qwen3_moe"):
            return [0]
        count = next(g.count for name, g in self.first.items() if "{e}" in name)
        return [1, count]

    def alternative(self, head_dim: int, top_k: int, max_positions: int) -> dict[str, object]:
        q_rows = self.matrix("self_attn.q_proj.weight")[0]
        k_rows = self.matrix("self_attn.k_proj.weight")[0]
        found: dict[str, object] = {
            "head_dim": head_dim,
            "num_attention_heads": q_rows // head_dim,
            "num_key_value_heads": k_rows // head_dim,
            "max_position_embeddings": max_positions,
        }
        if top_k:
            found["num_experts_per_tok"] = top_k
        return found

    def source_of(self, key: str) -> str:
        return "shapes" if key not in ("tie_word_embeddings",) else "whether lm_head is stored"

    def unknowns(self, heads: list[int], top_k: list[int]) -> tuple[Unknown, ...]:
        silent = "no configuration, and headers do not tell"
        unknowns = [
            Unknown("max_position_embeddings", f"{silent} (bounds {_SHORTEST} to {_LONGEST})"),
            Unknown("sliding_window", f"{silent}: KV is that of full attention, an upper bound"),
            Unknown("rope_theta", silent),
            Unknown("rms_norm_eps", silent),
        ]
        if len(heads) > 1:
            rows = self.matrix("self_attn.k_proj.weight")[0]
            found = f"{rows} rows of K, heads of {', '.join(map(str, heads))}"
            unknowns.append(Unknown("num_key_value_heads", found, ("kv",)))
        if len(top_k) > 1:
            unknowns.append(Unknown("num_experts_per_tok", f"1 to {top_k[-1]}", ("flops",)))
        return tuple(unknowns)
