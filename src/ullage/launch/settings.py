"""A Launch → the Deployment that it describes, with vLLM's names whatever the engine.

Holds the tables flag → field. What is hidden by a variable, a config file or a malformed value is
hidden in the Deployment too (`open_values.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite

from ullage.costs.deployment import Deployment, Parallel
from ullage.launch.launch import Given, Launch
from ullage.launch.open_values import hide
from ullage.launch.values import parse_integer

MAX_INTEGER = 2**63 - 1
AUTO = -1
Value = int | float | bool | str | None


def _count(text: str) -> int:
    number = parse_integer(text)
    if not 1 <= number <= MAX_INTEGER:
        raise ValueError(text)
    return number


def _length(text: str) -> int:
    return AUTO if text.strip().lower() in ("auto", "-1") else _count(text)


def _fraction(text: str) -> float:
    number = float(text)
    if not isfinite(number) or not 0 < number <= 1:
        raise ValueError(text)
    return number


def _truth(text: str) -> bool:
    return text == "true"


def _dtype(text: str) -> str | None:
    return None if text == "auto" else text


def _more_than_one(text: str) -> bool:
    return _count(text) > 1


def _chunk(text: str) -> int | None:
    """SGLang's -1 turns chunks off."""
    return None if text.strip() == "-1" else _count(text)


def _off(text: str) -> bool:
    return text != "true"


@dataclass(frozen=True, slots=True)
class Setting:
    """A flag that sets a field of the Deployment (or of its parallel sizes)."""

    flag: str
    field: str
    parse: Callable[[str], Value]
    expected: str


COUNT = "a whole number of at least 1"
SETTINGS: Mapping[str, tuple[Setting, ...]] = {
    "vllm": (
        Setting("--tensor-parallel-size", "tensor", _count, COUNT),
        Setting("--pipeline-parallel-size", "pipeline", _count, COUNT),
        Setting("--data-parallel-size", "data", _count, COUNT),
        Setting("--enable-expert-parallel", "expert", _truth, "no value"),
        Setting("--dtype", "dtype", _dtype, "a dtype"),
        Setting("--kv-cache-dtype", "kv_cache_dtype", str, "a dtype"),
        Setting("--kv-cache-memory-bytes", "kv_cache_memory_bytes", _count, COUNT),
        Setting("--gpu-memory-utilization", "gpu_memory_utilization", _fraction,
                "a fraction above 0, at most 1"),
        Setting("--max-model-len", "max_model_len", _length, f"{COUNT}, or auto"),
        Setting("--max-num-seqs", "max_num_seqs", _count, COUNT),
        Setting("--max-num-batched-tokens", "max_num_batched_tokens", _count, COUNT),
        Setting("--block-size", "block_size", _count, COUNT),
        Setting("--enable-prefix-caching", "enable_prefix_caching", _truth, "no value"),
        Setting("--async-scheduling", "async_scheduling", _truth, "no value"),
    ),
    "sglang": (
        Setting("--tp-size", "tensor", _count, COUNT),
        Setting("--pp-size", "pipeline", _count, COUNT),
        Setting("--dp-size", "data", _count, COUNT),
        Setting("--ep-size", "expert", _more_than_one, COUNT),
        Setting("--dtype", "dtype", _dtype, "a dtype"),
        Setting("--kv-cache-dtype", "kv_cache_dtype", str, "a dtype"),
        Setting("--context-length", "max_model_len", _count, COUNT),
        Setting("--max-running-requests", "max_num_seqs", _count, COUNT),
        Setting("--chunked-prefill-size", "max_num_batched_tokens", _chunk, f"{COUNT}, or -1"),
        Setting("--page-size", "block_size", _count, COUNT),
        Setting("--disable-radix-cache", "enable_prefix_caching", _off, "no value"),
    ),
}  # fmt: skip

