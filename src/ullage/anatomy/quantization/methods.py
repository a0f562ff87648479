"""One reader per quantisation method: a section of config.json → Quantization.

Holds what each method's fields mean in bits, groups and scales, with the source of each layout.
Finding the section and what it leaves open is `read.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ullage.anatomy.quantization.fields import Fields
from ullage.anatomy.quantization.match import EXPERTS, LINEAR
from ullage.anatomy.spec import Quantization, WeightScheme

# --- schemes whose layout does not depend on the configuration ------------------------------------

_FP8_TENSOR = WeightScheme("fp8", 8, -1, 32)
_FP8_TENSOR_STATIC = WeightScheme("fp8", 8, -1, 32, tensor_scales=1)
_FP8_CHANNEL = WeightScheme("fp8_channel", 8, 0, 32)
_INT8_CHANNEL = WeightScheme("int8_channel", 8, 0, 16)
_NVFP4 = WeightScheme("nvfp4", 4, 16, 8, tensor_scales=2)
_NVFP4_W4A16 = WeightScheme("nvfp4", 4, 16, 8, tensor_scales=1)
MXFP4 = WeightScheme("mxfp4", 4, 32, 8)
_MXFP6 = WeightScheme("mxfp6", 6, 32, 8)
_MXFP8 = WeightScheme("mxfp8", 8, 32, 8)

# ModelOpt's names of algorithms (vLLM 0.32 modelopt.py, ModelOpt 0.4x export); group_size is read.
_MODELOPT: dict[str, WeightScheme] = {
    "FP8": _FP8_TENSOR_STATIC,
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8_CHANNEL,
    "FP8_PB_WO": WeightScheme("fp8_block", 8, 0, 32, block=(128, 128)),
    "FP8_PB_REAL": WeightScheme("fp8_block", 8, 0, 32, block=(128, 128)),
    "NVFP4": _NVFP4,
    "NVFP4_AWQ": _NVFP4,
    "NVFP4_SVDQUANT": _NVFP4,
    "W4A16_NVFP4": _NVFP4_W4A16,
    "W4A8_NVFP4_FP8": _NVFP4,
    "MXFP4": MXFP4,
    "W4A8_MXFP4_FP8": MXFP4,
    "MXFP8": _MXFP8,
    "INT4_AWQ": WeightScheme("int4_awq", 4, 128, 32),
    "W4A16_AWQ": WeightScheme("int4_awq", 4, 128, 32),
    "W4A8_AWQ": WeightScheme("int4_awq", 4, 128, 32, tensor_scales=2),
    "INT8_SQ": WeightScheme("int8_channel", 8, 0, 32, tensor_scales=1),
    "W8A8_SQ_PER_CHANNEL": WeightScheme("int8_channel", 8, 0, 32, tensor_scales=1),
    "INT8_WO": WeightScheme("int8_channel", 8, 0, 32),
}
_MODELOPT_ACTIVATION_BITS = {"FP8": 8, "NVFP4": 4, "NVFP4_AWQ": 4, "MXFP8": 8, "MXFP4": None}
_KV = {"FP8": "fp8", "FP8_E4M3": "fp8", "INT8": "int8", "NVFP4": "nvfp4"}


# --- one reader per method -----------------------------------------------------------------------


def _read_fp8(fields: Fields) -> Quantization:
    block = fields.values.get("weight_block_size")
    static = fields.text("activation_scheme", "dynamic") == "static"
    if block is None:
        scheme = _FP8_TENSOR_STATIC if static else _FP8_TENSOR
    else:
        scheme = WeightScheme("fp8_block", 8, 0, 32, block=_block(fields, "weight_block_size"))
    # `ignore` belongs to ModelOpt's part of a mixed configuration; Fp8Config does not read it.
    ignore = fields.strings("modules_to_not_convert", "ignored_layers")
    return Quantization("fp8", ((LINEAR, scheme),), ignore, _kv_scheme(fields), activation_bits=8)


def _block(fields: Fields, key: str) -> tuple[int, int]:
    value = fields.values.get(key)
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or any(isinstance(v, bool) or not isinstance(v, int) or not 0 < v < 1 << 24 for v in value)
    ):
        raise fields.error(key, value, "two positive whole numbers")
    return value[0], value[1]


def _read_compressed_tensors(fields: Fields) -> Quantization:
    groups = fields.section("config_groups")
    layout = fields.text("format", "dense")
    schemes: list[tuple[str, WeightScheme]] = []
    activation_bits: int | None = None
    for name, group in groups.sections() if groups is not None else ():
        weights = group.section("weights")
        if weights is None:
            continue
        scheme = _compressed_scheme(weights, group.text("format", layout) or layout)
        if scheme is None:
            return Quantization("compressed-tensors", ())
        inputs = group.section("input_activations")
        if inputs is not None:
            activation_bits = inputs.integer("num_bits", 8, 1, 16)
            # A static scale of the input is stored; "local" (NVFP4) keeps the global one.
            if inputs.values.get("dynamic") is not True and scheme.name in ("nvfp4", "fp8"):
                scheme = replace(scheme, tensor_scales=scheme.tensor_scales + 1)
        targets = group.strings("targets") or (LINEAR,)
        if not name:
            raise group.error("targets", targets, "a named group")
        schemes += [(target, scheme) for target in targets]
    sparsity = fields.section("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        return Quantization("compressed-tensors", ())
    # Names and patterns win over class names in any order (vLLM 0.32, find_matched_target).
    schemes.sort(key=lambda pair: pair[0] == LINEAR)
    return Quantization(
        "compressed-tensors",
        tuple(schemes),
        fields.strings("ignore"),
        _kv_scheme(fields),
        activation_bits,
    )


def _compressed_scheme(weights: Fields, layout: str) -> WeightScheme | None:
    bits = weights.integer("num_bits", 8, 1, 16)
    kind = weights.text("type", "int")
    strategy = weights.text("strategy", "")
    group = weights.values.get("group_size")
    symmetric = weights.boolean("symmetric", True)
    if layout == "nvfp4-pack-quantized" or (kind == "float" and bits == 4 and group == 16):
        return _NVFP4_W4A16
    if layout == "mxfp4-pack-quantized" or (kind == "float" and bits == 4 and group == 32):
        return MXFP4
    if layout not in _COMPRESSED_LAYOUTS:
        return None
    base = "fp8" if kind == "float" else f"int{bits}"
    zero_bits = 0 if symmetric or kind == "float" else bits
    index_bits = 32 if weights.values.get("actorder") in ("group", True) else 0
    # pack-quantized keeps each matrix's shape as two int64 beside it: four float32's worth.
    extra = 4 if layout == "pack-quantized" else 0
    if strategy == "block" or weights.values.get("block_structure") is not None:
        block = _block(weights, "block_structure")
        return WeightScheme(f"{base}_block", bits, 0, 32, block=block)
    if strategy == "tensor" or (not strategy and group is None):
        return WeightScheme(base, bits, -1, 32 if kind == "float" else 16, zero_bits=zero_bits,
                            tensor_scales=extra)  # fmt: skip
    if strategy in ("channel", "token") or group == -1:
        return WeightScheme(f"{base}_channel", bits, 0, 16, zero_bits=zero_bits,
                            tensor_scales=extra)  # fmt: skip
    if strategy in ("group", "tensor_group", ""):
        size = weights.integer("group_size", None, 1, 1 << 20)
        return WeightScheme(f"{base}_group", bits, size, 16, zero_bits=zero_bits,
                            tensor_scales=extra, index_bits=index_bits)  # fmt: skip
    return None


# Not `dense`: the weights then lie unpacked, with scales of no fixed place beside them.
_COMPRESSED_LAYOUTS = {
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
}  # fmt: skip


def read_modelopt(fields: Fields | None, side: Fields | None) -> Quantization:
    """config.json's section where it speaks, the side file for the rest (both carry the same)."""
    main = fields if fields is not None and fields.values.get("quant_algo") is not None else side
    main = main or fields or side
    assert main is not None, "called with neither section"
    every = [f for f in (fields, side) if f is not None]
    algorithm = main.text("quant_algo").upper()
    ignore: tuple[str, ...] = ()
    layers: Fields | None = None
    kv: str | None = None
    for part in every:
        ignore = ignore or part.strings("exclude_modules", "ignore")
        layers = layers or part.section("quantized_layers")
        kv = kv or _kv_scheme(part)
    if algorithm == "MIXED_PRECISION" or (not algorithm and layers is not None):
        schemes = tuple(
            (name, modelopt_scheme(layer.text("quant_algo").upper(), layer))
            for name, layer in (layers.sections() if layers is not None else ())
        )
        return Quantization("modelopt", schemes, ignore, kv)
    if not algorithm:
        return Quantization("modelopt", (), ignore, kv)
    scheme = modelopt_scheme(algorithm, main)
    bits = _MODELOPT_ACTIVATION_BITS.get(algorithm)
    return Quantization("modelopt", ((LINEAR, scheme),), ignore, kv, bits)


