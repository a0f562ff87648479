"""Which specs the decoder in `model` can run: a table of what it needs, field by field.

A spec that asks for anything else is refused with one sentence that names the field. Nothing is
approximated: a window that was ignored would give fluent, wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.anatomy.naming.names import naming_for
from ullage.anatomy.spec import Attention, Dense, LayerSpec, ModelSpec, Tower, Unknown
from ullage.engine.rope import unsupported_rope
from ullage.errors import UnsupportedModel

# Field of the spec → what the engine can do with. Anything else is refused.
MODEL_FIELDS: Mapping[str, tuple[object, ...]] = {
    "kind": ("decoder",),
    "encoder_layers": ((),),
    "token_types": (0,),
    "final_norm": (True,),
    "embedding_norm": (False,),
    "lm_head": (True,),
    "lm_head_bias": (False,),
    "logit_soft_cap": (None,),
    "residual_streams": (1,),
    "per_layer_input": (None,),
    "towers": ((),),
    "unknowns": ((),),
}
NORM_FIELDS: Mapping[str, tuple[object, ...]] = {
    "kind": ("rms",),
    "place": ("pre",),
    "bias": (False,),
    "affine": (True,),
    "beside": (False,),
}
ATTENTION_FIELDS: Mapping[str, tuple[object, ...]] = {
    "chunk": (None,),
    "causal": (True,),
    "qk_norm": (None, "head"),
    "v_norm": (False,),
    "sinks": (False,),
    "soft_cap": (None,),
    "output_gate": (None,),
    "kv_shared_from": (None,),
    "k_eq_v": (False,),
    "sparse_index": (None,),
    "q_lora_rank": (None,),
    "input_size": (None,),
    "query_sets": (0,),
}
LAYER_FIELDS: Mapping[str, tuple[object, ...]] = {
    "cross_attention": (None,),
    "parallel_dense": (None,),
    "weights_from": (None,),
    "conv_tail": (0,),
}
# Where a family's own tensors would change what a layer computes.
_LAYER_SCOPES = ("model", "layer", "run", "attention", "dense")
DENSE_FIELDS: Mapping[str, tuple[object, ...]] = {
    "activation": ("silu", "swish", "gelu", "gelu_pytorch_tanh"),
    "gated": (True,),
}


def require_supported(spec: ModelSpec, max_model_len: int) -> None:
    """Raise UnsupportedModel, naming the field, unless `model.Decoder` runs `spec` exactly.

    A sliding window at least as wide as `max_model_len` never hides anything and is accepted.
    """
    _require(spec, MODEL_FIELDS, "")
    _require(spec.norm, NORM_FIELDS, "norm.")
    if spec.positions.kind != "rope":
        raise _refusal("positions.kind", spec.positions.kind, ("rope",))
    if spec.quantization is not None and spec.quantization.method != "gguf":
        raise _refusal("quantization.method", spec.quantization.method, (None, "gguf"))
    naming = naming_for(spec.architecture, spec.model_type, spec.family)
    own = [e.path for e in naming.extras if e.scope in _LAYER_SCOPES]
    if own:
        raise UnsupportedModel(
            f"{own[0]} is not run by the embedded engine",
            field="family",
            expected="a family without tensors of its own",
        )
    if spec.embedding_size not in (None, spec.hidden_size):
        raise _refusal("embedding_size", spec.embedding_size, (spec.hidden_size,))
    for layer in spec.layers:
        _require_layer(layer, max_model_len)


def attention_of(layer: LayerSpec) -> Attention:
    """The layer's full attention; require_supported has held that it is one."""
    assert isinstance(layer.mixer, Attention)
    return layer.mixer


def dense_of(layer: LayerSpec) -> Dense:
    """The layer's dense MLP; require_supported has held that it is one."""
    assert isinstance(layer.feed_forward, Dense)
    return layer.feed_forward


def _require_layer(layer: LayerSpec, max_model_len: int) -> None:
    where = f"layers[{layer.index}]."
    mixer, feed_forward = layer.mixer, layer.feed_forward
    if not isinstance(mixer, Attention):
        raise _refusal(where + "mixer", type(mixer).__name__, ("Attention",))
    _require(mixer, ATTENTION_FIELDS, where + "mixer.")
    if mixer.window is not None and mixer.window < max_model_len:
        raise UnsupportedModel(
            f"a sliding window of {mixer.window} tokens is not run by the embedded engine",
            field=where + "mixer.window",
            expected=f"--max-model-len of at most {mixer.window}, within which it hides nothing",
        )
    if mixer.rope is None:
        raise _refusal(where + "mixer.rope", None, ("rotary positions",))
    if (refusal := unsupported_rope(mixer.rope)) is not None:
        raise refusal
    if mixer.v_head_dim != mixer.head_dim:
        raise _refusal(where + "mixer.v_head_dim", mixer.v_head_dim, (mixer.head_dim,))
    if mixer.num_heads % mixer.num_kv_heads != 0:
        raise _refusal(
            where + "mixer.num_kv_heads", mixer.num_kv_heads, (f"divisor of {mixer.num_heads}",)
        )
    if not isinstance(feed_forward, Dense):
        raise _refusal(where + "feed_forward", type(feed_forward).__name__, ("Dense",))
    _require(feed_forward, DENSE_FIELDS, where + "feed_forward.")
    _require(layer, LAYER_FIELDS, where)


def _require(part: object, fields: Mapping[str, tuple[object, ...]], where: str) -> None:
    for field, accepted in fields.items():
        found = getattr(part, field)
        if found not in accepted:
            raise _refusal(where + field, found, accepted)


def _refusal(field: str, found: object, accepted: tuple[object, ...]) -> UnsupportedModel:
    return UnsupportedModel(
        f"{_shown(found)[:120]} is not run by the embedded engine",
        field=field,
        expected=" or ".join(_shown(value) for value in accepted),
    )


def _shown(value: object) -> str:
    """A value of the specification in words: of its own parts, their names."""
    if isinstance(value, str):
        return value
    if isinstance(value, Unknown):
        return f"{value.field} {value.found}"
    if isinstance(value, Tower):
        return f"the {value.modality} tower"
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value)) or "none"
    return repr(value)
