"""What a model is: `ModelSpec` and its parts, frozen and hashable.

Holds plain data only. Reading it from a configuration is `config/`; naming its tensors is
 `tensors/expected.py`; pricing it is `costs/`; running it is `engine/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# --- positions and norms -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of one kind of layer.

    `rotary_dim` is how many of the head's dimensions turn (partial RoPE when below head_dim).
    `scaling` is the kind in the config's words: default, linear, dynamic, yarn, llama3, longrope,
    proportional, …; `parameters` holds its remaining numbers as sorted (key, value) pairs.
    `sections` are multi-section (M-RoPE) sizes in halves of rotary_dim, or empty.
    """

    theta: float
    rotary_dim: int
    scaling: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    sections: tuple[int, ...] = ()
    interleaved: bool = False
    parameters: tuple[tuple[str, float | str | bool | tuple[float, ...]], ...] = ()


PositionKind = Literal["rope", "learned", "sinusoidal", "alibi", "relative", "none"]


@dataclass(frozen=True, slots=True)
class Positions:
    """How a stack knows positions. RoPE's numbers lie with each layer's mixer.

    `table_rows` counts the rows of a learned table (with any padding offset); 0 without a table.
    `padding_id`: positions count the tokens that are not this one, from padding_id + 1 (RoBERTa);
    None: they count all tokens, from 0 or from what table_rows has more than the model positions.
    """

    kind: PositionKind
    table_rows: int = 0
    padding_id: int | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """`kind` rms or layer; `place` pre, post, sandwich (both) or parallel (attention ∥ MLP).

    `beside` says that attention and MLP, run side by side, have a norm each (Falcon-40B's two).
    `bias` says whether a layer norm stores one; `unit_offset` whether x·(1 + weight) is applied
    (Gemma); `affine` is False for norms without any weight (OLMo).
    """

    kind: Literal["rms", "layer"]
    eps: float
    place: Literal["pre", "post", "sandwich", "parallel"] = "pre"
    bias: bool = False
    unit_offset: bool = False
    affine: bool = True
    beside: bool = False


# --- mixers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention: full, sliding-window (`window`) or chunked-local (`chunk`).

    Shapes: Q [num_heads, head_dim], K [num_kv_heads, head_dim], V [num_kv_heads, v_head_dim].
    `kv_shared_from` is the earlier layer whose KV this one reads (it stores none of its own).
    `k_eq_v`: V is K's projection (Gemma-4 global layers), one matrix but both are cached.
    `qk_norm`: per head over head_dim, or over the whole projection.
    `sparse_index`: an indexer beside plain GQA that picks keys (MiniMax-M3).
    `q_lora_rank`: queries come through a normed middle of this width (Step-3); None: straight.
    `kv_shared_from` −1: KV is another model's (a draft that reads its target's), stored nowhere
    here. `input_size`: what Q, K and V read where it is not hidden_size (Zamba reads the embedding
    beside the hidden state). `query_sets`: Q and O are picked per token among this many sets, whose
    chosen ones together have num_heads heads (JetMoe); 0: one set.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    chunk: int | None = None
    causal: bool = True
    q_bias: bool = False
    kv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "layer"] | None = None
    v_norm: bool = False
    sinks: bool = False
    soft_cap: float | None = None
    scale: float | None = None
    output_gate: Literal["element", "head"] | None = None
    kv_shared_from: int | None = None
    k_eq_v: bool = False
    rope: Rope | None = None
    sparse_index: Indexer | None = None
    q_lora_rank: int | None = None
    input_size: int | None = None
    query_sets: int = 0


@dataclass(frozen=True, slots=True)
class Indexer:
    """The small scorer of sparse attention: which keys a query may see.

    It caches one key of head_dim per token (`kept` numbers where that is not what it keeps);
    `shared` layers reuse an earlier layer's choice and
    store neither weights nor cache. `topk` counts tokens (or blocks of `block` tokens).
    """

    num_heads: int
    head_dim: int
    topk: int
    block: int = 1
    shared: bool = False
    kept: int | None = None


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA: one latent of kv_lora_rank plus one rotary key of qk_rope_head_dim cached per token.

    `q_lora_rank` None means a plain Q projection. `indexer` is DeepSeek-V3.2's and GLM-5's.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    bias: bool = False
    rope: Rope | None = None
    indexer: Indexer | None = None


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """DeepSeek-V4: a window of raw keys, and all older ones pooled `ratio` to one (0: window only).

    One shared key-value vector of head_dim per (compressed) token, low-rank Q (q_lora_rank) and a
    grouped low-rank output (o_groups × o_lora_rank). The indexer exists at the fine ratio only.
    """

    num_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    ratio: int
    sinks: bool = True
    rope: Rope | None = None
    indexer: Indexer | None = None


