"""What one sequence keeps on one rank: KV that grows, windows that do not, recurrent state.

Holds engine-neutral arithmetic on a ModelSpec. What an engine reserves for it (blocks, pages,
groups, batches in flight) is `planning/vllm*.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import lcm

from ullage.anatomy.distinct import mixer_parts
from ullage.anatomy.spec import (
    Attention,
    CompressedAttention,
    LatentAttention,
    LayerSpec,
    LinearAttention,
    Mamba,
    Mixer,
    ModelSpec,
    ShortConv,
)
from ullage.costs.deployment import Parallel
from ullage.costs.kv_formats import ELEMENT_BYTES as ELEMENT_BYTES
from ullage.costs.kv_formats import (
    attention_token_bytes,
    element_bytes,
    index_key_bytes,
    latent_token_bytes,
)

ONE_RANK = Parallel()


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps per sequence on one rank, in bytes.

    A growing layer adds `token_bytes` for every `ratio` tokens of context. With `window` set, only
    the last `window` tokens are kept at `window_token_bytes` each (also beside a growing part:
    DeepSeek-V4). `state_bytes` is the fixed recurrent state.
    """

    index: int
    token_bytes: int = 0
    ratio: int = 1
    window: int = 0
    window_token_bytes: int = 0
    state_bytes: int = 0

    def bytes_at(self, context: int) -> int:
        """Bytes at a context of that many tokens, in an engine without blocks or padding."""
        window = min(context, self.window) * self.window_token_bytes
        return (context // self.ratio) * self.token_bytes + window + self.state_bytes


def kv_heads_per_rank(num_kv_heads: int, tensor: int) -> int:
    """KV heads that one tensor-parallel rank holds: replicated once there are more ranks."""
    return max(1, num_kv_heads // tensor)


def mamba_groups_per_rank_bundle(n_groups: int, tensor: int) -> int:
    """Mamba-2 groups over all ranks together: each rank needs a whole group for its heads."""
    return n_groups if n_groups % tensor == 0 else tensor


def state_elements(mixer: Mixer, tensor: int) -> tuple[int, int]:
    """(convolution, recurrent) state elements of one layer on one rank; zeros without state.

    Shapes: Mamba-1 [d_conv−1, d_inner] and [d_inner, d_state]; Mamba-2 [d_conv−1, d_inner +
    2·n_groups·d_state] and [heads, head_dim, d_state]; linear attention [d_conv−1, 2·k + v] and
    [v_heads, k_dim, v_dim]; short convolution [d_conv−1, channels]. Channels and heads are cut
    by tensor parallelism.
    """
    match mixer:
        case Mamba(version=1):
            channels = mixer.d_inner // tensor
            return (mixer.d_conv - 1) * channels, channels * mixer.d_state
        case Mamba():
            groups = mamba_groups_per_rank_bundle(mixer.n_groups, tensor)
            channels = (mixer.d_inner + 2 * groups * mixer.d_state) // tensor
            heads = mixer.num_heads // tensor
            return (mixer.d_conv - 1) * channels, heads * mixer.head_dim * mixer.d_state
        case LinearAttention():
            keys = mixer.num_k_heads * mixer.k_head_dim
            values = mixer.num_v_heads * mixer.v_head_dim
            tail = max(mixer.d_conv - 1, 0) * ((2 * keys + values) // tensor)
            return tail, mixer.num_v_heads // tensor * mixer.k_head_dim * mixer.v_head_dim
        case ShortConv():
            return (mixer.d_conv - 1) * (mixer.channels // tensor), 0
        case _:
            return 0, 0


def recurrent_dtype(mixer: Mixer, dtype: str) -> str:
    """The dtype of the recurrent (not the convolution) state; the model's unless it says.

    KDA's delta rule is kept in float32 by its reference code and by vLLM 0.32 (mamba_utils.py).
    """
    match mixer:
        case Mamba(state_dtype=str(named)) | LinearAttention(state_dtype=str(named)):
            return named
        case LinearAttention(kind="kda"):
            return "float32"
        case _:
            return dtype


def layer_kv(
    layer: LayerSpec, parallel: Parallel, kv_cache_dtype: str = "auto", dtype: str = "bfloat16"
) -> LayerKV:
    """What this layer keeps per sequence on one rank. `dtype` is the one the model computes in."""
    parts = [
        _mixer_kv(m, layer.index, parallel, kv_cache_dtype, dtype) for m in mixer_parts(layer.mixer)
    ]
    kept = parts[0]
    if layer.conv_tail:  # channels are cut like the heads that they belong to
        tail = -(-layer.conv_tail // parallel.tensor) * element_bytes("auto", dtype)
        parts.append(LayerKV(layer.index, state_bytes=tail))
    for other in parts[1:]:
        assert not (kept.ratio > 1 or other.ratio > 1), "parallel mixers are not compressed"
        kept = LayerKV(
            layer.index,
            token_bytes=kept.token_bytes + other.token_bytes,
            window=max(kept.window, other.window),
            window_token_bytes=kept.window_token_bytes + other.window_token_bytes,
            state_bytes=kept.state_bytes + other.state_bytes,
        )
    return kept


def _mixer_kv(
    mixer: Mixer, index: int, parallel: Parallel, kv_cache_dtype: str, dtype: str
) -> LayerKV:
    match mixer:
        case Attention():
            return _attention_kv(mixer, index, parallel, kv_cache_dtype, dtype)
        case LatentAttention():
            latent = latent_token_bytes(mixer, kv_cache_dtype, dtype)
            if mixer.indexer is not None and not mixer.indexer.shared:
                latent += index_key_bytes(mixer.indexer, quantized=True)
            return LayerKV(index, token_bytes=latent)
        case CompressedAttention():
            return _compressed_kv(mixer, index, kv_cache_dtype, dtype)
        case _:
            conv, recurrent = state_elements(mixer, parallel.tensor)
            size = conv * element_bytes("auto", dtype)
            size += recurrent * element_bytes("auto", recurrent_dtype(mixer, dtype))
            return LayerKV(index, state_bytes=size)


def _attention_kv(
    mixer: Attention, index: int, parallel: Parallel, kv_cache_dtype: str, dtype: str
) -> LayerKV:
    if mixer.kv_shared_from is not None or not mixer.causal:
        return LayerKV(index)
    heads = kv_heads_per_rank(mixer.num_kv_heads, parallel.tensor)
    sizes = (mixer.head_dim, mixer.v_head_dim)
    token = attention_token_bytes(heads, *sizes, kv_cache_dtype, dtype)
    bound = mixer.window or mixer.chunk
    if bound:
        return LayerKV(index, window=bound, window_token_bytes=token)
    if mixer.sparse_index is not None and not mixer.sparse_index.shared:
        token += index_key_bytes(mixer.sparse_index, quantized=False)
    return LayerKV(index, token_bytes=token)


def _compressed_kv(
    mixer: CompressedAttention, index: int, kv_cache_dtype: str, dtype: str
) -> LayerKV:
    key = mixer.head_dim * element_bytes(kv_cache_dtype, dtype)
    if mixer.ratio <= 1:
        return LayerKV(index, window=mixer.window, window_token_bytes=key)
    token = key
    if mixer.indexer is not None and not mixer.indexer.shared:
        token += index_key_bytes(mixer.indexer, quantized=True)
    return LayerKV(
        index,
        token_bytes=token,
        ratio=mixer.ratio,
        window=mixer.window,
        window_token_bytes=key,
    )


def pipeline_stages(num_layers: int, pipeline: int) -> tuple[range, ...]:
    """The layers of each pipeline rank, as vLLM 0.32 splits them (distributed/utils.py).

    An even split; what is left over goes one each to the stages before the last.
    """
    sizes = [num_layers // pipeline] * pipeline
    for extra in range(num_layers % pipeline):
        sizes[-2 - extra] += 1
    ends = [sum(sizes[: i + 1]) for i in range(pipeline)]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def layers_kv(
    spec: ModelSpec,
    parallel: Parallel = ONE_RANK,
    kv_cache_dtype: str = "auto",
    dtype: str | None = None,
) -> tuple[LayerKV, ...]:
    """Every layer of the generating stack, multi-token prediction off; cached by equal mixers."""
    memo: dict[tuple[Mixer, int], LayerKV] = {}
    rows = []
    for layer in spec.layers:
        key = (layer.mixer, layer.conv_tail)
        row = memo.get(key)
        if row is None:
            row = layer_kv(layer, parallel, kv_cache_dtype, dtype or compute_dtype(spec.dtype))
            memo[key] = row
        rows.append(replace(_growing(row, spec.max_positions), index=layer.index))
    return tuple(rows)


def _growing(row: LayerKV, max_positions: int) -> LayerKV:
    """A window as wide as the longest sequence never closes: the layer grows like any other.

    Phi-3-mini-128k states a window of 262,144 over 131,072 positions.
    """
    if not 0 < max_positions <= row.window or row.token_bytes:
        return row
    return replace(row, token_bytes=row.window_token_bytes, window=0, window_token_bytes=0)


def compute_dtype(dtype: str) -> str:
    """What serving engines compute a float32 checkpoint in: bfloat16, as vLLM's `auto` does."""
    return "bfloat16" if dtype in ("float32", "float") else dtype


def kv_bytes_per_token(
    spec: ModelSpec,
    parallel: Parallel = ONE_RANK,
    kv_cache_dtype: str = "auto",
    dtype: str | None = None,
) -> int:
    """Bytes that one more token adds on the fullest pipeline rank, rounded up.

    All layers that grow without bound (a layer that keeps every `ratio`-th vector counts 1/ratio);
    windows, chunks and recurrent state add nothing. 0 only where nothing grows.
    """
    rows = layers_kv(spec, parallel, kv_cache_dtype, dtype)
    return max(_growth(rows[s.start : s.stop]) for s in _stages(rows, parallel))


def _growth(rows: Iterable[LayerKV]) -> int:
    growing = [(row.token_bytes, row.ratio) for row in rows if row.token_bytes]
    common = lcm(*(ratio for _, ratio in growing))
    return -(-sum(size * (common // ratio) for size, ratio in growing) // common)


def state_bytes_per_sequence(
    spec: ModelSpec, parallel: Parallel = ONE_RANK, dtype: str | None = None
) -> int:
    """Bytes of recurrent and convolution state of one sequence on the fullest rank."""
    rows = layers_kv(spec, parallel, "auto", dtype)
    return max(
        sum(row.state_bytes for row in rows[s.start : s.stop]) for s in _stages(rows, parallel)
    )


def kv_bytes(
    spec: ModelSpec,
    context: int,
    parallel: Parallel = ONE_RANK,
    kv_cache_dtype: str = "auto",
    dtype: str | None = None,
) -> int:
    """Bytes that one sequence of `context` tokens keeps on the fullest rank, state included.

    Ideal: no blocks, no padding, no batch in flight. What vLLM reserves is `planning.vllm`.
    """
    rows = layers_kv(spec, parallel, kv_cache_dtype, dtype)
    return max(
        sum(row.bytes_at(context) for row in rows[s.start : s.stop])
        for s in _stages(rows, parallel)
    )


def _stages(rows: tuple[LayerKV, ...], parallel: Parallel) -> tuple[range, ...]:
    return pipeline_stages(len(rows), parallel.pipeline)
