"""Asks the installed transformers, per model class, what module tree PEFT puts its layers into.

Run with the development environment's Python; re-records the package's table:

    python tools/record_transformers_trees.py > src/ullage/adapters/transformers_5_24.jsonl

Models are built on the meta device from the library's default configurations. One JSON object a
line, in the order of the classes' names: `modules` maps path patterns (numbers as {i}) to
`linear`, `conv1d`, `embedding`, `plain CLASS` (one that PEFT has no layer for) or a list of stacked
experts' parameters; `renames` and `merges` are how the library turns older keys into this tree;
`moe` names PEFT's own table of older targets of experts, `targets` are PEFT's defaults.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from typing import Any

SECONDS_EACH = 60
# What the library's defaults lack to be built, by model type.
CHANGES: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8}, "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128}, "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}  # fmt: skip


def main() -> None:
    import torch
    import transformers
    from transformers.models.auto import modeling_auto as auto

    tables = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    names = set()
    for table in tables:
        for found in table.values():
            names.update((found,) if isinstance(found, str) else found)
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _stall)
    for name in sorted(names):
        try:
            signal.alarm(SECONDS_EACH)
            print(json.dumps({"class": name, **_tree(getattr(transformers, name))}), flush=True)
        except Exception as error:
            print(name, f"{type(error).__name__}: {error}"[:200], file=sys.stderr)
        finally:
            signal.alarm(0)


def _stall(*_: object) -> None:
    raise TimeoutError("took too long")


def _tree(kind: Any) -> dict[str, Any]:
    import torch
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        get_model_conversion_mapping,
    )
    from transformers.core_model_loading import WeightRenaming

    config = kind.config_class(**CHANGES.get(kind.config_class.model_type, {}))
    with torch.device("meta"):
        model = kind(config)
    converted = get_checkpoint_conversion_mapping(config.model_type) is not None
    renames, merges = [], []
    for entry in get_model_conversion_mapping(model, add_legacy=False) if converted else ():
        scope = [entry.scope_prefix, entry.base_model_prefix]
        if type(entry).rename_source_key is WeightRenaming.rename_source_key and isinstance(
            entry, WeightRenaming
        ):
            renames.append([entry.compiled_sources.pattern, list(entry.target_patterns), scope])
        elif entry.target_patterns[0].endswith(("gate_up_proj", "down_proj")) and all(
            "*" in source for source in entry.source_patterns
        ):
            merges.append([list(entry.source_patterns), entry.target_patterns[0], scope])
    return {
        "converted": converted, "moe": _moe(config.model_type) if converted else None,
        "targets": _targets(config.model_type), "renames": renames, "merges": merges,
        "output": _output(model), "modules": _modules(model),
    }  # fmt: skip


def _moe(model_type: str) -> str | None:
    from peft.utils import transformers_weight_conversion as peft

    base = peft._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    return base if base in peft._MOE_TARGET_MODULE_MAPPING else None


def _targets(model_type: str) -> list[str]:
    """What PEFT targets where a configuration names nothing."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    return list(KNOWN.get(model_type, ()))


def _output(model: Any) -> str | None:
    head = model.get_output_embeddings()
    return next((n for n, m in model.named_modules() if m is head), None) if head else None


def _modules(model: Any) -> dict[str, Any]:
    import torch
    from transformers.pytorch_utils import Conv1D

    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "{i}", name)
        own = dict(module.named_parameters(recurse=False))
        if pattern in found or not own:
            continue
        if isinstance(module, torch.nn.Linear):
            found[pattern] = "linear"
        elif isinstance(module, Conv1D):
            found[pattern] = "conv1d"
        elif isinstance(module, torch.nn.Embedding):
            found[pattern] = "embedding"
        elif any(p.ndim == 3 for p in own.values()):
            found[pattern] = list(own)
        else:
            found[pattern] = f"plain {type(module).__name__}"
    return found


if __name__ == "__main__":
    main()
