"""Which specs `encoder.Encoder` can run: tables of what it needs, field by field.

A spec that asks for anything else is refused with one sentence that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.anatomy.naming.names import naming_for
from ullage.anatomy.spec import Attention, Dense, LayerSpec, ModelSpec
from ullage.engine.positions.scaling import unsupported_rope
from ullage.engine.refusals import refusal, require
from ullage.errors import UnsupportedModel

# Families whose forward pass was held against transformers 5.24 by tests/engine/test_encoder.py.
# Each with the tensors of its own that are obeyed, by the end of their names.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "bert": (),
    "roberta": (),
    "distilbert": (),
    "electra": (),
    "mpnet": ("relative_attention_bias.weight",),
    "megatron-bert": (),
    "roberta-prelayernorm": (),
    "xlm-roberta-xl": (),
    "nomic_bert": (),
    "modernbert": (),
    "eurobert": (),
}
# Field of the spec → what the encoder can do with. Anything else is refused.
MODEL_FIELDS: Mapping[str, tuple[object, ...]] = {
    "kind": ("encoder",),
    "encoder_layers": ((),),
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
    "kind": ("layer", "rms"),
    "place": ("pre", "post"),
    "unit_offset": (False,),
    "affine": (True,),
    "beside": (False,),
}
ATTENTION_FIELDS: Mapping[str, tuple[object, ...]] = {
    "chunk": (None,),
    "causal": (False,),
    "qk_norm": (None,),
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
DENSE_FIELDS: Mapping[str, tuple[object, ...]] = {
    "activation": ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"),
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
    require(spec, MODEL_FIELDS, "")
    if spec.family not in FAMILIES:
        raise refusal("family", spec.family, tuple(FAMILIES))
    require(spec.norm, NORM_FIELDS, "norm.")
    if spec.positions.kind not in ("learned", "rope"):
        raise refusal("positions.kind", spec.positions.kind, ("learned", "rope"))
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
        raise refusal(where + "mixer", type(mixer).__name__, ("Attention",))
    if not isinstance(feed_forward, Dense):
        raise refusal(where + "feed_forward", type(feed_forward).__name__, ("Dense",))
    require(mixer, ATTENTION_FIELDS, where + "mixer.")
    if mixer.rope is not None and (bad_rope := unsupported_rope(mixer.rope)) is not None:
        raise bad_rope
    if mixer.v_head_dim != mixer.head_dim:
        raise refusal(where + "mixer.v_head_dim", mixer.v_head_dim, (mixer.head_dim,))
    if mixer.num_heads % mixer.num_kv_heads:
        raise refusal(
            where + "mixer.num_kv_heads", mixer.num_kv_heads, (f"divisor of {mixer.num_heads}",)
        )
    require(feed_forward, DENSE_FIELDS, where + "feed_forward.")
    require(layer, LAYER_FIELDS, where)
