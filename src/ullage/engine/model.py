"""One decoder, configured by a `ModelSpec`: families differ by data, never by code here.

Holds the forward pass and the order of its weights. Which specs it runs is `support`, where the
numbers come from is `weights`, what a row may see is `attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ullage.anatomy.spec import ModelSpec
from ullage.engine.attention import AttentionPath
from ullage.engine.batch import Batch
from ullage.engine.kv import KVCache, KVShape
from ullage.engine.linear import Linear, LinearFactory
from ullage.engine.lora import Rows, Site
from ullage.engine.rope import rope_tables, rotate
from ullage.engine.rule import AttentionRule
from ullage.engine.support import attention_of, dense_of, require_supported
from ullage.engine.weights import Weights

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, Q, K and V fused into one matrix, gate and up into another."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rule: AttentionRule
    mixer_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    rope: int
    feed_forward_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]


class Decoder:
    """Runs batches of ragged sequences over a paged KV cache."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, linear: LinearFactory, max_model_len: int
    ) -> None:
        """Raises UnsupportedModel for a spec it would not run exactly."""
        require_supported(spec, max_model_len)
        self.spec = spec
        self.max_model_len = max_model_len
        self._eps = spec.norm.eps
        ropes = list(dict.fromkeys(attention_of(layer).rope for layer in spec.layers))
        self._ropes = [rope_tables(rope, max_model_len) for rope in ropes if rope is not None]
        self._offset = 1.0 if spec.norm.unit_offset else 0.0
        self._embedding_VE = weights.tensor("embed", (spec.vocab_size, spec.hidden_size))
        self._layers = [
            self._layer(index, weights, linear, ropes.index(attention_of(layer).rope))
            for index, layer in enumerate(spec.layers)
        ]
        self._final_norm_E = self._norm_weight(weights, "final_norm", spec.hidden_size)
        self._head = linear(
            self._embedding_VE
            if spec.tie_embeddings
            else weights.tensor("head", (spec.vocab_size, spec.hidden_size)),
            None,
        )

    @property
    def kv_shapes(self) -> list[KVShape]:
        """What each layer stores per token."""
        return kv_shapes(self.spec)

    @property
    def windows(self) -> list[int | None]:
        """How far back each layer sees, None: to the start."""
        return windows(self.spec, self.max_model_len)

    @property
    def weights_bytes(self) -> int | None:
        """Bytes of all weights, a tied head once; None where a kernel packed some of them."""
        linears = [self._head]
        tensors = [self._embedding_VE, self._final_norm_E]
        for layer in self._layers:
            linears += [layer.qkv, layer.output, layer.gate_up, layer.down]
            norms = (layer.mixer_norm, layer.q_norm, layer.k_norm, layer.feed_forward_norm)
            tensors += [norm for norm in norms if norm is not None]
        for linear in linears:
            held = linear.tensors
            if held is None:
                return None
            tensors += held
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache, attention: AttentionPath) -> torch.Tensor:
        """Logits float32 [sampled rows, vocab]; writes the batch's K and V into the cache."""
        attend = attention.prepare(batch)
        positions_T = batch.positions_T
        turns = [
            (cos.index_select(0, positions_T)[:, None], sin.index_select(0, positions_T)[:, None])
            for cos, sin in self._ropes
        ]
        x_TE = F.embedding(batch.token_ids_T, self._embedding_VE)
        if self.spec.embedding_scale != 1.0:
            x_TE = x_TE * self.spec.embedding_scale
        last = len(self._layers) - 1
        rows, lora = batch.sampled_rows, batch.lora
        for index, layer in enumerate(self._layers):
            normed_TE = self._rms(x_TE, layer.mixer_norm)
            qkv_TO = _apply(layer.qkv, normed_TE, lora, index, "qkv")
            q_THD, k_TKD, v_TKD = self._heads(layer, qkv_TO, turns)
            kv.write(index, batch.slots[kv.layout.group_of[index]], k_TKD, v_TKD)
            mixed_TE = attend(index, q_THD, k_TKD, v_TKD, layer.rule).flatten(1)
            if index == last:
                # Only these rows' logits are wanted; after the last K and V the rest is over.
                x_TE, mixed_TE = x_TE.index_select(0, rows), mixed_TE.index_select(0, rows)
                lora = batch.sampled_lora
            x_TE = x_TE + _apply(layer.output, mixed_TE, lora, index, "output")
            normed_TE = self._rms(x_TE, layer.feed_forward_norm)
            gate_TF, up_TF = _apply(layer.gate_up, normed_TE, lora, index, "gate_up").chunk(2, -1)
            hidden_TF = layer.activation(gate_TF) * up_TF
            x_TE = x_TE + _apply(layer.down, hidden_TF, lora, index, "down")
        return self._head(self._rms(x_TE, self._final_norm_E))

    def _heads(
        self,
        layer: Layer,
        qkv_TO: torch.Tensor,
        turns: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q [tokens, heads, dim], K and V [tokens, kv_heads, dim], normed and turned."""
        num_qk_heads = layer.num_heads + layer.num_kv_heads
        heads_TND = qkv_TO.view(qkv_TO.shape[0], -1, layer.head_dim)
        qk_TND, v_TKD = heads_TND[:, :num_qk_heads], heads_TND[:, num_qk_heads:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q_THD, k_TKD = qk_TND[:, : layer.num_heads], qk_TND[:, layer.num_heads :]
            qk_TND = torch.cat([self._rms(q_THD, layer.q_norm), self._rms(k_TKD, layer.k_norm)], 1)
        qk_TND = rotate(qk_TND, *turns[layer.rope])
        return qk_TND[:, : layer.num_heads], qk_TND[:, layer.num_heads :], v_TKD

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def _norm_weight(self, weights: Weights, role: str, size: int) -> torch.Tensor:
        return weights.tensor(role, (size,)) + self._offset

    def _layer(self, index: int, weights: Weights, linear: LinearFactory, rope: int) -> Layer:
        spec = self.spec.layers[index]
        mixer, mlp, hidden = attention_of(spec), dense_of(spec), self.spec.hidden_size
        q_size, kv_size = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim

        def fused(*parts: tuple[str, int, int, bool]) -> Linear:
            """One matrix from parts (role, out, in, has bias) stacked along the output."""
            matrix = [weights.layer(index, role, (out, width)) for role, out, width, _ in parts]
            bias = None
            if any(has_bias for *_, has_bias in parts):
                bias = torch.cat(
                    [
                        weights.layer(index, role + "_bias", (out,)) if has else torch.zeros(out)
                        for role, out, _, has in parts
                    ]
                )
            return linear(torch.cat(matrix) if len(matrix) > 1 else matrix[0], bias)

        def norm(role: str, size: int) -> torch.Tensor:
            return weights.layer(index, role, (size,)) + self._offset

        return Layer(
            num_heads=mixer.num_heads,
            num_kv_heads=mixer.num_kv_heads,
            head_dim=mixer.head_dim,
            rule=AttentionRule(mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale),
            mixer_norm=norm("mixer_norm", hidden),
            qkv=fused(
                ("q", q_size, hidden, mixer.q_bias),
                ("k", kv_size, hidden, mixer.kv_bias),
                ("v", kv_size, hidden, mixer.kv_bias),
            ),
            q_norm=norm("q_norm", mixer.head_dim) if mixer.qk_norm else None,
            k_norm=norm("k_norm", mixer.head_dim) if mixer.qk_norm else None,
            output=fused(("o", hidden, q_size, mixer.o_bias)),
            rope=rope,
            feed_forward_norm=norm("feed_forward_norm", hidden),
            gate_up=fused(
                ("gate", mlp.intermediate, hidden, mlp.bias),
                ("up", mlp.intermediate, hidden, mlp.bias),
            ),
            down=fused(("down", hidden, mlp.intermediate, mlp.bias)),
            activation=ACTIVATIONS[mlp.activation],
        )


def _apply(
    linear: Linear, x_TI: torch.Tensor, lora: tuple[Rows, ...], layer: int, site: Site
) -> torch.Tensor:
    """The linear's output, each adapter's change added to its own rows."""
    y_TO = linear(x_TI)
    for rows in lora:
        rows.add(layer, site, x_TI, y_TO)
    return y_TO


def kv_shapes(spec: ModelSpec) -> list[KVShape]:
    """What each layer stores per token, for specs that require_supported accepts."""
    return [
        KVShape(attention.num_kv_heads, attention.head_dim)
        for attention in map(attention_of, spec.layers)
    ]


def windows(spec: ModelSpec, max_model_len: int) -> list[int | None]:
    """How far back each layer sees, None where that is as far as any request reaches."""
    found = [attention_of(layer).window for layer in spec.layers]
    return [w if w is not None and w < max_model_len else None for w in found]
