"""Asks a real vLLM how many bytes of parameters one rank holds, for whole models, without memory.

Run with the Python of vLLM's own environment (tools/vllm_setup.sh); re-records the fixture:

    PYTHON_OF_VLLM tools/vllm_weights.py ../shared/configs > tests/costs/vllm_weights.json

Models are built on the meta device as rank 0 of a group whose size is set by hand, so that any
tensor, data and expert parallel size can be asked about on one CPU. Packed weights are not asked
about, save where vLLM builds them on a CPU: its kernels for the others refuse to be chosen there.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(
    VLLM_TARGET_DEVICE="cpu", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1",
    VLLM_HOST_IP="127.0.0.1", VLLM_CPU_KVCACHE_SPACE="1",
)  # fmt: skip

SHARED = (
    "Qwen--Qwen3-0.6B", "meta-llama--Meta-Llama-3.1-8B", "meta-llama--Meta-Llama-3.1-405B",
    "mistralai--Mixtral-8x7B-v0.1", "Qwen--Qwen3-235B-A22B", "deepseek-ai--DeepSeek-V3",
    "moonshotai--Kimi-K2-Instruct", "openai--gpt-oss-120b", "nvidia--Nemotron-H-56B-Base-8K",
    "MiniMaxAI--MiniMax-M2.5", "nvidia--Llama-3.1-70B-Instruct-FP8",
)  # fmt: skip
PACKED = ("nvidia--Llama-3.1-70B-Instruct-FP8",)

# Defaults of the library for these types, with what must be small or present.
LIBRARY = {
    "gemma2": {}, "gemma3_text": {}, "phi3": {}, "opt": {}, "gpt2": {}, "bloom": {"n_head": 8},
    "starcoder2": {}, "stablelm": {}, "olmo2": {}, "cohere": {}, "granite": {}, "jamba": {},
    "bamba": {}, "falcon_h1": {}, "mamba2": {}, "qwen3_next": {}, "qwen2_moe": {}, "glm4": {},
    "glm4_moe": {"head_dim": 128}, "ernie4_5_moe": {}, "exaone4": {}, "gpt_neox": {}, "lfm2": {},
    "granitemoehybrid": {}, "olmoe": {}, "deepseek_v2": {"num_experts_per_tok": 2},
}  # fmt: skip
SIZES = ((1, 1, False), (2, 1, False), (8, 1, False), (16, 1, False), (8, 1, True), (2, 4, False),
         (2, 4, True))  # fmt: skip
STAGES = ((61, 4), (36, 5), (94, 8), (126, 16), (7, 3), (48, 48), (10, 1), (43, 6))


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM prints on stdout; the document alone belongs there
    from vllm.distributed.utils import get_pp_indices

    folder = Path(sys.argv[1])
    cases = [(name, _shared(folder, name), False) for name in SHARED]
    cases += [(name, _library(name, changes), True) for name, changes in LIBRARY.items()]
    weights = []
    for name, config, inline in cases:
        if config is None:
            continue
        ranks = _ranks(config)
        if not ranks:
            continue
        entry: dict[str, object] = {"name": name, "ranks": ranks}
        if inline:
            entry["config"] = config
        weights.append(entry)
        print(name, ranks, file=sys.stderr)
    stages = [
        {"layers": n, "stages": p, "bounds": [list(get_pp_indices(n, i, p)) for i in range(p)]}
        for n, p in STAGES
    ]
    document = {"vllm": _version(), "weights": weights, "pipeline": stages}
    os.write(answers, (json.dumps(document, indent=1) + "\n").encode())


def _version() -> str:
    import vllm

    return str(vllm.__version__)


def _shared(folder: Path, name: str) -> dict[str, object]:
    config = json.loads((folder / f"{name}_config.json").read_text())
    if name in PACKED:
        side = json.loads((folder / f"{name}_hf_quant_config.json").read_text())
        config["quantization_config"] = {**side, "quant_method": "modelopt"}
    else:
        config.pop("quantization_config", None)
    return config


def _library(model_type: str, changes: dict[str, object]) -> dict[str, object] | None:
    """The library's default configuration as config.json would say it, None when it has none."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    try:
        made = CONFIG_MAPPING[model_type](**changes)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
    except Exception as error:
        print(model_type, repr(error)[:200], file=sys.stderr)
        return None
    raw = json.loads(json.dumps(made.to_dict(), default=str))
    return {**raw, "architectures": [type(model).__name__], "dtype": "bfloat16"}


def _ranks(config: dict[str, object]) -> list[dict[str, object]]:
    ranks = []
    for tensor, data, expert in SIZES:
        size = {"tensor": tensor, "data": data, "expert": expert}
        try:
            ranks.append({**size, "bytes": _bytes(config, tensor, data, expert)})
        except Exception as error:
            print(size, repr(error)[:200], file=sys.stderr)
    return ranks


def _bytes(config: dict[str, object], tensor: int, data: int, expert: bool) -> int:
    import torch
    import vllm.distributed.parallel_state as state
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe import expert_map_manager
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    # A log line that wants the values of a tensor on the meta device.
    expert_map_manager.ExpertMapManager.get_compressed_map_string = lambda _: ""
    folder = tempfile.mkdtemp()
    (Path(folder) / "config.json").write_text(json.dumps(config))
    settings = EngineArgs(
        model=folder, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True,
        max_model_len=1024, enable_expert_parallel=expert,
    ).create_engine_config()  # fmt: skip
    with set_current_vllm_config(settings):
        if not state.model_parallel_is_initialized():
            state.init_distributed_environment(1, 0, f"file://{folder}/init", 0, "gloo")
            state.initialize_model_parallel(1, 1)
        if state._EP is None or state._EP is state._DP:
            state._EP = copy.copy(state._DP)  # made for mixtures of experts only
        settings.parallel_config.tensor_parallel_size = tensor
        settings.parallel_config.data_parallel_size = data
        state._TP.world_size, state._DP.world_size = tensor, data
        state._EP.world_size = tensor * data
        try:
            with set_default_torch_dtype(settings.model_config.dtype), torch.device("meta"):
                model = initialize_model(vllm_config=settings)
        finally:
            state._TP.world_size = state._DP.world_size = state._EP.world_size = 1
    held = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    return sum(held.values())


if __name__ == "__main__":
    main()
