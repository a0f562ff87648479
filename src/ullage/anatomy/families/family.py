"""What a row of the family table can say: `Family`, the facts that no configuration key tells.

Holds the shape of a row. The rows are in `table.py`; the readers that use them are `config/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# True or False where the code of the family fixes it; a string names the boolean key that says it
# ("not key" turns it round); None means that nobody knows (an unknown family).
Fact = bool | str | None
QkNorm = Literal["head", "layer"] | None


@dataclass(frozen=True, slots=True)
class Family:
    """One row. `base` is the transformers model type whose config class gives absent keys.

    `windows`: which layers a `sliding_window` limits when no `layer_types` says so
    (never, all, top: layers from max_window_layers on, even: layers 0, 2, …, every: all but each
    pattern-th, `pattern` being the default). `nope`: layers without RoPE (full: the full-attention
    ones of a hybrid; keys: as no_rope_layers or no_rope_layer_interval say; thetas: where
    layer_rope_theta is 0).
    `last_full`: the last layer has full attention whatever layer_types says.
    `shared_gate`: the shared expert has a one-row gate.
    `dtype` is what the family's checkpoints hold when the configuration names none.
    `parallel_if` names the key that puts attention and MLP side by side. `mamba` is the version of
    the family's Mamba layers. `flatten` lists nested objects whose keys belong to the whole.
    `width_rule`: the MLP's width is the key's number, half of it, expansion_ratio × hidden_size, or
    two thirds of it rounded up (LFM2). `masked_lm` says that only classes named ForMaskedLM have an
    output head.
    `padding_id`: positions begin behind the padding token's id, which this key names or this is.
    `stored_positions` says that a sinusoidal table lies in the checkpoint. `ignored` lists keys
    that change nothing in this family. `extra` adds defaults for keys that the class does not have.
    `outer_sizes` are like maybe_sizes, in the sections around the language model's.
    `requires` gives the only values of keys under which the row holds; any other is refused.
    `classes`: the only architectures that the row describes, where others of the same model type
    have more parts. `apart` names nested configurations of models that this one does not hold.
    `qk_norm_words` are its words under qk_norm_type. `words` are the family's own words for
    kinds of layer. `experts_if` names the key without which
    there are no experts, `sandwich_if` the one without which norms only come before the parts.
    `window_key` names the window; `head_floor`: head_dim is hidden_size / heads rounded down.
    `window_twice` names a key that counts both sides of a window, of which a decoder sees one.
    `reads_twice`: attention reads the embedding beside the hidden state. `query_sets`: queries are
    picked among as many sets as there are experts. `full_gates`: KDA's gates are whole matrices.
    `vision_width` is the key in vision_config of what its cross-attention reads.
    `unpriced` names the key of layers whose weights are counted and whose work is not.
    `tail` is the size (as `naming/row.py` writes sizes) of a layer's convolution tails. `loop`
    names how layers run more than once (`config/loops.py`).
    `sizes`: keys whose numbers only tensors of this family's own depend on; `maybe_sizes` the same
    for keys that may be null, flags (1 or 0), lists (their length, or one number as `key[0]`) or,
    as `key=word`, words.
    `cheaper_if`: the condition (written as one of `maybe_sizes`, or `always`) on which the code
    replaces full attention by an approximation, whose work is bracketed. `pre_if` names the key
    that puts norms before the parts and one at the end, `embedding_norm_if` the condition for a
    norm over the embedding. `rotary`: an encoder-decoder that rotates. `encoder_key`: where an
    encoder-decoder keeps its encoder's whole configuration, `decoder_key` the decoder's, when not
    beside it. `decoder_alone`: its encoder is a tower. `cross_attention`: every layer of the
    decoder reads an encoder too.
    """

    name: str
    base: str | None = None
    kind: Literal["decoder", "encoder", "encoder-decoder"] = "decoder"
    norm: Literal["rms", "layer"] = "rms"
    place: Literal["pre", "post", "sandwich", "parallel"] = "pre"
    parallel_if: str | None = None
    norm_bias: Fact = False
    unit_offset: Fact = False
    affine: bool = True
    final_norm: bool = True
    positions: Literal[
        "rope", "learned", "sinusoidal", "alibi", "relative", "disentangled", "none"
    ] = "rope"
    position_offset: int = 0
    padding_id: str | int | None = None
    stored_positions: bool = True
    ignored: tuple[str, ...] = ()
    last_full: bool = False
    mixer: Literal["attention", "latent", "compressed"] | None = "attention"
    linear: Literal["gated_delta_net", "kda", "lightning", "rg_lru", "mamba"] | None = None
    mamba: Literal[1, 2] = 2
    mamba_norm: Fact = False
    flatten: tuple[str, ...] = ()
    q_bias: Fact = "attention_bias"
    kv_bias: Fact = "attention_bias"
    o_bias: Fact = "attention_bias"
    qk_norm: QkNorm = None
    qk_norm_if: str | None = None
    qk_norm_words: Mapping[str, QkNorm] = field(default_factory=dict)
    v_norm: bool = False
    sinks: bool = False
    output_gate: Literal["element", "head"] | None = None
    output_gate_if: str | None = None
    windows: Literal["never", "all", "top", "even", "every", "every_first"] = "never"
    window_if: str | None = None
    pattern: int = 1
    nope: Literal["full", "keys", "all", "if_nope", "thetas"] | None = None
    rope_interleaved: Fact = False
    gated: Fact = True
    activation: str | None = None
    mlp_bias: Fact = "mlp_bias"
    expert_bias: bool = False
    router_bias: bool = False
    score_bias: Fact = False
    shared_gate: bool = False
    dense_width: str = "intermediate_size"
    width_rule: Literal["plain", "half", "expansion", "rounded"] = "plain"
    expert_width: str = "moe_intermediate_size"
    embedding_norm: bool = False
    embedding_scale: Literal["sqrt", "key", "mup"] | None = None
    lm_head_bias: Fact = False
    token_types: bool = False
    masked_lm: bool = False
    cross_attention: bool = False
    soft_cap_key: str = "attn_logit_softcapping"
    plan: str | None = None
    dtype: str | None = None
    sizes: tuple[str, ...] = ()
    maybe_sizes: tuple[str, ...] = ()
    cheaper_if: str | None = None
    pre_if: str | None = None
    embedding_norm_if: str | None = None
    rotary: bool = False
    encoder_key: str | None = None
    decoder_key: str | None = None
    decoder_alone: bool = False
    extra: Mapping[str, object] = field(default_factory=dict)
    outer_sizes: tuple[str, ...] = ()
    requires: Mapping[str, object] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    apart: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    experts_if: str | None = None
    sandwich_if: str | None = None
    window_twice: str | None = None
    window_key: str = "sliding_window"
    head_floor: bool = False
    reads_twice: bool = False
    query_sets: bool = False
    full_gates: bool = False
    tail: str | None = None
    loop: str | None = None
    unpriced: str | None = None
    vision_width: str | None = None


GENERIC = Family(
    "generic",
    q_bias=None,
    kv_bias=None,
    o_bias=None,
    gated=None,
    mlp_bias=None,
    mixer=None,
)
