"""Rules about quantisation: methods, side files, headers, KV formats, hardware units.

Holds what the checkpoint says against what it stores and what will run it; quantised matrices that
are cut over ranks are `quantized_cuts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.audit import vllm
from ullage.audit.checkpoint import NO_HEADERS, headers
from ullage.audit.rule import Clear, Fired, NotEvaluable, Rule, Verdict
from ullage.audit.subject import Subject
from ullage.findings.finding import Evidence, Severity

SECTION = "quantization_config"
FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
PACKED = frozenset(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "U8", "I8", "U4", "I4"))
PACKED_ENDINGS = (".qweight", ".weight_packed", "_blocks", ".weight_scale", ".weight_scale_inv")
KV_SCALES = (".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")
UNITS_BY_SCHEME = {"fp8": ("fp8",), "nvfp4": ("fp4",), "mxfp4": ("fp4",), "mxfp8": ("fp8",)}
EIGHT_BITS = {"fp8": "fp8", "fp8_e4m3": "fp8"}


def _section(subject: Subject) -> Mapping[str, object]:
    for place in (subject.config, subject.text):
        found = place.get(SECTION)
        if isinstance(found, Mapping):
            return found
    return {}


def _said(subject: Subject) -> str:
    """Where the quantisation is written: config.json's section, or the side file beside it."""
    checkpoint = subject.model.checkpoint
    if checkpoint is not None and checkpoint.format == "gguf":
        return "header: tensor types"
    if _section(subject):
        return subject.where(SECTION)
    return f"side file: {subject.model.files.quant_side_file or 'hf_quant_config.json'}"


def _method(subject: Subject) -> Verdict:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    quantization = subject.spec.quantization
    written = _section(subject).get("quant_method")
    if isinstance(written, str) and written:
        method = written.lower()  # also where nothing here can price it
    elif quantization is not None:
        method = quantization.method
    else:
        return Clear((subject.fact("quantisation method", None, SECTION),))
    method = method.replace("compressed_tensors", "compressed-tensors")  # as vLLM spells it
    facts = (Evidence("quantisation method", method, "", _said(subject)),)
    if method in vllm.DEPRECATED_QUANTIZATION_METHODS:
        return Fired(
            f"vLLM 0.32 refuses quantisation method {method!r} as deprecated.",
            "Pass --allow-deprecated-quantization for now, and convert the checkpoint to "
            "compressed-tensors.",
            facts,
        )
    if method not in vllm.QUANTIZATION_METHODS:
        return Fired(
            f"vLLM 0.32 has no loader for quantisation method {method!r} and refuses to start.",
            "Take a checkpoint in a format that it loads (compressed-tensors, fp8, modelopt, awq, "
            "gptq, mxfp4), or an engine that loads this one.",
            facts,
        )
    return Clear(facts)


def _sides_agree(subject: Subject) -> Verdict:
    side = subject.model.files.quant_side
    if side is None:
        return Clear((Evidence("hf_quant_config.json", None, "", "beside config.json"),))
    inner = side.get("quantization")
    inner = inner if isinstance(inner, Mapping) else side
    section = _section(subject)
    if not section:
        return Clear((Evidence("quantization_config", None, "", "config.json"),))
    compared = (
        ("quant_algo", inner.get("quant_algo"), section.get("quant_algo")),
        ("KV cache", _kv_word(inner), _kv_word(section)),
        ("group_size", inner.get("group_size"), _group(section)),
    )
    facts = []
    for name, in_side, in_config in compared:
        if in_side is None or in_config is None:
            continue
        facts.append(Evidence(name, str(in_side), "", "hf_quant_config.json"))
        if str(in_side).upper() != str(in_config).upper():
            return Fired(
                f"{name} is {in_side} in hf_quant_config.json and {in_config} in config.json: "
                "which one applies depends on the engine (vLLM reads config.json first).",
                "Make both files say what was exported; the dtypes in the safetensors headers "
                "tell which is right.",
                (*facts, Evidence(name, str(in_config), "", f"config: {SECTION}")),
            )
    if not facts:
        return NotEvaluable(("a value that both files state",))
    return Clear(tuple(facts))