def modelopt_scheme(algorithm: str, fields: Fields) -> WeightScheme:
    scheme = _MODELOPT.get(algorithm)
    if scheme is None:
        known = ", ".join(sorted(_MODELOPT))
        raise fields.error("quant_algo", algorithm, f"MIXED_PRECISION or one of {known}")
    if scheme.group > 0 and fields.values.get("group_size") is not None:
        scheme = replace(scheme, group=fields.integer("group_size", None, 1, 1 << 20))
    return scheme


def _read_mxfp4(fields: Fields) -> Quantization:
    """gpt-oss: only the experts are packed (vLLM 0.32 mxfp4.py leaves linears alone)."""
    ignore = fields.strings("modules_to_not_convert", "ignored_layers")
    return Quantization("mxfp4", ((EXPERTS, MXFP4),), ignore, _kv_scheme(fields))


def _read_mxfp8(fields: Fields) -> Quantization:
    ignore = fields.strings("modules_to_not_convert", "ignored_layers")
    return Quantization("mxfp8", ((LINEAR, _MXFP8),), ignore, _kv_scheme(fields), 8)


def _read_awq(fields: Fields) -> Quantization:
    """Packed [in, out / pack] with fp16 scales and packed zeros per group."""
    bits = fields.integer(fields.first("bits", "w_bit"), 4, 2, 8)
    group = fields.integer(fields.first("group_size", "q_group_size"), 128, -1, 1 << 20)
    zeros = fields.boolean("zero_point", True)
    scheme = WeightScheme("awq", bits, max(group, 0), 16, zero_bits=bits if zeros else 0)
    return Quantization("awq", ((LINEAR, scheme),), fields.strings("modules_to_not_convert"))


