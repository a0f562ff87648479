"""Asks the installed transformers, per model class, what module tree PEFT puts its layers into.

Run with the development environment's Python; re-records the package's table, of the classes
named after it or of all:

    python tools/record_transformers_trees.py > src/ullage/adapters/engines/transformers_5_24.jsonl

Models are built on the meta device from the library's default configurations. One JSON object a
line, in the order of the classes' names: `modules` maps path patterns (numbers as {i}) to
`linear`, `conv1d`, `embedding`, `plain CLASS` (one that PEFT has no layer for) or a list of stacked
experts' parameters; `renames` and `merges` are how the library turns older keys into this tree;
`moe` names PEFT's own table of older targets of experts, `targets` are PEFT's defaults. Blocks that
a configuration turns on or off are built both ways (VARIANTS); `optional` are the patterns that
not every build, or not every layer, has.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from typing import Any

SECONDS_EACH = 240
# What the library's defaults lack to be built, by model type.
CHANGES: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8}, "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128}, "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}  # fmt: skip
# Settings by which the library's classes (`if config.…` in their __init__) build other modules; one
# is tried wherever a configuration, or a part of it, has its first field.
EVERY = "every layer"
VARIANTS: tuple[dict[str, Any], ...] = (
    {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    {"attention_k_eq_v": True}, {"use_clipped_linears": True}, {"use_clipped_linears": False},
    {"hidden_size_per_layer_input": 0}, {"hidden_size_per_layer_input": 64},
    {"num_kv_shared_layers": 0}, {"num_kv_shared_layers": 2},
    {"q_lora_rank": None}, {"q_lora_rank": 64},
    {"first_k_dense_replace": 1}, {"first_k_dense_replace": 0}, {"first_k_dense_replace": 10**6},
    {"mlp_layer_types": (EVERY, "dense")}, {"mlp_layer_types": (EVERY, "sparse")},
    {"mlp_only_layers": [0]}, {"decoder_sparse_step": 10**6}, {"decoder_sparse_step": 1},
    {"num_dense_layers": 1}, {"num_dense_layers": 0}, {"num_dense_layers": 10**6},
    {"num_experts": 0}, {"num_experts": 4}, {"num_local_experts": 0}, {"num_local_experts": 4},
    {"n_shared_experts": 1}, {"n_shared_experts": 0}, {"n_shared_experts": None},
    {"num_shared_experts": 1}, {"num_shared_experts": 0},
    {"moe_num_shared_experts": 1}, {"moe_num_shared_experts": 0},
    {"moe_layer_start_index": 0}, {"moe_layer_start_index": 1},
    {"moe_layer_interval": 2}, {"moe_layers": [0]}, {"moe_layers": []},
    {"is_moe": True}, {"is_moe": False}, {"moe_latent_size": 64}, {"use_fine_route": True},
    {"shared_intermediate_size": 0}, {"shared_intermediate_size": 64},
    {"is_decoder": True}, {"is_decoder": True, "add_cross_attention": True},
    {"add_cross_attention": True}, {"is_gated_act": True}, {"is_gated_act": False},
    {"layer_types": (EVERY, "full_attention")}, {"use_qk_norm": True}, {"qk_layernorm": True},
    {"word_embed_proj_dim": 64}, {"embedding_size": 64}, {"gating": True}, {"gating": False},
    {"use_attention_gate": True}, {"use_resampler": True}, {"enable_audio_output": False},
    {"enable_audio_output": True}, {"num_nextn_predict_layers": 1}, {"has_lora_adapter": True},
    {"use_shared_attention_adapter": True}, {"use_bottleneck": False},
    {"num_feedforward_networks": 1}, {"use_decoder_only_language_model": False},
    {"use_decoder_only_language_model": True}, {"asm": True}, {"emb_layer_norm_before": True},
    {"use_ordered_embeddings": True}, {"use_ordered_embeddings": False}, {"use_task_id": True},
    {"new_decoder_architecture": True}, {"conv_kernel_size": 3}, {"adapter_layer_norm": True},
    {"additional_vocab_size": 8}, {"use_entity_aware_attention": False},
)  # fmt: skip


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
    for name in sorted(names.intersection(sys.argv[1:]) if sys.argv[1:] else names):
        try:
            signal.alarm(SECONDS_EACH)
            print(json.dumps({"class": name, **_tree(getattr(transformers, name))}), flush=True)
        except (Exception, Stalled) as error:
            print(name, f"{type(error).__name__}: {error}"[:200], file=sys.stderr)
        finally:
            signal.alarm(0)


class Stalled(BaseException):
    """Not an Exception, for a single variant's failure is passed over."""


def _stall(*_: object) -> None:
    raise Stalled("took too long")


def _tree(kind: Any) -> dict[str, Any]:
    import torch
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        get_model_conversion_mapping,
    )
    from transformers.core_model_loading import WeightRenaming

    config = _config(kind)
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
    modules, optional = _modules(model), _irregular(model)
    for changed in _variants(kind):
        try:
            with torch.device("meta"):
                other = kind(changed)
        except Exception:  # settings that this class cannot have, or not without others
            continue
        found = _modules(other)
        optional |= (modules.keys() ^ found.keys()) | _irregular(other)
        modules |= {pattern: found[pattern] for pattern in found if pattern not in modules}
    return {
        "converted": converted, "moe": _moe(config.model_type) if converted else None,
        "targets": _targets(config.model_type), "renames": renames, "merges": merges,
        "output": _output(model), "modules": modules, "optional": sorted(optional),
    }  # fmt: skip


def _config(kind: Any) -> Any:
    return kind.config_class(**CHANGES.get(kind.config_class.model_type, {}))


def _variants(kind: Any) -> Iterator[Any]:
    """The class's configurations with one setting of VARIANTS each, and with the parts (towers)
    that the default leaves out."""
    absent = [
        name for name in kind.config_class.sub_configs if getattr(_config(kind), name) is None
    ]
    for name in absent:
        config = _config(kind)
        part = kind.config_class.sub_configs[name]
        if part.__name__ != "AutoConfig":
            setattr(config, name, part())
            yield config
    for changes in VARIANTS:
        first = next(iter(changes))
        for number in range(len(_parts(_config(kind)))):
            config = _config(kind)
            part = _parts(config)[number]
            new = {name: _value(value, part) for name, value in changes.items()}
            try:
                if not hasattr(part, first):
                    continue
                if all(getattr(part, name, None) == value for name, value in new.items()):
                    continue
                for name, value in new.items():
                    setattr(part, name, value)
            except Exception:  # a value that this configuration does not take, or has per layer
                continue
            yield config


def _value(value: Any, part: Any) -> Any:
    if isinstance(value, tuple) and value[0] is EVERY and hasattr(part, "num_hidden_layers"):
        return [value[1]] * part.num_hidden_layers
    return value


def _parts(config: Any) -> list[Any]:
    found = [config]
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "sub_configs"):
            found += _parts(part)
    return found


def _irregular(model: Any) -> set[str]:
    """Patterns of modules that some of their repeated part's layers have and some do not."""
    layers: dict[str, set[str]] = {}
    stacks: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        match = re.match(r"(.*?\.)(\d+)(?=\.)", name)
        if match is None or not dict(module.named_parameters(recurse=False)):
            continue
        layers.setdefault(_pattern(name), set()).add(match.group(2))
        stacks.setdefault(match.group(1), set()).add(match.group(2))
    return {
        pattern
        for pattern, found in layers.items()
        if len(found) < len(stacks[pattern.partition("{i}")[0]])
    }


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "{i}", name)


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
        pattern = _pattern(name)
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