def _kv_word(section: Mapping[str, object]) -> str | None:
    word = section.get("kv_cache_quant_algo")
    if isinstance(word, str):
        return word
    scheme = section.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return None
    kind = {"float": "FP", "int": "INT"}.get(str(scheme.get("type")), str(scheme.get("type")))
    return f"{kind}{scheme.get('num_bits')}"


def _group(section: Mapping[str, object]) -> object:
    groups = section.get("config_groups")
    if isinstance(groups, Mapping):
        sizes = {
            weights.get("group_size")
            for group in groups.values()
            if isinstance(group, Mapping) and isinstance(weights := group.get("weights"), Mapping)
        }
        if len(sizes) == 1:
            return sizes.pop()
    return section.get("group_size")


def _kv_asked(subject: Subject) -> Verdict:
    quantization = subject.spec.quantization
    asked = None if quantization is None else quantization.kv_scheme
    flag = subject.deployment.kv_cache_dtype
    facts = (
        Evidence("KV format of the checkpoint", asked, "", _said(subject)),
        subject.flag("--kv-cache-dtype", flag),
    )
    if asked is None or flag == "auto" or EIGHT_BITS.get(flag, flag) == asked:
        return Clear(facts)
    return Fired(
        f"The checkpoint was calibrated for a KV cache in {asked}, and --kv-cache-dtype {flag} "
        "overrides it.",
        f"Drop --kv-cache-dtype to use {asked}, unless full precision is what you want: then count "
        "the larger cache.",
        facts,
    )


def _kv_scales(subject: Subject) -> Verdict:
    flag = subject.deployment.kv_cache_dtype
    asked = subject.spec.quantization.kv_scheme if subject.spec.quantization else None
    effective = asked if flag == "auto" else flag
    facts: tuple[Evidence, ...] = (
        subject.flag("--kv-cache-dtype", flag),
        Evidence("KV format of the checkpoint", asked, "", _said(subject) if asked else "config"),
    )
    if effective is None or not effective.startswith("fp8") or "per_token" in effective:
        return Clear(facts)
    checkpoint = headers(subject)
    if checkpoint is None:
        if asked is not None:
            return Clear(facts)
        return NO_HEADERS
    stored = sum(1 for tensor in checkpoint.tensors if tensor.name.endswith(KV_SCALES))
    facts = (*facts, Evidence("KV scales stored", stored, "", f"{checkpoint.format} headers"))
    if stored:
        return Clear(facts)
    return Fired(
        "The KV cache is to be kept in 8 bits, but the checkpoint holds no scales for it: vLLM "
        "takes 1.0, which clips keys and values above 448 and wastes bits on small ones.",
        "Take a checkpoint with calibrated k_scale and v_scale, or pass --kv-cache-dtype "
        "fp8_per_token_head, which computes scales as it runs; compare answers before relying on "
        "it.",
        facts,
    )


def _kv_format(subject: Subject) -> Verdict:
    missing = subject.missing_engine_rules()
    if missing:
        return NotEvaluable(missing)
    flag, platform = subject.deployment.kv_cache_dtype, subject.deployment.platform
    facts = (subject.flag("--kv-cache-dtype", flag), subject.platform_fact())
    if flag not in vllm.KV_CACHE_DTYPES:
        return Fired(
            f"vLLM 0.32 has no KV cache dtype {flag!r}: its command line refuses the flag.",
            f"Pass one of {', '.join(sorted(vllm.KV_CACHE_DTYPES))}.",
            facts,
        )
    if platform == "cpu" and flag not in vllm.CPU_KV_CACHE_DTYPES:
        return Fired(
            f"The CPU attention of vLLM 0.32 does not list KV cache dtype {flag!r}.",
            f"Pass one of {', '.join(sorted(vllm.CPU_KV_CACHE_DTYPES))}.",
            facts,
            Severity.warning,
        )
    return Clear(facts)


