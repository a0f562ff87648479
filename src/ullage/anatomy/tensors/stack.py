"""The tensors of one stack of layers, written down one after another in a family's names: `Stack`.

Holds embeddings, norms, heads and the frame of a layer; mixers and feed-forwards are
`mixers.py` and `feed_forward.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from ullage.anatomy.naming.names import Naming
from ullage.anatomy.naming.row import Extra
from ullage.anatomy.spec import Attention, LayerSpec, ModelSpec, NoFeedForward, NoMixer, Norm
from ullage.anatomy.tensors.feed_forward import dense, feed_forward
from ullage.anatomy.tensors.mixers import attention, mixer_tensors
from ullage.anatomy.tensors.tensor import Role, Shard, StackName, TensorSpec


class Stack:
    """Writes down the tensors of one stack of layers, in its family's names."""

    def __init__(
        self, spec: ModelSpec, naming: Naming, emit: Callable[[TensorSpec], None], stack: StackName
    ) -> None:
        self.spec = spec
        self.naming = naming
        self.paths = naming.paths
        self.emit = emit
        self.stack: StackName = stack
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
        held_dtype: str | None = None,
        sequence_whole: bool = False,
        num_experts: int = 0,
    ) -> None:
        module = self.prefix + path
        self.emit(
            TensorSpec(
                name=module + suffix, shape=shape, count=count, module=module, role=role,
                shard=shard, layer=self.layer, stack=self.stack, quantizable=quantizable,
                named=self.named, cut=cut, groups=groups, grouped=grouped, in_dim=in_dim,
                dtype=dtype, held_dtype=held_dtype, sequence_whole=sequence_whole,
                num_experts=num_experts or (count if shard == "expert" else 0),
            )
        )  # fmt: skip

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
        quantizable: bool = True,
        held_dtype: str | None = None,
        sequence_whole: bool = False,
    ) -> None:
        """A matrix [rows out, columns in] (turned round where the family does) and its bias."""
        turned = self.naming.transposed
        cut = {"column": 0, "kv": 0, "qkv": 0, "row": 1}.get(shard)
        if cut is not None and turned:
            cut = 1 - cut
        self.tensor(
            path, (columns, rows) if turned else (rows, columns), role, shard, cut=cut,
            quantizable=quantizable, groups=groups, grouped=grouped, in_dim=0 if turned else 1,
            held_dtype=held_dtype, sequence_whole=sequence_whole,
        )  # fmt: skip
        if bias:
            whole = shard in ("row", "replicated")
            self.tensor(
                path, (rows,), "bias", "replicated" if whole else shard, suffix=".bias",
                cut=None if whole else 0, groups=groups, grouped=grouped,
            )  # fmt: skip

    def norm(
        self,
        path: str,
        width: int,
        norm: Norm | None = None,
        shard: Shard = "replicated",
        groups: int = 0,
    ) -> None:
        """A norm's weight and bias, as far as norms of this kind have them."""
        norm = norm or self.spec.norm
        if not norm.affine:
            return
        cut = None if shard == "replicated" else 0
        suffixes = (".weight", ".bias") if norm.kind == "layer" and norm.bias else (".weight",)
        for suffix in suffixes:
            self.tensor(path, (width,), "norm", shard, suffix=suffix, cut=cut, groups=groups)

    def extras(self, scope: str, sizes: dict[str, int]) -> None:
        for extra in self.naming.extras:
            if extra.scope == scope:
                self.family_tensor(extra, sizes)

    def family_tensor(self, extra: Extra, sizes: dict[str, int]) -> None:
        # A class of another family lends its names only: the sizes are not there.
        needed = (*extra.shape, extra.copies or "1")
        if any(isinstance(s, str) and s not in sizes for s in needed):
            return
        shape = tuple(sizes[s] if isinstance(s, str) else s for s in extra.shape)
        if 0 in shape:  # a part that this model of the family is without
            return
        path, dot, kind = extra.path.rpartition(".")
        if kind in ("weight", "bias"):
            suffix = dot + kind
        else:
            path, suffix = extra.path, ""
        vocab = extra.role in ("embed", "lm_head") and not extra.linear
        self.tensor(
            path, shape, extra.role, "vocab" if vocab else "replicated", suffix=suffix,  # type: ignore[arg-type]
            cut=0 if vocab else None, quantizable=extra.linear or extra.role == "lm_head",
            in_dim=len(shape) - 1, dtype=extra.dtype, count=sizes[extra.copies or "1"],
        )  # fmt: skip

    def sizes(self, num_experts: int = 0) -> dict[str, int]:
        """The sizes that a family's own tensors may be made of, by name."""
        hidden = self.spec.hidden_size
        width = self.spec.embedding_size or hidden
        sizes = {
            "1": 1, "H": hidden, "2H": 2 * hidden, "V": self.spec.vocab_size, "E": num_experts,
            "M": width,
        }  # fmt: skip
        for key, size in self.spec.family_sizes:
            sizes |= {key: size, f"{key}-1": size - 1, f"{key}^2": size * size}
        return sizes

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
            self.paths["embed"], (spec.vocab_size + self.naming.embed_extra, width), "embed",
            "vocab", cut=0, in_dim=1,
        )  # fmt: skip
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
            if spec.architecture.endswith("Model"):
                self.extras("bare", self.sizes())
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
        number = -1
        for layer in layers:
            if layer.weights_from is not None:
                continue
            number += 1
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
        both = parallel and (spec.norm.beside or self.naming.parallel_norms == 2)
        beside = "_beside" if spec.norm.beside and "pre1_beside" in self.paths else ""
        if has_mixer and before and (self.naming.first_norm or not first):
            self.norm(self.paths["pre1" + beside], hidden)
        mixer_tensors(self, layer.mixer)
        if has_mixer and after:
            self.norm(self.paths["post1"], hidden)
        if self.relative_rows() and (first or self.naming.relative_everywhere):
            rows = self.relative_rows()
            heads = layer.mixer.num_heads if isinstance(layer.mixer, Attention) else 1
            self.tensor(self.paths["relative_bias"], (rows, heads), "attn_bias_table", "column",
                        cut=1)  # fmt: skip
        if layer.cross_attention is not None:
            self.norm(self.paths["cross_norm"], hidden)
            attention(self, layer.cross_attention, cross="cross_")
            self.extras("cross", self.sizes())
        if has_ff and before and (not parallel or both):
            self.norm(self.paths["pre2" + beside], hidden)
        feed_forward(self, layer.feed_forward)
        if layer.parallel_dense is not None:
            dense(self, layer.parallel_dense, "dense_")
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
