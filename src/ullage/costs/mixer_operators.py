"""The operators of each kind of mixer: projections, attention, scans, convolutions.

Holds formulas only, each with its source where it is not plain matrix multiplication. Counting
conventions are `step.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ullage.anatomy.spec import (
    Attention,
    CompressedAttention,
    Indexer,
    LatentAttention,
    LinearAttention,
    LinearMixer,
    Mamba,
    Mixer,
    NoMixer,
    ShortConv,
)
from ullage.anatomy.spec import Parallel as ParallelMixers
from ullage.costs.step import Operator, Step, matmul, share, visible_keys, visible_pairs


def mixer_operators(mixer: Mixer, hidden: int, step: Step, ranks: int) -> Iterator[Operator]:
    """The operators of one mixer on one of `ranks` tensor-parallel ranks."""
    match mixer:
        case Attention():
            yield from _attention(mixer, hidden, step, ranks)
        case LatentAttention():
            yield from _latent(mixer, hidden, step, ranks)
        case CompressedAttention():
            yield from _compressed(mixer, hidden, step, ranks)
        case Mamba():
            yield from _mamba(mixer, hidden, step, ranks)
        case LinearAttention():
            yield from _linear_attention(mixer, hidden, step, ranks)
        case ShortConv():
            yield from _short_conv(mixer, hidden, step, ranks)
        case ParallelMixers(parts=parts):
            for part in parts:
                yield from mixer_operators(part, hidden, step, ranks)
        case LinearMixer():
            yield matmul("linear_mixer", step.num_tokens, hidden, -(-hidden // ranks), "projection")
        case NoMixer():
            return


def _attention(a: Attention, hidden: int, step: Step, ranks: int) -> Iterator[Operator]:
    n = step.num_tokens
    heads, kv_heads = share(a.num_heads, ranks), share(a.num_kv_heads, ranks)
    seen = a.input_size or hidden
    gate = {"element": heads * a.head_dim, "head": heads, None: 0}[a.output_gate]
    if a.q_lora_rank is None:
        yield matmul("q", n, seen, heads * a.head_dim + gate, "projection")
    else:
        yield matmul("q_a", n, seen, a.q_lora_rank, "projection")
        yield matmul("q_b", n, a.q_lora_rank, heads * a.head_dim, "projection")
    if a.kv_shared_from is None:
        width = kv_heads * (a.head_dim + (0 if a.k_eq_v else a.v_head_dim))
        yield matmul("kv", n, seen, width, "projection")
    limits = {"window": a.window, "chunk": a.chunk}
    pairs = visible_pairs(step.new_tokens, step.context, causal=a.causal, **limits)
    keys = visible_keys(step.new_tokens, step.context, **limits)
    if a.sparse_index is not None:
        yield from _indexer(a.sparse_index, hidden, hidden, step, pairs, keys, weighted=False)
        pairs, keys = _picked(a.sparse_index, step, pairs, keys)
    yield Operator(
        "attention",
        "attention",
        flops=2.0 * step.num_seqs * pairs * heads * (a.head_dim + a.v_head_dim),
        activation_elements=n * heads * (a.head_dim + a.v_head_dim),
        cache_elements=step.num_seqs
        * (keys + (step.new_tokens if a.kv_shared_from is None else 0))
        * kv_heads
        * (a.head_dim + a.v_head_dim),
    )
    yield matmul("o", n, heads * a.v_head_dim, hidden, "projection")


def cross_attention_operators(
    a: Attention, hidden: int, encoded_width: int, step: Step, ranks: int
) -> Iterator[Operator]:
    """K and V of the encoder's tokens are made in the prefill and read in every step after.

    The encoder's states are `encoded_width` wide.
    """
    n, heads, kv_heads = step.num_tokens, share(a.num_heads, ranks), share(a.num_kv_heads, ranks)
    yield matmul("cross.q", n, hidden, heads * a.head_dim, "projection")
    encoded = step.num_seqs * step.encoder_tokens
    if step.context == 0 and encoded:
        width = kv_heads * (a.head_dim + a.v_head_dim)
        yield matmul("cross.kv", encoded, encoded_width, width, "projection")
    yield Operator(
        "cross.attention",
        "attention",
        flops=2.0 * n * step.encoder_tokens * heads * (a.head_dim + a.v_head_dim),
        activation_elements=n * heads * (a.head_dim + a.v_head_dim),
        cache_elements=encoded * kv_heads * (a.head_dim + a.v_head_dim),
    )
    yield matmul("cross.o", n, heads * a.v_head_dim, hidden, "projection")


def _latent(a: LatentAttention, hidden: int, step: Step, ranks: int) -> Iterator[Operator]:
    """MLA. Decode multiplies the up-projections into Q and the output and attends in the latent
    (512 + 64 wide for DeepSeek-V3); prefill expands keys and values per head. DeepSeek-V2 paper,
    section 2.1; vLLM 0.32 does the same (model_executor/layers/attention/mla_attention.py).
    """
    n, heads = step.num_tokens, share(a.num_heads, ranks)
    qk = a.qk_nope_head_dim + a.qk_rope_head_dim
    if a.q_lora_rank is None:
        yield matmul("q", n, hidden, heads * qk, "projection")
    else:
        yield matmul("q_a", n, hidden, a.q_lora_rank, "projection")
        yield matmul("q_b", n, a.q_lora_rank, heads * qk, "projection")
    latent = a.kv_lora_rank + a.qk_rope_head_dim
    yield matmul("kv_a", n, hidden, latent, "projection")
    pairs = visible_pairs(step.new_tokens, step.context)
    keys = step.context + step.new_tokens
    if a.indexer is not None:
        yield from _indexer(a.indexer, hidden, a.q_lora_rank or hidden, step, pairs, keys)
        pairs, keys = _picked(a.indexer, step, pairs, keys)
    absorbed = step.is_decode or a.indexer is not None
    up = a.qk_nope_head_dim + a.v_head_dim
    expanded = n if absorbed else step.num_seqs * keys
    yield matmul("kv_b", expanded, a.kv_lora_rank, heads * up, "projection")
    width = latent + a.kv_lora_rank if absorbed else qk + a.v_head_dim
    yield Operator(
        "attention",
        "attention",
        flops=2.0 * step.num_seqs * pairs * heads * width,
        activation_elements=n * heads * width,
        cache_elements=step.num_seqs * (keys + step.new_tokens) * latent,
    )
    yield matmul("o", n, heads * a.v_head_dim, hidden, "projection")


def _indexer(
    i: Indexer,
    hidden: int,
    query_rows: int,
    step: Step,
    pairs: int,
    keys: int,
    *,
    weighted: bool = True,
) -> Iterator[Operator]:
    """Scores every visible key with a few small heads; every rank holds it whole.

    Beside latent attention a projection weighs the heads, beside grouped attention none does.
    """
    if i.shared:
        return
    n = step.num_tokens
    yield matmul("indexer.q", n, query_rows, i.num_heads * i.head_dim, "projection")
    yield matmul("indexer.k", n, hidden, i.head_dim, "projection")
    if weighted:
        yield matmul("indexer.weights", n, hidden, i.num_heads, "projection")
    yield Operator(
        "indexer.scores",
        "attention",
        flops=2.0 * step.num_seqs * pairs * i.num_heads * i.head_dim,
        activation_elements=n * i.num_heads * i.head_dim,
        cache_elements=step.num_seqs * (keys + step.new_tokens) * i.head_dim,
    )


def _picked(i: Indexer, step: Step, pairs: int, keys: int) -> tuple[int, int]:
    """Pairs and keys after the indexer's choice: no query sees more than topk × block keys."""
    most = i.topk * i.block
    limited = visible_pairs(step.new_tokens, step.context, window=most)
    return min(pairs, limited), min(keys, step.new_tokens * most)


