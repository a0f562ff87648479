"""The tensors of every token mixer, from its shapes.

Functions that write into a `Writer`; one per kind of mixer. Sources are named where a layout is
not plain from the mixer's own description in `spec.py`.
"""

from __future__ import annotations

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
    Norm,
    Parallel,
    ShortConv,
)
from ullage.anatomy.tensors.tensor import Shard
from ullage.anatomy.tensors.writer import Writer

_HELD = {"A_log": "float32"}  # vLLM 0.32 mamba_mixer.py, mamba_mixer2.py, qwen3_next.py
_OVERLAPPING_RATIO = 4  # transformers 5.24, deepseek_v4: the compressed-sparse layers overlap


def mixer_tensors(w: Writer, mixer: Mixer) -> None:
    match mixer:
        case Attention():
            attention(w, mixer)
            w.extras("attention")
        case LatentAttention():
            latent(w, mixer)
            w.extras("latent")
        case CompressedAttention():
            compressed(w, mixer)
        case Mamba():
            mamba(w, mixer)
        case LinearAttention():
            linear_attention(w, mixer)
            w.extras("linear")
        case ShortConv():
            short_conv(w, mixer)
        case Parallel():
            for part in mixer.parts:
                mixer_tensors(w, part)
        case LinearMixer():
            w.linear(w.paths["attn"], w.spec.hidden_size, w.spec.hidden_size, "o",
                        "replicated", bias=mixer.bias)  # fmt: skip
        case NoMixer():
            pass


# --- attention -------------------------------------------------------------------------------


def attention(w: Writer, a: Attention, cross: str = "") -> None:
    hidden, paths = w.spec.hidden_size, w.paths
    seen = a.input_size or hidden
    read = (w.spec.encoder_hidden_size or hidden) if cross else seen  # what K and V are made of
    q_rows = a.num_heads * a.head_dim
    k_rows, v_rows = a.num_kv_heads * a.head_dim, a.num_kv_heads * a.v_head_dim
    if a.output_gate == "element" and "element_gate" not in paths:
        q_rows *= 2  # the gate lies beside the queries in one matrix (Qwen3-Next, Qwen3.5)
    if a.query_sets:
        query_sets(w, a)
        return
    own_kv = a.kv_shared_from is None or w.naming.idle_kv
    if "qkv" in paths and not cross and own_kv and not a.k_eq_v:
        w.linear(paths["qkv"], q_rows + k_rows + v_rows, seen, "qkv", "qkv",
                    bias=a.q_bias, groups=a.num_kv_heads, grouped=k_rows + v_rows)  # fmt: skip
    else:
        if a.q_lora_rank is None:
            w.linear(paths[cross + "q"], q_rows, seen, "q", "column", bias=a.q_bias)
        else:
            w.linear(paths["q"], a.q_lora_rank, seen, "q_a", "replicated", bias=a.q_bias)
            w.norm(paths["q_inner_norm"], a.q_lora_rank)
            w.linear(paths["q_wide"], q_rows, a.q_lora_rank, "q_b", "column", bias=a.q_bias)
        if own_kv:
            w.linear(paths[cross + "k"], k_rows, read, "k", "kv", groups=a.num_kv_heads,
                        bias=a.kv_bias and w.naming.key_bias)  # fmt: skip
        if own_kv and not a.k_eq_v:
            w.linear(paths[cross + "v"], v_rows, read, "v", "kv", bias=a.kv_bias,
                        groups=a.num_kv_heads)  # fmt: skip
    w.linear(paths[cross + "o"], hidden, a.num_heads * a.v_head_dim, "o", "row",
                bias=a.o_bias)  # fmt: skip
    if a.output_gate == "element" and "element_gate" in paths:
        w.linear(paths["element_gate"], q_rows, seen, "attn_gate", "column")
    if a.output_gate == "head":
        w.linear(paths["head_gate"], a.num_heads, hidden, "attn_gate", "column")
    if a.qk_norm is not None:
        whole = a.qk_norm == "layer"
        cut = whole and w.naming.qk_norm_cut
        w.norm(paths["q_norm"], a.num_heads * a.head_dim if whole else a.head_dim,
               shard="column" if cut else "replicated")  # fmt: skip
        if own_kv:
            w.norm(paths["k_norm"], k_rows if whole else a.head_dim,
                   shard="kv" if cut else "replicated", groups=a.num_kv_heads)  # fmt: skip
    if a.sinks:
        w.tensor(paths["sinks"], (a.num_heads,), "sinks", "column", suffix="", cut=0)
    if a.sparse_index is not None:
        sparse_index(w, a.sparse_index)