def _read_gptq(fields: Fields) -> Quantization:
    """GPTQ and GPTQModel: `dynamic` overrides or leaves out modules by regular expression."""
    schemes: list[tuple[str, WeightScheme]] = []
    ignore = list(fields.strings("modules_to_not_convert"))
    dynamic = fields.section("dynamic")
    for pattern in dynamic.values if dynamic is not None else ():
        assert dynamic is not None
        if pattern.startswith("-:"):
            ignore.append("re:" + pattern[2:])
            continue
        override = dynamic.section(pattern) or Fields({}, fields.file, fields.path)
        merged = Fields({**fields.values, **override.values}, override.file, override.path)
        schemes.append(("re:" + pattern.removeprefix("+:"), _gptq_scheme(merged)))
    schemes.append((LINEAR, _gptq_scheme(fields)))
    if fields.boolean("lm_head", False):
        schemes.append(("lm_head", _gptq_scheme(fields)))
    return Quantization("gptq", tuple(schemes), tuple(ignore))


def _gptq_scheme(fields: Fields) -> WeightScheme:
    bits = fields.integer(fields.first("bits", "wbits"), 4, 2, 8)
    group = fields.integer(fields.first("group_size", "groupsize"), 128, -1, 1 << 20)
    return WeightScheme("gptq", bits, max(group, 0), 16, zero_bits=bits, index_bits=32)


