"""An encoder, configured by a `ModelSpec`: every token sees every other, in one pass.

There is no KV cache here, and nothing to keep: keys and values serve a token that comes later, and
no token comes later. A text's tokens all go through a layer together, once, and what is left is
the hidden state. Hence no blocks, no prefill and decode, no preemption; what is scheduled is whole
texts. Pooling is `pooling`, weights become layers in `encoder_layer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F

from ullage.anatomy.spec import Attention, ModelSpec, Rope
from ullage.engine.encoder.bias import bucketed_bias, window_bias
from ullage.engine.encoder.layer import EncoderLayer, encoder_norm, read_layer
from ullage.engine.encoder.support import require_encoder
from ullage.engine.encoder.weights import EncoderWeights
from ullage.engine.linear import LinearFactory
from ullage.engine.positions.rope import Turn, rotary_tables
from ullage.engine.positions.scaling import Reach, rope_angles

# Texts of one length that lie side by side: the length, and how many.
Run = tuple[int, int]


class Encoder:
    """Runs batches of whole texts of any lengths, without padding."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: EncoderWeights,
        linear: LinearFactory,
        max_model_len: int | None = None,
    ) -> None:
        """`max_model_len` None: as long as positions reach. Raises UnsupportedModel."""
        require_encoder(spec)
        self.spec = spec
        self._embedding_VE = weights.tensor("embed")
        # Every token is of the first type.
        self._type_E = weights.tensor("token_types")[0] if spec.token_types else None
        self._positions_PE = weights.optional("positions")
        self._embedding_norm = (
            encoder_norm(spec, weights, "embed_norm") if spec.embedding_norm else None
        )
        project = weights.optional("project_in")
        self._project = (
            None
            if project is None
            else linear(project, weights.tensor("project_in", suffix=".bias"))
        )
        self._bias_RH = _bucket_table(spec, weights)
        longest = min(max_model_len or max_tokens(spec), max_tokens(spec))
        self._tables = {
            rope: rotary_tables(
                rope_angles(rope, Reach(longest, spec.max_positions, head_dim)), longest
            )
            for rope, head_dim in _ropes(spec)
        }
        self._layers = [
            read_layer(spec, index, weights, linear) for index in range(spec.num_layers)
        ]
        self._final_norm = encoder_norm(spec, weights, "final_norm") if spec.final_norm else None

    @property
    def weights_bytes(self) -> int | None:
        """Bytes of all weights; None where a kernel packed some of them."""
        tensors = [self._embedding_VE, self._type_E, self._positions_PE, self._bias_RH]
        norms = [self._embedding_norm, self._final_norm]
        linears = [] if self._project is None else [self._project]
        for layer in self._layers:
            norms += layer.norms
            linears += layer.linears
        tensors += [t for norm in norms if norm is not None for t in (norm.weight_E, norm.bias_E)]
        for linear in linears:
            if linear.tensors is None:
                return None
            tensors += linear.tensors
        held = [tensor for tensor in tensors if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    @torch.inference_mode()
    def forward(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The last hidden state, float32 [tokens, hidden], of each text of token ids.

        Products run over all tokens of the batch in one row; attention over the texts of one
        length at a time, so that nothing is ever computed for padding.
        """
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        lengths = [len(texts[index]) for index in order]
        runs = [(length, len(list(same))) for length, same in groupby(lengths)]
        places_T = torch.cat([torch.arange(length) for length in lengths])
        x_TE = self._embed([texts[index] for index in order], places_T)
        turns = {rope: tables.at(places_T) for rope, tables in self._tables.items()}
        windows = {layer.window for layer in self._layers}
        biases = {window: [self._bias(window, length) for length, _ in runs] for window in windows}
        for layer in self._layers:
            turn = None if layer.rope is None else turns[layer.rope]
            seen_TE = x_TE if layer.pre_mixer is None else layer.pre_mixer(x_TE)
            x_TE = x_TE + layer.output(_attend(layer, seen_TE, turn, runs, biases[layer.window]))
            x_TE = x_TE if layer.post_mixer is None else layer.post_mixer(x_TE)
            seen_TE = x_TE if layer.pre_feed_forward is None else layer.pre_feed_forward(x_TE)
            x_TE = x_TE + layer.feed_forward(seen_TE)
            x_TE = x_TE if layer.post_feed_forward is None else layer.post_feed_forward(x_TE)
        if self._final_norm is not None:
            x_TE = self._final_norm(x_TE)
        found = dict(zip(order, torch.split(x_TE, lengths), strict=True))
        return [found[index] for index in range(len(texts))]

    def _embed(self, texts: Sequence[Sequence[int]], places_T: torch.Tensor) -> torch.Tensor:
        ids_T = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
        x_TE = F.embedding(ids_T, self._embedding_VE)
        if self._positions_PE is not None:
            rows_T = places_T
            if self.spec.positions.padding_id is not None:
                rows_T = torch.cat([self._rows(text) for text in texts])
            x_TE = x_TE + F.embedding(rows_T, self._positions_PE)
        if self._type_E is not None:
            x_TE = x_TE + self._type_E
        if self._embedding_norm is not None:
            x_TE = self._embedding_norm(x_TE)
        return x_TE if self._project is None else self._project(x_TE)

    def _rows(self, text: Sequence[int]) -> torch.Tensor:
        """Rows of a position table that begins behind the padding token's id (RoBERTa).

        Padding within a text has no number of its own.
        """
        padding = self.spec.positions.padding_id
        assert padding is not None
        counts_T = torch.tensor([token != padding for token in text], dtype=torch.int64)
        return counts_T.cumsum(0) * counts_T + padding

    def _bias(self, window: int | None, length: int) -> torch.Tensor | None:
        """What is added to the scores of a text: by distance, and −∞ beyond a window."""
        if self._bias_RH is not None:
            return bucketed_bias(self._bias_RH, length)
        return None if window is None else window_bias(window, length)


def max_tokens(spec: ModelSpec) -> int:
    """The longest text that the positions reach; a padding token's id takes rows from it."""
    padding = spec.positions.padding_id
    if spec.positions.kind != "learned":
        return spec.max_positions
    return spec.positions.table_rows - (0 if padding is None else padding + 1)


def _ropes(spec: ModelSpec) -> dict[tuple[Rope, int], None]:
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention)]
    return {(mixer.rope, mixer.head_dim): None for mixer in mixers if mixer.rope is not None}


