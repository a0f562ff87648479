"""An encoder, configured by a `ModelSpec`: every token sees every other, in one pass.

There is no KV cache here, and nothing to keep: keys and values serve a token that comes later, and
no token comes later. A text's tokens all go through a layer together, once, and what is left is
the hidden state. Hence no blocks, no prefill and decode, no preemption; what is scheduled is whole
texts. Pooling is `pooling`, weights are found by `encoder_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

from ullage.anatomy.spec import Attention, Dense, ModelSpec
from ullage.engine.encoder_bias import bucketed_bias
from ullage.engine.encoder_support import require_encoder
from ullage.engine.encoder_weights import EncoderWeights
from ullage.engine.linear import Linear, LinearFactory

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """x normalised over its last dimension, then scaled and shifted."""

    weight_E: torch.Tensor
    bias_E: torch.Tensor | None
    eps: float

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x_TE, self.weight_E.shape, self.weight_E, self.bias_E, self.eps)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One layer's weights; a norm stands behind each part, over its sum with the residual."""

    num_heads: int
    head_dim: int
    scale: float
    qkv: Linear
    output: Linear
    mixer_norm: LayerNorm
    up: Linear
    down: Linear
    feed_forward_norm: LayerNorm
    activation: Callable[[torch.Tensor], torch.Tensor]