def _read_auto_round(fields: Fields) -> Quantization:
    packing = fields.text("packing_format", "auto_round:auto_gptq")
    if "awq" in packing:
        return replace(_read_awq(fields), method="auto-round")
    if "gptq" not in packing:
        return Quantization("auto-round", ())
    return replace(_read_gptq(fields), method="auto-round")


def _read_bitsandbytes(fields: Fields) -> Quantization:
    """int8: one float32 scale per output row. 4-bit: a scale per 64 elements, itself 8 bits wide
    (with 32 more per 256 of those) when nested, and tables of 16 (and 256) floats per matrix."""
    ignore = fields.strings("llm_int8_skip_modules", "modules_to_not_convert")
    if fields.boolean(fields.first("load_in_8bit", "_load_in_8bit"), False):
        scheme = WeightScheme("bnb_int8", 8, 0, 32)
    elif fields.boolean("bnb_4bit_use_double_quant", False):
        scheme = WeightScheme("bnb_nf4", 4, 64, 8, tensor_scales=16 + 256 + 32)
    else:
        scheme = WeightScheme("bnb_nf4", 4, 64, 32, tensor_scales=16 + 32)
    return Quantization("bitsandbytes", ((LINEAR, scheme),), ignore)


def _read_hqq(fields: Fields) -> Quantization:
    inner = fields.section("quant_config") or fields
    inner = inner.section("weight_quant_params") or inner
    if "nbits" not in inner.values:
        return Quantization("hqq", ())  # one configuration per kind of layer
    bits = inner.integer("nbits", None, 1, 8)
    group = inner.integer("group_size", 64, 1, 1 << 20)
    if bits not in (1, 2, 4, 8):
        return Quantization("hqq", ())  # 3 bits are packed ten to an int32
    scheme = WeightScheme("hqq", bits, group, 16, zero_bits=16)
    return Quantization("hqq", ((LINEAR, scheme),), fields.strings("skip_modules"))


