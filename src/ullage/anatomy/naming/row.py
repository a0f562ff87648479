"""What one row of the naming table can say: `Row`, and `Extra` for tensors of one family only.

Holds the shape of a row. The rows are `rows.py`; resolving them is `names.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ExpertLayout = Literal["each", "stacked", "stacked_in_out", "stacked_split"]
"""How routed experts lie on disk.

`each`: one matrix per expert. `stacked`: [experts, out, in], gate over up in one tensor.
`stacked_in_out`: the same with [experts, in, out]. `stacked_split`: [experts, out, in] with gate
and up apart.
"""

Scope = Literal[
    "model",
    "layer",
    "run",
    "attention",
    "latent",
    "linear",
    "dense",
    "experts",
    "cross",
    "head",
    "bare",
    "sequence",
    "token",
    "question",
    "reward",
    "mtp_layer",
    "mtp",
]


@dataclass(frozen=True, slots=True)
class Extra:
    """A tensor that only this family has. `shape` mixes numbers and the names of sizes.

    Sizes: H hidden, V vocabulary, E experts, M the embedding's width; where there is a mixer or a
    feed-forward also Q, K and O (rows of queries, rows of keys, what the output reads), heads,
    kv_heads, D (one head) and I (the MLP's width). Sizes of the family's own go by their
    configuration key, also as `key-1` and `key^2`; sums, products and
    differences are written with +, * and -; `!key` is 1 where that size is 0, else 0.
    `copies` is such a size, with {e} in the path. `scope` says how often: once per model, per
    layer, per run of a layer (also of one whose weights are another's), per layer with attention,
    latent attention, a recurrent mixer, a dense MLP, experts or cross-attention, with an output
    head, in a bare model with none, per multi-token-prediction layer, once for all of those. A size
    of 0 leaves it out. `column`: tensor parallelism cuts the first dimension. `unless` names two
    sizes whose equality leaves it out.
    """

    scope: Scope
    path: str
    shape: tuple[int | str, ...]
    role: str = "norm"
    linear: bool = False
    dtype: str | None = None
    copies: str | None = None
    column: bool = False
    unless: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One family's names, as changes to the row called `base`.

    `paths` maps a slot to a path; a path may hold {root} and the other prefix slots, {i} for the
    layer, {e} for the expert. `transposed`: linears are stored [in, out]. `parallel_norms`: how
    many norms a layer has whose attention and MLP run side by side. `encoder` names the row of
    an encoder-decoder's other stack. `key_bias` False: keys have none though values do.
    `router_bias_row`: the router's bias is stored as [1, experts]. `router_held`: the dtype
    that vLLM 0.32 loads routers in, the model's when None; `sequence_parallel`: whether its
    module keeps shared experts whole under sequence-parallel mixtures; `qk_norm_cut`: whether
    it cuts norms over all of Q or K. `idle_kv`: layers that read another's KV hold projections
    of their own all the same. `embed_extra`: rows of the embedding beyond the vocabulary, a
    number or sizes.
    `relative_everywhere`: each layer has a table of relative positions, not only the first.
    `hyper_mixed` False: hyper-connections do not mix the streams among each other. A slot with an
    empty path holds no tensor. `parts` (path, size) lists stacks one after the other in place of
    one: so many layers under each path (HRM).
    `towers_whole`: vLLM takes the towers from transformers and cuts none of them. `mtp` is the
    path of a multi-token-prediction layer, None when it is not known; `mtp_from_end` counts
    those layers on from the last decoder layer. `own_head`: the extras of scope `head` are all of
    the output head. `judges`: the heads of classifiers, `heads.py`. `unnamed`: some
    names depend on words of the configuration, so none are predicted.
    """

    base: str | None = "llama"
    paths: dict[str, str] = field(default_factory=dict)
    experts: ExpertLayout | None = None
    transposed: bool | None = None
    parallel_norms: int | None = None
    first_norm: bool | None = None
    key_bias: bool | None = None
    router_bias_row: bool | None = None
    router_held: str | None = None
    sequence_parallel: bool | None = None
    qk_norm_cut: bool | None = None
    idle_kv: bool | None = None
    embed_extra: int | str | None = None
    relative_everywhere: bool | None = None
    towers_whole: bool | None = None
    hyper_mixed: bool | None = None
    parts: tuple[tuple[str, str], ...] | None = None
    extras: tuple[Extra, ...] = ()
    encoder: str | None = None
    own_head: bool | None = None
    judges: tuple[Extra, ...] | None = None
    unnamed: bool | None = None
    mtp: str | None = None
    mtp_from_end: bool | None = None