def _units(subject: Subject) -> Verdict:
    quantization, gpus = subject.spec.quantization, subject.gpus
    if quantization is None:
        return Clear((subject.fact("quantisation method", None, SECTION),))
    if gpus is None:
        return NotEvaluable(("--gpu NAME",))
    hardware = gpus.hardware
    facts = []
    for scheme in dict.fromkeys(scheme.name for _, scheme in quantization.schemes):
        units = next((u for p, u in UNITS_BY_SCHEME.items() if scheme.startswith(p)), ())
        facts.append(Evidence("weights stored as", scheme, "", _said(subject)))
        for unit in units:
            rate = hardware.flops_per_s(unit)
            source = hardware.source("flops")
            facts.append(Evidence(f"{unit} FLOP/s of {hardware.name}", rate, "FLOP/s", source))
            if rate is None:
                return Fired(
                    f"{hardware.name} has no {unit} matrix units: weights stored as {scheme} "
                    "are widened on the fly and multiplied in 16 bits, so they save memory and "
                    "bandwidth but no compute.",
                    f"Expect 16-bit prefill speed on {hardware.name}, or choose a GPU with {unit} "
                    "units.",
                    tuple(facts),
                )
    return Clear(tuple(facts) or (Evidence("schemes that name units", 0, "", _said(subject)),))


def _said_not_stored(subject: Subject) -> Verdict:
    quantization, checkpoint = subject.spec.quantization, headers(subject)
    if checkpoint is None:
        return NO_HEADERS
    if checkpoint.format == "gguf":
        return Clear((Evidence("format", "gguf: the types are the headers' own", "", "header"),))
    narrow = sum(
        1
        for tensor in checkpoint.tensors
        if tensor.dtype not in FLOATS or tensor.name.endswith(PACKED_ENDINGS)
    )
    facts = (
        Evidence(
            "quantisation in the configuration",
            None if quantization is None else quantization.method,
            "",
            "config" if quantization is None else _said(subject),
        ),
        Evidence("quantised tensors stored", narrow, "", "safetensors headers"),
        Evidence("tensors stored", len(checkpoint.tensors), "", "safetensors headers"),
    )
    if quantization is None or narrow or not checkpoint.is_complete:
        return (
            Clear(facts)
            if checkpoint.is_complete or quantization is None
            else NotEvaluable(("all shards of the checkpoint",))
        )
    return Fired(
        f"The configuration says {quantization.method}, but none of the {len(checkpoint.tensors):,}"
        " stored tensors is quantised: the engine looks for scales that are not there, and memory "
        "is planned too small.",
        "Remove quantization_config from config.json for these weights, or take the quantised "
        "checkpoint.",
        facts,
    )


def _stored_not_said(subject: Subject) -> Verdict:
    quantization, checkpoint = subject.spec.quantization, headers(subject)
    if checkpoint is None:
        return NO_HEADERS
    if checkpoint.format == "gguf" or quantization is not None:
        method = "gguf" if quantization is None else quantization.method
        return Clear((Evidence("quantisation method", method, "", _said(subject)),))
    narrow = [
        tensor
        for tensor in checkpoint.tensors
        if (tensor.dtype in PACKED or tensor.name.endswith(PACKED_ENDINGS))
        and len(tensor.shape) >= 1
    ]
    facts = (
        Evidence("quantisation in the configuration", None, "", "config.json"),
        Evidence("quantised tensors stored", len(narrow), "", "safetensors headers"),
    )
    if not narrow:
        return Clear(facts)
    return Fired(
        f"{len(narrow):,} tensors are stored quantised (the first is {narrow[0].name} in "
        f"{narrow[0].dtype}), but neither config.json nor hf_quant_config.json says how: an engine "
        "reads their bytes as plain weights or refuses.",
        "Restore quantization_config in config.json, or hf_quant_config.json, from the original "
        "checkpoint.",
        facts,
    )


