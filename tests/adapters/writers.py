"""Adapters in the layouts of programs that are not peft: names of files, keys and fields.

Each function writes what the named release's own code writes (read there, not run here), for a
Llama of two layers: hidden size 64, four heads of 16, two KV heads, intermediate size 128.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
# place → (out, in)
PLACES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.v_proj": (32, 64),
    "mlp.down_proj": (64, 128),
}
_TUNE = {
    "self_attn.q_proj": "attn.q_proj",
    "self_attn.v_proj": "attn.v_proj",
    "mlp.down_proj": "mlp.w2",
}
RANK = 4
LORA = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "owner/name",
}


def _config(folder: Path, **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def peft_tensors(prefix: str = "base_model.model.", tail: str = ".weight") -> Tensors:
    """A and B of every place of both layers, in PEFT's names."""
    tensors = {}
    for layer in range(2):
        for place, (out, inner) in PLACES.items():
            name = f"{prefix}model.layers.{layer}.{place}"
            tensors[f"{name}.lora_A{tail}"] = torch.randn(RANK, inner)
            tensors[f"{name}.lora_B{tail}"] = torch.randn(out, RANK)
    return tensors


def peft(folder: Path, **fields: Any) -> Path:
    """PEFT's layout with hand-made tensors: for what needs no model."""
    _config(folder, **{**LORA, **fields})
    save_file(peft_tensors(), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def unsloth(folder: Path) -> Path:
    """unsloth_zoo 2026.10.9, hf_utils.py: PEFT's layout with a mark in auto_mapping."""
    mark = {
        "base_model_class": "LlamaForCausalLM",
        "parent_library": "transformers.models.llama.modeling_llama",
        "unsloth_fixed": True,
    }
    return peft(folder, auto_mapping=mark)


def ms_swift(folder: Path) -> Path:
    """ms-swift 4.6.0, swift/tuners/peft.py: what PEFT has no field for lies in a second file."""
    peft(folder)
    extra = {"lora_dtype": None, "lorap_lr_ratio": None, "lorap_emb_lr": 1e-6}
    (folder / "additional_config.json").write_text(json.dumps(extra))
    return folder


def llama_factory(folder: Path) -> Path:
    """llamafactory 0.9.5, train/callbacks.py: PEFT's layout beside the trainer's log."""
    peft(folder)
    (folder / "trainer_log.jsonl").write_text("{}\n")
    return folder


def axolotl_sharded(folder: Path) -> Path:
    """axolotl 0.19.0, train.py: the shards of merged FSDP weights, renamed to adapter_model*."""
    _config(folder, **LORA)
    tensors = peft_tensors()
    names = sorted(tensors)
    places = {}
    for number, chosen in enumerate((names[:5], names[5:]), 1):
        file = f"adapter_model-{number:05d}-of-00002.safetensors"
        save_file({n: tensors[n] for n in chosen}, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(chosen, file))
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def mlx(folder: Path, *, kind: str = "lora", experts: int = 0) -> Path:
    """mlx_lm 0.32.2, lora.py and tuner/lora.py, dora.py: A is [in, rank], B is [rank, out].

    A stack of experts (LoRASwitchLinear) has A as [experts, rank, in], B as [experts, out, rank].
    """
    keys = list(PLACES)
    _config(
        folder,
        model="owner/name",
        fine_tune_type=kind,
        num_layers=2,
        lora_parameters={"rank": RANK, "dropout": 0.0, "scale": 20.0, "keys": keys},
        train=True,
        iters=1000,
        seed=0,
    )
    tensors = {}
    for layer in range(2):
        for place, (out, inner) in PLACES.items():
            name = f"model.layers.{layer}.{place}"
            tensors[f"{name}.lora_a"] = torch.randn(inner, RANK)
            tensors[f"{name}.lora_b"] = torch.randn(RANK, out)
            if kind == "dora":
                tensors[f"{name}.m"] = torch.rand(out)
        if experts:
            name = f"model.layers.{layer}.mlp.switch_mlp.up_proj"
            tensors[f"{name}.lora_a"] = torch.randn(experts, RANK, 64)
            tensors[f"{name}.lora_b"] = torch.randn(experts, 32, RANK)
    save_file(tensors, folder / "adapters.safetensors", metadata={"format": "mlx"})
    save_file(tensors, folder / "0000100_adapters.safetensors", metadata={"format": "mlx"})
    return folder


def mlx_vlm_legacy(folder: Path) -> Path:
    """mlx_vlm 0.7.10, trainer/peft/lora.py with legacy=True: bare A and B, alpha over rank."""
    _config(folder, rank=RANK, alpha=0.4, dropout=0.1)
    tensors = {}
    for place, (out, inner) in PLACES.items():
        name = f"language_model.model.layers.0.{place}"
        tensors[f"{name}.A"] = torch.randn(inner, RANK)
        tensors[f"{name}.B"] = torch.randn(RANK, out)
    save_file(tensors, folder / "adapters.safetensors", metadata={"format": "mlx"})
    return folder


def _tune_tensors(*, dora: bool = False) -> Tensors:
    tensors = {}
    for layer in range(2):
        for place, (out, inner) in PLACES.items():
            name = f"layers.{layer}.{_TUNE[place]}"
            tensors[f"{name}.lora_a.weight"] = torch.randn(RANK, inner)
            tensors[f"{name}.lora_b.weight"] = torch.randn(out, RANK)
            if dora:
                tensors[f"{name}.magnitude"] = torch.rand(out)
    return tensors


def torchtune(folder: Path) -> Path:
    """torchtune 0.6.1, training/checkpointing/_checkpointer.py: its own .pt beside PEFT's file."""
    fields = {key: LORA[key] for key in ("r", "lora_alpha", "target_modules", "peft_type")}
    _config(folder, **fields, base_model_name_or_path="owner/name")
    torch.save(_tune_tensors(), folder / "adapter_model.pt")
    save_file(peft_tensors(), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def torchtune_own(folder: Path, *, dora: bool = False) -> Path:
    """torchtune's own names alone, as for the models that it cannot convert (Phi, Llama Vision)."""
    _config(folder, **LORA, use_dora=dora)
    torch.save(_tune_tensors(dora=dora), folder / "adapter_model.pt")
    return folder


def megatron(folder: Path) -> Path:
    """Megatron-Bridge's adapter modules under Megatron's own names, in one state dict."""
    _config(folder, **LORA)
    tensors = {}
    for layer in range(2):
        for place, (out, inner) in {
            "self_attention.linear_qkv": (128, 64),
            "self_attention.linear_proj": (64, 64),
            "mlp.linear_fc1": (256, 64),
        }.items():
            name = f"decoder.layers.{layer}.{place}.adapter"
            tensors[f"{name}.linear_in.weight"] = torch.randn(RANK, inner)
            tensors[f"{name}.linear_out.weight"] = torch.randn(out, RANK)
    torch.save({"adapter_state_dict": tensors}, folder / "adapter_model.bin")
    return folder