@dataclass(frozen=True, slots=True)
class Mamba:
    """A state-space mixer. Version 1: d_inner channels × d_state. Version 2: heads × head_dim.

    Per sequence it keeps a convolution tail of (d_conv − 1) × conv channels and one state:
    v1 [d_inner, d_state]; v2 [num_heads, head_dim, d_state]; conv channels are d_inner for v1,
    d_inner + 2·n_groups·d_state for v2. `state_dtype` None means the engine's default.
    """

    version: Literal[1, 2]
    d_inner: int
    d_state: int
    d_conv: int
    dt_rank: int = 0
    num_heads: int = 0
    head_dim: int = 0
    n_groups: int = 1
    conv_bias: bool = True
    proj_bias: bool = False
    inner_norm: bool = False
    state_dtype: str | None = None
    chunk_size: int = 256


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Recurrent linear attention: gated delta-net (Qwen3-Next/3.5), KDA (Kimi Linear), lightning.

    State per sequence: [num_v_heads, k_head_dim, v_head_dim]; convolution tails over
    2·num_k_heads·k_head_dim + num_v_heads·v_head_dim channels (none when d_conv is 0).
    rg_lru is RecurrentGemma's recurrence: one number per channel, so num_k_heads 0, k_head_dim 1
    and num_v_heads·v_head_dim channels. `full_gates`: KDA's decay (f) and output gate (g) are
    whole matrices instead of pairs of low rank.
    """

    kind: Literal["gated_delta_net", "kda", "lightning", "rg_lru"]
    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    d_conv: int = 0
    state_dtype: str | None = None
    full_gates: bool = False


@dataclass(frozen=True, slots=True)
class ShortConv:
    """LFM2's gated short convolution: a tail of (d_conv − 1) × channels per sequence."""

    channels: int
    d_conv: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Parallel:
    """Two mixers that read the same input and are summed (Falcon-H1: attention ∥ Mamba-2)."""

    parts: tuple[Attention | Mamba, ...]


@dataclass(frozen=True, slots=True)
class LinearMixer:
    """Attention that was replaced by one hidden × hidden matrix (pruned NAS models)."""

    bias: bool = False


@dataclass(frozen=True, slots=True)
class NoMixer:
    """The layer has no token mixer at all (pruned, or a feed-forward-only layer)."""


Mixer = (
    Attention
    | LatentAttention
    | CompressedAttention
    | Mamba
    | LinearAttention
    | ShortConv
    | Parallel
    | LinearMixer
    | NoMixer
)

# --- feed-forward --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dense:
    """One MLP: gated (three matrices) or plain (two)."""

    intermediate: int
    activation: str
    gated: bool
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts. Each expert is a Dense of `intermediate`; `top_k` of them run per token.

    `shared_intermediate` is the summed width of the experts that always run (0: none), gated by a
    one-row `shared_gate` when set; `shared_bias` is theirs, `bias` the routed ones'. `latent` is
    the width that routed experts work in when it is not hidden_size (Nemotron-3 Super and Ultra).
    `hash_routed`: the router is a table by token id.
    `zero_experts` the router may choose too; they have no weights (LongCat-Flash).
    `router_width`: the router reads a middle of this width instead of hidden_size (Zaya).
    """

    num_experts: int
    top_k: int
    intermediate: int
    activation: str
    gated: bool
    bias: bool = False
    shared_intermediate: int = 0
    shared_gate: bool = False
    shared_bias: bool = False
    router_bias: bool = False
    score_correction_bias: bool = False
    latent: int | None = None
    hash_routed: bool = False
    num_groups: int = 1
    zero_experts: int = 0
    router_width: int | None = None


@dataclass(frozen=True, slots=True)
class LinearFeedForward:
    """An MLP that was replaced by one hidden × hidden matrix (pruned NAS models)."""

    bias: bool = False


@dataclass(frozen=True, slots=True)
class NoFeedForward:
    """The layer has no feed-forward (pruned, or a mixer-only layer)."""


FeedForward = Dense | Experts | LinearFeedForward | NoFeedForward


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: a mixer, perhaps cross-attention, one or two feed-forwards side by side.

    `parallel_dense` is a dense MLP that runs beside the experts on the same input with norms of
    its own (Gemma-4); shared experts are not that, they lie inside `Experts`. `weights_from` is the
    earlier layer whose weights this one runs again (ALBERT): it stores none, but caches its own.
    `conv_tail` counts the numbers that short convolutions around the mixer and the feed-forward
    keep per sequence, beside the mixer's own state (Inkling, Zaya).
    """

    index: int
    mixer: Mixer
    feed_forward: FeedForward
    cross_attention: Attention | None = None
    parallel_dense: Dense | None = None
    weights_from: int | None = None
    conv_tail: int = 0


