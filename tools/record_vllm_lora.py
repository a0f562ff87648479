"""Asks a real vLLM, per architecture, what decides where an adapter's weights go.

Run with the Python of vLLM's own environment (tools/vllm_setup.sh); re-records the package's table:

    PYTHON_OF_VLLM tools/record_vllm_lora.py ../shared/configs \\
        > src/ullage/adapters/engines/vllm_0_32.jsonl

Models are built on the meta device from shared configurations and from the library's defaults, one
child process each; an architecture that cannot be built here is recorded from its class alone
(`built` false, no modules). One JSON object a line, in the order of the architectures' names.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_TARGET_DEVICE="cpu", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1",
    VLLM_HOST_IP="127.0.0.1", VLLM_CPU_KVCACHE_SPACE="1",
)  # fmt: skip

SECONDS_EACH = 120
# What the defaults of the library lack to be built, by model type.
CHANGES: dict[str, dict[str, Any]] = {
    "bloom": {"n_head": 8}, "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 2}, "nemotron": {"num_key_value_heads": 8},
    "glm4_moe_lite": {"first_k_dense_replace": 1}, "afmoe": {"score_func": "sigmoid"},
    "lfm2": {"block_dim": 2560, "block_ff_dim": 6656, "block_multiple_of": 256,
             "block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0},
    "gemma4_text": {"num_kv_shared_layers": 4},
    "gemma4": {"text_config": {"num_kv_shared_layers": 4}, "vision_config": {}},
    "hunyuan_v1_dense": {"head_dim": 128}, "hunyuan_v1_moe": {"head_dim": 128},
}  # fmt: skip
KINDS = ("QKVParallelLinear", "MergedColumnParallelLinear", "ColumnParallelLinear",
         "RowParallelLinear", "ReplicatedLinear", "ParallelLMHead", "VocabParallelEmbedding",
         "MoERunner", "LinearBase")  # fmt: skip


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM prints on stdout; the document alone belongs there
    sys.path.insert(0, str(Path(__file__).parent))
    import transformers
    import vllm_oracle
    from vllm.model_executor.models.registry import ModelRegistry

    vllm_oracle.prepare()
    cases: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(Path(sys.argv[1]).glob("*_config.json")):
        config = json.loads(file.read_text())
        config.pop("quantization_config", None)
        for name in config.get("architectures", ()):
            cases.setdefault(name, []).append(config)
    only = set(sys.argv[2:])
    for name in sorted(ModelRegistry.get_supported_archs()):
        if only and name not in only:
            continue
        configs = cases.get(name, [])
        library = _library(transformers, name)
        if library is not None:
            configs = [*configs, library]
        record = _architecture(name, configs)
        print(name, record["built"], record.get("why", "")[:150], file=sys.stderr)
        os.write(answers, (json.dumps(record) + "\n").encode())


def _library(transformers: Any, name: str) -> dict[str, Any] | None:
    """The library's default configuration as config.json would say it, None when it has none."""
    kind = getattr(getattr(transformers, name, None), "config_class", None)
    if kind is None:
        return None
    try:
        made = kind(**CHANGES.get(kind.model_type, {}))
        raw = json.loads(json.dumps(made.to_dict(), default=str))
    except Exception as error:
        print(name, repr(error)[:200], file=sys.stderr)
        return None
    return {**raw, "architectures": [name], "dtype": "bfloat16"}


def _architecture(name: str, configs: list[dict[str, Any]]) -> dict[str, Any]:
    """One architecture, its modules joined over all its configurations."""
    whole: dict[str, Any] | None = None
    why = "no configuration"
    seen: set[str] = set()
    for config in configs:
        shape = json.dumps({k: v for k, v in config.items() if not isinstance(v, float)})
        if shape in seen:
            continue
        seen.add(shape)
        answer = _in_child(lambda config=config: _instance(config))
        if "error" in answer:
            why = answer["error"]
        elif whole is None:
            whole = answer
        else:
            whole["modules"] = {**answer["modules"], **whole["modules"]}
            whole["supported"] = sorted({*answer["supported"], *whole["supported"]})
    if whole is not None:
        return {"architecture": name, "built": True, **whole}
    answer = _in_child(lambda: _class(name))
    if "error" in answer:
        return {"architecture": name, "built": False, "why": answer["error"]}
    return {"architecture": name, "built": False, "why": why, **answer}


def _in_child(work: Any) -> dict[str, Any]:
    """What `work` returns, or {"error": …}; a crash or a stall of the child is an error too."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            answer = work()
        except BaseException as error:
            # One sentence, without this run's folder: what follows is the library's advice.
            said = re.sub(r" for '/tmp/[^']*'", "", str(error)).partition(". ")[0]
            answer = {"error": f"{type(error).__name__}: {said}"[:300]}
        with os.fdopen(write, "w") as stream:
            json.dump(answer, stream)
        os._exit(0)
    os.close(write)
    parts, deadline = [], time.monotonic() + SECONDS_EACH
    with os.fdopen(read, "rb", buffering=0) as stream:
        while True:
            if not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
                os.kill(child, signal.SIGKILL)
                parts = [b'{"error": "took too long"}']
                break
            part = stream.read(1 << 16)
            if not part:
                break
            parts.append(part)
    os.waitpid(child, 0)
    text = b"".join(parts)
    return json.loads(text) if text else {"error": "the process died"}


def _attributes(model: Any) -> dict[str, Any]:
    """What is said of adapters by a model or by its class."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    facts: dict[str, Any] = {
        "supports_lora": bool(getattr(model, "supports_lora", False)),
        "embedding_modules": _embeddings(model),
        "skip_prefixes": list(getattr(model, "lora_skip_prefixes", None) or []),
        "is_3d": bool(getattr(model, "is_3d_moe_weight", False)),
        "non_gated": bool(getattr(model, "is_non_gated_moe", False)),
        "multimodal": bool(getattr(model, "supports_multimodal", False)),
        "tower_lora": bool(getattr(model, "supports_tower_connector_lora", False)),
        "packed": dict(getattr(model, "packed_modules_mapping", None) or {}),
    }
    if mapper is not None:
        facts["mapper"] = _mapper(mapper.get_rename_mapper())
    return facts


