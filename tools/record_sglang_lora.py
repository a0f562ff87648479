"""Asks SGLang's own loading code what it makes of adapters' names: the tests' record.

Run with the development environment's Python on the `sglang` folder of an unpacked wheel:

    python tools/record_sglang_lora.py FOLDER > tests/adapters/sglang_loads.jsonl

Only srt/lora/lora.py, lora_config.py and utils.py run; what they import besides is replaced by
empty modules, which the code that is asked does not use. One JSON object a line: the adapter, and
the error or the shapes of the weights as they are put together.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch

EMPTY = ("", ".srt", ".srt.configs", ".srt.layers", ".srt.lora", ".srt.lora.backend",
         ".srt.model_loader", ".srt.utils", ".srt.model_executor")  # fmt: skip
NAMES = {
    ".srt.configs.load_config": "LoadConfig", ".srt.lora.backend.base_backend": "BaseLoRABackend",
    ".srt.model_loader.loader": "DefaultModelLoader",
    ".srt.utils.hf_transformers_utils": "AutoConfig",
    ".srt.model_executor.forward_batch_info": "ForwardBatch",
}  # fmt: skip
# Sides [in, out] of a Llama's modules of 64, 4 heads, 2 of keys and values, 128 inside.
SIDES = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (64, 32), "self_attn.v_proj": (64, 32),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (64, 128), "mlp.up_proj": (64, 128),
    "mlp.down_proj": (128, 64), "self_attn.qkv_proj": (64, 128), "mlp.gate_up_proj": (64, 256),
}  # fmt: skip
PREFIXES = (
    "base_model.model.model.", "", "module.base_model.model.model.",
    "base_model.model._orig_mod.model.", "base_model.model.model.language_model.",
)  # fmt: skip
NUM_CASES = 160


def main() -> None:
    loader, utils, config = _load(Path(sys.argv[1]))
    draw = random.Random(5)  # noqa: S311
    for _ in range(NUM_CASES):
        case = _case(draw)
        print(json.dumps({**case, **_ask(case, loader, utils, config)}))


def _load(folder: Path) -> tuple[Any, Any, Any]:
    for name in EMPTY:
        _module(f"sglang{name}").__path__ = []
    for name, word in NAMES.items():
        setattr(_module(f"sglang{name}"), word, object)
    _module("sglang.srt.layers.utils").get_layer_id = _layer
    config = _run("lora_config", folder)
    utils = _run("utils", folder)
    return _run("lora", folder), utils, config


def _module(name: str) -> Any:
    sys.modules[name] = types.ModuleType(name)
    return sys.modules[name]


def _layer(name: str) -> int | None:
    match = re.search(r"layers\.(\d+)\.", name)
    return int(match.group(1)) if match else None


def _run(name: str, folder: Path) -> Any:
    full = f"sglang.srt.lora.{name}"
    spec = importlib.util.spec_from_file_location(full, folder / f"srt/lora/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    return module


def _case(draw: random.Random) -> dict[str, Any]:
    """One adapter: names with shapes, and its configuration."""
    split = [name for name in SIDES if "qkv" not in name and "gate_up" not in name]
    chosen = draw.sample(split if draw.random() < 0.7 else list(SIDES), draw.randint(1, 6))
    if draw.random() < 0.6:  # with what SGLang wants beside them
        chosen += [name for name in ("self_attn.q_proj", "self_attn.v_proj") if name not in chosen]
        chosen += ["mlp.gate_proj"] if "mlp.gate_proj" not in chosen else []
    leaves = {name.partition(".")[2] for name in chosen}
    targets = leaves if draw.random() < 0.8 else set(draw.sample(sorted(leaves), 1))
    targets = targets | {name.partition(".")[2] for name in draw.sample(split, draw.randint(0, 2))}
    prefix = draw.choice(PREFIXES)
    shapes: dict[str, list[int]] = {}
    for name in chosen:
        rank = 4 if draw.random() < 0.08 else 8
        inner, outer = SIDES[name]
        for layer in range(3 if draw.random() < 0.03 else 2):
            stem = f"{prefix}layers.{layer}.{name}"
            shapes[f"{stem}.lora_A.weight"] = [rank, inner]
            shapes[f"{stem}.lora_B.weight"] = [outer, rank]
    if draw.random() < 0.1:
        shapes.pop(draw.choice(sorted(shapes)))
    alpha, rslora = draw.choice((4, 8, 16)), draw.random() < 0.3
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": alpha, "use_rslora": rslora,
              "target_modules": sorted(targets)}  # fmt: skip
    return {"config": config, "shapes": dict(sorted(shapes.items()))}


def _ask(case: dict[str, Any], loader: Any, utils: Any, config: Any) -> dict[str, Any]:
    base = types.SimpleNamespace(num_hidden_layers=2)
    try:
        adapter = loader.LoRAAdapter(
            "a", config.LoRAConfig.from_dict(case["config"]), base, None, None
        )
        adapter.initialize_weights_from_tensors(
            {name: torch.zeros(shape) for name, shape in case["shapes"].items()}
        )
        targets = utils.get_normalized_target_modules(case["config"]["target_modules"])
        weights = [dict(layer.weights) for layer in adapter.layers]
        for layer in weights:
            for name in layer:
                utils.get_target_module_name(name, targets)
    except Exception as error:
        return {"error": str(error)}
    found = [{name: list(w.shape) for name, w in layer.items()} for layer in weights]
    return {"scaling": adapter.scaling, "weights": found}


if __name__ == "__main__":
    main()