# --- towers, quantisation, the whole -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision or audio encoder in front of the language model, with its projector.

    `parameters` None means that the tower exists but its size is not understood; the bounds of
    the specs (`Anatomy.low`, `.high`) then carry a guessless range.
    """

    modality: Literal["vision", "audio"]
    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate: int
    parameters: int | None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How one group of weights is stored.

    `bits` per element; `scale_bits` of each scale, one per `group` elements along the input
    (group 0: one per output channel; −1: one per tensor; `block` for two-dimensional blocks);
    `zero_bits` per group for asymmetric schemes; `tensor_scales` counts the extra float32
    scalars per matrix (NVFP4's global scale, static input scales); `index_bits` per input element
    (GPTQ's g_idx).
    """

    name: str
    bits: int
    group: int
    scale_bits: int
    block: tuple[int, int] | None = None
    zero_bits: int = 0
    tensor_scales: int = 0
    index_bits: int = 0


@dataclass(frozen=True, slots=True)
class Quantization:
    """What the checkpoint says of its own quantisation.

    `method` in the engines' words (fp8, awq, gptq, compressed-tensors, modelopt, mxfp4, gguf, …).
    `schemes` pairs a target pattern ("Linear", "re:…", a glob, a module path) with its scheme, the
    first that matches wins; `ignore` lists patterns that stay in the model's dtype.
    `kv_scheme` is the KV dtype that the checkpoint asks for ("fp8", "int8"), or None.
    """

    method: str
    schemes: tuple[tuple[str, WeightScheme], ...]
    ignore: tuple[str, ...] = ()
    kv_scheme: str | None = None
    activation_bits: int | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """One thing that was not understood: where, what was found, and which results it widens."""

    field: str
    found: str
    widens: tuple[Literal["weights", "kv", "state", "flops"], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model. `layers` is the stack that generates (or encodes, for an encoder).

    `kind` decoder, encoder or encoder-decoder; `encoder_layers` is the other stack of an
    encoder-decoder, `encoder_hidden_size` its width where it has another. `mtp_layers` are
    multi-token-prediction layers, off unless asked for.
    `family` is the row of the family table that was used, "generic" when none fits.
    `dtype` is what unquantised weights are stored in. `judges` says what a classifying head that
    stands in for the output head looks at, with `num_labels` outputs.
    `family_sizes` are (configuration key, size) pairs that only tensors of this family depend on.
    `numerics` are (configuration key, value) pairs that change what is computed and no size, where
    the value is not the usual one (`config/numerics.py`).
    """

    model_type: str
    architecture: str
    family: str
    kind: Literal["decoder", "encoder", "encoder-decoder"]
    hidden_size: int
    vocab_size: int
    max_positions: int
    layers: tuple[LayerSpec, ...]
    norm: Norm
    positions: Positions
    tie_embeddings: bool
    dtype: str
    embedding_size: int | None = None
    encoder_layers: tuple[LayerSpec, ...] = ()
    encoder_positions: Positions | None = None
    encoder_hidden_size: int | None = None
    mtp_layers: tuple[LayerSpec, ...] = ()
    token_types: int = 0
    final_norm: bool = True
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    lm_head: bool = True
    lm_head_bias: bool = False
    judges: Literal["sequence", "token", "question", "reward"] | None = None
    num_labels: int = 0
    logit_soft_cap: float | None = None
    residual_streams: int = 1
    per_layer_input: tuple[int, int] | None = None
    family_sizes: tuple[tuple[str, int], ...] = ()
    towers: tuple[Tower, ...] = ()
    quantization: Quantization | None = None
    unknowns: tuple[Unknown, ...] = ()
    numerics: tuple[tuple[str, float | bool | str], ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True)
class FieldSource:
    """Where one field of a ModelSpec came from.

    `source`: `config: text_config.head_dim`, `default: Qwen3Config`, `derived: hidden_size /
    num_attention_heads`, `header: …`, `side file: hf_quant_config.json`.
    """

    field: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Anatomy:
    """A spec together with how surely it is known.

    `low` and `high` are complete specs that bracket what is not understood: any cost is a range
    from cost(low) to cost(high), a plain number when the two agree. With nothing unknown all three
    are the same object. `unread` lists configuration keys that nobody looked at.
    """

    spec: ModelSpec
    low: ModelSpec
    high: ModelSpec
    sources: tuple[FieldSource, ...] = ()
    unread: tuple[str, ...] = ()
