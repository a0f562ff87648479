"""A mixture of experts: which of them each token goes to, and the tokens of each in one product.

Holds the routing, the grouping and how stored matrices become experts. Which specs are run is
`support`; where tensors lie is `weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from ullage.engine.linear import FloatLinear, Linear, LinearFactory

if TYPE_CHECKING:
    from ullage.anatomy.naming.row import ExpertLayout
    from ullage.anatomy.spec import Experts

Activation = Callable[[torch.Tensor], torch.Tensor]


class ExpertReader(Protocol):
    """One matrix of a layer by its slot in the naming table (`anatomy/naming/paths.py`).

    `expert` picks one of several that lie each for themselves; None for the rest.
    """

    def __call__(
        self, slot: str, shape: tuple[int, ...], expert: int | None = None
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) · up(x)), gate over up in one matrix [2·intermediate, in]."""

    gate_up: Linear
    down: Linear
    activation: Activation

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = self.gate_up(x_TE).chunk(2, -1)
        return self.down(self.activation(gate_TF) * up_TF)


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """One layer's experts. `renormalise`: the chosen experts' weights are made to add up to one.

    `shared` runs for every token, its output times sigmoid(shared_gate(x)) where there is a gate.
    """

    router: Linear
    experts: tuple[GatedMlp, ...]
    top_k: int
    renormalise: bool
    shared: GatedMlp | None = None
    shared_gate: Linear | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix that it holds, for counting bytes."""
        mlps = self.experts if self.shared is None else (*self.experts, self.shared)
        own = tuple(linear for mlp in mlps for linear in (mlp.gate_up, mlp.down))
        gate = () if self.shared_gate is None else (self.shared_gate,)
        return (self.router, *own, *gate)

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """The mixture's output [tokens, hidden]."""
        weights_TK, chosen_TK = route(self.router(x_TE.float()), self.top_k, self.renormalise)
        out_TE = mixed(self.experts, x_TE, weights_TK, chosen_TK)
        if self.shared is None:
            return out_TE
        shared_TE = self.shared(x_TE)
        if self.shared_gate is not None:
            gate_T1 = torch.sigmoid(self.shared_gate(x_TE.float())).to(x_TE.dtype)
            shared_TE = gate_T1 * shared_TE
        return out_TE + shared_TE


def route(
    logits_TX: torch.Tensor, top_k: int, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and indices, each [tokens, top_k], of the experts with the greatest softmax.

    The softmax runs over all experts, in float32, and stands before the choice: without
    `renormalise` the weights add up to less than one (Qwen2-MoE, Qwen3-MoE unless told otherwise).
    """
    weights_TK, chosen_TK = logits_TX.float().softmax(-1).topk(top_k, dim=-1)
    if renormalise:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK, chosen_TK


def mixed(
    experts: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    x_TE: torch.Tensor,
    weights_TK: torch.Tensor,
    chosen_TK: torch.Tensor,
) -> torch.Tensor:
    """Σ over a token's experts of weight · expert(x). Each expert runs once, over its tokens.

    Experts that nobody chose are not touched: at batch 1 only top_k of them are read from memory.
    """
    top_k = chosen_TK.shape[1]
    flat = chosen_TK.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=len(experts)).tolist()
    rows = order // top_k
    weights = weights_TK.flatten().index_select(0, order).unsqueeze(1).to(x_TE.dtype)
    out_TE = torch.zeros_like(x_TE)
    first = 0
    for expert, count in zip(experts, counts, strict=True):
        if count:
            theirs = rows[first : first + count]
            y = expert(x_TE.index_select(0, theirs))
            out_TE.index_add_(0, theirs, y * weights[first : first + count])
            first += count
    return out_TE


# --- from stored matrices ------------------------------------------------------------------------


def read_mixture(
    ff: Experts,
    hidden_size: int,
    layout: ExpertLayout,
    read: ExpertReader,
    linear: LinearFactory,
    activation: Activation,
    *,
    renormalise: bool,
) -> MixtureOfExperts:
    """One layer's mixture of gated experts without biases.

    The router and the shared expert's gate stay in float32: they are small, and a choice that
    flips is an error that no tolerance covers.
    """
    experts = tuple(
        GatedMlp(linear(gate_up_FE, None), linear(down_EF, None), activation)
        for gate_up_FE, down_EF in expert_matrices(ff, hidden_size, layout, read)
    )
    shared = gate = None
    if width := ff.shared_intermediate:
        gate_up_FE = torch.cat(
            [read("s_gate", (width, hidden_size)), read("s_up", (width, hidden_size))]
        )
        down_EF = read("s_down", (hidden_size, width))
        shared = GatedMlp(linear(gate_up_FE, None), linear(down_EF, None), activation)
        if ff.shared_gate:
            gate = FloatLinear(read("shared_gate", (1, hidden_size)))
    router = FloatLinear(read("router", (ff.num_experts, hidden_size)))
    return MixtureOfExperts(router, experts, ff.top_k, renormalise, shared, gate)


def expert_matrices(
    ff: Experts, hidden_size: int, layout: ExpertLayout, read: ExpertReader
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each expert gate over up [2·intermediate, hidden] and down [hidden, intermediate]."""
    num, width = ff.num_experts, ff.intermediate
    if layout == "each":
        into, out = (width, hidden_size), (hidden_size, width)
        for index in range(num):
            gate_up_FE = torch.cat([read("e_gate", into, index), read("e_up", into, index)])
            yield gate_up_FE, read("e_down", out, index)
        return
    if layout == "stacked_split":
        gate_XFE, up_XFE = (
            read(slot, (num, width, hidden_size)) for slot in ("e_gate_up", "e_all_up")
        )
        gate_up_XFE = torch.cat([gate_XFE, up_XFE], dim=1)
        down_XEF = read("e_all_down", (num, hidden_size, width))
    elif layout == "stacked_in_out":
        gate_up_XFE = read("e_gate_up", (num, hidden_size, 2 * width)).transpose(1, 2)
        down_XEF = read("e_all_down", (num, width, hidden_size)).transpose(1, 2)
    else:
        gate_up_XFE = read("e_gate_up", (num, 2 * width, hidden_size))
        down_XEF = read("e_all_down", (num, hidden_size, width))
    for gate_up_FE, down_EF in zip(gate_up_XFE, down_XEF, strict=True):
        yield gate_up_FE.contiguous(), down_EF.contiguous()
