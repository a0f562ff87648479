"""The decoder through `kernels.step`: which models and batches that runs, and the tables it reads.

Holds addresses and buffers. What the compiled step does not run goes to the decoder in torch, which
gives the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from ullage.engine.attention import AttentionPath
from ullage.engine.batch import Batch, Span
from ullage.engine.kernels.compiling import aligned, available
from ullage.engine.kv import KVCache, KVShape
from ullage.engine.linear import FloatLinear, Int8Linear, Linear
from ullage.engine.model.decoder import Decoder
from ullage.engine.model.layer import Dense, Layer
from ullage.engine.model.norms import Norm
from ullage.engine.options import EngineOptions
from ullage.engine.taps import PLACES, Taps

# `--dtype` → what matrices are kept in, and what flows between them in torch.
DTYPES: Mapping[str, torch.dtype] = {
    "auto": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
# Up to which context prompts are done sooner here than by torch: the longer it is, the more of it
# is attention, where SDPA's matrix products win. SmolLM2-135M, one busy machine: in int8, 512 rows
# took 1.09 s here and 1.55 s in torch; in float32, 128 rows 0.49 s of one processor here and 0.54 s
# in torch, 256 rows 1.18 s and 1.37 s, 512 rows the same time, 128 rows at 1,024 0.84 s and 0.73 s.
# Decodes in the same step are always done sooner here.
_LONGEST_INT8_PREFILL = 1024
_LONGEST_FLOAT_PREFILL = 256
# The same where torch's decoder multiplies float32 by the package's own loops (`kernels.product`):
# one thread of a Zen 5, seconds of processor, here and in torch: 64 rows 0.160 and 0.170, 96 rows
# 0.237 and 0.210, 256 rows 0.685 and 0.440.
_LONGEST_OUTRUN_PREFILL = 64
# Ways of attention that somebody asks for by name to see just that.
_ATTENTION_IN_TORCH = ("gathered", "reference")

# How compiled code sees what a cache holds.
_STORAGE: Mapping[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
}
_UNTAPPED, _NO_OFFSETS = np.zeros(0, np.int64), np.zeros(len(PLACES), np.int64)
_WIDTH_MULTIPLE = 32
_DIM_MULTIPLE = 16


def _is_rms(norm: Norm | None, size: int) -> bool:
    return (
        norm is not None
        and (norm.kind, norm.size, norm.bias) == ("rms", size, None)
        and norm.weight is not None
    )


def _is_gated_silu(layer: Layer) -> bool:
    mlp = layer.feed_forward
    return isinstance(mlp, Dense) and mlp.gated and mlp.activation_name in ("silu", "swish")


def _has_plain_residuals(layer: Layer) -> bool:
    return (
        layer.wiring == "serial"
        and layer.mixer_out_norm is None
        and layer.feed_forward_out_norm is None
        and layer.residual_scale == 1.0
    )


def _norms_heads(layer: Layer) -> bool:
    q_norm, k_norm = layer.q_norm, layer.k_norm
    if q_norm is None and k_norm is None:
        return True
    return _is_rms(q_norm, layer.head_dim) and _is_rms(k_norm, layer.head_dim)


def _form(layer: Layer) -> tuple[int, int, int]:
    return (layer.num_heads, layer.num_kv_heads, layer.head_dim)


def _width(linear: Linear) -> int | None:
    """Of the rows that a matrix of the compiled step is given; None of any other matrix."""
    if isinstance(linear, FloatLinear):
        dtype = linear.weight_OI.dtype
        return linear.weight_OI.shape[1] if dtype in (torch.float32, torch.bfloat16) else None
    # The weights may be filled up to a wider row than the step's, which it would then read askew.
    return linear.in_features if isinstance(linear, Int8Linear) else None


# Why a layer is not run by the compiled step: (is it as wanted, what is not).
_LAYER_WANTS: Sequence[tuple[Callable[[Layer], bool], str]] = (
    (_is_gated_silu, "a feed-forward other than gated SiLU"),
    (_has_plain_residuals, "residuals that are scaled, normed or parallel"),
    (_norms_heads, "a norm over more than one head"),
    (lambda layer: layer.clip is None, "clipped queries, keys and values"),
    (lambda layer: not layer.rule.slopes, "ALiBi"),
    (lambda layer: layer.head_dim % _DIM_MULTIPLE == 0, f"a head_dim not of {_DIM_MULTIPLE}s"),
    (
        lambda layer: all((_width(linear) or 1) % _WIDTH_MULTIPLE == 0 for linear in layer.linears),
        f"a width that is no multiple of {_WIDTH_MULTIPLE}",
    ),
)


def why_not(decoder: Decoder) -> str | None:
    """What keeps `decoder` from the compiled step, in words; None where nothing does."""
    if not available():
        return "numba is not installed"
    spec, size = decoder.spec, decoder.spec.hidden_size
    if decoder.positions_NE is not None or decoder.embedding_norm is not None:
        return "positions or norms at the embedding"
    if decoder.project_in is not None or decoder.logit_scale != 1.0:
        return "scaled or projected hidden states"
    if spec.logit_soft_cap is not None or not _is_rms(decoder.final_norm, size):
        return "logits other than those of an RMS norm"
    if any(tables.interleaved for tables in decoder.ropes):
        return "rotary pairs of neighbours"
    for layer in decoder.layers:
        for is_wanted, what in _LAYER_WANTS:
            if not is_wanted(layer):
                return what
        if not _is_rms(layer.mixer_norm, size) or not _is_rms(layer.feed_forward_norm, size):
            return "norms other than RMS in front of both parts"
        if _form(layer) != _form(decoder.layers[0]):
            return "layers of unlike heads"
    linears = [decoder.head, *(linear for layer in decoder.layers for linear in layer.linears)]
    if any(_width(linear) is None for linear in linears):
        return "a kind of weights without kernels"
    if len({_outputs(layer.linears[2]) for layer in decoder.layers}) > 1:
        return "layers of unlike feed-forwards"
    return None


def eager_because(decoder: Decoder, options: EngineOptions) -> str | None:
    """Why every step of an engine runs in torch, in words; None where small ones are compiled."""
    if options.enforce_eager:
        return "--enforce-eager"
    if options.attention in _ATTENTION_IN_TORCH:
        return f"attention {options.attention} was asked for"
    return why_not(decoder)


def fastest(decoder: Decoder, options: EngineOptions) -> Decoder | CompiledDecoder:
    """`decoder` with its small steps compiled, unless it or the options do not allow that."""
    return decoder if eager_because(decoder, options) is not None else CompiledDecoder(decoder)


class CompiledDecoder:
    """A `Decoder` to its callers: batches that the step runs are compiled, the rest is torch."""

    def __init__(self, decoder: Decoder) -> None:
        """`why_not(decoder)` is None."""
        from ullage.engine.attention import paged, row_blocks
        from ullage.engine.kernels import product, step
        from ullage.engine.kernels.attention import EXTRA

        team = product.team
        self._step, self._team, self._blocks = step, team(), row_blocks
        self._extra = EXTRA
        holds_int8 = isinstance(decoder.head, Int8Linear)
        self._longest_prefill = _LONGEST_INT8_PREFILL if holds_int8 else _LONGEST_FLOAT_PREFILL
        if product.OUTRUNS_TORCH and decoder.embedding_VE.dtype == torch.float32 and not holds_int8:
            self._longest_prefill = _LONGEST_OUTRUN_PREFILL
        self._least_gathered = paged.LEAST_GATHERED
        self._decoder = decoder
        self.spec = decoder.spec
        # Of one layer, which all are like.
        layer, spec = decoder.layers[0], decoder.spec
        self._intermediate = _outputs(layer.linears[2]) // 2  # gates and ups
        self._layers = np.stack([self._row(index) for index in range(len(decoder.layers))])
        self._head = np.array(_matrix(decoder.head), np.int64)
        self._rules = np.array(
            [(one.rule.scale, one.rule.soft_cap or 0.0) for one in decoder.layers], np.float32
        )
        self._sizes = np.zeros(step.SIZES, np.int64)
        self._sizes[step.HIDDEN], self._sizes[step.VOCAB] = spec.hidden_size, spec.vocab_size
        self._sizes[step.HEADS], self._sizes[step.KV_HEADS] = layer.num_heads, layer.num_kv_heads
        self._sizes[step.HEAD_DIM] = layer.head_dim
        self._storage: np.typing.NDArray[np.generic] = np.empty(0, np.float32)
        self._kv: KVCache | None = None
        self._buffers = _Buffers(decoder, self._intermediate, 1)
        self._nothing_kept = np.zeros((len(decoder.layers) + 1, 0, 0), np.float32)

    @property
    def plain(self) -> Decoder:
        return self._decoder

    @property
    def max_model_len(self) -> int:
        return self._decoder.max_model_len

    @property
    def kv_shapes(self) -> list[KVShape]:
        return self._decoder.kv_shapes

    @property
    def windows(self) -> list[int | None]:
        return self._decoder.windows

    @property
    def weights_bytes(self) -> int | None:
        return self._decoder.weights_bytes

    @torch.inference_mode()
    def forward(
        self, batch: Batch, kv: KVCache, attention: AttentionPath, taps: Taps | None = None
    ) -> torch.Tensor:
        """Logits float32 [sampled rows, vocab]; writes the batch's K and V into the cache."""
        in_torch = batch.lora or not all(map(self._suits, batch.prefills))
        if in_torch or attention.watches(batch):
            return self._decoder.forward(batch, kv, attention, taps)
        if self._kv is not kv:
            self._bind(kv)
        rows = len(batch.token_ids_T)
        if rows > self._buffers.rows:
            self._buffers = _Buffers(self._decoder, self._intermediate, 2 * rows)
        x_TE = F.embedding(batch.token_ids_T, self._decoder.embedding_VE).float()
        if self.spec.embedding_scale != 1.0:
            x_TE *= self.spec.embedding_scale
        logits_SV = torch.empty(len(batch.sampled_rows), self.spec.vocab_size)
        self._run(batch, rows, x_TE, logits_SV, taps)
        return logits_SV

    def _suits(self, span: Span) -> bool:
        """Whether a prefill chunk is done sooner here than by torch's products."""
        return span.count < self._least_gathered or span.context <= self._longest_prefill

    def _run(
        self,
        batch: Batch,
        rows: int,
        x_TE: torch.Tensor,
        logits_SV: torch.Tensor,
        taps: Taps | None,
    ) -> None:
        assert self._decoder.final_norm is not None
        if taps is not None:
            taps.compiled = True
        spans = batch.decodes + batch.prefills
        blocks_N4 = self._blocks.row_blocks(spans)
        own = self._buffers
        self._team.run(
            self._step.step,
            self._step.num_phases(len(self._layers)),
            self._layers,
            self._head,
            _address(self._decoder.final_norm.weight),
            self._sizes,
            self._rules,
            np.empty(0, np.float32),
            np.float32(self.spec.norm.eps),
            self._storage,
            batch.positions_T.numpy(),
            torch.stack(batch.slots).numpy(),
            blocks_N4,
            self._blocks.block_tables(spans, len(batch.slots)),
            batch.sampled_rows.numpy(),
            x_TE.numpy(),
            own.normed_TE[:rows],
            own.whole_N,
            own.scales_N,
            own.qkv_TO[:rows],
            own.mixed_TO[:rows],
            own.hidden_TF[:rows],
            self._states(blocks_N4, spans, rows),
            logits_SV.numpy(),
            _UNTAPPED if taps is None else taps.map_of(rows),
            self._nothing_kept if taps is None else taps.kept_LRW,
            _NO_OFFSETS if taps is None else taps.offsets,
        )

    def _states(
        self, blocks_N4: np.typing.NDArray[np.int64], spans: Sequence[Span], rows: int
    ) -> np.typing.NDArray[np.float32]:
        """Room that the threads share where contexts are cut into parts, [rows, KV heads, parts].

        Of no rows where they are not.
        """
        layer, threads = self._decoder.layers[0], self._team.num_threads
        kv_heads, longest = layer.num_kv_heads, max(span.context for span in spans)
        parts = self._blocks.num_parts(len(blocks_N4) * kv_heads, longest, threads)
        group, width = layer.num_heads // kv_heads, layer.head_dim + self._extra
        return np.empty((rows if parts > 1 else 0, kv_heads, parts, group, width), np.float32)

    def _bind(self, kv: KVCache) -> None:
        """Take up the addresses of a cache, which is kept as long as they are."""
        step = self._step
        for index, row in enumerate(self._layers):
            for column, tensor in (
                (step.KEYS, kv.keys[index]),
                (step.VALUES, kv.values[index]),
                (step.KEY_SCALES, kv.key_scales[index]),
                (step.VALUE_SCALES, kv.value_scales[index]),
            ):
                row[column] = _address(tensor) if tensor.numel() else 0
            row[step.GROUP] = kv.layout.group_of[index]
        self._sizes[step.NUM_BLOCKS], self._sizes[step.BLOCK_SIZE] = kv.num_blocks, kv.block_size
        self._sizes[step.KV_WIDTH] = kv.keys[0].shape[-1]
        self._storage = np.empty(0, _STORAGE[kv.keys[0].dtype])
        self._kv = kv

    def _row(self, index: int) -> np.typing.NDArray[np.int64]:
        """What the step is told of one layer, its cache excepted."""
        step, layer = self._step, self._decoder.layers[index]
        row = np.zeros(step.COLUMNS, np.int64)
        for column, linear in zip(
            (step.QKV, step.OUTPUT, step.GATE_UP, step.DOWN), layer.linears, strict=True
        ):
            row[column : column + 4] = _matrix(linear)
        for column, norm in (
            (step.MIXER_NORM, layer.mixer_norm),
            (step.MLP_NORM, layer.feed_forward_norm),
            (step.Q_NORM, layer.q_norm),
            (step.K_NORM, layer.k_norm),
        ):
            row[column] = 0 if norm is None else _address(norm.weight)
        if layer.rope is not None:
            tables = self._decoder.ropes[layer.rope]
            row[step.COS], row[step.SIN] = _address(tables.cos_ND), _address(tables.sin_ND)
            row[step.ROTARY_DIM] = tables.cos_ND.shape[1]
        row[step.WINDOW] = self._decoder.windows[index] or 0
        return row