def query_sets(w: Writer, a: Attention) -> None:
    """JetMoe's queries and outputs: a router, and as many sets of them as there are experts."""
    hidden, attn, sets = w.spec.hidden_size, w.paths["attn"], a.query_sets
    rows = a.num_kv_heads * a.head_dim
    w.linear(f"{attn}.kv_proj", 2 * rows, hidden, "k", "kv", groups=a.num_kv_heads)
    w.linear(f"{attn}.experts.router.layer", sets, hidden, "router", "replicated")
    for leaf, shape, role in (("input_linear", (sets, rows, hidden), "q"),
                              ("output_linear", (sets, hidden, rows), "o")):  # fmt: skip
        w.tensor(f"{attn}.experts.{leaf}", shape, role)  # type: ignore[arg-type]
    w.tensor(f"{attn}.experts", (hidden,), "bias", suffix=".bias")


def sparse_index(w: Writer, index: Indexer) -> None:
    """MiniMax-M3's index branch: queries and one key per token, each with its norm."""
    if index.shared:
        return
    hidden, paths = w.spec.hidden_size, w.paths
    rows = (index.num_heads + 1) * index.head_dim
    if "sparse_qk" in paths:
        w.linear(paths["sparse_qk"], rows, hidden, "indexer", "replicated")
        w.norm(paths["sparse_q_norm"], index.head_dim)
        w.norm(paths["sparse_k_norm"], index.head_dim)
        return
    w.linear(paths["sparse_q"], index.num_heads * index.head_dim, hidden, "indexer", "kv",
                groups=index.num_heads)  # fmt: skip
    w.linear(paths["sparse_k"], index.head_dim, hidden, "indexer", "replicated")
    w.norm(paths["sparse_q_norm"], index.head_dim)
    w.norm(paths["sparse_k_norm"], index.head_dim)


def latent(w: Writer, a: LatentAttention) -> None:
    hidden, paths = w.spec.hidden_size, w.paths
    head = a.qk_nope_head_dim + a.qk_rope_head_dim
    if a.q_lora_rank is None:
        w.linear(paths["q"], a.num_heads * head, hidden, "q", "column")
    else:
        w.linear(paths["q_a"], a.q_lora_rank, hidden, "q_a", "replicated", bias=a.bias)
        w.norm(paths["q_a_norm"], a.q_lora_rank)
        w.linear(paths["q_b"], a.num_heads * head, a.q_lora_rank, "q_b", "column")
    w.linear(paths["kv_a"], a.kv_lora_rank + a.qk_rope_head_dim, hidden, "kv_a",
                "replicated", bias=a.bias)  # fmt: skip
    w.norm(paths["kv_a_norm"], a.kv_lora_rank)
    w.linear(paths["kv_b"], a.num_heads * (a.qk_nope_head_dim + a.v_head_dim),
                a.kv_lora_rank, "kv_b", "column")  # fmt: skip
    w.linear(paths["o"], hidden, a.num_heads * a.v_head_dim, "o", "row", bias=a.bias)
    if a.indexer is not None and not a.indexer.shared:
        index = a.indexer
        w.linear(paths["index_q"], index.num_heads * index.head_dim,
                    a.q_lora_rank or hidden, "indexer", "replicated")  # fmt: skip
        w.linear(paths["index_k"], index.head_dim, hidden, "indexer", "replicated")
        w.norm(paths["index_norm"], index.head_dim, Norm("layer", 1e-6, bias=True))
        w.linear(paths["index_weights"], index.num_heads, hidden, "indexer", "replicated",
                 quantizable=False)  # fmt: skip


def compressed(w: Writer, a: CompressedAttention) -> None:
    """DeepSeek-V4 (vLLM 0.32, models/deepseek_v4; transformers 5.24, deepseek_v4)."""
    hidden, attn = w.spec.hidden_size, w.paths["attn"]
    o_width = a.num_heads * a.head_dim // a.o_groups
    w.linear(f"{attn}.wq_a", a.q_lora_rank, hidden, "q_a", "replicated")
    w.norm(f"{attn}.q_norm", a.q_lora_rank)
    w.linear(f"{attn}.wq_b", a.num_heads * a.head_dim, a.q_lora_rank, "q_b", "column")
    w.linear(f"{attn}.wkv", a.head_dim, hidden, "kv_a", "replicated")
    w.norm(f"{attn}.kv_norm", a.head_dim)
    w.linear(f"{attn}.wo_a", a.o_groups * a.o_lora_rank, o_width, "o", "column")
    w.linear(f"{attn}.wo_b", hidden, a.o_groups * a.o_lora_rank, "o", "row")
    if a.sinks:
        w.tensor(w.paths["sinks"], (a.num_heads,), "sinks", "column", suffix="", cut=0,
                    dtype="float32")  # fmt: skip
    if a.ratio:
        compressor(w, f"{attn}.compressor", a.head_dim, a.ratio)
    if a.indexer is not None and not a.indexer.shared:
        index = a.indexer
        w.linear(f"{attn}.indexer.wq_b", index.num_heads * index.head_dim, a.q_lora_rank,
                    "indexer", "replicated")  # fmt: skip
        w.linear(f"{attn}.indexer.weights_proj", index.num_heads, hidden, "indexer",
                 "replicated", quantizable=False)  # fmt: skip
        compressor(w, f"{attn}.indexer.compressor", index.head_dim, a.ratio)