def _read_aqlm(fields: Fields) -> Quantization:
    """Additive codebooks: codes of `nbits_per_codebook` for every group, books of float16."""
    books = fields.integer("num_codebooks", 1, 1, 16)
    width = fields.integer("nbits_per_codebook", 16, 1, 16)
    inside = fields.integer("in_group_size", 8, 1, 1 << 10)
    outside = fields.integer("out_group_size", 1, 1, 1 << 10)
    stored = 8 if width <= 8 else 16  # the codes are int8 or int16
    if (books * stored) % (inside * outside) or outside != 1:
        return Quantization("aqlm", ())
    floats = books * (1 << width) * inside * outside // 2
    scheme = WeightScheme("aqlm", books * stored // inside, 0, 16, tensor_scales=floats)
    ignore = fields.strings("linear_weights_not_to_quantize")
    return Quantization(
        "aqlm", ((LINEAR, scheme),), tuple(i.removesuffix(".weight") for i in ignore)
    )


def _read_quanto(fields: Fields) -> Quantization:
    kind = fields.text("weights", "int8")
    schemes = {
        "int8": _INT8_CHANNEL,
        "float8": WeightScheme("quanto_float8", 8, 0, 16),
        "int4": WeightScheme("quanto_int4", 4, 128, 16, zero_bits=16),
        "int2": WeightScheme("quanto_int2", 2, 128, 16, zero_bits=16),
    }
    if kind not in schemes:
        return Quantization("quanto", ())
    return Quantization(
        "quanto", ((LINEAR, schemes[kind]),), fields.strings("modules_to_not_convert")
    )


def _read_torchao(fields: Fields) -> Quantization:
    """The short names only; a serialised object of torchao's own is left unknown."""
    kind = fields.values.get("quant_type")
    group = 128
    arguments = fields.section("quant_type_kwargs")
    if arguments is not None:
        group = arguments.integer("group_size", 128, 1, 1 << 20)
    schemes = {
        "int4_weight_only": WeightScheme("torchao_int4", 4, group, 16, zero_bits=16),
        "int8_weight_only": _INT8_CHANNEL,
        "int8_dynamic_activation_int8_weight": _INT8_CHANNEL,
        "float8_weight_only": _FP8_CHANNEL,
    }
    if not isinstance(kind, str) or kind not in schemes:
        return Quantization("torchao", ())
    return Quantization(
        "torchao", ((LINEAR, schemes[kind]),), fields.strings("modules_to_not_convert")
    )


def _read_eetq(fields: Fields) -> Quantization:
    scheme = _INT8_CHANNEL
    return Quantization("eetq", ((LINEAR, scheme),), fields.strings("modules_to_not_convert"))


def _read_fbgemm(fields: Fields) -> Quantization:
    ignore = fields.strings("modules_to_not_convert")
    return Quantization("fbgemm_fp8", ((LINEAR, _FP8_CHANNEL),), ignore, activation_bits=8)


def _read_bitnet(fields: Fields) -> Quantization:
    """Four ternary weights to a byte and one scale per matrix."""
    scheme = WeightScheme("bitnet", 2, -1, 16)
    return Quantization("bitnet", ((LINEAR, scheme),), fields.strings("modules_to_not_convert"))


def _read_quark(fields: Fields) -> Quantization:
    """AMD Quark's native export: one global scheme, overrides per layer, patterns left out."""
    schemes: list[tuple[str, WeightScheme]] = []
    overrides = fields.section("layer_quant_config")
    parts = overrides.sections() if overrides is not None else []
    whole = fields.section("global_quant_config")
    if whole is not None:
        parts.append((LINEAR, whole))
    for target, part in parts:
        weight = part.section("weight")
        scheme = _quark_scheme(weight) if weight is not None else None
        if scheme is None:
            return Quantization("quark", ())
        schemes.append((target, scheme))
    return Quantization("quark", tuple(schemes), fields.strings("exclude"))


def _quark_scheme(weight: Fields) -> WeightScheme | None:
    kind, how = weight.text("dtype"), weight.text("qscheme")
    if kind == "fp8_e4m3" and how == "per_tensor":
        return _FP8_TENSOR_STATIC
    if kind == "fp8_e4m3" and how == "per_channel":
        return _FP8_CHANNEL
    if kind in ("fp4", "fp6_e3m2", "fp6_e2m3") and how == "per_group":
        return replace(
            MXFP4 if kind == "fp4" else _MXFP6, group=weight.integer("group_size", 32, 1, 1 << 20)
        )
    if kind == "int8" and how in ("per_channel", "per_tensor"):
        return _INT8_CHANNEL
    if kind in ("int4", "uint4") and how == "per_group":
        size = weight.integer("group_size", 128, 1, 1 << 20)
        return WeightScheme("int4_group", 4, size, 16, zero_bits=4)
    return None


def _kv_scheme(fields: Fields) -> str | None:
    """The KV dtype that the checkpoint asks for, in vLLM's word, or None."""
    algorithm = fields.text("kv_cache_quant_algo").upper()
    if algorithm:
        return _KV.get(algorithm, algorithm.lower())
    scheme = fields.section("kv_cache_scheme")
    if scheme is None:
        return None
    bits = scheme.integer("num_bits", 8, 1, 16)
    kind = scheme.text("type", "float")
    return {("float", 8): "fp8", ("int", 8): "int8", ("float", 4): "nvfp4"}.get(
        (kind, bits), f"{kind}{bits}"
    )


READERS: dict[str, Callable[[Fields], Quantization]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": lambda fields: read_modelopt(fields, None),
    "modelopt-fp4": lambda fields: read_modelopt(fields, None),
    "mxfp4": _read_mxfp4,
    "gpt-oss-mxfp4": _read_mxfp4,
    "mxfp8": _read_mxfp8,
    "awq": _read_awq,
    "awq-marlin": _read_awq,
    "gptq": _read_gptq,
    "gptq-marlin": _read_gptq,
    "gptqmodel": _read_gptq,
    "auto-round": _read_auto_round,
    "intel/auto-round": _read_auto_round,
    "bitsandbytes": _read_bitsandbytes,
    "hqq": _read_hqq,
    "aqlm": _read_aqlm,
    "quanto": _read_quanto,
    "torchao": _read_torchao,
    "eetq": _read_eetq,
    "fbgemm-fp8": _read_fbgemm,
    "bitnet": _read_bitnet,
    "quark": _read_quark,
}
