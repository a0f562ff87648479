"""Which specs `encoder.Encoder` can run: tables of what it needs, field by field.

A spec that asks for anything else is refused with one sentence that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.anatomy.naming.names import naming_for
from ullage.anatomy.spec import Attention, Dense, LayerSpec, ModelSpec
from ullage.errors import UnsupportedModel

# Families whose forward pass was held against transformers 5.24 by tests/engine/test_encoder.py.
# Each with the tensors of its own that are obeyed, by the end of their names.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "bert": (),
    "roberta": (),
    "distilbert": (),
    "electra": (),
    "mpnet": ("relative_attention_bias.weight",),
}
# Field of the spec → what the encoder can do with. Anything else is refused.
MODEL_FIELDS: Mapping[str, tuple[object, ...]] = {
    "kind": ("encoder",),
    "encoder_layers": ((),),
    "final_norm": (False,),
    "embedding_norm": (True,),
    "embedding_scale": (1.0,),
    "residual_streams": (1,),
    "per_layer_input": (None,),
    "towers": ((),),
    "quantization": (None,),
    "unknowns": ((),),
    "numerics": ((),),
    # A class that judges has a head whose answer is its purpose.
    "judges": (None,),
}
NORM_FIELDS: Mapping[str, tuple[object, ...]] = {
    "kind": ("layer",),
    "place": ("post",),
    "unit_offset": (False,),
    "affine": (True,),
    "beside": (False,),
}
ATTENTION_FIELDS: Mapping[str, tuple[object, ...]] = {
    "window": (None,),
    "chunk": (None,),
    "causal": (False,),
    "qk_norm": (None,),
    "v_norm": (False,),
    "sinks": (False,),
    "soft_cap": (None,),
    "output_gate": (None,),
    "kv_shared_from": (None,),
    "k_eq_v": (False,),
    "rope": (None,),
    "sparse_index": (None,),
    "q_lora_rank": (None,),
    "input_size": (None,),
    "query_sets": (0,),
}
DENSE_FIELDS: Mapping[str, tuple[object, ...]] = {
    "activation": ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"),
    "gated": (False,),
}
LAYER_FIELDS: Mapping[str, tuple[object, ...]] = {
    "cross_attention": (None,),
    "parallel_dense": (None,),
    "weights_from": (None,),
    "conv_tail": (0,),
}
_OWN_SCOPES = ("model", "layer", "run", "attention", "dense")


def require_encoder(spec: ModelSpec) -> None:
    """Raise UnsupportedModel, naming the field, unless `encoder.Encoder` runs `spec` exactly."""
    _require(spec, MODEL_FIELDS, "")
    if spec.family not in FAMILIES:
        raise _refusal("family", spec.family, tuple(FAMILIES))
    _require(spec.norm, NORM_FIELDS, "norm.")
    if spec.positions.kind != "learned":
        raise _refusal("positions.kind", spec.positions.kind, ("learned",))
    naming = naming_for(spec.architecture, spec.model_type, spec.family)
    obeyed = FAMILIES[spec.family]
    own = [e.path for e in naming.extras if e.scope in _OWN_SCOPES and not e.path.endswith(obeyed)]
    if own:
        raise UnsupportedModel(
            f"{own[0]} is not run by the embedded engine",
            field="family",
            expected="a family without tensors of its own",
        )
    for layer in spec.layers:
        _require_layer(layer)


def _require_layer(layer: LayerSpec) -> None:
    where = f"layers[{layer.index}]."
    mixer, feed_forward = layer.mixer, layer.feed_forward
    if not isinstance(mixer, Attention):
        raise _refusal(where + "mixer", type(mixer).__name__, ("Attention",))
    if not isinstance(feed_forward, Dense):
        raise _refusal(where + "feed_forward", type(feed_forward).__name__, ("Dense",))
    _require(mixer, ATTENTION_FIELDS, where + "mixer.")
    if (mixer.num_kv_heads, mixer.v_head_dim) != (mixer.num_heads, mixer.head_dim):
        found = f"{mixer.num_kv_heads} KV heads of {mixer.v_head_dim}"
        raise _refusal(where + "mixer", found, (f"{mixer.num_heads} of {mixer.head_dim}",))
    _require(feed_forward, DENSE_FIELDS, where + "feed_forward.")
    _require(layer, LAYER_FIELDS, where)


def _require(part: object, fields: Mapping[str, tuple[object, ...]], where: str) -> None:
    for field, accepted in fields.items():
        found = getattr(part, field)
        if found not in accepted:
            raise _refusal(where + field, found, accepted)


def _refusal(field: str, found: object, accepted: tuple[object, ...]) -> UnsupportedModel:
    return UnsupportedModel(
        f"{str(found)[:120]} is not run by the embedded engine's encoder",
        field=field,
        expected=" or ".join(str(value) or "none" for value in accepted),
    )
