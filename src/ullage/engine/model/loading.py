"""From a checkpoint to the layers of a decoder: which slot fills which field, and row orders.

Holds the reading of layers and norms. Slots are named in `anatomy/naming/paths.py`; what a family
does beyond its spec is `engine/model/families.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ullage.anatomy.spec import Dense as DenseSpec
from ullage.anatomy.spec import Experts, LayerSpec, ModelSpec
from ullage.engine.linear import Linear, LinearFactory
from ullage.engine.model.experts import MixtureOfExperts, read_mixture
from ullage.engine.model.families import FORWARDS
from ullage.engine.model.layer import ACTIVATIONS, Dense, Layer, Wiring
from ullage.engine.model.norms import Norm
from ullage.engine.model.support import attention_of
from ullage.engine.model.weights import Weights
from ullage.engine.rule import AttentionRule
from ullage.engine.sites import Site, block_rows, site_slots


@dataclass(frozen=True, slots=True)
class NormSlots:
    """Which slots hold the norms around a layer's two parts; None where the place has none."""

    mixer: str | None
    mixer_out: str | None
    feed_forward: str | None
    feed_forward_out: str | None


# `Norm.place` → the slots. With `parallel` the second norm is there only where it is expected.
_PLACES: Mapping[str, NormSlots] = {
    "pre": NormSlots("pre1", None, "pre2", None),
    "post": NormSlots(None, "post1", None, "post2"),
    "sandwich": NormSlots("pre1", "post1", "pre2", "post2"),
    "parallel": NormSlots("pre1", None, "pre2", None),
}