def compressor(w: Writer, path: str, head_dim: int, ratio: int) -> None:
    """Pools `ratio` keys into one; the fine ratio overlaps windows and so keeps two sets.

    Like the indexer's weights it is never quantised (vLLM 0.32 deepseek_v4/compressor.py).
    """
    width = head_dim * (2 if ratio == _OVERLAPPING_RATIO else 1)
    hidden = w.spec.hidden_size
    w.linear(f"{path}.wkv", width, hidden, "compressor", "replicated", quantizable=False)
    w.linear(f"{path}.wgate", width, hidden, "compressor", "replicated", quantizable=False)
    w.norm(f"{path}.norm", head_dim)
    w.tensor(f"{path}.ape", (ratio, width), "compressor", suffix="", dtype="float32")


# --- recurrent mixers ------------------------------------------------------------------------


def mamba(w: Writer, m: Mamba) -> None:
    hidden, path = w.spec.hidden_size, w.paths["mamba"]
    if m.version == 1:
        conv = m.d_inner
        w.linear(f"{path}.in_proj", 2 * m.d_inner, hidden, "mamba_in", "column",
                    bias=m.proj_bias)  # fmt: skip
        w.linear(f"{path}.x_proj", m.dt_rank + 2 * m.d_state, m.d_inner, "mamba", "row")
        w.linear(f"{path}.dt_proj", m.d_inner, m.dt_rank, "mamba", "column", bias=True)
        states: tuple[tuple[str, tuple[int, ...]], ...] = (
            ("A_log", (m.d_inner, m.d_state)), ("D", (m.d_inner,)))  # fmt: skip
        if m.inner_norm:
            for leaf, width in (("dt", m.dt_rank), ("b", m.d_state), ("c", m.d_state)):
                w.norm(f"{path}.{leaf}_layernorm", width)
        grouped = 0
    else:
        grouped = 2 * m.n_groups * m.d_state
        conv = m.d_inner + grouped
        w.linear(f"{path}.in_proj", m.d_inner + conv + m.num_heads, hidden, "mamba_in",
                    "qkv", bias=m.proj_bias, groups=m.n_groups, grouped=grouped)  # fmt: skip
        states = (("A_log", (m.num_heads,)), ("D", (m.num_heads,)), ("dt_bias", (m.num_heads,)))
        if m.inner_norm:
            w.norm(f"{path}.norm", m.d_inner, shard="column")
    conv1d(w, f"{path}.conv1d", conv, m.d_conv, bias=m.conv_bias, groups=m.n_groups,
                grouped=grouped)  # fmt: skip
    for leaf, shape in states:
        w.tensor(f"{path}.{leaf}", shape, "mamba", "column", suffix="", cut=0,
                 held_dtype=_HELD.get(leaf))  # fmt: skip
    w.linear(f"{path}.out_proj", hidden, m.d_inner, "mamba_out", "row", bias=m.proj_bias)


def conv1d(
    w: Writer,
    path: str,
    channels: int,
    width: int,
    *,
    bias: bool,
    groups: int = 0,
    grouped: int = 0,
) -> None:
    """A depthwise convolution over time: [channels, 1, width]."""
    shard: Shard = "qkv" if grouped else "column"
    w.tensor(path, (channels, 1, width), "conv", shard, cut=0, groups=groups,
                grouped=grouped)  # fmt: skip
    if bias:
        w.tensor(path, (channels,), "bias", shard, suffix=".bias", cut=0, groups=groups,
                    grouped=grouped)  # fmt: skip