RULES = (
    Rule(
        id="A084",
        title="Quantisation method known to the engine",
        severity=Severity.error,
        category="quantisation",
        why="Each method needs a loader; without one the server stops at start.",
        fix="Take a checkpoint in a format that the engine loads.",
        source="vllm 0.32: model_executor/layers/quantization/__init__.py; config/model.py, "
        "_verify_quantization",
        example='quantization_config {"quant_method": "hqq"}',
        check=_method,
    ),
    Rule(
        id="A085",
        title="hf_quant_config.json against config.json",
        severity=Severity.warning,
        category="quantisation",
        why="ModelOpt writes the quantisation twice. Engines read one or the other, so a "
        "difference changes what is loaded.",
        fix="Make both say what was exported.",
        source="vllm 0.32: transformers_utils/config.py reads config.json first",
        example="quant_algo NVFP4 in one file and FP8 in the other",
        check=_sides_agree,
    ),
    Rule(
        id="A086",
        title="KV format of the checkpoint against --kv-cache-dtype",
        severity=Severity.info,
        category="quantisation",
        why="A checkpoint may carry a calibrated KV format, which auto takes up; a flag overrides "
        "it and changes the size of the cache.",
        fix="Drop the flag unless the other format is meant.",
        source="vllm 0.32: utils/torch_utils.py, resolve_kv_cache_dtype_string",
        example="kv_cache_quant_algo FP8 with --kv-cache-dtype bfloat16",
        check=_kv_asked,
    ),
    Rule(
        id="A087",
        title="Scales for an 8-bit KV cache",
        severity=Severity.warning,
        category="quantisation",
        why="fp8 keeps values up to 448 with three bits of fraction. Without calibrated scales "
        "keys and values are stored as they come.",
        fix="Use a checkpoint with KV scales, or scales computed as it runs.",
        source="vllm 0.32: quantization/kv_cache.py; OCP 8-bit floating point (E4M3)",
        example="--kv-cache-dtype fp8 on a checkpoint without k_scale",
        check=_kv_scales,
    ),
    Rule(
        id="A088",
        title="KV cache dtype of the platform",
        severity=Severity.error,
        category="quantisation",
        why="A dtype that the engine does not know stops the server (fp8_e4m3fn is a torch name "
        "that vLLM does not take), and the CPU's attention lists few of them.",
        fix="Pass a dtype from the list.",
        source="vllm 0.32: config/cache.py, CacheDType; v1/attention/backends/cpu_attn.py",
        example="--kv-cache-dtype fp8_e4m3fn",
        check=_kv_format,
    ),
    Rule(
        id="A089",
        title="Matrix units for the quantised weights",
        severity=Severity.info,
        category="quantisation",
        why="Quantised weights always save memory. They save compute only on a GPU that "
        "multiplies in their format.",
        fix="Expect 16-bit speed, or choose another GPU.",
        source="vendor datasheets (hardware catalogue); vllm 0.32 Marlin fallbacks",
        example="FP8 weights on an A100",
        check=_units,
    ),
    Rule(
        id="A090",
        title="Quantisation that is said and not stored",
        severity=Severity.error,
        category="quantisation",
        why="A leftover quantization_config makes the engine look for packed weights and scales.",
        fix="Make config.json describe the stored tensors.",
        source="safetensors headers against config.json; vllm 0.32 loaders",
        example="quant_method fp8 over BF16 tensors",
        check=_said_not_stored,
    ),
    Rule(
        id="A091",
        title="Quantisation that is stored and not said",
        severity=Severity.error,
        category="quantisation",
        why="Packed bytes without a description are read as weights, which gives noise, or are "
        "refused.",
        fix="Restore the description of the quantisation.",
        source="safetensors headers against config.json; vllm 0.32 loaders",
        example="F8_E4M3 tensors with weight_scale_inv and no quantization_config",
        check=_stored_not_said,
    ),
)
