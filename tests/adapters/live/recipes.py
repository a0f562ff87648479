"""Ways of making an adapter to ask vLLM about; `table.py` says which are made of which model.

`make` leaves the adapter in the bench's folder and returns the prompt's log probabilities as
training meant them (the trained model's under PEFT, before anything was renamed), or None where
training says nothing. What vLLM does with it is recorded in outcomes.jsonl, not here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from peft import LoraConfig

from .training import Bench

Make = Callable[[Bench], list[float] | None]

QV = ["q_proj", "v_proj"]
STEM = "base_model.model."


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    model: str
    make: Make
    flags: tuple[str, ...] = ()
    tolerance: float = 2e-3
    request: tuple[str, ...] = ()
    """Switches of the load request that are on (`is_3d_lora_weight`)."""
    unseen: bool = False
    """It adapts what a text prompt does not pass through: its effect cannot be measured here."""


def lora(targets: Any = None, **more: Any) -> LoraConfig:
    """A LoRA of rank 8 and scale 2 unless told otherwise."""
    given = {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": QV if targets is None else targets,
        "task_type": "CAUSAL_LM",
    }
    return LoraConfig(**{**given, **more})


def trained(targets: Any = None, **more: Any) -> Make:
    return lambda bench: bench.train(lora(targets, **more))


def renamed(change: Callable[[str], str | None], targets: Any = None, **more: Any) -> Make:
    """Trained, then every key through `change`."""

    def make(bench: Bench) -> list[float]:
        said = bench.train(lora(targets, **more))
        bench.keys(change)
        return said

    return make


def reconfigured(drop: Sequence[str] = (), targets: Any = None, **changes: Any) -> Make:
    """Trained, then adapter_config.json changed."""

    def make(bench: Bench) -> list[float]:
        said = bench.train(lora(targets))
        bench.config(changes, tuple(drop))
        return bench.loaded() or said

    return make


def reshaped(change: Callable[[dict[str, Any]], dict[str, Any]], targets: Any = None) -> Make:
    """Trained, then the tensors changed: what is meant is what PEFT still makes of them."""

    def make(bench: Bench) -> list[float] | None:
        bench.train(lora(targets))
        bench.tensors(change)
        return bench.loaded()

    return make


def stem(new: str) -> Callable[[str], str]:
    return lambda key: new + key.removeprefix(STEM)


def inside(old: str, new: str) -> Callable[[str], str]:
    return lambda key: key.replace(old, new)


def each(matching: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Change the tensors whose key contains `matching`."""
    return lambda tensors: {k: change(v) if matching in k else v for k, v in tensors.items()}


def wider(rows: int = 0, columns: int = 0) -> Callable[[Any], Any]:
    return lambda t: torch.nn.functional.pad(t, (0, columns, 0, rows), value=0.1)


def narrower(rows: int = 0, columns: int = 0) -> Callable[[Any], Any]:
    return lambda t: t[: t.shape[0] - rows, : t.shape[1] - columns]


# Kinds that are written otherwise than by one call ---------------------------------------------


def pickled(file: str) -> Make:
    def make(bench: Bench) -> list[float]:
        said = bench.train(lora())
        _replace_weights(bench, lambda tensors: torch.save(tensors, bench.adapter / file))
        return said

    return make


def _replace_weights(bench: Bench, write: Callable[[dict[str, Any]], Any]) -> None:
    import safetensors.torch

    old = bench.adapter / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(old)
    old.unlink()
    write(tensors)


def mlx(bench: Bench) -> list[float]:
    """As mlx-lm writes: adapters.safetensors, `lora_a` [in, r], its own adapter_config.json."""
    import safetensors.torch

    said = bench.train(lora())

    def write(tensors: dict[str, Any]) -> None:
        names = {".lora_A.weight": ".lora_a", ".lora_B.weight": ".lora_b"}
        turned = {}
        for key, value in tensors.items():
            suffix = next(s for s in names if key.endswith(s))
            name = key.removeprefix(STEM).removesuffix(suffix) + names[suffix]
            turned[name] = value.T.contiguous()
        safetensors.torch.save_file(turned, bench.adapter / "adapters.safetensors")

    _replace_weights(bench, write)
    own = {
        "fine_tune_type": "lora",
        "num_layers": 2,
        "lora_parameters": {"rank": 8, "scale": 2.0, "dropout": 0.0, "keys": QV},
    }
    (bench.adapter / "adapter_config.json").write_text(json.dumps(own))
    return said