UNPRICED = frozenset(
    [
        "--config",
        "--speculative-config",
        "--spec-method",
        "--spec-model",
        "--spec-tokens",
        "--enable-lora",
        "--cpu-offload-gb",
        "--kv-offloading-size",
        "--language-model-only",
        "--mm-encoder-only",
        "--limit-mm-per-prompt",
        "--num-gpu-blocks-override",
        "--disable-hybrid-kv-cache-manager",
        "--disable-sliding-window",
        "--decode-context-parallel-size",
        "--prefill-context-parallel-size",
        "--kv-cache-dtype-skip-layers",
        "--kv-sharing-fast-prefill",
        "--mamba-cache-dtype",
        "--mamba-ssm-cache-dtype",
        "--mamba-block-size",
        "--mamba-cache-mode",
        "--prefix-match-unit",
        "--enable-eplb",
        "--eplb-config",
        "--hf-config-path",
        "--quantization",
        "--quantization-config",
        "--offload-backend",
        "--offload-params",
        "--offload-group-size",
        "--runner",
        "--convert",
        "--diffusion-config",
    ]
)
"""vLLM's flags that change what memory holds and that the ledger does not count."""


def deployment_of(launch: Launch, base: Deployment) -> Deployment:
    """`base` with what the launch says; a flag that hides its value hides the field.

    What `base` has set (other than Deployment's defaults) was given beside the file, and wins.
    """
    values: dict[str, Value] = {}
    hidden: dict[str, str] = {}
    sizes = {field.name for field in fields(Parallel)}
    for setting in SETTINGS[launch.engine]:
        part, default = (
            (base.parallel, Parallel()) if setting.field in sizes else (base, Deployment())
        )
        if getattr(part, setting.field) != getattr(default, setting.field):
            continue
        given = launch.given(setting.flag)
        if given is None:
            if launch.absent_unknown:
                hidden[setting.field] = f"{setting.flag} (perhaps in {launch.absent_unknown[0]})"
            continue
        problem = problem_of(setting, given)
        if given.open:
            hidden[setting.field] = f"the value of {setting.flag} ({given.open})"
        elif problem:
            hidden[setting.field] = f"a value for {setting.flag} ({problem})"
        else:
            values[setting.field] = setting.parse(given.values[0])
    if attention_groups(launch):
        values["data"] = 1
        hidden.pop("data", None)
    parallel = replace(base.parallel, **{k: v for k, v in values.items() if k in sizes})  # type: ignore[arg-type]
    rest = {k: v for k, v in values.items() if k not in sizes}
    version = base.engine_version
    if version == Deployment().engine_version:
        version = launch.version or ("unknown" if launch.engine != base.engine else version)
    made = replace(base, parallel=parallel, engine=launch.engine, engine_version=version, **rest)  # type: ignore[arg-type]
    return hide(made, hidden) if hidden else made


def attention_groups(launch: Launch) -> bool:
    """Whether SGLang's data-parallel size counts groups inside the tensor-parallel ranks.

    Then it asks for no device more (sglang 0.5.23: arg_groups/parallel_hook.py,
    handle_deprecated_dp_attention).
    """
    return launch.engine == "sglang" and launch.given("--enable-dp-attention") is not None


def problem_of(setting: Setting, given: Given) -> str:
    """What is wrong with the value that was given, "" when nothing is."""
    if given.trouble or not given.values:
        return given.trouble or "no value"
    try:
        setting.parse(given.values[0])
    except (ValueError, OverflowError):
        return repr(given.values[0][:40])
    return ""


def unpriced(launch: Launch, quantization: str | None = None) -> tuple[str, ...]:
    """The flags given that the memory ledger does not count, as their names.

    `quantization` is the checkpoint's method: to say the same by flag changes nothing.
    """
    given = dict.fromkeys(flag.name.rstrip(".") for flag in launch.flags if flag.trouble == "")
    said = launch.given("--quantization")
    if said is not None and said.values == (quantization,) and not said.open:
        given.pop("--quantization", None)
    return tuple(name for name in given if name in UNPRICED)
