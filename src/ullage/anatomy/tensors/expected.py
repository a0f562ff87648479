"""Every parameter tensor that a Hugging Face checkpoint of a model holds: `expected_tensors`.

A pure function of a ModelSpec: names, shapes, counts, how tensor parallelism cuts each. How a
quantised matrix is stored is `quantization/read.py`; bytes are `costs/weights.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ullage.anatomy.naming.names import naming_for
from ullage.anatomy.naming.row import ExpertLayout
from ullage.anatomy.spec import ModelSpec, Tower
from ullage.anatomy.tensors import stack
from ullage.anatomy.tensors.tensor import Role, Shard, TensorSpec
from ullage.anatomy.tensors.writer import Writer

__all__ = ["ExpertLayout", "Role", "Shard", "TensorSpec", "expected_tensors"]


@lru_cache(maxsize=4)
def expected_tensors(
    spec: ModelSpec, experts: ExpertLayout | None = None
) -> tuple[TensorSpec, ...]:
    """Every parameter tensor of the model's checkpoint, in the order of the forward pass.

    Tied output embeddings and non-persistent buffers (rotary tables) are not stored, so not here.
    Towers come as one entry of as many elements as the spec says; a tower of unknown size (None)
    is left out, and the spec's `unknowns` say so.

    Args:
        experts: how routed experts lie on disk when that is known better than by family: some
            families are found both one by one and stacked (a quantiser or a trainer re-saved them).
    """
    naming = naming_for(spec.architecture, spec.model_type, spec.family)
    if spec.kind == "encoder" and naming.encoder:  # of an encoder-decoder, saved alone
        naming = naming_for(naming.encoder)
    if experts is not None:
        naming = replace(naming, experts=experts)
    tensors: list[TensorSpec] = []
    decoder = Writer(
        spec, naming, tensors.append, "encoder" if spec.kind == "encoder" else "decoder"
    )
    if spec.encoder_layers:
        names = naming_for(naming.encoder or "") if naming.encoder else naming
        wide = replace(spec, hidden_size=spec.encoder_hidden_size or spec.hidden_size)
        encoder = Writer(wide, names, tensors.append, "encoder")
        encoder.extras("model")
        stack.positions(encoder, spec.encoder_positions)
        stack.layers(encoder, spec.encoder_layers)
        stack.final_norm(encoder)
    stack.embeddings(decoder)
    stack.layers(decoder, spec.layers)
    stack.final_norm(decoder)
    stack.head(decoder)
    stack.mtp_layers(Writer(spec, naming, tensors.append, "mtp"))
    tensors += [
        _tower(number, tower, whole=naming.towers_whole)
        for number, tower in enumerate(spec.towers)
        if tower.parameters
    ]
    return tuple(tensors)


def _tower(number: int, tower: Tower, *, whole: bool) -> TensorSpec:
    """All of a tower in one entry.

    vLLM 0.32 (vision.py, mm_encoder_tp_mode `weights`) cuts the linears of its blocks: four of
    attention, at least two of the MLP. Projectors and embeddings are taken for whole.
    """
    width = tower.hidden_size
    linears = tower.num_layers * (4 * width * width + 2 * width * tower.intermediate)
    size = tower.parameters or 0
    name = f"{tower.modality}_tower.{number}"
    return TensorSpec(
        name=name, shape=(size,), count=1, module=name, role="tower",
        shard="replicated" if whole or not tower.num_heads else "tower", layer=None, stack="tower",
        quantizable=False, named=False, cut=None if whole or not tower.num_heads else 0,
        groups=tower.num_heads, grouped=min(linears, size), dtype=tower.dtype,
    )  # fmt: skip