def linear_attention(w: Writer, a: LinearAttention) -> None:
    hidden, path = w.spec.hidden_size, w.paths["linear"]
    k_rows, v_rows = a.num_k_heads * a.k_head_dim, a.num_v_heads * a.v_head_dim
    if a.kind == "gated_delta_net":
        if "in_qkvz" in w.paths:
            parts = [(w.paths["in_qkvz"], 2 * k_rows + 2 * v_rows),
                     (w.paths["in_ba"], 2 * a.num_v_heads)]  # fmt: skip
        else:
            parts = [(f"{path}.in_proj_qkv", 2 * k_rows + v_rows),
                     (f"{path}.in_proj_z", v_rows), (f"{path}.in_proj_b", a.num_v_heads),
                     (f"{path}.in_proj_a", a.num_v_heads)]  # fmt: skip
        for name, rows in parts:
            w.linear(name, rows, hidden, "linear_in", "column")
        conv1d(w, f"{path}.conv1d", 2 * k_rows + v_rows, a.d_conv, bias=False)
        for leaf in ("A_log", "dt_bias"):
            w.tensor(f"{path}.{leaf}", (a.num_v_heads,), "linear", "column", suffix="", cut=0,
                     held_dtype=_HELD.get(leaf))  # fmt: skip
        w.norm(f"{path}.norm", a.v_head_dim)
        w.linear(f"{path}.out_proj", hidden, v_rows, "linear_out", "row")
    elif a.kind == "kda":
        kda(w, a, k_rows, v_rows)
    elif a.kind == "rg_lru":
        rg_lru(w, a)
    else:
        w.linear(f"{path}.qkv_proj", 2 * k_rows + v_rows, hidden, "linear_in", "column")
        w.linear(f"{path}.output_gate", v_rows, hidden, "linear_in", "column")
        w.norm(f"{path}.norm", v_rows, shard="column")
        w.linear(f"{path}.out_proj", hidden, v_rows, "linear_out", "row")


def kda(w: Writer, a: LinearAttention, k_rows: int, v_rows: int) -> None:
    """Kimi Delta Attention: gates of low rank (the head's width) or whole, convolutions.

    One convolution each for Q, K and V, or one over all three where the family names one.
    """
    hidden, path, forget = w.spec.hidden_size, w.paths["linear"], w.paths["forget"]
    fused = "kda_conv" in w.paths
    for leaf, rows in (("q", k_rows), ("k", k_rows), ("v", v_rows)):
        w.linear(f"{path}.{leaf}_proj", rows, hidden, "linear_in", "column")
        if not fused:
            conv1d(w, f"{path}.{leaf}_conv1d", rows, a.d_conv, bias=False)
    if fused:
        conv1d(w, w.paths["kda_conv"], 2 * k_rows + v_rows, a.d_conv, bias=False)
    for stem, rows in ((f"{forget}.f", k_rows), (f"{path}.g", v_rows)):
        if a.full_gates:
            w.linear(f"{stem}_proj", rows, hidden, "linear_in", "column")
            continue
        w.linear(f"{stem}_a_proj", a.v_head_dim, hidden, "linear_in", "replicated")
        w.linear(f"{stem}_b_proj", rows, a.v_head_dim, "linear_in", "column")
    w.linear(f"{path}.b_proj", a.num_v_heads, hidden, "linear_in", "column")
    decays = (a.num_v_heads,) if fused else (1, 1, a.num_v_heads, 1)
    w.tensor(f"{forget}.A_log", decays, "linear", "column", suffix="", cut=0 if fused else 2,
             held_dtype=_HELD["A_log"])  # fmt: skip
    w.tensor(f"{forget}.dt_bias", (k_rows,), "linear", "column", suffix="", cut=0)
    w.norm(f"{path}.o_norm", a.v_head_dim)
    w.linear(f"{path}.o_proj", hidden, v_rows, "linear_out", "row")


def rg_lru(w: Writer, a: LinearAttention) -> None:
    """RecurrentGemma's recurrence: two input branches, a convolution, block-diagonal gates."""
    hidden, path = w.spec.hidden_size, w.paths["linear"]
    width, heads, head = a.num_v_heads * a.v_head_dim, a.num_v_heads, a.v_head_dim
    for leaf in ("linear_y", "linear_x"):
        w.linear(f"{path}.{leaf}", width, hidden, "linear_in", "column", bias=True)
    conv1d(w, f"{path}.conv_1d", width, a.d_conv, bias=True)
    lru = f"{path}.rg_lru"
    w.tensor(f"{lru}.recurrent_param", (width,), "linear", "column", suffix="", cut=0)
    for gate in ("input_gate", "recurrent_gate"):
        for leaf, shape in (("weight", (heads, head, head)), ("bias", (heads, head))):
            w.tensor(f"{lru}.{gate}_{leaf}", shape, "linear", "column", suffix="", cut=0)
    w.linear(f"{path}.linear_out", hidden, width, "linear_out", "row", bias=True)


def short_conv(w: Writer, c: ShortConv) -> None:
    hidden, path = w.spec.hidden_size, w.paths["conv"]
    w.linear(f"{path}.in_proj", 3 * c.channels, hidden, "linear_in", "column", bias=c.bias)
    conv1d(w, f"{path}.conv", c.channels, c.d_conv, bias=c.bias)
    w.linear(f"{path}.out_proj", hidden, c.channels, "linear_out", "row", bias=c.bias)
