"""Every parameter tensor that a Hugging Face checkpoint of a model holds: `expected_tensors`.

Pure functions of a ModelSpec: names, shapes, counts, how tensor parallelism cuts each. How a
quantised matrix is stored is `quantization.py`; bytes are `costs/weights.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ullage.anatomy.naming import Extra, Naming, naming_for
from ullage.anatomy.spec import (
    Attention,
    CompressedAttention,
    Dense,
    Experts,
    FeedForward,
    Indexer,
    LatentAttention,
    LayerSpec,
    LinearAttention,
    LinearFeedForward,
    LinearMixer,
    Mamba,
    Mixer,
    ModelSpec,
    NoFeedForward,
    NoMixer,
    Norm,
    Parallel,
    ShortConv,
)

Role = Literal[
    "embed", "position", "lm_head",
    "q", "k", "v", "qkv", "o", "attn_gate", "sinks", "attn_bias_table",
    "q_a", "q_b", "kv_a", "kv_b", "indexer", "compressor",
    "mamba_in", "mamba_out", "mamba", "linear_in", "linear_out", "linear", "conv",
    "gate", "up", "down", "gate_up", "router", "hash_table",
    "expert_gate", "expert_up", "expert_down", "expert_gate_up",
    "shared_gate", "shared_up", "shared_down", "shared_gate_up", "shared_router", "latent",
    "norm", "bias", "expert_bias", "scale", "hyper", "per_layer", "mtp", "tower",
]  # fmt: skip
"""What a tensor does; a bias has the role `bias` (`expert_bias` when it lies with the experts)."""

Shard = Literal["vocab", "column", "row", "kv", "qkv", "expert", "replicated"]
"""How tensor parallelism cuts a tensor, along `TensorSpec.cut`.

