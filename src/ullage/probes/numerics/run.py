"""`ullage probe numerics` of one model: load it twice, run it, hold one against the other.

Holds the order of things only. Each look has a module of its own (`numerics_*`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ullage.anatomy import load
from ullage.probes.attention.embedded import require_prompt
from ullage.probes.attention.through_transformers import load_model
from ullage.probes.numerics.apart import REFERENCES, departures, not_finite_parameters
from ullage.probes.numerics.bundle import Bundle
from ullage.probes.numerics.bundle_take import bundle_of
from ullage.probes.numerics.kernels import HEAD_DIMS, kernels_of
from ullage.probes.numerics.norms import norms_of
from ullage.probes.numerics.numerics import NumericsReading
from ullage.probes.numerics.trace import trace

DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in REFERENCES)


def read_numerics(
    model: str | Path,
    token_ids: tuple[int, ...],
    *,
    name: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    backward: bool = False,
    marks: bool = False,
) -> tuple[NumericsReading, Bundle | None]:
    """The reading, and with `marks` the bundle of the run. Raises BadInput as `load_model` does."""
    spec = load(model).anatomy.spec
    require_prompt(token_ids, spec.max_positions or len(token_ids), spec.vocab_size)
    loaded = load_model(model, dtype).to(device)
    reference = load_model(model, REFERENCES[dtype]).to(device)
    return read_models(
        loaded, reference, token_ids, name=name or str(model), backward=backward, marks=marks
    )


def read_models(
    model: Any,
    reference: Any,
    token_ids: tuple[int, ...],
    *,
    name: str,
    backward: bool = False,
    marks: bool = False,
) -> tuple[NumericsReading, Bundle | None]:
    """The same of two loaded models of one checkpoint; both are left as they were."""
    if hasattr(reference, "set_experts_implementation"):
        reference.set_experts_implementation("eager")  # grouped products know no float64
    traced = trace(model, token_ids, backward=backward, marks=marks)
    apart = departures(model, reference, token_ids, backward=backward)
    reading = NumericsReading(
        model=name,
        dtype=str(model.dtype).removeprefix("torch."),
        reference_dtype=str(reference.dtype).removeprefix("torch."),
        device=str(model.device),
        tokens=len(token_ids),
        modules=len(apart.ratios),
        faults=tuple(traced.faults),
        departures=tuple(apart.departures),
        norms=norms_of(model),
        kernels=kernels_of(model.dtype, {*HEAD_DIMS, *_head_dims(model)}, model.device),
        not_finite_parameters=not_finite_parameters(model),
        not_judged=tuple(apart.not_judged.items()),
    )
    bundle = None
    if marks:
        bundle = bundle_of(model, token_ids, traced, source=name, backward=backward)
    return reading, bundle


def _head_dims(model: Any) -> set[int]:
    found = {getattr(module, "head_dim", None) for module in model.modules()}
    return {one for one in found if isinstance(one, int) and one > 0}