def sharded(bench: Bench) -> list[float]:
    import safetensors.torch

    said = bench.train(lora())

    def write(tensors: dict[str, Any]) -> None:
        weight_map = {}
        for part, layer in enumerate((".layers.0.", ".layers.1."), start=1):
            file = f"adapter_model-{part:05d}-of-00002.safetensors"
            share = {k: v for k, v in tensors.items() if layer in k}
            safetensors.torch.save_file(share, bench.adapter / file)
            weight_map |= dict.fromkeys(share, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (bench.adapter / "adapter_model.safetensors.index.json").write_text(json.dumps(index))

    _replace_weights(bench, write)
    return said


def custom_name(bench: Bench) -> list[float]:
    """An adapter of another name than `default`: PEFT saves it in a folder of that name."""
    model, said = bench.trained(lora(), adapter_name="tone")
    model.save_pretrained(bench.adapter)
    for path in (bench.adapter / "tone").iterdir():
        shutil.move(path, bench.adapter / path.name)
    (bench.adapter / "tone").rmdir()
    return said


def custom_name_left_inside(bench: Bench) -> list[float]:
    """The same, pointed at the folder above."""
    model, said = bench.trained(lora(), adapter_name="tone")
    model.save_pretrained(bench.adapter)
    return said


def compiled_outside(bench: Bench) -> list[float]:
    """torch.compile around the PEFT model, its state dict saved as it is."""
    return _state_dict_of(bench, torch.compile)


def plain_state_dict(bench: Bench) -> list[float]:
    """The trainable part of the PEFT model's own state dict: `lora_A.default.weight`."""
    return _state_dict_of(bench, lambda model: model)


def _state_dict_of(bench: Bench, wrap: Callable[[Any], Any]) -> list[float]:
    import safetensors.torch

    model, said = bench.trained(lora())
    model.save_pretrained(bench.adapter)
    tensors = {k: v for k, v in wrap(model).state_dict().items() if ".lora_" in k}
    safetensors.torch.save_file(tensors, bench.adapter / "adapter_model.safetensors")
    return said


def compiled_inside(bench: Bench) -> list[float]:
    """get_peft_model around a compiled base model, saved by PEFT: `_orig_mod.` in every key."""
    import peft

    torch.manual_seed(1)
    from . import training

    base = torch.compile(bench.model.load(bench.base))
    model = peft.get_peft_model(base, lora())
    training.randomise(model)
    model.save_pretrained(bench.adapter)
    return training.logprobs(model.base_model.model._orig_mod)


PER_LAYER_INPUTS = ["per_layer_input_gate", "per_layer_projection"]


def keys_of_sharing_layers(bench: Bench) -> None:
    """Pairs for the keys of layers that have none of their own, as trainers of old wrote them."""
    bench.train(lora(["q_proj", "k_proj"]))
    bench.tensors(
        lambda tensors: {
            **tensors,
            **{
                k.replace(".1.", ".3."): v.clone()
                for k, v in tensors.items()
                if ".1.self_attn.k_" in k
            },
        }
    )


def only_keys_of_sharing_layers(bench: Bench) -> None:
    bench.train(lora(["k_proj"]))
    bench.tensors(
        lambda tensors: {
            key.replace(".1.", ".3."): value for key, value in tensors.items() if ".1." in key
        }
    )


def no_config(bench: Bench) -> list[float]:
    said = bench.train(lora())
    (bench.adapter / "adapter_config.json").unlink()
    return said


def no_tensors_file(bench: Bench) -> None:
    bench.train(lora())
    (bench.adapter / "adapter_model.safetensors").unlink()


def no_folder(bench: Bench) -> None:
    """Nothing is there at all."""


def both_files(bench: Bench) -> list[float]:
    """A stale .bin beside the safetensors file."""
    said = bench.train(lora())
    import safetensors.torch

    tensors = safetensors.torch.load_file(bench.adapter / "adapter_model.safetensors")
    zeros = {k: torch.zeros_like(v) for k, v in tensors.items()}
    torch.save(zeros, bench.adapter / "adapter_model.bin")
    return said


def with_embedding_layers(bench: Bench) -> list[float]:
    """save_embedding_layers: the base weights of what was adapted are saved too."""
    model, said = bench.trained(lora(["q_proj", "embed_tokens", "lm_head"]))
    model.save_pretrained(bench.adapter, save_embedding_layers=True)
    return said


def method(name: str, **own: Any) -> Make:
    """Another PEFT method than LoRA, by its config class."""

    def make(bench: Bench) -> list[float]:
        import peft

        return bench.train(getattr(peft, name)(task_type="CAUSAL_LM", **own))

    return make


def cast(dtype: torch.dtype) -> Make:
    def make(bench: Bench) -> list[float]:
        said = bench.train(lora())
        bench.tensors(lambda tensors: {k: v.to(dtype) for k, v in tensors.items()})
        return said

    return make


def _only(*wanted: str) -> Callable[[str], str | None]:
    return lambda key: key if any(w in key for w in wanted) else None


def _without(*unwanted: str) -> Callable[[str], str | None]:
    return lambda key: None if any(w in key for w in unwanted) else key


def _astray(missing: str) -> Callable[[str], str | None]:
    """The first layer under a name that is not served, and one of its matrices missing."""

    def change(key: str) -> str | None:
        if ".layers.0." not in key:
            return key
        return None if missing in key else key.replace(".layers.0.", ".blocks.0.")

    return change


def _beyond(tensors: dict[str, Any], first: int) -> dict[str, Any]:
    """Layers counted from `first`, as an adapter of a deeper model would have."""
    pattern = re.compile(r"(?<=\.layers\.)\d+")
    return {
        pattern.sub(lambda found: str(int(found[0]) + first), key): value
        for key, value in tensors.items()
    }


QKV = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
GATE_AND_UP = {"gate_proj": 192, "up_proj": 192}
"""Parts of what some models fuse, with their rows in the tiny models."""


def fused(fused_name: str, parent: str, parts: Mapping[str, int]) -> Make:
    """One pair of rank 8 for several projections, on a model that has them apart."""

    def make(bench: Bench) -> list[float]:
        first = next(iter(parts))
        bench.train(lora([first]))
        tensors = _pairs({f"{parent}.{fused_name}": sum(parts.values())})
        bench.tensors(lambda _: tensors)
        bench.config({"target_modules": [fused_name]})
        placed = []
        for module, delta in _deltas(tensors).items():
            for name, part in zip(parts, delta.split(list(parts.values())), strict=True):
                placed.append((module.replace(fused_name, name), 0, part))
        return bench.merged(placed)

    return make


def split(fused_name: str, parent: str, parts: Mapping[str, int], rank: int = 4) -> Make:
    """A pair of its own for each projection, on a model that has them fused."""

    def make(bench: Bench) -> list[float]:
        bench.train(lora([fused_name]))
        tensors = _pairs({f"{parent}.{name}": rows for name, rows in parts.items()}, rank)
        bench.tensors(lambda _: tensors)
        bench.config({"target_modules": [*parts], "r": rank, "lora_alpha": 2 * rank})
        starts = dict(zip(parts, accumulate(parts.values(), initial=0), strict=False))
        placed = []
        for module, delta in _deltas(tensors).items():
            stem, _, name = module.rpartition(".")
            placed.append((f"{stem}.{fused_name}", starts[name], delta))
        return bench.merged(placed)

    return make


def _pairs(rows: Mapping[str, int], rank: int = 8) -> dict[str, Any]:
    """Random pairs for modules of both layers, by name and rows."""
    torch.manual_seed(2)
    tensors = {}
    for layer in (0, 1):
        for name, count in rows.items():
            stem = f"{STEM}model.layers.{layer}.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, 128) * 0.05
            tensors[f"{stem}.lora_B.weight"] = torch.randn(count, rank) * 0.5
    return tensors


def _deltas(tensors: Mapping[str, Any], scale: float = 2.0) -> dict[str, Any]:
    """Module → scale·B·A."""
    return {
        key.removeprefix(STEM).removesuffix(".lora_A.weight"): scale
        * tensors[key.replace("lora_A", "lora_B")]
        @ tensors[key]
        for key in tensors
        if "lora_A" in key
    }


GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def experts(*parameters: str, **more: Any) -> LoraConfig:
    """LoRA on the three-dimensional parameters of a mixture of experts, and on nothing else."""
    return lora([], target_parameters=list(parameters), **more)


def trained_experts(*parameters: str, **more: Any) -> Make:
    return lambda bench: bench.train(experts(*parameters, **more))


def per_expert(gate: str, up: str, down: str, path: str = "mlp.experts") -> Make:
    """The same training, written as one pair of matrices per expert and projection.

    PEFT stores A as [experts · rank, in] and B as [out, rank · experts], gate above up.
    """

    def make(bench: Bench) -> list[float]:
        said = bench.train(experts(GATE_UP, DOWN))
        bench.tensors(lambda tensors: _per_expert(tensors, gate, up, down, path))
        bench.config({"target_modules": [gate, up, down], "target_parameters": None})
        return said

    return make


def _per_expert(
    tensors: dict[str, Any], gate: str, up: str, down: str, path: str
) -> dict[str, Any]:
    num_experts, split = 4, {}
    for layer in (0, 1):
        stem = f"{STEM}model.layers.{layer}.mlp.experts"
        inner = {m: tensors[f"{stem}.base_layer.lora_{m}.weight"] for m in "AB"}
        outer = {m: tensors[f"{stem}.lora_{m}.weight"] for m in "AB"}
        pairs = (inner, outer) if inner["B"].shape[0] != 128 else (outer, inner)
        for projections, pair in zip(((gate, up), (down,)), pairs, strict=True):
            a_ERI = pair["A"].reshape(num_experts, -1, pair["A"].shape[1])
            b_ORE = pair["B"].reshape(pair["B"].shape[0], -1, num_experts)
            parts_ORE = b_ORE.chunk(len(projections))
            for expert in range(num_experts):
                for projection, part_ORE in zip(projections, parts_ORE, strict=True):
                    name = f"{STEM}model.layers.{layer}.{path}.{expert}.{projection}"
                    split[f"{name}.lora_A.weight"] = a_ERI[expert].clone()
                    split[f"{name}.lora_B.weight"] = part_ORE[..., expert].clone()
    return split


LANGUAGE = r".*language_model.*\.(q|v)_proj"
"""The text side of a vision-language model, for `target_modules`."""


def text_keys(new: str) -> Make:
    """A text adapter of a vision-language model with another path before `layers`."""
    return renamed(inside("model.model.language_model.layers", f"model.{new}layers"), LANGUAGE)


def vision_language(name: str, tower: str | None) -> list[Recipe]:
    """Text adapters under each tree that training has seen, and adapters of the tower.

    `tower` None: the server was started without it, and knows none of its names.
    """
    makes = {
        "text": trained(LANGUAGE),
        "text-all-linear": trained(r".*language_model.*_proj"),
        "text-only-class": text_keys("model."),
        "text-old-tree": text_keys("language_model.model."),
        "text-language-model": text_keys("language_model."),
        "text-bare": text_keys(""),
        "text-no-stem": renamed(stem(""), LANGUAGE),
    }
    of_tower = {
        "lm-head": trained(["lm_head"]),
        "q-everywhere": trained(["q_proj", "qkv"]),
        "tower": trained(tower),
        "tower-old-tree": renamed(inside(STEM + "model.", STEM), tower),
        "tower-transformers-4": renamed(
            inside("model.vision_tower.", "vision_tower.vision_model."), tower
        ),
        "tower-served-tree": renamed(inside("vision_tower.", "vision_tower.vision_model."), tower),
        "tower-and-text": trained(f"{LANGUAGE}|{tower}"),
        "all-linear": trained("all-linear"),
    }
    recipes = [Recipe(f"{name}/{key}", name, make) for key, make in makes.items()]
    if tower is not None:
        recipes += [
            Recipe(f"{name}/{key}", name, make, unseen=key != "lm-head")
            for key, make in of_tower.items()
        ]
    return recipes


OLD_MIXTRAL = inside(".mlp.", ".block_sparse_moe.")
TOWER_FLAG = ("--enable-tower-connector-lora",)
SIGLIP = r".*vision_tower.*\.(q_proj|fc1)"


def classifier(targets: Any = None, **more: Any) -> Make:
    return trained(targets, task_type="SEQ_CLS", **more)