`vocab`: rows of a padded vocabulary. `column`, `row`: output or input dimension in equal parts.
`kv`: as column, but a rank holds at least one of `groups` heads. `qkv`: a fused matrix whose last
`grouped` rows are cut as `kv`, the rest as column. `expert`: expert parallelism deals experts out,
otherwise each expert is cut along `cut` (not at all when it is None). `replicated`: on every rank.
"""

Stack = Literal["decoder", "encoder", "mtp", "tower"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One expected tensor, or `count` equal ones whose names differ by the expert index {e}.

    `shape` is of one tensor, as stored. `module` is the name without `.weight` or `.bias`.
    `named` is False when the family's names are not known: shapes and counts then hold, but the
    name is only Llama's way of saying it and must not be looked for in a file.
    `quantizable`: a Linear's matrix, which a quantiser may have packed; `in_dim` is its input
    dimension. `dtype` is what the family stores whatever the model's dtype is, or None.
    `num_experts` counts the experts along the first dimension of a stacked tensor, or is `count`.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    module: str
    role: Role
    shard: Shard
    layer: int | None
    stack: Stack
    quantizable: bool
    named: bool
    cut: int | None = None
    groups: int = 0
    grouped: int = 0
    in_dim: int = -1
    dtype: str | None = None
    num_experts: int = 0

    @property
    def num_elements(self) -> int:
        """Elements of all `count` tensors together."""
        total = self.count
        for size in self.shape:
            total *= size
        return total


def expected_tensors(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """Every parameter tensor of the model's checkpoint, in the order of the forward pass.

    Tied output embeddings and non-persistent buffers (rotary tables) are not stored, so not here.
    Towers come as one entry of as many elements as the spec says; a tower of unknown size (None)
    is left out, and the spec's `unknowns` say so.
    """
    naming = naming_for(spec.architecture, spec.model_type, spec.family)
    tensors: list[TensorSpec] = []
    decoder = _Stack(
        spec, naming, tensors.append, "encoder" if spec.kind == "encoder" else "decoder"
    )
    if spec.encoder_layers:
        names = naming_for(naming.encoder or "") if naming.encoder else naming
        encoder = _Stack(spec, names, tensors.append, "encoder")
        encoder.positions(spec.encoder_positions)
        encoder.layers(spec.encoder_layers)
        encoder.final_norm()
    decoder.embeddings()
    decoder.layers(spec.layers)
    decoder.final_norm()
    decoder.head()
    _Stack(spec, naming, tensors.append, "mtp").mtp_layers()
    for number, tower in enumerate(spec.towers):
        if tower.parameters:
            name = f"{tower.modality}_tower.{number}"
            tensors.append(
                TensorSpec(
                    name,
                    (tower.parameters,),
                    1,
                    name,
                    "tower",
                    "replicated",
                    None,
                    "tower",
                    quantizable=False,
                    named=False,
                    dtype=tower.dtype,
                )
            )
    return tuple(tensors)


class _Stack:
    """Writes down the tensors of one stack of layers, in its family's names."""

    def __init__(
        self, spec: ModelSpec, naming: Naming, emit: Callable[[TensorSpec], None], stack: Stack
    ) -> None:
        self.spec = spec
        self.naming = naming
        self.paths = naming.paths
        self.emit = emit
        self.stack: Stack = stack
        self.layer: int | None = None
        self.prefix = ""
        self.named = naming.known

    # --- one tensor ------------------------------------------------------------------------------

    def tensor(
        self,
        path: str,
        shape: tuple[int, ...],
        role: Role,
        shard: Shard = "replicated",
        *,
        suffix: str = ".weight",
        cut: int | None = None,
        count: int = 1,
        quantizable: bool = False,
        groups: int = 0,
        grouped: int = 0,
        in_dim: int = -1,
        dtype: str | None = None,
        num_experts: int = 0,
    ) -> None:
        module = self.prefix + path
        self.emit(
            TensorSpec(
                module + suffix,
                shape,
                count,
                module,
                role,
                shard,
                self.layer,
                self.stack,
                quantizable,
                self.named,
                cut,
                groups,
                grouped,
                in_dim,
                dtype,
                num_experts or (count if shard == "expert" else 0),
            )
        )

    def linear(
        self,
        path: str,
        rows: int,
        columns: int,
        role: Role,
        shard: Shard,
        *,
        bias: bool = False,
        groups: int = 0,
        grouped: int = 0,
    ) -> None:
        """A matrix [rows out, columns in] (turned round where the family does) and its bias."""
        turned = self.naming.transposed
        cut = {"column": 0, "kv": 0, "qkv": 0, "row": 1}.get(shard)
        if cut is not None and turned:
            cut = 1 - cut
        self.tensor(
            path, (columns, rows) if turned else (rows, columns), role, shard, cut=cut,
            quantizable=True, groups=groups, grouped=grouped, in_dim=0 if turned else 1,
        )  # fmt: skip
        if bias:
            whole = shard in ("row", "replicated")
            self.tensor(
                path, (rows,), "bias", "replicated" if whole else shard, suffix=".bias",
                cut=None if whole else 0, groups=groups, grouped=grouped,
            )  # fmt: skip

    def norm(
        self, path: str, width: int, norm: Norm | None = None, shard: Shard = "replicated"
    ) -> None:
        norm = norm or self.spec.norm
        if not norm.affine:
            return
        cut = 0 if shard == "column" else None
        self.tensor(path, (width,), "norm", shard, cut=cut)
        if norm.kind == "layer" and norm.bias:
            self.tensor(path, (width,), "norm", shard, suffix=".bias", cut=cut)

    def extras(self, scope: str, sizes: dict[str, int]) -> None:
        for extra in self.naming.extras:
            if extra.scope == scope:
                self.family_tensor(extra, sizes)

    def family_tensor(self, extra: Extra, sizes: dict[str, int]) -> None:
        shape = tuple(sizes[s] if isinstance(s, str) else s for s in extra.shape)
        path, dot, kind = extra.path.rpartition(".")
        if kind in ("weight", "bias"):
            suffix = dot + kind
        else:
            path, suffix = extra.path, ""
        vocab = extra.role in ("embed", "lm_head") and not extra.linear
        self.tensor(
            path, shape, extra.role, "vocab" if vocab else "replicated", suffix=suffix,  # type: ignore[arg-type]
            cut=0 if vocab else None, quantizable=extra.linear or extra.role == "lm_head",
            in_dim=len(shape) - 1, dtype=extra.dtype,
        )  # fmt: skip

    def sizes(self, num_experts: int = 0) -> dict[str, int]:
        hidden = self.spec.hidden_size
        width = self.spec.embedding_size or hidden
        return {
            "H": hidden, "2H": 2 * hidden, "V": self.spec.vocab_size, "E": num_experts, "M": width,
        }  # fmt: skip

    # --- outside the layers ----------------------------------------------------------------------

    def positions(self, positions: object) -> None:
        rows = getattr(positions, "table_rows", 0)
        kind = getattr(positions, "kind", "none")
        if rows and kind in ("learned", "sinusoidal"):
            width = self.spec.hidden_size
            if self.spec.kind == "encoder":
                width = self.spec.embedding_size or width
            self.tensor(self.paths["positions"], (rows, width), "position")
        if self.spec.embedding_norm:
            width = self.spec.hidden_size
            if self.spec.kind == "encoder":
                width = self.spec.embedding_size or width
            self.norm(self.paths["embed_norm"], width)

    def embeddings(self) -> None:
        spec = self.spec
        width = spec.embedding_size or spec.hidden_size
        self.tensor(
            self.paths["embed"], (spec.vocab_size, width), "embed", "vocab", cut=0, in_dim=1
        )
        if spec.token_types:
            self.tensor(self.paths["token_types"], (spec.token_types, width), "position")
        self.positions(spec.positions)
        if width != spec.hidden_size:
            bias = spec.kind == "encoder"
            self.linear(self.paths["project_in"], spec.hidden_size, width, "embed", "replicated",
                        bias=bias)  # fmt: skip
        if spec.per_layer_input:
            vocab, ple = spec.per_layer_input
            every = ple * len(spec.layers)
            self.tensor(self.paths["ple_embed"], (vocab, every), "per_layer", "vocab", cut=0)
            self.linear(self.paths["ple_projection"], every, spec.hidden_size, "per_layer",
                        "replicated")  # fmt: skip
            self.norm(self.paths["ple_norm"], ple)
        if spec.residual_streams > 1:
            self.hyper("hc_head", spec.residual_streams, spec.residual_streams, 1, joint="_")
        self.extras("model", self.sizes())

    def final_norm(self) -> None:
        if self.spec.final_norm:
            self.norm(self.paths["final_norm"], self.spec.hidden_size)

    def head(self) -> None:
        spec = self.spec
        width = spec.embedding_size or spec.hidden_size
        if width != spec.hidden_size and spec.kind != "encoder":
            self.linear(self.paths["project_out"], width, spec.hidden_size, "lm_head", "replicated")
        if not spec.lm_head:
            return
        self.extras("head", self.sizes())
        path = self.paths["lm_head"]
        if not spec.tie_embeddings:
            self.tensor(path, (spec.vocab_size, width), "lm_head", "vocab", cut=0, quantizable=True,
                        in_dim=1)  # fmt: skip
        if spec.lm_head_bias:
            bias = self.paths["lm_head_bias"].removesuffix(".bias")
            self.tensor(bias, (spec.vocab_size,), "bias", "vocab", suffix=".bias", cut=0)

    def mtp_layers(self) -> None:
        spec = self.spec
        if not spec.mtp_layers:
            return
        self.named = self.naming.known and self.naming.mtp is not None
        path = self.naming.mtp or self.paths["layer"]
        first = len(spec.layers) if self.naming.mtp_from_end or self.naming.mtp is None else 0
        self.extras("mtp", self.sizes())
        for number, layer in enumerate(spec.mtp_layers):
            self.layer = layer.index
            self.prefix = path.replace("{i}", str(first + number)) + "."
            self.one_layer(layer)
            self.extras("mtp_layer", self.sizes())
        self.layer, self.prefix = None, ""

    # --- a layer ---------------------------------------------------------------------------------

    def layers(self, layers: tuple[LayerSpec, ...]) -> None:
        before, after = self.paths["layer"].split("{i}")
        for number, layer in enumerate(layers):
            self.layer = layer.index
            self.prefix = f"{before}{number}{after}."
            self.one_layer(layer, first=number == 0)
        self.layer, self.prefix = None, ""

    def one_layer(self, layer: LayerSpec, *, first: bool = False) -> None:
        spec, hidden = self.spec, self.spec.hidden_size
        place = spec.norm.place
        has_mixer = not isinstance(layer.mixer, NoMixer)
        has_ff = not isinstance(layer.feed_forward, NoFeedForward)
        parallel = place == "parallel"
        before = place in ("pre", "sandwich", "parallel")
        after = place in ("post", "sandwich")
        if has_mixer and before and (self.naming.first_norm or not first):
            self.norm(self.paths["pre1"], hidden)
        self.mixer(layer.mixer)
        if has_mixer and after:
            self.norm(self.paths["post1"], hidden)
        if first and self.relative_rows():
            rows = self.relative_rows()
            heads = layer.mixer.num_heads if isinstance(layer.mixer, Attention) else 1
            self.tensor(self.paths["relative_bias"], (rows, heads), "attn_bias_table", "column",
                        cut=1)  # fmt: skip
        if layer.cross_attention is not None:
            self.norm(self.paths["cross_norm"], hidden)
            self.attention(layer.cross_attention, cross="cross_")
        if has_ff and before and (not parallel or self.naming.parallel_norms == 2):
            self.norm(self.paths["pre2"], hidden)
        self.feed_forward(layer.feed_forward)
        if layer.parallel_dense is not None:
            self.dense(layer.parallel_dense, "dense_")
        if has_ff and after:
            self.norm(self.paths["post2"], hidden)
        if spec.per_layer_input and self.stack == "decoder":
            width = spec.per_layer_input[1]
            self.linear(self.paths["ple_gate"], width, hidden, "per_layer", "replicated")
            self.linear(self.paths["ple_out"], hidden, width, "per_layer", "replicated")
            self.norm(self.paths["ple_post_norm"], hidden)
        if spec.residual_streams > 1:
            streams = spec.residual_streams
            for part in ("hc_attn", "hc_ffn"):
                self.hyper(part, streams, (2 + streams) * streams, 3, joint="_")
        self.extras("layer", self.sizes())

    def hyper(self, path: str, streams: int, rows: int, scales: int, *, joint: str) -> None:
        """Hyper-connections (DeepSeek-V4): a matrix over all residual streams, in float32."""
        width = streams * self.spec.hidden_size
        for leaf, shape in (("fn", (rows, width)), ("base", (rows,)), ("scale", (scales,))):
            self.tensor(path, shape, "hyper", suffix=joint + leaf, dtype="float32")

    def relative_rows(self) -> int:
        positions = self.spec.positions
        if self.stack == "encoder" and self.spec.encoder_positions is not None:
            positions = self.spec.encoder_positions
        return positions.table_rows if positions.kind == "relative" else 0

    def mixer(self, mixer: Mixer) -> None:
        match mixer:
            case Attention():
                self.attention(mixer)
            case LatentAttention():
                self.latent(mixer)
            case CompressedAttention():
                self.compressed(mixer)
            case Mamba():
                self.mamba(mixer)
            case LinearAttention():
                self.linear_attention(mixer)
            case ShortConv():
                self.short_conv(mixer)
            case Parallel():
                for part in mixer.parts:
                    self.mixer(part)
            case LinearMixer():
                self.linear(self.paths["attn"], self.spec.hidden_size, self.spec.hidden_size, "o",
                            "replicated", bias=mixer.bias)  # fmt: skip
            case NoMixer():
                pass

    # --- attention -------------------------------------------------------------------------------

    def attention(self, a: Attention, cross: str = "") -> None:
        hidden, paths = self.spec.hidden_size, self.paths
        q_rows = a.num_heads * a.head_dim
        k_rows, v_rows = a.num_kv_heads * a.head_dim, a.num_kv_heads * a.v_head_dim
        if a.output_gate == "element":
            q_rows *= 2  # the gate lies beside the queries in one matrix (Qwen3-Next, Qwen3.5)
        own_kv = a.kv_shared_from is None
        if "qkv" in paths and not cross and own_kv and not a.k_eq_v:
            self.linear(paths["qkv"], q_rows + k_rows + v_rows, hidden, "qkv", "qkv",
                        bias=a.q_bias, groups=a.num_kv_heads, grouped=k_rows + v_rows)  # fmt: skip
        else:
            self.linear(paths[cross + "q"], q_rows, hidden, "q", "column", bias=a.q_bias)
            if own_kv:
                self.linear(paths[cross + "k"], k_rows, hidden, "k", "kv", groups=a.num_kv_heads,
                            bias=a.kv_bias and self.naming.key_bias)  # fmt: skip
            if own_kv and not a.k_eq_v:
                self.linear(paths[cross + "v"], v_rows, hidden, "v", "kv", bias=a.kv_bias,
                            groups=a.num_kv_heads)  # fmt: skip
        self.linear(paths[cross + "o"], hidden, a.num_heads * a.v_head_dim, "o", "row",
                    bias=a.o_bias)  # fmt: skip
        if a.output_gate == "head":
            self.linear(paths["head_gate"], a.num_heads, hidden, "attn_gate", "column")
        if a.qk_norm is not None:
            whole = a.qk_norm == "layer"
            self.norm(paths["q_norm"], a.num_heads * a.head_dim if whole else a.head_dim)
            if own_kv:
                self.norm(paths["k_norm"], k_rows if whole else a.head_dim)
        if a.sinks:
            self.tensor(paths["sinks"], (a.num_heads,), "sinks", "column", suffix="", cut=0)
        if a.sparse_index is not None:
            self.sparse_index(a.sparse_index)

    def sparse_index(self, index: Indexer) -> None:
        """MiniMax-M3's index branch: queries and one key per token, each with its norm."""
        if index.shared:
            return
        hidden, paths = self.spec.hidden_size, self.paths
        self.linear(paths["sparse_q"], index.num_heads * index.head_dim, hidden, "indexer", "kv",
                    groups=index.num_heads)  # fmt: skip
        self.linear(paths["sparse_k"], index.head_dim, hidden, "indexer", "replicated")
        self.norm(paths["sparse_q_norm"], index.head_dim)
        self.norm(paths["sparse_k_norm"], index.head_dim)

    def latent(self, a: LatentAttention) -> None:
        hidden, paths = self.spec.hidden_size, self.paths
        head = a.qk_nope_head_dim + a.qk_rope_head_dim
        if a.q_lora_rank is None:
            self.linear(paths["q"], a.num_heads * head, hidden, "q", "column")
        else:
            self.linear(paths["q_a"], a.q_lora_rank, hidden, "q_a", "replicated", bias=a.bias)
            self.norm(paths["q_a_norm"], a.q_lora_rank)
            self.linear(paths["q_b"], a.num_heads * head, a.q_lora_rank, "q_b", "column")
        self.linear(paths["kv_a"], a.kv_lora_rank + a.qk_rope_head_dim, hidden, "kv_a",
                    "replicated", bias=a.bias)  # fmt: skip
        self.norm(paths["kv_a_norm"], a.kv_lora_rank)
        self.linear(paths["kv_b"], a.num_heads * (a.qk_nope_head_dim + a.v_head_dim),
                    a.kv_lora_rank, "kv_b", "column")  # fmt: skip
        self.linear(paths["o"], hidden, a.num_heads * a.v_head_dim, "o", "row", bias=a.bias)
        if a.indexer is not None and not a.indexer.shared:
            index = a.indexer
            self.linear(paths["index_q"], index.num_heads * index.head_dim,
                        a.q_lora_rank or hidden, "indexer", "replicated")  # fmt: skip
            self.linear(paths["index_k"], index.head_dim, hidden, "indexer", "replicated")
            self.norm(paths["index_norm"], index.head_dim, Norm("layer", 1e-6, bias=True))
            self.linear(paths["index_weights"], index.num_heads, hidden, "indexer", "replicated")

    def compressed(self, a: CompressedAttention) -> None:
        """DeepSeek-V4 (vLLM 0.32, models/deepseek_v4; transformers 5.24, deepseek_v4)."""
        hidden, attn = self.spec.hidden_size, self.paths["attn"]
        o_width = a.num_heads * a.head_dim // a.o_groups
        self.linear(f"{attn}.wq_a", a.q_lora_rank, hidden, "q_a", "replicated")
        self.norm(f"{attn}.q_norm", a.q_lora_rank)
        self.linear(f"{attn}.wq_b", a.num_heads * a.head_dim, a.q_lora_rank, "q_b", "column")
        self.linear(f"{attn}.wkv", a.head_dim, hidden, "kv_a", "replicated")
        self.norm(f"{attn}.kv_norm", a.head_dim)
        self.linear(f"{attn}.wo_a", a.o_groups * a.o_lora_rank, o_width, "o", "column")
        self.linear(f"{attn}.wo_b", hidden, a.o_groups * a.o_lora_rank, "o", "row")
        if a.sinks:
            self.tensor(self.paths["sinks"], (a.num_heads,), "sinks", "column", suffix="", cut=0,
                        dtype="float32")  # fmt: skip
        if a.ratio:
            self.compressor(f"{attn}.compressor", a.head_dim, a.ratio)
        if a.indexer is not None and not a.indexer.shared:
            index = a.indexer
            self.linear(f"{attn}.indexer.wq_b", index.num_heads * index.head_dim, a.q_lora_rank,
                        "indexer", "replicated")  # fmt: skip
            self.linear(f"{attn}.indexer.weights_proj", index.num_heads, hidden, "indexer",
                        "replicated")  # fmt: skip
            self.compressor(f"{attn}.indexer.compressor", index.head_dim, a.ratio)

    def compressor(self, path: str, head_dim: int, ratio: int) -> None:
        """Pools `ratio` keys into one; the fine ratio overlaps windows and so keeps two sets."""
        width = head_dim * (2 if ratio == _OVERLAPPING_RATIO else 1)
        hidden = self.spec.hidden_size
        self.linear(f"{path}.wkv", width, hidden, "compressor", "replicated")
        self.linear(f"{path}.wgate", width, hidden, "compressor", "replicated")
        self.norm(f"{path}.norm", head_dim)
        self.tensor(f"{path}.ape", (ratio, width), "compressor", suffix="", dtype="float32")

    # --- recurrent mixers ------------------------------------------------------------------------

    def mamba(self, m: Mamba) -> None:
        hidden, path = self.spec.hidden_size, self.paths["mamba"]
        if m.version == 1:
            conv = m.d_inner
            self.linear(f"{path}.in_proj", 2 * m.d_inner, hidden, "mamba_in", "column",
                        bias=m.proj_bias)  # fmt: skip
            self.linear(f"{path}.x_proj", m.dt_rank + 2 * m.d_state, m.d_inner, "mamba", "row")
            self.linear(f"{path}.dt_proj", m.d_inner, m.dt_rank, "mamba", "column", bias=True)
            states: tuple[tuple[str, tuple[int, ...]], ...] = (
                ("A_log", (m.d_inner, m.d_state)), ("D", (m.d_inner,)))  # fmt: skip
            if m.inner_norm:
                for leaf, width in (("dt", m.dt_rank), ("b", m.d_state), ("c", m.d_state)):
                    self.norm(f"{path}.{leaf}_layernorm", width)
            grouped = 0
        else:
            grouped = 2 * m.n_groups * m.d_state
            conv = m.d_inner + grouped
            self.linear(f"{path}.in_proj", m.d_inner + conv + m.num_heads, hidden, "mamba_in",
                        "qkv", bias=m.proj_bias, groups=m.n_groups, grouped=grouped)  # fmt: skip
            states = (("A_log", (m.num_heads,)), ("D", (m.num_heads,)), ("dt_bias", (m.num_heads,)))
            if m.inner_norm:
                self.norm(f"{path}.norm", m.d_inner, shard="column")
        self.conv1d(f"{path}.conv1d", conv, m.d_conv, bias=m.conv_bias, groups=m.n_groups,
                    grouped=grouped)  # fmt: skip
        for leaf, shape in states:
            self.tensor(f"{path}.{leaf}", shape, "mamba", "column", suffix="", cut=0)
        self.linear(f"{path}.out_proj", hidden, m.d_inner, "mamba_out", "row", bias=m.proj_bias)

    def conv1d(
        self, path: str, channels: int, width: int, *, bias: bool, groups: int = 0, grouped: int = 0
    ) -> None:
        """A depthwise convolution over time: [channels, 1, width]."""
        shard: Shard = "qkv" if grouped else "column"
        self.tensor(path, (channels, 1, width), "conv", shard, cut=0, groups=groups,
                    grouped=grouped)  # fmt: skip
        if bias:
            self.tensor(path, (channels,), "bias", shard, suffix=".bias", cut=0, groups=groups,
                        grouped=grouped)  # fmt: skip

    def linear_attention(self, a: LinearAttention) -> None:
        hidden, path = self.spec.hidden_size, self.paths["linear"]
        k_rows, v_rows = a.num_k_heads * a.k_head_dim, a.num_v_heads * a.v_head_dim
        if a.kind == "gated_delta_net":
            if "in_qkvz" in self.paths:
                parts = [(self.paths["in_qkvz"], 2 * k_rows + 2 * v_rows),
                         (self.paths["in_ba"], 2 * a.num_v_heads)]  # fmt: skip
            else:
                parts = [(f"{path}.in_proj_qkv", 2 * k_rows + v_rows),
                         (f"{path}.in_proj_z", v_rows), (f"{path}.in_proj_b", a.num_v_heads),
                         (f"{path}.in_proj_a", a.num_v_heads)]  # fmt: skip
            for name, rows in parts:
                self.linear(name, rows, hidden, "linear_in", "column")
            self.conv1d(f"{path}.conv1d", 2 * k_rows + v_rows, a.d_conv, bias=False)
            for leaf in ("A_log", "dt_bias"):
                self.tensor(
                    f"{path}.{leaf}", (a.num_v_heads,), "linear", "column", suffix="", cut=0
                )
            self.norm(f"{path}.norm", a.v_head_dim)
            self.linear(f"{path}.out_proj", hidden, v_rows, "linear_out", "row")
        elif a.kind == "kda":
            self.kda(a, k_rows, v_rows)
        else:
            self.linear(f"{path}.qkv_proj", 2 * k_rows + v_rows, hidden, "linear_in", "column")
            self.linear(f"{path}.output_gate", v_rows, hidden, "linear_in", "column")
            self.norm(f"{path}.norm", v_rows, shard="column")
            self.linear(f"{path}.out_proj", hidden, v_rows, "linear_out", "row")

    def kda(self, a: LinearAttention, k_rows: int, v_rows: int) -> None:
        """Kimi Delta Attention: gates of low rank (the head's width), one convolution each."""
        hidden, path = self.spec.hidden_size, self.paths["linear"]
        for leaf, rows in (("q", k_rows), ("k", k_rows), ("v", v_rows)):
            self.linear(f"{path}.{leaf}_proj", rows, hidden, "linear_in", "column")
            self.conv1d(f"{path}.{leaf}_conv1d", rows, a.d_conv, bias=False)
        for leaf in ("f", "g"):
            self.linear(f"{path}.{leaf}_a_proj", a.v_head_dim, hidden, "linear_in", "replicated")
            self.linear(f"{path}.{leaf}_b_proj", v_rows, a.v_head_dim, "linear_in", "column")
        self.linear(f"{path}.b_proj", a.num_v_heads, hidden, "linear_in", "column")
        self.tensor(f"{path}.A_log", (1, 1, a.num_v_heads, 1), "linear", "column", suffix="", cut=2)
        self.tensor(f"{path}.dt_bias", (k_rows,), "linear", "column", suffix="", cut=0)
        self.norm(f"{path}.o_norm", a.v_head_dim)
        self.linear(f"{path}.o_proj", hidden, v_rows, "linear_out", "row")

    def short_conv(self, c: ShortConv) -> None:
        hidden, path = self.spec.hidden_size, self.paths["conv"]
        self.linear(f"{path}.in_proj", 3 * c.channels, hidden, "linear_in", "column", bias=c.bias)
        self.conv1d(f"{path}.conv", c.channels, c.d_conv, bias=c.bias)
        self.linear(f"{path}.out_proj", hidden, c.channels, "linear_out", "row", bias=c.bias)

    # --- feed-forward ----------------------------------------------------------------------------

    def feed_forward(self, ff: FeedForward) -> None:
        match ff:
            case Dense():
                self.dense(ff)
            case Experts():
                self.experts(ff)
            case LinearFeedForward():
                self.linear(self.paths["mlp"], self.spec.hidden_size, self.spec.hidden_size, "up",
                            "replicated", bias=ff.bias)  # fmt: skip
            case NoFeedForward():
                pass

    def dense(self, ff: Dense, slot: str = "") -> None:
        hidden, width, paths = self.spec.hidden_size, ff.intermediate, self.paths
        if ff.gated and f"{slot}gate_up" in paths:
            self.linear(
                paths[f"{slot}gate_up"], 2 * width, hidden, "gate_up", "column", bias=ff.bias
            )
        else:
            if ff.gated:
                self.linear(paths[f"{slot}gate"], width, hidden, "gate", "column", bias=ff.bias)
            up = paths[f"{slot}up"]
            if not ff.gated:
                up = paths.get(f"{slot}up_plain", up)
            self.linear(up, width, hidden, "up", "column", bias=ff.bias)
        self.linear(paths[f"{slot}down"], hidden, width, "down", "row", bias=ff.bias)

    def experts(self, ff: Experts) -> None:
        hidden, paths, num = self.spec.hidden_size, self.paths, ff.num_experts
        self.linear(paths["router"], num, hidden, "router", "replicated", bias=ff.router_bias)
        if ff.hash_routed:
            self.tensor(paths["hash_table"], (self.spec.vocab_size, ff.top_k), "hash_table",
                        suffix="", dtype="int64")  # fmt: skip
        if ff.score_correction_bias:
            path = paths["router_bias"]
            suffix = ".bias" if path.endswith(".bias") else ""
            self.tensor(path.removesuffix(".bias"), (num,), "bias", suffix=suffix, dtype="float32")
        width = ff.latent or hidden
        if ff.latent:
            self.linear(paths["latent_in"], width, hidden, "latent", "replicated")
        if self.naming.experts == "each":
            self.each_expert(ff, width)
        else:
            self.stacked_experts(ff, width)
        if ff.latent:
            self.linear(paths["latent_out"], hidden, width, "latent", "replicated")
        if ff.shared_intermediate:
            self.shared_expert(ff)
        self.extras("experts", self.sizes(num))

    def each_expert(self, ff: Experts, width: int) -> None:
        paths, inner = self.paths, ff.intermediate
        parts: list[tuple[str, tuple[int, int], Role, int]] = [
            (paths["e_up"], (inner, width), "expert_up", 0),
            (paths["e_down"], (width, inner), "expert_down", 1),
        ]
        if ff.gated:
            parts.insert(0, (paths["e_gate"], (inner, width), "expert_gate", 0))
        for path, shape, role, cut in parts:
            self.tensor(path, shape, role, "expert", cut=cut, count=ff.num_experts,
                        quantizable=True, in_dim=1)  # fmt: skip
            if ff.bias:
                self.tensor(path, (shape[0],), "expert_bias", "expert", suffix=".bias",
                            cut=0 if cut == 0 else None, count=ff.num_experts)  # fmt: skip

    def stacked_experts(self, ff: Experts, width: int) -> None:
        paths, num, inner, layout = self.paths, ff.num_experts, ff.intermediate, self.naming.experts
        parts: list[tuple[str, int, int, Role, bool]] = []  # path, out, in, role, cut along out
        if not ff.gated:
            parts.append((paths["e_all_up"], inner, width, "expert_up", True))
        elif layout == "stacked_split":
            parts.append((paths["e_gate_up"], inner, width, "expert_gate", True))
            parts.append((paths["e_all_up"], inner, width, "expert_up", True))
        else:
            parts.append((paths["e_gate_up"], 2 * inner, width, "expert_gate_up", True))
        parts.append((paths["e_all_down"], width, inner, "expert_down", False))
        in_out = layout == "stacked_in_out"
        for path, rows, columns, role, along_out in parts:
            shape = (num, columns, rows) if in_out else (num, rows, columns)
            self.tensor(path, shape, role, "expert", suffix=paths["stacked_suffix"],
                        cut=1 if along_out != in_out else 2, quantizable=True,
                        in_dim=1 if in_out else 2, num_experts=num)  # fmt: skip
            if ff.bias:
                self.tensor(path, (num, rows), "expert_bias", "expert", num_experts=num,
                            suffix=paths["stacked_bias"], cut=1 if along_out else None)  # fmt: skip

    def shared_expert(self, ff: Experts) -> None:
        hidden, width, paths = self.spec.hidden_size, ff.shared_intermediate, self.paths
        if ff.gated and "s_gate_up" in paths:
            self.linear(paths["s_gate_up"], 2 * width, hidden, "shared_gate_up", "column")
        else:
            if ff.gated:
                self.linear(paths["s_gate"], width, hidden, "shared_gate", "column")
            self.linear(paths["s_up"], width, hidden, "shared_up", "column")
        self.linear(paths["s_down"], hidden, width, "shared_down", "row")
        if ff.shared_gate:
            self.linear(paths["shared_gate"], 1, hidden, "shared_router", "replicated")


_OVERLAPPING_RATIO = 4  # transformers 5.24, deepseek_v4: the compressed-sparse layers overlap
