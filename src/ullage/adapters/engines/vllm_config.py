"""What vLLM 0.32 refuses by adapter_config.json alone, word for word: `check_configuration`.

Holds lora/peft_helper.py's checks in its order, and `Refused`, which carries what vLLM prints.
Names and shapes are `vllm_keys.py` and `vllm.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ullage.anatomy.adapters.adapter import Adapter

SAVABLE = ("classifier", "score")
"""Modules that may be saved whole: heads of classifiers."""

# peft_helper.py, _init_is_supported: inits that leave the base model's weights alone.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")


class Refused(Exception):
    """vLLM refuses; the text is what it prints."""


def check_configuration(adapter: Adapter, max_rank: int) -> None:
    """peft_helper.py: from_dict, __post_init__ and validate_legal, in that order."""
    raw = adapter.config.raw or {}
    name = Path(adapter.config.file or "").name
    if name != "adapter_config.json":
        # worker_manager.py turns FileNotFoundError into exceptions.LoRAAdapterNotFoundError.
        raise Refused(f"Loading lora adapter failed: No adapter found for {absolute(adapter)}")
    missing = [f for f in ("r", "lora_alpha", "target_modules") if f not in raw]
    if missing:
        raise Refused(f"Missing required configuration fields: {set_text(missing)}")
    rank, alpha = raw["r"], raw["lora_alpha"]
    if not isinstance(rank, int | float):
        kind = type(rank).__name__
        raise Refused(f"'<=' not supported between instances of '{kind}' and 'int'")
    if rank <= 0:
        raise Refused(f"LoRA rank `r` must be a positive integer, got {rank}.")
    ranks = _mapping(raw.get("rank_pattern"))
    for key, value in ranks.items():
        if not isinstance(value, int) or value <= 0:
            raise Refused(
                f"LoRA rank for `{key}` in `rank_pattern` must be a positive integer, got {value}."
            )
    if not isinstance(alpha, int | float):
        kinds = f"'{type(alpha).__name__}' and '{'float' if raw.get('use_rslora') else 'int'}'"
        raise Refused(f"unsupported operand type(s) for /: {kinds}")
    errors = _features(raw)
    highest = max([rank, *(value for value in ranks.values() if isinstance(value, int))])
    if highest > max_rank:
        errors.append(f"LoRA rank {highest} is greater than max_lora_rank {max_rank}.")
    if raw.get("bias", "none") != "none":
        errors.append("Adapter bias is not supported.")
    if errors:
        raise Refused(" ".join(errors))


def _features(raw: Mapping[str, object]) -> list[str]:
    """peft_helper.py, _validate_features."""
    errors = []
    saved = raw.get("modules_to_save") or []
    unsupported = [m for m in saved if m not in SAVABLE] if isinstance(saved, list) else []
    if unsupported:
        errors.append(
            "vLLM only supports modules_to_save being either None "
            'or ["classifier", "score"] for classification models. '
            f"Unsupported modules_to_save: {unsupported}"
        )
    if raw.get("use_dora"):
        errors.append("vLLM does not yet support DoRA.")
    if raw.get("lora_bias"):
        errors.append("vLLM does not support LoRA bias (lora_bias).")
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        errors.append(
            f"vLLM does not support init_lora_weights={init!r}."
            " Inits such as PiSSA, OLoRA, CorDA and LoftQ modify the base model"
            " weights when PEFT loads the adapter. Convert it to a regular LoRA"
            " adapter with PEFT's path_initial_model_for_weight_conversion, or"
            " set init_lora_weights to true if the served base model already"
            " contains the modified weights."
        )
    for key, message in _UNSUPPORTED:
        if raw.get(key):
            errors.append(message)
    return errors


_UNSUPPORTED = (
    ("alora_invocation_tokens", "vLLM does not support Activated LoRA (aLoRA)."),
    ("layer_replication", "vLLM does not support layer_replication."),
    ("use_bdlora", "vLLM does not support block-diagonal LoRA (BD-LoRA)."),
    ("use_qalora", "vLLM does not support QALoRA."),
)


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def set_text(names: Iterable[str]) -> str:
    """A set as Python prints it; its order there is chance, here it is the alphabet."""
    return "{" + ", ".join(repr(name) for name in sorted(names)) + "}"


def absolute(adapter: Adapter) -> str:
    return str(Path(adapter.path).absolute())
