r"""Asks a real vLLM which modules of a whole model it wraps for LoRA, and what a slot takes.

Run with the Python of vLLM's own environment (tools/vllm_setup.sh); re-records the fixture:

    PYTHON_OF_VLLM tools/record_vllm_lora_trees.py ../shared/configs \
        > tests/adapters/vllm_trees.jsonl

vLLM's own LoRAModelManager is put round models on the meta device, from shared configurations and
the library's defaults. Experts' kernels do not run on a CPU, so that their wrapper is built without
looking for one; its buffers are vLLM's own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import record_vllm_lora as record

MAX_LORA_RANK = 16
# What a configuration of the library says of no module.
SILENT = ("id2label", "label2id", "output_hidden_states", "return_dict", "chunk_size_feed_forward",
          "problem_type", "transformers_version", "output_attentions",
          "is_encoder_decoder")  # fmt: skip
# Tensor parallel sizes, and whether LoRA is cut on both sides (--fully-sharded-loras).
CUTS = ((2, False), (2, True), (8, False))
CUT = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM",
       "DeepseekV3ForCausalLM", "Phi3ForCausalLM", "Qwen3NextForCausalLM", "GemmaForCausalLM",
       "Gemma2ForCausalLM", "Glm4ForCausalLM", "NemotronHForCausalLM")  # fmt: skip
BUFFERS = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM prints on stdout; the document alone belongs there
    import transformers
    import vllm_oracle
    from vllm.model_executor.models.registry import ModelRegistry

    vllm_oracle.prepare()
    shared: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for file in sorted(Path(sys.argv[1]).glob("*_config.json")):
        config = json.loads(file.read_text())
        config.pop("quantization_config", None)
        for name in config.get("architectures", ()):
            if config not in [known for _, known in shared.get(name, [])]:
                shared.setdefault(name, []).append((file.name, config))
    only = set(sys.argv[2:])
    for name in sorted(ModelRegistry.get_supported_archs()):
        if only and name not in only:
            continue
        library = record._library(transformers, name)
        cases = [*shared.get(name, []), *([("", library)] if library else [])]
        for file, config in cases:
            answer = record._in_child(lambda config=config: _tree(config))
            if "error" in answer:
                print(name, file, answer["error"][:150], file=sys.stderr)
                continue
            for size, sharded in CUTS if name in CUT else ():
                cut = record._in_child(
                    lambda config=config, size=size, sharded=sharded: _tree(config, size, sharded)
                )
                key = f"slot_bytes_tp{size}{'_sharded' if sharded else ''}"
                answer[key] = cut.get("slot_bytes")
            case = {"file": file} if file else {"config": _spoken(config)}
            line = json.dumps({"architecture": name, **case, **answer})
            os.write(answers, (line + "\n").encode())


def _spoken(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without keys that say nothing of modules."""
    return {
        key: _spoken(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in SILENT and value is not None
    }


def _tree(config: dict[str, Any], size: int = 1, sharded: bool = False) -> dict[str, Any]:
    """One rank of `size`; groups of one process whose size is set by hand."""
    import copy

    import torch
    import vllm.distributed.parallel_state as state
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.layers.fused_moe import expert_map_manager
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import SupportsLoRA
    from vllm.utils.torch_utils import set_default_torch_dtype

    _experts_without_kernels()
    expert_map_manager.ExpertMapManager.get_compressed_map_string = lambda _: ""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        settings = EngineArgs(
            model=folder, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True,
            max_model_len=256, enable_lora=True, max_lora_rank=MAX_LORA_RANK,
            fully_sharded_loras=sharded,
        ).create_engine_config()  # fmt: skip
        with set_current_vllm_config(settings):
            state.init_distributed_environment(1, 0, f"file://{folder}/init", 0, "gloo")
            state.initialize_model_parallel(1, 1)
            if state._EP is None or state._EP is state._DP:
                state._EP = copy.copy(state._DP)  # made for mixtures of experts only
            settings.parallel_config.tensor_parallel_size = size
            state._TP.world_size = state._EP.world_size = size
            with set_default_torch_dtype(settings.model_config.dtype), torch.device("meta"):
                model = initialize_model(vllm_config=settings)
                if not isinstance(model, SupportsLoRA):
                    return {"error": "no LoRA"}
                manager = LoRAModelManager(
                    model, 4, 256, settings.model_config.get_vocab_size(), settings.lora_config,
                    torch.device("meta"), settings,
                )  # fmt: skip
    return {
        "modules": dict(Counter(record._pattern(name) for name in manager.modules)),
        "supported": sorted(manager.supported_lora_modules),
        "slot_bytes": sum(_bytes(module) for module in manager.modules.values()),
    }


def _bytes(module: Any) -> int:
    experts = hasattr(module, "w2_lora_a_stacked")
    held = 0
    for name in BUFFERS if experts else ("lora_a_stacked", "lora_b_stacked"):
        value = getattr(module, name)
        for tensor in value if isinstance(value, tuple | list) else (value,):
            held += tensor.numel() * tensor.element_size()
    return held


def _experts_without_kernels() -> None:
    import torch
    from vllm.lora.layers.fused_moe import FusedMoEWithLoRA

    def build(self: Any, base_layer: Any) -> None:
        torch.nn.Module.__init__(self)
        self.base_layer, self.moe_config = base_layer, base_layer.moe_config
        self._shared_experts = base_layer._shared_experts
        parallel = self.moe_config.moe_parallel_config
        self.tp_size, self.tp_rank = parallel.tp_size, 0
        self.device = torch.device("meta")
        self._w13_slices = 2 if base_layer.moe_config.is_act_and_mul else 1
        self.enable_moe_shared_loras = False
        self.n_slices = self.local_num_experts * (self._w13_slices + 1)

    FusedMoEWithLoRA.__init__ = build
    FusedMoEWithLoRA.set_mapping = lambda *_: None


if __name__ == "__main__":
    main()
