"""How a GGUF file stores each tensor, as a Quantization: by the headers, never by config.json.

Holds the types by Hugging Face's names, and the range where some tensors' types are not known.
Names are `names.py`; bytes are `costs/weights.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ullage.anatomy.checkpoint import CheckpointIndex, TensorEntry
from ullage.anatomy.gguf.names import hf_tensor_name
from ullage.anatomy.gguf.types import GGML_BLOCKS, bits_per_weight
from ullage.anatomy.quantization.match import LINEAR, scheme_table
from ullage.anatomy.spec import Anatomy, ModelSpec, Quantization, Unknown, WeightScheme
from ullage.anatomy.stored import aligned_prefix, without_common_end
from ullage.anatomy.tensors.expected import expected_tensors

_PAIRS = {"gate_proj": "up_proj", "up_proj": "gate_proj"}


def gguf_quantization(architecture: str, tensors: Iterable[TensorEntry]) -> Quantization:
    """The type of each tensor by its Hugging Face name (without `.weight`); experts as the first.

    A tensor that GGUF splits into parts of several types is left out, as what it has no name for.
    """
    types: dict[str, set[str]] = {}
    for tensor in tensors:
        name = hf_tensor_name(architecture, tensor.name)
        if name is not None:
            for held in _names(name.removesuffix(".weight")):
                types.setdefault(held, set()).add(tensor.dtype)
    schemes = {name: weight_scheme(*found) for name, found in types.items() if len(found) == 1}
    return Quantization(method="gguf", schemes=tuple(schemes.items()))


def _names(name: str) -> tuple[str, ...]:
    """What a tensor's type is asked for by: itself, and for experts also the stack of them all.

    GGUF stacks experts; a family's checkpoint may have them one by one or stacked, gate over up.
    """
    if ".experts.{e}." not in name:
        return (name,)
    stack, _, matrix = name.partition(".{e}.")
    together = f"{stack}.gate_up_proj" if matrix in _PAIRS else f"{stack}.{matrix}"
    return (name.replace("{e}", "0"), together)


def as_stored(anatomy: Anatomy, index: CheckpointIndex) -> Anatomy:
    """The anatomy with each tensor stored as the GGUF `index` says, whatever else was assumed.

    Tensors of the spec without a type there (parts that are absent, names not known) widen it: from
    the narrowest to the widest type of this file, or of all types when the file is not whole.
    """
    architecture = dict(index.metadata).get("general.architecture", "")
    found = _in_names_of(anatomy.spec, gguf_quantization(architecture, index.tensors))
    unnamed = _unnamed(anatomy.spec, found)
    if not unnamed:
        return _with_quantization(anatomy, found, found, found)
    matrices = [t for t in index.tensors if len(t.shape) > 1]
    known = {t.dtype for t in matrices} if matrices and not index.missing_files else GGML_BLOCKS
    by_width = sorted(known, key=bits_per_weight)
    likely = max(known, key=lambda kind: sum(t.num_bytes for t in matrices if t.dtype == kind))
    where = "quantization (types in the GGUF header)"
    text = f"no type for {len(unnamed)} tensors of this configuration, the first is {unnamed[0]}"
    unknown = Unknown(where, text, ("weights",))
    low, spec, high = (
        replace(found, schemes=(*found.schemes, (LINEAR, weight_scheme(kind))))
        for kind in (by_width[0], likely, by_width[-1])
    )
    return _with_quantization(anatomy, spec, low, high, unknown)


def _in_names_of(spec: ModelSpec, found: Quantization) -> Quantization:
    """The types under the spec's own prefix too, where it calls the stack otherwise (`bert.`)."""
    prefixes = aligned_prefix(
        expected_tensors(spec), (name + ".weight" for name, _ in found.schemes)
    )
    expected, stored = without_common_end(*prefixes)
    if expected == stored:
        return found
    renamed = [
        (expected + name[len(stored) :], scheme)
        for name, scheme in found.schemes
        if name.startswith(stored)
    ]
    return replace(found, schemes=(*found.schemes, *renamed))


def _unnamed(spec: ModelSpec, found: Quantization) -> list[str]:
    """Tensors that the spec predicts for this file and for which it has no type."""
    table = scheme_table(found)
    return [
        tensor.name
        for tensor in expected_tensors(spec)
        # Towers lie in a file of their own, and converters leave prediction layers and poolers out.
        if tensor.stack not in ("tower", "mtp")
        and ".pooler." not in f".{tensor.name}"
        and table.stored(tensor.name) is None
    ]


def _with_quantization(
    anatomy: Anatomy,
    spec: Quantization,
    low: Quantization,
    high: Quantization,
    unknown: Unknown | None = None,
) -> Anatomy:
    """Plain anatomies stay plain: without anything unknown all three specs are one object."""

    def stored(of: ModelSpec, quantization: Quantization) -> ModelSpec:
        more = () if unknown is None else (unknown,)
        return replace(of, quantization=quantization, unknowns=of.unknowns + more)

    made = stored(anatomy.spec, spec)
    plain = unknown is None
    return replace(
        anatomy,
        spec=made,
        low=made if plain and anatomy.low is anatomy.spec else stored(anatomy.low, low),
        high=made if plain and anatomy.high is anatomy.spec else stored(anatomy.high, high),
    )


def weight_scheme(ggml_type: str) -> WeightScheme:
    """A GGUF type as bits per element and, per block, all bits beyond them. KeyError when unknown.

    The bits are those of the type's name; scales, minima and block-wise signs are `scale_bits`.
    """
    elements, num_bytes = GGML_BLOCKS[ggml_type]
    if elements == 1:
        return WeightScheme(ggml_type, bits=num_bytes * 8, group=-1, scale_bits=0)
    bits = int(next(letter for letter in ggml_type if letter.isdigit()))
    return WeightScheme(
        ggml_type, bits=bits, group=elements, scale_bits=num_bytes * 8 - bits * elements
    )