class Encoder:
    """Runs batches of whole texts of any lengths, without padding."""

    def __init__(self, spec: ModelSpec, weights: EncoderWeights, linear: LinearFactory) -> None:
        """Raises UnsupportedModel for a spec it would not run exactly."""
        require_encoder(spec)
        self.spec = spec
        self._embedding_VE = weights.tensor("embed")
        positions_PE = weights.tensor("positions")
        if spec.token_types:
            # Every token is of the first type, so the type's row can lie in the positions already.
            positions_PE = positions_PE + weights.tensor("token_types")[0]
        self._positions_PE = positions_PE
        self._embedding_norm = self._norm(weights, "embed_norm")
        project = weights.optional("project_in")
        self._project = (
            None
            if project is None
            else linear(project, weights.tensor("project_in", suffix=".bias"))
        )
        table = dict(spec.family_sizes).get("relative_attention_num_buckets")
        self._bias_RH = None
        if table is not None:
            heads = dict(spec.family_sizes)["num_attention_heads"]
            self._bias_RH = weights.named("encoder.relative_attention_bias.weight", (table, heads))
        self._layers = [self._layer(index, weights, linear) for index in range(spec.num_layers)]

    @property
    def max_tokens(self) -> int:
        """The longest text that the table of positions reaches."""
        return self.spec.positions.table_rows - self._first_position

    @property
    def weights_bytes(self) -> int | None:
        """Bytes of all weights; None where a kernel packed some of them."""
        tensors = [self._embedding_VE, self._positions_PE]
        norms = [self._embedding_norm]
        linears = [] if self._project is None else [self._project]
        for layer in self._layers:
            norms += [layer.mixer_norm, layer.feed_forward_norm]
            linears += [layer.qkv, layer.output, layer.up, layer.down]
        tensors += [t for norm in norms for t in (norm.weight_E, norm.bias_E) if t is not None]
        for linear in linears:
            if linear.tensors is None:
                return None
            tensors += linear.tensors
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @torch.inference_mode()
    def forward(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The last hidden state, float32 [tokens, hidden], of each text of token ids.

        Products run over all tokens of the batch in one row; attention over the texts of one
        length at a time, so that nothing is ever computed for padding.
        """
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        lengths = [len(texts[index]) for index in order]
        runs = [(length, len(list(same))) for length, same in groupby(lengths)]
        x_TE = self._embed([texts[index] for index in order])
        biases = [self._bias(length) for length, _ in runs]
        for layer in self._layers:
            mixed_TE = self._attend(layer, x_TE, runs, biases)
            x_TE = layer.mixer_norm(x_TE + layer.output(mixed_TE))
            hidden_TF = layer.activation(layer.up(x_TE))
            x_TE = layer.feed_forward_norm(x_TE + layer.down(hidden_TF))
        found = dict(zip(order, torch.split(x_TE, lengths), strict=True))
        return [found[index] for index in range(len(texts))]

    @property
    def _first_position(self) -> int:
        padding = self.spec.positions.padding_id
        return 0 if padding is None else padding + 1

    def _embed(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        ids_T = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
        positions_T = torch.cat([self._positions(text) for text in texts])
        x_TE = F.embedding(ids_T, self._embedding_VE) + F.embedding(positions_T, self._positions_PE)
        x_TE = self._embedding_norm(x_TE)
        return x_TE if self._project is None else self._project(x_TE)

    def _positions(self, text: Sequence[int]) -> torch.Tensor:
        """Rows of the position table. Padding within a text has no number of its own (RoBERTa)."""
        padding = self.spec.positions.padding_id
        if padding is None:
            return torch.arange(len(text))
        counts_T = torch.tensor([token != padding for token in text], dtype=torch.int64)
        return counts_T.cumsum(0) * counts_T + padding

    def _bias(self, length: int) -> torch.Tensor | None:
        return None if self._bias_RH is None else bucketed_bias(self._bias_RH, length)

    def _attend(
        self,
        layer: EncoderLayer,
        x_TE: torch.Tensor,
        runs: Sequence[tuple[int, int]],
        biases: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        """Attention within each text; `runs` are (length, texts) in the order of the rows."""
        qkv_TO = layer.qkv(x_TE)
        heads_T3HD = qkv_TO.view(len(x_TE), 3, layer.num_heads, layer.head_dim)
        out_TE = torch.empty_like(x_TE[:, : layer.num_heads * layer.head_dim])
        first = 0
        for (length, count), bias_HSS in zip(runs, biases, strict=True):
            last = first + length * count
            rows = heads_T3HD[first:last].view(count, length, 3, layer.num_heads, layer.head_dim)
            q_NHSD, k_NHSD, v_NHSD = rows.permute(2, 0, 3, 1, 4)
            mixed_NHSD = F.scaled_dot_product_attention(
                q_NHSD, k_NHSD, v_NHSD, attn_mask=bias_HSS, scale=layer.scale
            )
            out_TE[first:last] = mixed_NHSD.transpose(1, 2).reshape(length * count, -1)
            first = last
        return out_TE

    def _norm(self, weights: EncoderWeights, slot: str, layer: int | None = None) -> LayerNorm:
        bias = weights.optional(slot, layer, ".bias")
        return LayerNorm(weights.tensor(slot, layer), bias, self.spec.norm.eps)

    def _layer(self, index: int, weights: EncoderWeights, linear: LinearFactory) -> EncoderLayer:
        spec = self.spec.layers[index]
        mixer, mlp = spec.mixer, spec.feed_forward
        assert isinstance(mixer, Attention)
        assert isinstance(mlp, Dense)

        def product(*slots: str) -> Linear:
            matrix = [weights.tensor(slot, index) for slot in slots]
            found = [weights.optional(slot, index, ".bias") for slot in slots]
            biases = [
                torch.zeros(len(weight_OI)) if bias_O is None else bias_O
                for weight_OI, bias_O in zip(matrix, found, strict=True)
            ]
            return linear(torch.cat(matrix), torch.cat(biases))

        return EncoderLayer(
            num_heads=mixer.num_heads,
            head_dim=mixer.head_dim,
            scale=mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale,
            qkv=product("q", "k", "v"),
            output=product("o"),
            mixer_norm=self._norm(weights, "post1", index),
            up=product("up"),
            down=product("down"),
            feed_forward_norm=self._norm(weights, "post2", index),
            activation=ACTIVATIONS[mlp.activation],
        )
