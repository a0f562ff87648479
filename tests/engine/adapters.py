"""Adapters made by the real PEFT for the tiny models, with an effect that no rounding hides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.engine.references import load_reference

EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(model: Path, directory: Path, seed: int = 0, **config: Any) -> Path:
    """A random adapter of `model` in `directory`; `config` is LoraConfig's."""
    from peft import LoraConfig, get_peft_model

    chosen = {"r": 4, "lora_alpha": 16, "target_modules": EVERYWHERE, **config}
    adapted = get_peft_model(load_reference(model), LoraConfig(**chosen))
    random = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.14, generator=random)
    adapted.save_pretrained(str(directory))
    return directory


def load_adapted(model: Path, adapter: Path) -> Any:
    """The reference with the adapter in it, as PEFT applies it."""
    from peft import PeftModel

    return PeftModel.from_pretrained(load_reference(model), str(adapter)).eval()