class LayerReader:
    """Reads one layer after the other of a spec that `require_supported` accepted."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, linear: LinearFactory, dtype: torch.dtype
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._linear = linear
        self._dtype = dtype
        self._forward = FORWARDS[spec.family]
        self._numerics = dict(spec.numerics)

    def layer(self, index: int, rope: int | None) -> Layer:
        """Layer `index`, rotated by table `rope`."""
        spec, norms = self._spec, self._norm_slots(index)
        layer = spec.layers[index]
        mixer = attention_of(layer)
        return Layer(
            num_heads=mixer.num_heads,
            num_kv_heads=mixer.num_kv_heads,
            head_dim=mixer.head_dim,
            rule=attention_rule(spec, layer),
            rope=rope,
            mixer_norm=self._part_norm(norms.mixer, index),
            qkv=self._matrix("qkv", index),
            q_norm=self._qk_norm("q_norm", index, mixer.num_heads),
            k_norm=self._qk_norm("k_norm", index, mixer.num_kv_heads),
            output=self._matrix("output", index),
            mixer_out_norm=self._part_norm(norms.mixer_out, index),
            feed_forward_norm=self._part_norm(norms.feed_forward, index),
            feed_forward=self._feed_forward(index, layer),
            feed_forward_out_norm=self._part_norm(norms.feed_forward_out, index),
            wiring=wiring(spec),
            clip=self._number("clip_qkv"),
            residual_scale=self._number("residual_multiplier") or 1.0,
        )

    def norm(self, slot: str, size: int, layer: int | None = None) -> Norm:
        """The norm of a slot, over `size` numbers, with what weights the spec gives it."""
        about = self._spec.norm
        weight = bias = None
        if self._weights.has(slot, layer):
            weight = self._weights.tensor(slot, layer)
            if about.unit_offset and not self._weights.norms_hold_offset:
                weight = weight + 1.0
        if self._weights.has(slot, layer, ".bias"):
            bias = self._weights.tensor(slot, layer, ".bias")
        return Norm(about.kind, size, about.eps, weight, bias)

    # --- parts -----------------------------------------------------------------------------------

    def _norm_slots(self, index: int) -> NormSlots:
        slots = _PLACES[self._spec.norm.place]
        if self._spec.norm.place != "parallel":
            return slots
        has = self._weights.has
        if self._spec.norm.beside and has("pre1_beside", index):
            return NormSlots("pre1_beside", None, "pre2_beside", None)
        return slots if has("pre2", index) else NormSlots("pre1", None, None, None)

    def _part_norm(self, slot: str | None, index: int) -> Norm | None:
        return None if slot is None else self.norm(slot, self._spec.hidden_size, index)

    def _qk_norm(self, slot: str, index: int, num_heads: int) -> Norm | None:
        mixer = attention_of(self._spec.layers[index])
        if mixer.qk_norm is None:
            return None
        return self.norm(
            slot, mixer.head_dim * (num_heads if mixer.qk_norm == "layer" else 1), index
        )

    def _feed_forward(self, index: int, layer: LayerSpec) -> Dense | MixtureOfExperts:
        mlp = layer.feed_forward
        if isinstance(mlp, Experts):
            return self._mixture(index, mlp)
        assert isinstance(mlp, DenseSpec)
        name = self._forward.activation or mlp.activation
        return Dense(
            gate_up=self._matrix("gate_up", index),
            down=self._matrix("down", index),
            activation=ACTIVATIONS[name],
            activation_name=name,
            gated=mlp.gated,
        )

    def _mixture(self, index: int, experts: Experts) -> MixtureOfExperts:
        def read(
            slot: str,
            shape: tuple[int, ...],  # noqa: ARG001
            expert: int | None = None,
        ) -> torch.Tensor:
            if expert is None:
                return self._weights.tensor(slot, index, self._suffix(slot, index))
            return self._weights.expert(slot, index, expert)

        name = self._forward.activation or experts.activation
        return read_mixture(
            experts,
            self._spec.hidden_size,
            self._weights.expert_layout,
            read,
            self._cast_linear,
            ACTIVATIONS[name],
            renormalise=self._numerics.get("norm_topk_prob", True) is True,
        )

    def _suffix(self, slot: str, index: int) -> str:
        """Stacked experts are named without `.weight` in most families."""
        return ".weight" if self._weights.has(slot, index) else ""

    def _cast_linear(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Linear:
        bias_O = None if bias_O is None else bias_O.to(self._dtype)
        return self._linear(weight_OI.to(self._dtype).contiguous(), bias_O)

    def _matrix(self, site: Site, index: int) -> Linear:
        """One matrix of the parts of a site stacked along the output.

        Only this one is held in full: the factory may pack it before the next is read.
        """
        matrices: list[torch.Tensor] = []
        biases: list[torch.Tensor | None] = []
        for slot in site_slots(self._weights.slots, site, index):
            matrices.append(self._rows(slot, index, ".weight").to(self._dtype))
            has_bias = self._weights.has(slot, index, ".bias")
            biases.append(self._rows(slot, index, ".bias") if has_bias else None)
        bias = None
        if any(part is not None for part in biases):
            pairs = zip(biases, matrices, strict=True)
            bias = torch.cat([torch.zeros(w.shape[0]) if b is None else b for b, w in pairs])
            bias = bias.to(self._dtype)
        weight = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        del matrices
        return self._linear(weight.contiguous(), bias)

    def _rows(self, slot: str, index: int, suffix: str) -> torch.Tensor:
        """A tensor with its rows in the order of Hugging Face, or in blocks where it is fused."""
        mixer = attention_of(self._spec.layers[index])
        if slot in ("q", "k"):
            return self._weights.heads(slot, index, mixer.head_dim, suffix)
        tensor = self._weights.tensor(slot, index, suffix)
        if slot != "qkv" or self._weights.from_gguf:  # llama.cpp's converters put them in blocks
            return tensor
        order = block_rows(self._forward, mixer)
        return tensor if order is None else tensor[order]

    def _number(self, key: str) -> float | None:
        value = self._numerics.get(key)
        return float(value) if isinstance(value, int | float) else None


def wiring(spec: ModelSpec) -> Wiring:
    """How the parts of each layer are joined."""
    if spec.norm.place == "parallel":
        return "parallel"
    after = spec.norm.place == "post" and FORWARDS[spec.family].norm_after_sum
    return "after_sum" if after else "serial"


def attention_rule(spec: ModelSpec, layer: LayerSpec) -> AttentionRule:
    """What rows of a layer see, and how scores are formed."""
    mixer, numerics, forward = attention_of(layer), dict(spec.numerics), FORWARDS[spec.family]
    scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
    own = numerics.get("softmax_scale")  # MPT
    if isinstance(own, int | float):
        scale = float(own)
    if not forward.scaled or numerics.get("scale_attn_weights") is False:  # GPT-Neo, GPT-2
        scale = 1.0
    if numerics.get("scale_attn_by_inverse_layer_idx") is True:
        scale /= layer.index + 1
    slopes: tuple[float, ...] = ()
    if spec.positions.kind == "alibi":
        assert forward.slopes is not None, spec.family
        slopes = forward.slopes(mixer.num_heads)
    return AttentionRule(scale, mixer.window, mixer.soft_cap, slopes)