def _embeddings(model: Any) -> list[str]:
    """Of the model and, where it was built, of its parts (get_supported_lora_modules asks all)."""
    parts = [model, *(model.modules() if not isinstance(model, type) else ())]
    return sorted({n for part in parts for n in getattr(part, "embedding_modules", None) or {}})


def _mapper(mapper: Any) -> dict[str, Any]:
    return {
        "renaming": [[r.source_patterns, r.target_patterns] for r in mapper.orig_to_new_renaming],
        "regex": [[p.pattern, new] for p, new in mapper.orig_to_new_regex.items()],
        "substr": list(mapper.orig_to_new_substr.items()),
        "prefix": list(mapper.orig_to_new_prefix.items()),
        "suffix": list(mapper.orig_to_new_suffix.items()),
    }


def _class(name: str) -> dict[str, Any]:
    from vllm.model_executor.models.registry import ModelRegistry

    found = ModelRegistry._try_load_model_cls(name)
    return {"error": "its class cannot be loaded"} if found is None else _attributes(found)


def _instance(config: dict[str, Any]) -> dict[str, Any]:
    import torch
    import vllm.distributed.parallel_state as state
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.utils import get_supported_lora_modules, process_packed_modules_mapping
    from vllm.model_executor.layers.fused_moe import expert_map_manager
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import SupportsLoRA
    from vllm.utils.torch_utils import set_default_torch_dtype

    # A log line that wants the values of a tensor on the meta device.
    expert_map_manager.ExpertMapManager.get_compressed_map_string = lambda _: ""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        settings = EngineArgs(
            model=folder, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True,
            max_model_len=256,
        ).create_engine_config()  # fmt: skip
        with set_current_vllm_config(settings):
            state.init_distributed_environment(1, 0, f"file://{folder}/init", 0, "gloo")
            state.initialize_model_parallel(1, 1)
            with set_default_torch_dtype(settings.model_config.dtype), torch.device("meta"):
                model = initialize_model(vllm_config=settings)
    facts = _attributes(model)
    facts["supports_lora"] = isinstance(model, SupportsLoRA)
    facts["class"] = type(model).__name__
    if hasattr(model, "get_mm_mapping"):
        keys = model.get_mm_mapping()
        facts["towers"] = {
            "language_model": keys.language_model,
            "connector": keys.connector,
            "tower_model": keys.tower_model,
        }
    packed = facts["packed"]
    if facts["supports_lora"]:
        packed = process_packed_modules_mapping(model)
        experts = packed.get("experts")
        if experts and len(experts) > 3:
            # Expert by expert: the three (or two) names of one expert say it all.
            first = [name for name in experts if ".0." in name]
            packed["experts"] = [name.replace(".0.", ".{e}.", 1) for name in first]
    facts["packed"] = packed
    facts["supported"] = sorted(get_supported_lora_modules(model))
    facts["modules"], facts["aliases"] = _modules(model, packed)
    return facts


def _modules(model: Any, packed: dict[str, list[str]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Path pattern (numbers as {i}) → [kind, wrapper, slices] of every module LoRA could be on;
    and second names → first names."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.utils import _all_lora_classes
    from vllm.model_executor.layers.fused_moe import MoERunner
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    lora = LoRAConfig()
    found: dict[str, Any] = {}
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, LinearBase | MoERunner | VocabParallelEmbedding):
            continue
        if first.setdefault(id(module), name) != name and "lm_head" not in name:
            # Held under a second name too: adapters know it by the first.
            aliases[_pattern(name)] = _pattern(first[id(module)])
            continue
        names = [kind.__name__ for kind in type(module).__mro__]
        kind = next(k for k in KINDS if k in names)
        part = packed.get(name.rpartition(".")[2], [])
        if kind == "MoERunner":
            part = ["w13"] if getattr(model, "is_3d_moe_weight", False) else ["w1", "w3"]
        wrapper = next(
            (
                c.__name__.removesuffix("WithLoRA")
                for c in _all_lora_classes
                if c.can_replace_layer(
                    source_layer=module, lora_config=lora, packed_modules_list=part,
                    model_config=model.config,
                )
            ),
            None,
        )  # fmt: skip
        pattern = _pattern(name)
        slices = len(getattr(module, "output_sizes", ()) or ())
        found.setdefault(pattern, [kind, wrapper, slices])
    return found, aliases


def _pattern(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "{i}", path)


if __name__ == "__main__":
    main()