class _Buffers:
    """Room for what flows through a layer, for up to `rows` rows."""

    def __init__(self, decoder: Decoder, intermediate: int, rows: int) -> None:
        layer, hidden = decoder.layers[0], decoder.spec.hidden_size
        mixed = layer.num_heads * layer.head_dim
        self.rows = rows
        self.normed_TE = aligned(rows * hidden, np.float32).reshape(rows, hidden)
        self.qkv_TO = np.empty((rows, _outputs(layer.qkv)), np.float32)
        self.mixed_TO = aligned(rows * mixed, np.float32).reshape(rows, mixed)
        self.hidden_TF = aligned(rows * intermediate, np.float32).reshape(rows, intermediate)
        self.whole_N = aligned(rows * max(hidden, mixed, intermediate), np.int16)
        self.scales_N = np.empty(self.whole_N.size // _WIDTH_MULTIPLE, np.float32)


def _outputs(linear: Linear) -> int:
    assert isinstance(linear, FloatLinear | Int8Linear)
    return linear.weight_OI.shape[0]


def _matrix(linear: Linear) -> list[int]:
    """Kind and addresses of weights, scales and bias, as `kernels.step` has them."""
    from ullage.engine.kernels import matmul

    assert isinstance(linear, FloatLinear | Int8Linear)
    kinds = {
        torch.int8: matmul.KIND_INT8,
        torch.float32: matmul.KIND_FLOAT32,
        torch.bfloat16: matmul.KIND_BFLOAT16,
    }
    scales_O = linear.scales_O if isinstance(linear, Int8Linear) else None
    kind = kinds[linear.weight_OI.dtype]
    return [kind, *map(_address, (linear.weight_OI, scales_O, linear.bias_O))]


def _address(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    assert tensor.is_contiguous()
    return tensor.data_ptr()