def _compressed(a: CompressedAttention, hidden: int, step: Step, ranks: int) -> Iterator[Operator]:
    """DeepSeek-V4: one shared key-value vector per token in the window, one per `ratio` before it.

    The compressor projects each token to a key-value vector and a gate, twice as wide at the fine
    ratio (overlapping groups); the output is low-rank per group of heads.
    """
    n, heads = step.num_tokens, share(a.num_heads, ranks)
    yield matmul("q_a", n, hidden, a.q_lora_rank, "projection")
    yield matmul("q_b", n, a.q_lora_rank, heads * a.head_dim, "projection")
    yield matmul("kv", n, hidden, a.head_dim, "projection")
    pairs = visible_pairs(step.new_tokens, step.context, window=a.window)
    keys = visible_keys(step.new_tokens, step.context, window=a.window)
    if a.ratio:
        width = a.head_dim * (2 if a.indexer is not None else 1)
        yield matmul("compressor", n, hidden, 2 * width, "projection")
        pooled = visible_pairs(step.new_tokens, step.context) // a.ratio
        pooled_keys = (step.context + step.new_tokens) // a.ratio
        if a.indexer is not None:
            i = a.indexer
            yield matmul("indexer.q", n, a.q_lora_rank, i.num_heads * i.head_dim, "projection")
            yield matmul("indexer.compressor", n, hidden, 4 * i.head_dim, "projection")
            yield matmul("indexer.weights", n, hidden, i.num_heads, "projection")
            yield Operator(
                "indexer.scores",
                "attention",
                flops=2.0 * step.num_seqs * pooled * i.num_heads * i.head_dim,
                cache_elements=step.num_seqs * pooled_keys * i.head_dim,
            )
            pooled = min(pooled, step.new_tokens * i.topk)
            pooled_keys = min(pooled_keys, step.new_tokens * i.topk)
        pairs, keys = pairs + pooled, keys + pooled_keys
    yield Operator(
        "attention",
        "attention",
        flops=4.0 * step.num_seqs * pairs * heads * a.head_dim,
        activation_elements=2 * n * heads * a.head_dim,
        cache_elements=step.num_seqs * (keys + step.new_tokens) * a.head_dim,
    )
    # Each group of heads has a low-rank output of its own: block-diagonal, then one full matrix.
    groups = share(a.o_groups, ranks)
    group_width = heads * a.head_dim // groups
    yield replace(
        matmul("o_a", n, group_width, groups * a.o_lora_rank, "projection"),
        activation_elements=n * (heads * a.head_dim + groups * a.o_lora_rank),
    )
    yield matmul("o_b", n, groups * a.o_lora_rank, hidden, "projection")