def _bucket_table(spec: ModelSpec, weights: EncoderWeights) -> torch.Tensor | None:
    """MPNet's numbers per bucket of distance and head."""
    sizes = dict(spec.family_sizes)
    if "relative_attention_num_buckets" not in sizes:
        return None
    shape = (sizes["relative_attention_num_buckets"], sizes["num_attention_heads"])
    return weights.named("encoder.relative_attention_bias.weight", shape)


def _attend(
    layer: EncoderLayer,
    x_TE: torch.Tensor,
    turn: Turn | None,
    runs: Sequence[Run],
    biases: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """Attention within each text, [tokens, heads · head_dim]."""
    heads_TND = layer.qkv(x_TE).view(len(x_TE), -1, layer.head_dim)
    num_qk = layer.num_heads + layer.num_kv_heads
    qk_TND, v_TKD = heads_TND[:, :num_qk], heads_TND[:, num_qk:]
    if turn is not None:
        qk_TND = turn(qk_TND)
    q_THD, k_TKD = qk_TND[:, : layer.num_heads], qk_TND[:, layer.num_heads :]
    out_THD = torch.empty(q_THD.shape)
    first = 0
    for (length, count), bias in zip(runs, biases, strict=True):
        rows = slice(first, first + length * count)
        q_NHSD, k_NKSD, v_NKSD = (
            part[rows].view(count, length, -1, layer.head_dim).transpose(1, 2)
            for part in (q_THD, k_TKD, v_TKD)
        )
        mixed_NHSD = F.scaled_dot_product_attention(
            q_NHSD,
            k_NKSD,
            v_NKSD,
            attn_mask=bias,
            scale=layer.scale,
            enable_gqa=layer.num_heads != layer.num_kv_heads,
        )
        out_THD[rows] = mixed_NHSD.transpose(1, 2).reshape(-1, layer.num_heads, layer.head_dim)
        first = rows.stop
    return out_THD.flatten(1)
