"""Writing down one tensor after another in a family's names: `Writer`.

Holds single tensors, matrices, norms and a family's own; what a stack of layers holds is
`stack.py`, what a mixer or a feed-forward holds `mixers.py` and `feed_forward.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from ullage.anatomy.naming.names import Naming
from ullage.anatomy.naming.row import Extra
from ullage.anatomy.spec import LayerSpec, ModelSpec, Norm
from ullage.anatomy.tensors.sizes import layer_sizes, size_of
from ullage.anatomy.tensors.tensor import Role, Shard, StackName, TensorSpec


class Writer:
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
        self.sizes = self._model_sizes = _sizes(spec)

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
        if not path:
            return
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

    def extras(self, scope: str) -> None:
        """The family's own tensors of one scope, where the current layer stands."""
        for extra in (*self.naming.extras, *self.naming.judges):
            if extra.scope == scope:
                self.family_tensor(extra, self.sizes)

    def family_tensor(self, extra: Extra, sizes: dict[str, int]) -> None:
        # A class of another family lends its names only: the sizes are not there.
        shape: list[int] = []
        for part in (*extra.shape, extra.copies or 1):
            size = size_of(part, sizes) if isinstance(part, str) else part
            if not size:  # not there, or a part that this model of the family is without
                return
            shape.append(size)
        if extra.unless is not None and len({sizes[name] for name in extra.unless}) == 1:
            return
        count = shape.pop()
        path, dot, kind = extra.path.rpartition(".")
        if kind in ("weight", "bias"):
            suffix = dot + kind
        else:
            path, suffix = extra.path, ""
        vocab = extra.role in ("embed", "lm_head") and not extra.linear
        self.tensor(
            path, tuple(shape), extra.role,  # type: ignore[arg-type]
            "vocab" if vocab else "column" if extra.column else "replicated", suffix=suffix,
            cut=0 if vocab or extra.column else None,
            quantizable=extra.linear or extra.role == "lm_head",
            in_dim=len(shape) - 1, dtype=extra.dtype, count=count,
        )  # fmt: skip

    def begin_layer(self, layer: LayerSpec, prefix: str, *, first: bool) -> None:
        """Put what follows under `prefix`, with the sizes of this layer's parts."""
        self.layer, self.prefix = layer.index, prefix
        self.sizes = self._model_sizes | layer_sizes(layer, first=first)

    def end_layers(self) -> None:
        self.layer, self.prefix, self.sizes = None, "", self._model_sizes


def _sizes(spec: ModelSpec) -> dict[str, int]:
    """The sizes of a whole model that a family's own tensors may be made of, by name."""
    hidden = spec.hidden_size
    sizes = {"1": 1, "H": hidden, "2H": 2 * hidden, "V": spec.vocab_size}
    sizes["M"] = spec.embedding_size or hidden
    sizes["L"] = spec.num_labels
    for key, size in spec.family_sizes:
        sizes |= {
            key: size,
            f"{key}-1": size - 1,
            f"{key}^2": size * size,
            f"!{key}": int(not size),
        }
    return sizes