def _mamba(m: Mamba, hidden: int, step: Step, ranks: int) -> Iterator[Operator]:
    """State-space scan, counted in its recurrent form: decay, input and output per state element.

    Chunked kernels do more arithmetic on matrix units to do fewer steps (Dao and Gu 2024,
    section 6), so for a prefill this is a lower bound.
    """
    n, inner = step.num_tokens, -(-m.d_inner // ranks)
    if m.version == 1:
        yield matmul("in_proj", n, hidden, 2 * inner, "projection")
        yield matmul("x_proj", n, inner, m.dt_rank + 2 * m.d_state, "projection")
        yield matmul("dt_proj", n, m.dt_rank, inner, "projection")
        # exp(dt·A) per element, decay, dt·B·x added, C·h summed: 1 + 1 + 2 + 2.
        channels, state, per_state = inner, inner * m.d_state, 6
    else:
        heads, groups = share(m.num_heads, ranks), share(m.n_groups, ranks)
        channels = inner + 2 * groups * m.d_state
        yield matmul("in_proj", n, hidden, inner + channels + heads, "projection")
        # The decay is one number per head: 1 + 2 + 2.
        state, per_state = heads * m.head_dim * m.d_state, 5
    yield _convolution(step, channels, m.d_conv)
    yield _scan(step, state, per_state)
    yield matmul("out_proj", n, inner, hidden, "projection")


def _linear_attention(
    a: LinearAttention, hidden: int, step: Step, ranks: int
) -> Iterator[Operator]:
    """Gated delta-net, KDA and lightning attention in recurrent form.

    Delta rule per state element: decay 1, read k·S 2, write k⊗δ 2, read q·S 2 (Yang et al. 2024,
    equation 10). Lightning has no read before the write: 1 + 2 + 2.
    """
    n = step.num_tokens
    k_heads, v_heads = share(a.num_k_heads, ranks), share(a.num_v_heads, ranks)
    k_width, v_width = k_heads * a.k_head_dim, v_heads * a.v_head_dim
    yield matmul("qkv", n, hidden, 2 * k_width + v_width, "projection")
    if a.kind == "kda":
        # The decay per key channel and the output gate: low-rank pairs, or whole matrices.
        yield matmul("beta", n, hidden, v_heads, "projection")
        for name, rank, width in (("f", a.k_head_dim, k_width), ("g", a.v_head_dim, v_width)):
            if a.full_gates:
                yield matmul(name, n, hidden, width, "projection")
                continue
            yield matmul(f"{name}_a", n, hidden, rank, "projection")
            yield matmul(f"{name}_b", n, rank, width, "projection")
    else:
        yield matmul("gate", n, hidden, v_width, "projection")
    if a.kind == "gated_delta_net":
        yield matmul("beta_decay", n, hidden, 2 * v_heads, "projection")
    if a.d_conv:
        yield _convolution(step, 2 * k_width + v_width, a.d_conv)
    yield _scan(step, v_heads * a.k_head_dim * a.v_head_dim, 5 if a.kind == "lightning" else 7)
    yield matmul("out_proj", n, v_width, hidden, "projection")


def _short_conv(c: ShortConv, hidden: int, step: Step, ranks: int) -> Iterator[Operator]:
    channels = -(-c.channels // ranks)
    yield matmul("in_proj", step.num_tokens, hidden, 3 * channels, "projection")
    yield _convolution(step, channels, c.d_conv)
    yield matmul("out_proj", step.num_tokens, channels, hidden, "projection")


def _convolution(step: Step, channels: int, taps: int) -> Operator:
    """A causal depthwise convolution; its tail of taps − 1 inputs is kept per sequence."""
    return Operator(
        "conv",
        "scan",
        flops=2.0 * step.num_tokens * channels * taps,
        weight_elements=channels * taps,
        activation_elements=2 * step.num_tokens * channels,
        cache_elements=2 * step.num_seqs * channels * (taps - 1),
    )


def _scan(step: Step, state: int, flops_per_element: int) -> Operator:
    """A recurrence over `state` elements per token; each sequence's state is read and written."""
    return Operator(
        "scan",
        "scan",
        flops=float(flops_per_element) * step.num_tokens * state,
        cache_elements=2 * step.num_seqs * state,
    )
