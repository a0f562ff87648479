"""What a checkpoint says of its own quantisation: `read_quantization`.

Reads config.json's `quantization_config` and ModelOpt's `hf_quant_config.json` into a Quantization.
Which tensors a scheme covers is `match.py`; bytes are `costs/weights.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ullage.anatomy.quantization.fields import Fields
from ullage.anatomy.quantization.match import EXPERTS, LINEAR
from ullage.anatomy.quantization.methods import MXFP4, READERS, modelopt_scheme, read_modelopt
from ullage.anatomy.spec import Quantization, WeightScheme


@dataclass(frozen=True, slots=True)
class Doubt:
    """What a quantisation does not say: where, what was found, and the two ends it leaves open.

    `likely` is what vLLM 0.32 would take it for, or the upper end where it would refuse.
    """

    field: str
    found: str
    likely: Quantization | None
    low: Quantization
    high: Quantization | None


def read_quantization(
    config: Mapping[str, object], side_file: Mapping[str, object] | None, *, file: str
) -> Quantization | None:
    """How the checkpoint's weights are stored, or None when it says nothing of quantisation.

    Args:
        config: the whole config.json; the section may lie in it or in its text section.
        side_file: the whole hf_quant_config.json beside it, if there is one.
        file: the configuration's name, for messages.

    A method that is not known comes back with no schemes: `doubt_of` then gives the range.

    Raises:
        MalformedConfig: a field is of the wrong type or outside its range.
    """
    fields, side = _find(config, file), _find_side(side_file)
    if fields is None and side is None:
        return None
    method = (fields.text("quant_method") if fields is not None else "").lower()
    if fields is None or (side is not None and method in ("modelopt", "modelopt_fp4", "")):
        quantization = read_modelopt(fields, side)
    elif method == "" and fields.values.get("quant_algo") is not None:
        quantization = read_modelopt(fields, None)
    else:
        reader = READERS.get(method.replace("_", "-"))
        quantization = reader(fields) if reader else Quantization(method or "unnamed", ())
    if quantization.method in ("fp8", "modelopt"):
        quantization = _with_expert_dtype(quantization, config, fields, file)
    return quantization


def doubt_of(
    quantization: Quantization | None,
    config: Mapping[str, object],
    side_file: Mapping[str, object] | None,
    *,
    file: str,
) -> Doubt | None:
    """What the configuration leaves open about the stored weights, as two ends; None if nothing."""
    if quantization is None:
        return None
    fields, side = _find(config, file), _find_side(side_file)
    named = fields if fields is not None else side
    path = named.path if named is not None else "quantization_config"
    if not quantization.schemes and not _packs_nothing(quantization, fields):
        lowest = ((LINEAR, WeightScheme("unknown", 1, 0, 16)),)
        return Doubt(
            f"{path}.quant_method",
            f"{quantization.method}: how it stores weights is not known",
            None,
            replace(quantization, schemes=lowest),
            None,
        )
    if quantization.method == "modelopt" and _lists_nothing(fields, side):
        return Doubt(
            f"{path}.exclude_modules",
            "absent: which modules stay in the model's dtype is not said",
            quantization,
            quantization,
            replace(quantization, schemes=tuple((EXPERTS, s) for _, s in quantization.schemes)),
        )
    if _is_v4(config) and quantization.method == "fp8" and "expert_dtype" not in config:
        experts = dict(quantization.schemes).get(EXPERTS)
        if experts is not None:
            high = tuple(pair for pair in quantization.schemes if pair[0] != EXPERTS)
            return Doubt(
                "expert_dtype",
                "absent: the experts may be stored as fp4 (what vLLM 0.32 assumes) or as fp8",
                quantization,
                quantization,
                replace(quantization, schemes=high),
            )
    return None


# --- finding the sections ------------------------------------------------------------------------


def _find(config: Mapping[str, object], file: str) -> Fields | None:
    top = Fields(config, file, "")
    for around in ("", "text_config", "llm_config", "language_config"):
        place = top.section(around) if around else top
        if place is None:
            continue
        for key in ("quantization_config", "compression_config"):
            found = place.section(key)
            if found is not None:
                return found
    return None


def _find_side(side_file: Mapping[str, object] | None) -> Fields | None:
    if side_file is None:
        return None
    whole = Fields(side_file, "hf_quant_config.json", "")
    return whole.section("quantization") or whole


def _lists_nothing(fields: Fields | None, side: Fields | None) -> bool:
    """Whether no source says which modules are left out, or which are quantised."""
    lists = ("exclude_modules", "ignore", "quantized_layers", "modules_to_not_convert")
    return not any(key in f.values for f in (fields, side) if f is not None for key in lists)


def _packs_nothing(quantization: Quantization, fields: Fields | None) -> bool:
    """Whether the section only says how the KV cache is quantised (compressed-tensors)."""
    return (
        quantization.method == "compressed-tensors"
        and fields is not None
        and not fields.values.get("config_groups")
        and fields.values.get("kv_cache_scheme") is not None
    )


def _is_v4(config: Mapping[str, object]) -> bool:
    """DeepSeek-V4's way of storing experts apart from the rest, by the keys that only it has."""
    return "expert_dtype" in config or ("compress_ratios" in config and "hc_mult" in config)


def _with_expert_dtype(
    quantization: Quantization, config: Mapping[str, object], fields: Fields | None, file: str
) -> Quantization:
    """DeepSeek-V4: fp8 everywhere but the routed experts (vLLM 0.32 deepseek_v4/quant_config.py).

    `expert_dtype` fp4 (and, for vLLM, absent) means MXFP4 experts and e8m0 scales, fp8 plain block
    scales; `moe_quant_algo` NVFP4 replaces the experts' scheme.
    """
    if not _is_v4(config) or fields is None or quantization.method != "fp8":
        return quantization
    stored = Fields(config, file, "").text("expert_dtype", "fp4")
    if stored not in ("fp4", "fp8"):
        raise Fields(config, file, "").error("expert_dtype", stored, "fp4 or fp8")
    algorithm = fields.text("moe_quant_algo").upper()
    experts = modelopt_scheme(algorithm, fields) if algorithm else MXFP4
    if stored == "fp8" and not algorithm:
        return quantization
    narrow = tuple((target, replace(s, scale_bits=8)) for target, s in quantization.schemes)
    return replace(quantization, schemes=((EXPERTS, experts), *narrow))
