"""Which specs the decoder in `model` can run: a table of what it needs, field by field.

A spec that asks for anything else is refused with one sentence that names the field. Nothing is
approximated: what was ignored would give fluent, wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.anatomy.naming.names import naming_for
from ullage.anatomy.spec import Attention, Dense, Experts, LayerSpec, ModelSpec
from ullage.engine.kv_formats import KVShape
from ullage.engine.model.families import FORWARDS, Forward
from ullage.engine.positions.scaling import unsupported_rope
from ullage.engine.refusals import refusal, require
from ullage.errors import UnsupportedModel

# Field of the spec → what the engine can do with. Anything else is refused.
MODEL_FIELDS: Mapping[str, tuple[object, ...]] = {
    "kind": ("decoder",),
    "encoder_layers": ((),),
    "token_types": (0,),
    "lm_head": (True,),
    "judges": (None,),
    "residual_streams": (1,),
    "per_layer_input": (None,),
    "towers": ((),),
    "unknowns": ((),),
}
ATTENTION_FIELDS: Mapping[str, tuple[object, ...]] = {
    "chunk": (None,),
    "causal": (True,),
    "v_norm": (False,),
    "sinks": (False,),
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
EXPERTS_FIELDS: Mapping[str, tuple[object, ...]] = {
    "gated": (True,),
    "bias": (False,),
    "shared_bias": (False,),
    "router_bias": (False,),
    "score_correction_bias": (False,),
    "latent": (None,),
    "hash_routed": (False,),
    "num_groups": (1,),
    "zero_experts": (0,),
    "router_width": (None,),
}
# Where a family's own tensors would change what a layer computes.
_LAYER_SCOPES = ("model", "layer", "run", "attention", "dense", "experts")
_ACTIVATIONS = (
    *("silu", "swish", "gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
    *("gelu_python_tanh", "quick_gelu", "relu", "relu2"),
)
_POSITIONS = ("rope", "learned", "alibi", "none")


def require_supported(spec: ModelSpec, max_model_len: int) -> None:  # noqa: ARG001
    """Raise UnsupportedModel, naming the field, unless `model.Decoder` runs `spec` exactly."""
    require(spec, MODEL_FIELDS, "")
    forward = FORWARDS.get(spec.family)
    if forward is None or spec.model_type not in (forward.model_types or (spec.family,)):
        raise UnsupportedModel(
            f"{spec.family} ({spec.model_type}) is not run by the embedded engine",
            field="family",
            expected="one of " + ", ".join(FORWARDS),
        )
    for key, value in spec.numerics:
        if key not in forward.obeys:
            raise UnsupportedModel(
                f"{value!r} is not run by the embedded engine for the family {spec.family}",
                field=key,
            )
    _require_positions(spec, forward)
    if spec.quantization is not None and spec.quantization.method != "gguf":
        raise refusal("quantization.method", spec.quantization.method, (None, "gguf"))
    naming = naming_for(spec.architecture, spec.model_type, spec.family)
    own = [e.path for e in naming.extras if e.scope in _LAYER_SCOPES]
    if own or naming.parts or not naming.known:
        raise UnsupportedModel(
            f"{(own or ['a layout of its own'])[0]} is not run by the embedded engine",
            field="family",
            expected="a family without tensors of its own",
        )
    for layer in spec.layers:
        _require_layer(layer, forward)


def _require_positions(spec: ModelSpec, forward: Forward) -> None:
    """Raise unless rows of the model are told apart in a way that the decoder has."""
    positions = spec.positions
    if positions.kind not in _POSITIONS:
        raise refusal("positions.kind", positions.kind, _POSITIONS)
    if positions.kind == "alibi" and forward.slopes is None:
        raise refusal("positions.kind", positions.kind, ("positions of another kind",))
    if positions.kind == "learned" and positions.table_rows < spec.max_positions:
        raise refusal("positions.table_rows", positions.table_rows, (spec.max_positions,))


def attention_of(layer: LayerSpec) -> Attention:
    """The layer's full attention; require_supported has held that it is one."""
    assert isinstance(layer.mixer, Attention)
    return layer.mixer


def kv_shapes(spec: ModelSpec) -> list[KVShape]:
    """What each layer stores per token, for specs that require_supported accepts."""
    return [
        KVShape(attention.num_kv_heads, attention.head_dim)
        for attention in map(attention_of, spec.layers)
    ]


def windows(spec: ModelSpec, max_model_len: int) -> list[int | None]:
    """How far back each layer sees, None where that is as far as any request reaches."""
    found = [attention_of(layer).window for layer in spec.layers]
    return [w if w is not None and w < max_model_len else None for w in found]


def _require_layer(layer: LayerSpec, forward: Forward) -> None:
    where = f"layers[{layer.index}]."
    mixer, feed_forward = layer.mixer, layer.feed_forward
    if not isinstance(mixer, Attention):
        raise refusal(where + "mixer", type(mixer).__name__, ("Attention",))
    require(mixer, ATTENTION_FIELDS, where + "mixer.")
    if mixer.qk_norm not in forward.qk_norms:
        raise refusal(where + "mixer.qk_norm", mixer.qk_norm, forward.qk_norms)
    if mixer.rope is not None and (bad_rope := unsupported_rope(mixer.rope)) is not None:
        raise bad_rope
    if mixer.v_head_dim != mixer.head_dim:
        raise refusal(where + "mixer.v_head_dim", mixer.v_head_dim, (mixer.head_dim,))
    if mixer.num_heads % mixer.num_kv_heads != 0:
        raise refusal(
            where + "mixer.num_kv_heads", mixer.num_kv_heads, (f"divisor of {mixer.num_heads}",)
        )
    if isinstance(feed_forward, Experts):
        require(feed_forward, EXPERTS_FIELDS, where + "feed_forward.")
    elif not isinstance(feed_forward, Dense):
        raise refusal(where + "feed_forward", type(feed_forward).__name__, ("Dense", "Experts"))
    activation = forward.activation or feed_forward.activation
    if activation not in _ACTIVATIONS:
        raise refusal(where + "feed_forward.activation", activation, _ACTIVATIONS)
    require(layer, LAYER_FIELDS, where)
