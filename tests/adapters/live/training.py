"""Adapters as PEFT trains and saves them, with weights that show, and what PEFT says they do."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import safetensors
import safetensors.torch
import torch

from .models import VOCABULARY, TinyModel

PROMPT = tuple(random.Random(7).choices(range(4, VOCABULARY), k=24))  # noqa: S311
SPREAD = 0.5
"""Standard deviation of the trained B: the adapter moves the weights as much as they are wide."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Where one recipe works: the base model's folder and the folder for its adapter."""

    model: TinyModel
    base: Path
    adapter: Path

    def train(self, config: Any, **how: Any) -> list[float]:
        """Train (randomly) and save as PEFT does; the prompt's log probabilities under PEFT."""
        trained, logprobs = self.trained(config, **how)
        self.adapter.mkdir(parents=True)
        trained.save_pretrained(self.adapter, save_embedding_layers=False)
        return logprobs

    def trained(self, config: Any, adapter_name: str = "default") -> tuple[Any, list[float]]:
        torch.manual_seed(1)
        base = self.model.load(self.base)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(base, config, adapter_name=adapter_name)
        randomise(model)
        return model, self.answer(model)

    def answer(self, model: Any) -> list[float]:
        """What the prompt gets: the log probability of its tokens, or a classifier's logits."""
        return scores(model) if self.model.task == "SEQ_CLS" else logprobs(model)

    def loaded(self) -> list[float] | None:
        """What PEFT makes of the files as they lie; None where they do not fit its model."""
        base = self.model.load(self.base)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model = peft.PeftModel.from_pretrained(base, str(self.adapter))
            except Exception:
                return None
        expected = {k: v.shape for k, v in peft.get_peft_model_state_dict(model).items()}
        path = self.adapter / "adapter_model.safetensors"
        held = {k: v.shape for k, v in safetensors.torch.load_file(path).items()}
        return self.answer(model) if held == expected else None

    def merged(self, placed: list[tuple[str, int, Any]]) -> list[float]:
        """The answer with each change added to a module's weight, from a row on: no PEFT at all."""
        model = self.model.load(self.base)
        with torch.no_grad():
            for module, row, delta in placed:
                model.get_submodule(module).weight[row : row + delta.shape[0]] += delta
        return self.answer(model)

    def keys(self, change: Callable[[str], str | None]) -> None:
        """Rename the saved tensors; None drops one."""
        self.tensors(
            lambda tensors: {
                new: value for key, value in tensors.items() if (new := change(key)) is not None
            }
        )

    def tensors(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Rewrite the saved tensors."""
        path = self.adapter / "adapter_model.safetensors"
        changed = change(safetensors.torch.load_file(path))
        safetensors.torch.save_file({k: v.contiguous() for k, v in changed.items()}, path)

    def config(self, changes: Mapping[str, Any], drop: tuple[str, ...] = ()) -> None:
        """Change or drop keys of adapter_config.json."""
        path = self.adapter / "adapter_config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))


def randomise(model: Any) -> None:
    """Give every trained parameter values that show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or "lora_A" in name:
                continue
            if "magnitude" in name:
                parameter.mul_(1 + 0.5 * torch.rand_like(parameter))
            elif "lora_" in name or "trainable_tokens" in name:
                parameter.copy_(torch.randn_like(parameter) * SPREAD)
            else:  # modules_to_save, biases
                parameter.add_(torch.randn_like(parameter) * 0.15)


def logprobs(model: Any) -> list[float]:
    """Log probability of each prompt token but the first."""
    model.eval()
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([PROMPT])).logits[0].float()
    all_TV = torch.log_softmax(logits_TV, dim=-1)
    return [float(all_TV[t, token]) for t, token in enumerate(PROMPT[1:])]


def scores(model: Any) -> list[float]:
    """A classifier's logits."""
    model.eval()
    with torch.no_grad():
        return [float(x) for x in model(input_ids=torch.tensor([PROMPT])).logits[0]]
