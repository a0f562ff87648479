"""One decoder, configured by a `ModelSpec`: families differ by data, never by code here.

Holds the forward pass. Which specs it runs is `support`, how layers are filled `loading.py`, where
the numbers come from `weights`, what a row may see `attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ullage.anatomy.spec import ModelSpec, Rope
from ullage.engine.kv import KVCache, KVShape
from ullage.engine.linear import Linear, LinearFactory
from ullage.engine.model.experts import MixtureOfExperts
from ullage.engine.model.freed import give_back_freed
from ullage.engine.model.layer import Dense, Layer
from ullage.engine.model.loading import LayerReader
from ullage.engine.model.support import attention_of, kv_shapes, require_supported, windows
from ullage.engine.model.weights import Weights
from ullage.engine.positions.rope import RotaryTables, Turn, rotary_tables
from ullage.engine.positions.scaling import Reach, rope_angles
from ullage.engine.sites import Site

if TYPE_CHECKING:  # these import this package in turn
    from ullage.engine.attention import AttentionPath
    from ullage.engine.batch import Batch
    from ullage.engine.lora import Rows
    from ullage.engine.taps import Taps


class Decoder:
    """Runs batches of ragged sequences over a paged KV cache."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        linear: LinearFactory,
        max_model_len: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype` is that of matrices and of what flows between them; norms and logits are float32.

        Raises UnsupportedModel for a spec it would not run exactly.
        """
        require_supported(spec, max_model_len)
        self.spec = spec
        self.max_model_len = max_model_len
        self.dtype = dtype
        turns = turns_of(spec)
        self.ropes = [_tables(spec, *turn, max_model_len) for turn in turns]
        reader = LayerReader(spec, weights, linear, dtype)
        self.embedding_VE = weights.tensor("embed").to(dtype)
        self.layers: list[Layer] = []
        for index in range(spec.num_layers):
            turn = _turn(spec, index)
            self.layers.append(reader.layer(index, None if turn is None else turns.index(turn)))
            give_back_freed()
        size = spec.hidden_size
        self.positions_NE = weights.tensor("positions").to(dtype) if _learned(spec) else None
        # OPT and BioGPT keep rows in front of the first position.
        self.first_position = spec.positions.table_rows - spec.max_positions
        self.embedding_norm = reader.norm("embed_norm", size) if spec.embedding_norm else None
        self.project_in = self.project_out = None
        if spec.embedding_size not in (None, size):
            self.project_in = linear(weights.tensor("project_in").to(dtype), None)
            self.project_out = linear(weights.tensor("project_out").to(dtype), None)
        self.final_norm = reader.norm("final_norm", size) if spec.final_norm else None
        head_VE = self.embedding_VE if spec.tie_embeddings else weights.tensor("lm_head").to(dtype)
        bias_V = weights.tensor("lm_head_bias", suffix="") if spec.lm_head_bias else None
        self.head = linear(head_VE, None if bias_V is None else bias_V.to(dtype))
        self.logit_scale = _logit_scale(spec)
        give_back_freed()

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
        linears = [self.head, *(linear for layer in self.layers for linear in layer.linears)]
        linears += [linear for linear in (self.project_in, self.project_out) if linear is not None]
        norms = [norm for layer in self.layers for norm in layer.norms]
        norms += [norm for norm in (self.embedding_norm, self.final_norm) if norm is not None]
        tensors = [self.embedding_VE, *(t for norm in norms for t in norm.tensors)]
        if self.positions_NE is not None:
            tensors.append(self.positions_NE)
        for linear in linears:
            held = linear.tensors
            if held is None:
                return None
            tensors += held
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())

    @torch.inference_mode()
    def forward(
        self, batch: Batch, kv: KVCache, attention: AttentionPath, taps: Taps | None = None
    ) -> torch.Tensor:
        """Logits float32 [sampled rows, vocab]; writes the batch's K and V into the cache.

        `taps` are filled with what their rows, all of them sampled ones, were on the way.
        """
        attend = attention.prepare(batch)
        turns = [tables.at(batch.positions_T) for tables in self.ropes]
        x_TE = self._embed(batch)
        last = len(self.layers) - 1
        rows, lora = batch.sampled_rows, batch.lora
        for index, layer in enumerate(self.layers):
            normed_TE = x_TE if layer.mixer_norm is None else layer.mixer_norm(x_TE)
            qkv_TO = _apply(layer.qkv, normed_TE, lora, index, "qkv")
            turn = None if layer.rope is None else turns[layer.rope]
            q_THD, k_TKD, v_TKD = _heads(layer, qkv_TO, turn)
            kv.write(index, batch.slots[kv.layout.group_of[index]], k_TKD, v_TKD)
            mixed_TE = attend(index, q_THD, k_TKD, v_TKD, layer.rule).flatten(1)
            if taps is not None:
                turned_TND = torch.cat([q_THD, k_TKD, v_TKD], 1)
                taps.keep(index, x=x_TE, normed=normed_TE, qkv=qkv_TO, turned=turned_TND)
                taps.keep(index, mixed=mixed_TE)
                if index == last:
                    taps.narrow(rows)
            if index == last:
                # Only these rows' logits are wanted; after the last K and V the rest is over.
                x_TE, mixed_TE = x_TE.index_select(0, rows), mixed_TE.index_select(0, rows)
                normed_TE = normed_TE.index_select(0, rows)
                lora = batch.sampled_lora
            added_TE = _apply(layer.output, mixed_TE.to(x_TE.dtype), lora, index, "output")
            x_TE = _joined(layer, index, x_TE, normed_TE, added_TE, lora, taps)
        return self._logits(x_TE, taps)

    def _embed(self, batch: Batch) -> torch.Tensor:
        x_TE = F.embedding(batch.token_ids_T, self.embedding_VE)
        if self.spec.embedding_scale != 1.0:
            x_TE = x_TE * self.spec.embedding_scale
        if self.project_in is not None:
            x_TE = self.project_in(x_TE)
        if self.positions_NE is not None:
            x_TE = x_TE + self.positions_NE[batch.positions_T + self.first_position]
        return x_TE if self.embedding_norm is None else self.embedding_norm(x_TE)

    def _logits(self, x_TE: torch.Tensor, taps: Taps | None) -> torch.Tensor:
        if taps is not None:
            taps.keep(len(self.layers), x=x_TE)
        if self.final_norm is not None:
            x_TE = self.final_norm(x_TE)
        if taps is not None:
            taps.keep(len(self.layers), normed=x_TE)
        if self.project_out is not None:
            x_TE = self.project_out(x_TE)
        logits_TV = self.head(x_TE).float()
        if self.logit_scale != 1.0:
            logits_TV = logits_TV * self.logit_scale
        cap = self.spec.logit_soft_cap
        return logits_TV if cap is None else torch.tanh(logits_TV / cap) * cap


def _joined(
    layer: Layer,
    index: int,
    x_TE: torch.Tensor,
    normed_TE: torch.Tensor,
    mixed_TE: torch.Tensor,
    lora: tuple[Rows, ...],
    taps: Taps | None,
) -> torch.Tensor:
    """The residual after the whole layer, given what the mixer adds; see `Wiring`."""
    before, after = layer.mixer_out_norm, layer.feed_forward_out_norm
    if layer.wiring == "parallel":
        own = layer.feed_forward_norm
        seen_TE = normed_TE if own is None else own(x_TE)
        return x_TE + mixed_TE + _feed_forward(layer.feed_forward, seen_TE, lora, index)
    if layer.wiring == "after_sum":
        assert before is not None
        assert after is not None
        x_TE = before(x_TE + mixed_TE)
        return after(x_TE + _feed_forward(layer.feed_forward, x_TE, lora, index))
    if before is not None:
        mixed_TE = before(mixed_TE)
    x_TE = _added(layer, x_TE, mixed_TE)
    seen_TE = x_TE if layer.feed_forward_norm is None else layer.feed_forward_norm(x_TE)
    if taps is not None:
        taps.keep(index, middle=x_TE, mlp_normed=seen_TE)
    made_TE = _feed_forward(layer.feed_forward, seen_TE, lora, index, taps)
    return _added(layer, x_TE, made_TE if after is None else after(made_TE))


def _added(layer: Layer, x_TE: torch.Tensor, part_TE: torch.Tensor) -> torch.Tensor:
    if layer.residual_scale != 1.0:
        part_TE = part_TE * layer.residual_scale
    return x_TE + part_TE


def _feed_forward(
    mlp: Dense | MixtureOfExperts,
    x_TE: torch.Tensor,
    lora: tuple[Rows, ...],
    index: int,
    taps: Taps | None = None,
) -> torch.Tensor:
    if isinstance(mlp, MixtureOfExperts):
        return mlp(x_TE)
    made_TF = _apply(mlp.gate_up, x_TE, lora, index, "gate_up")
    if mlp.gated:
        gate_TF, up_TF = made_TF.chunk(2, -1)
        hidden_TF = mlp.activation(gate_TF) * up_TF
    else:
        hidden_TF = mlp.activation(made_TF)
    if taps is not None:
        taps.keep(index, hidden=hidden_TF)
        width = hidden_TF.shape[-1]
        taps.keep(index, gate=made_TF[:, :-width], up=made_TF[:, -width:])
    return _apply(mlp.down, hidden_TF, lora, index, "down")


def _heads(
    layer: Layer, qkv_TO: torch.Tensor, turn: Turn | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q [tokens, heads, dim], K and V [tokens, kv_heads, dim] in float32, normed and turned."""
    num_tokens, num_qk_heads = qkv_TO.shape[0], layer.num_heads + layer.num_kv_heads
    if layer.clip is not None:
        qkv_TO = qkv_TO.clamp(-layer.clip, layer.clip)
    qkv_TO = qkv_TO.float()
    heads_TND = qkv_TO.view(num_tokens, -1, layer.head_dim)
    qk_TND, v_TKD = heads_TND[:, :num_qk_heads], heads_TND[:, num_qk_heads:]
    if layer.q_norm is not None and layer.k_norm is not None:
        q_THD, k_TKD = qk_TND[:, : layer.num_heads], qk_TND[:, layer.num_heads :]
        # A norm over all heads sees them as one row.
        q_TNS = layer.q_norm(q_THD.reshape(num_tokens, -1, layer.q_norm.size))
        k_TNS = layer.k_norm(k_TKD.reshape(num_tokens, -1, layer.k_norm.size))
        qk_TND = torch.cat([q_TNS.reshape(q_THD.shape), k_TNS.reshape(k_TKD.shape)], 1)
    if turn is not None:
        qk_TND = turn(qk_TND)
    return qk_TND[:, : layer.num_heads], qk_TND[:, layer.num_heads :], v_TKD


def _apply(
    linear: Linear, x_TI: torch.Tensor, lora: tuple[Rows, ...], layer: int, site: Site
) -> torch.Tensor:
    """The linear's output, each adapter's change added to its own rows."""
    y_TO = linear(x_TI)
    for rows in lora:
        rows.add(layer, site, x_TI, y_TO)
    return y_TO


# --- what follows from the spec ------------------------------------------------------------------


def _learned(spec: ModelSpec) -> bool:
    return spec.positions.kind == "learned"


def _turn(spec: ModelSpec, index: int) -> tuple[Rope, int] | None:
    """How a layer rotates: its rope and the width of a head; None if it does not."""
    mixer = attention_of(spec.layers[index])
    return None if mixer.rope is None else (mixer.rope, mixer.head_dim)


def turns_of(spec: ModelSpec) -> list[tuple[Rope, int]]:
    """The different ways in which the layers rotate."""
    every = (_turn(spec, index) for index in range(spec.num_layers))
    return list(dict.fromkeys(turn for turn in every if turn is not None))


def _tables(spec: ModelSpec, rope: Rope, head_dim: int, max_model_len: int) -> RotaryTables:
    reach = Reach(max_model_len, spec.max_positions, head_dim)
    return rotary_tables(rope_angles(rope, reach), max_model_len)


def _logit_scale(spec: ModelSpec) -> float:
    """What logits are multiplied by: Cohere's logit_scale, Granite's logits_scaling turned over."""
    numerics = dict(spec.numerics)
    scale, divisor = numerics.get("logit_scale"), numerics.get("logits_scaling")
    if isinstance(scale, int | float):
        return float(scale)
    return 1.0 / float(divisor) if isinstance(divisor, int | float) else 1.0
