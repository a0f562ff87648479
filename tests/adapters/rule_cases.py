"""For every rule about adapters an adapter on which it fires, and a part of what it then says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.adapters.cases import ALL, OTHERS, QV, REPORTED, Case, names, pairs, safetensors, works
from ullage.adapters.rules.table import Base

PLAIN = works("llama", pairs(names(*QV)), 4)


def _changed(case: Case = PLAIN, **changes: object) -> Case:
    return replace(case, **changes)  # type: ignore[arg-type]


def _configured(**config: object) -> Case:
    return replace(PLAIN, config=config)


def _zeros(folder: Path) -> None:
    raw = bytearray((folder / "adapter_model.safetensors").read_bytes())
    length = int.from_bytes(raw[:8], "little")
    raw[8 + length :] = bytes(len(raw) - 8 - length)
    (folder / "adapter_model.safetensors").write_bytes(bytes(raw))


def _second_file(folder: Path) -> None:
    (folder / "adapters.safetensors").write_bytes(safetensors(PLAIN.shapes))


def _pickled(folder: Path) -> None:
    import torch

    (folder / "adapter_model.safetensors").unlink()
    tensors = {name: torch.ones(shape) for name, shape in PLAIN.shapes.items()}
    torch.save(tensors, folder / "adapter_model.bin")


_TWICE = pairs(names(*QV)) | pairs(names(*QV), stem="")

# rule → the case, a part of the cause, and (where it matters) what is known of the base.
FIRES: dict[str, tuple[Case, str, Base]] = {
    "L001": (REPORTED["compiled model"][0], "drops 4 of 4 modules", Base()),
    "L002": (REPORTED["peft#1579 a model without its head"][0], "by the base model alone", Base()),
    "L003": (OTHERS["ranks that the configuration denies"][0], "at 4 instead of 2", Base()),
    "L004": (_changed(shapes=_TWICE), "4 modules are loaded and then overwritten", Base()),
    "L005": (OTHERS["a tower that adapters may not change"][0], "leaves 2 of 2 modules out",
             Base()),
    "L006": (OTHERS["a narrower base's adapter"][0], "fills what is missing with zeros", Base()),
    "L007": (REPORTED["ms-swift#4221 rank 64"][0], "rank 64, above the 16", Base()),
    "L008": (_changed(options={"max_lora_rank": 256}), "allocated for rank 256", Base()),
    "L009": (OTHERS["the adapter's name left in the keys"][0],
             "lora_A.default.weight is unsupported LoRA weight", Base()),
    "L010": (_changed(engine="sglang", config={"init_lora_weights": "pissa"}),
             "changed the base in training", Base()),
    "L021": (_changed(shapes=pairs(names("attn.c_attn", tree="transformer.h.{i}."))),
             "none of the base's", Base()),
    "L022": (OTHERS["layers that the base lacks"][0], "it has 2", Base()),
    "L023": (OTHERS["a wider base's adapter"][0], "maps 128 to 64 where the base maps 64", Base()),
    "L024": (OTHERS["an embedding of another vocabulary"][0], "a vocabulary of 260", Base()),
    "L025": (_configured(base_model_name_or_path="Qwen/Qwen3-8B-Base"), "trained on Qwen/Qwen3-8B-",
             Base(name="Qwen/Qwen3-8B")),
    "L026": (_configured(revision="0a1b2c3"), "revision 0a1b2c3",
             Base(name="x", revision="ffffffffff")),
    "L027": (OTHERS["a tied head"][1], "changes only the head", Base()),
    "L028": (Case("gemma4-shared", pairs(names(*QV, tree="model.layers.{i}."), sides={
        "q_proj": (64, 64), "v_proj": (64, 32)}), "works", 4, 4), "compute none of their own",
        Base()),
    "L029": (OTHERS["a trained copy of the embedding"][1], "of the base's own weights", Base()),
    "L041": (OTHERS["another method"][0], "is IA3, not LoRA", Base()),
    "L042": (REPORTED["vllm#6983 DoRA"][0], "2 magnitude vectors", Base()),
    "L043": (REPORTED["vllm#9280 modules_to_save"][0], "1 full weights", Base()),
    "L044": (OTHERS["biases"][0], "4 stored", Base()),
    "L045": (OTHERS["an init that changed the base"][0], "init_lora_weights pissa", Base()),
    "L046": (REPORTED["FSDP around the layers"][0], "_fsdp_wrapped_module in 8 keys", Base()),
    "L047": (OTHERS["the adapter's name left in the keys"][0], "(default)", Base()),
    "L048": (OTHERS["A without B"][0], "has no B", Base()),
    "L049": (OTHERS["ranks that the configuration denies"][0], "r and rank_pattern say 4", Base()),
    "L050": (_changed(files=_zeros), "4 of 4 modules add nothing", Base()),
    "L051": (_changed(files=_pickled), "a pickle", Base()),
    "L052": (_configured(frobnicate=True), "frobnicate", Base()),
    "L053": (_changed(files=_second_file), "adapters.safetensors", Base()),
}  # fmt: skip

SILENT = {name: pair[1] for name, pair in ALL.items()}
