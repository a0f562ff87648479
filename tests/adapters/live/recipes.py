"""Adapters to ask vLLM about: how each is made, and for which tiny model and server.

`make` leaves the adapter in the bench's folder and returns the prompt's log probabilities as
training meant them (the trained model's under PEFT, before anything was renamed), or None where
training says nothing. What vLLM does with it is recorded in outcomes.jsonl, not here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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


ONLY_Q = ("--lora-target-modules", "q_proj")
ONLY_O = ("--lora-target-modules", "o_proj")
RANK_32 = ("--max-lora-rank", "32")
LLAMA: dict[str, Make] = {
    # what training usually writes
    "plain": trained(),
    "all-linear": trained("all-linear"),
    "regex-targets": trained(r".*\.layers\.1\.self_attn\.(q|o)_proj"),
    "attention": trained(["q_proj", "k_proj", "v_proj", "o_proj"]),
    "down-only": trained(["down_proj"]),
    "gate-only": trained(["gate_proj"]),
    "one-layer": trained(layers_to_transform=[1]),
    "rank-1": trained(r=1, lora_alpha=4),
    "rank-16": trained(r=16),
    "rank-32": trained(r=32),
    "alpha-fraction": trained(lora_alpha=3.5),
    "rslora": trained(use_rslora=True),
    "rank-pattern": trained(rank_pattern={"v_proj": 4}),
    "rank-pattern-over": trained(rank_pattern={"v_proj": 24}),
    "alpha-pattern": trained(alpha_pattern={"layers.0.self_attn.q_proj": 64}),
    "both-patterns": trained(
        rank_pattern={r"layers\.1\..*": 4}, alpha_pattern={"q_proj": 4, "self_attn.q_proj": 64}
    ),
    "rslora-rank-pattern": trained(use_rslora=True, rank_pattern={"q_proj": 2}),
    "caret-pattern": trained(rank_pattern={"^model.layers.0.self_attn.q_proj": 4}),
    "gaussian": trained(init_lora_weights="gaussian"),
    "dora": trained(use_dora=True),
    "bias-all": trained(["o_proj"], bias="all"),
    "bias-lora-only": trained(bias="lora_only"),
    "lora-bias": trained(lora_bias=True),
    "save-lm-head": trained(modules_to_save=["lm_head"]),
    "save-embeddings": trained(modules_to_save=["embed_tokens"]),
    "save-norms": trained(modules_to_save=["input_layernorm"]),
    "lm-head": trained(["q_proj", "lm_head"]),
    "embed-tokens": trained(["q_proj", "embed_tokens"]),
    "embed-and-head": trained(["embed_tokens", "lm_head"]),
    "embedding-layers-saved": with_embedding_layers,
    "trainable-tokens": trained(trainable_token_indices=[5, 6, 7]),
    "custom-name": custom_name,
    "custom-name-above": custom_name_left_inside,
    # wrappers
    "state-dict": plain_state_dict,
    "compiled-outside": compiled_outside,
    "compiled-inside": compiled_inside,
    "orig-mod-first": renamed(lambda key: "_orig_mod." + key),
    "orig-mod-inside": renamed(inside(STEM, STEM + "_orig_mod.")),
    "orig-mod-per-layer": renamed(inside(".self_attn.", "._orig_mod.self_attn.")),
    "fsdp-first": renamed(lambda key: "_fsdp_wrapped_module." + key),
    "fsdp-inside": renamed(inside(STEM, STEM + "_fsdp_wrapped_module.")),
    "fsdp-per-layer": renamed(inside(".self_attn.", "._fsdp_wrapped_module.self_attn.")),
    "checkpointing": renamed(inside(".self_attn.", "._checkpoint_wrapped_module.self_attn.")),
    "ddp-first": renamed(lambda key: "module." + key),
    "ddp-inside": renamed(inside(STEM, STEM + "module.")),
    "name-kept": renamed(inside(".weight", ".default.weight")),
    # prefixes
    "no-stem": renamed(stem("")),
    "only-base-model": renamed(stem("base_model.")),
    "only-layers": renamed(inside("base_model.model.model.", "")),
    "model-missing": renamed(inside("base_model.model.model.", STEM)),
    "stem-twice": renamed(lambda key: STEM + key),
    "stem-model-twice": renamed(stem(STEM + "model.")),
    "language-model": renamed(stem(STEM + "language_model.")),
    "model-language-model": renamed(
        inside("model.model.layers", "model.model.language_model.layers")
    ),
    "transformer": renamed(inside("model.model.layers", "model.transformer.layers")),
    # names
    "unknown-module": renamed(inside("q_proj", "qq_proj")),
    "unknown-all": renamed(lambda k: k.replace("q_proj", "wq").replace("v_proj", "wv")),
    "wrong-parent": renamed(inside(".self_attn.", ".attn.")),
    "wrong-parent-one": renamed(inside(".0.self_attn.", ".0.attn.")),
    "norm-lora": renamed(lambda k: k.replace("self_attn.q_proj", "input_layernorm")),
    "lower-case": renamed(lambda k: k.replace("lora_A", "lora_a").replace("lora_B", "lora_b")),
    "no-weight": renamed(lambda k: k.removesuffix(".weight")),
    "diffusers": renamed(lambda k: k.replace("lora_A", "lora.down").replace("lora_B", "lora.up")),
    "fused-qkv-keys": fused("qkv_proj", "self_attn", QKV),
    "fused-gate-up-keys": fused("gate_up_proj", "mlp", GATE_AND_UP),
    "qkv-names": renamed(inside("q_proj", "qkv_proj"), ["q_proj"]),
    # parts missing
    "missing-b-one": renamed(lambda k: None if "layers.0.self_attn.q_proj.lora_B" in k else k),
    "missing-a-one": renamed(lambda k: None if "layers.0.self_attn.q_proj.lora_A" in k else k),
    "missing-b-down": renamed(
        lambda k: None if "layers.0.mlp.down_proj.lora_B" in k else k, ["down_proj"]
    ),
    "missing-a-down": renamed(
        lambda k: None if "layers.0.mlp.down_proj.lora_A" in k else k, ["down_proj"]
    ),
    "missing-a-unmapped-first": renamed(_astray(".q_proj.lora_A")),
    "missing-a-unmapped-later": renamed(_astray(".v_proj.lora_A")),
    "missing-b-unmapped": renamed(_astray(".v_proj.lora_B")),
    "missing-b-all": renamed(_without("lora_B")),
    "missing-a-all": renamed(_without("lora_A")),
    "empty": renamed(lambda k: None),
    "no-config": no_config,
    "no-tensors": no_tensors_file,
    "no-folder": no_folder,
    "zero-b": reshaped(each("lora_B", torch.zeros_like)),
    "zero-b-one": reshaped(each("q_proj.lora_B", torch.zeros_like)),
    # shapes
    "out-too-small": reshaped(each("o_proj.lora_B", narrower(rows=64)), ["o_proj"]),
    "out-too-large": reshaped(each("o_proj.lora_B", wider(rows=64)), ["o_proj"]),
    "in-too-small": reshaped(each("o_proj.lora_A", narrower(columns=64)), ["o_proj"]),
    "in-too-large": reshaped(each("o_proj.lora_A", wider(columns=64)), ["o_proj"]),
    "packed-out-too-small": reshaped(each("v_proj.lora_B", narrower(rows=32))),
    "packed-out-too-large": reshaped(each("v_proj.lora_B", wider(rows=64))),
    "packed-in-too-small": reshaped(each("v_proj.lora_A", narrower(columns=64))),
    "packed-in-too-large": reshaped(each("v_proj.lora_A", wider(columns=64))),
    "gate-out-too-small": reshaped(each("gate_proj.lora_B", narrower(rows=64)), ["gate_proj"]),
    "gate-out-too-large": reshaped(each("gate_proj.lora_B", wider(rows=64)), ["gate_proj"]),
    "tensors-rank-4": reshaped(
        lambda t: {k: v[:4] if "lora_A" in k else v[:, :4] for k, v in t.items()}
    ),
    "tensors-rank-16": reshaped(
        lambda t: {k: torch.cat([v, v], 0 if "lora_A" in k else 1) for k, v in t.items()}
    ),
    "tensors-rank-24": reshaped(
        lambda t: {k: torch.cat([v] * 3, 0 if "lora_A" in k else 1) for k, v in t.items()}
    ),
    "ranks-differ": reshaped(each("lora_A", lambda t: torch.cat([t, t]))),
    "ranks-differ-b": reshaped(each("lora_B", lambda t: torch.cat([t, t], 1))),
    "transposed": reshaped(lambda t: {k: v.T for k, v in t.items()}, ["o_proj"]),
    "three-dimensions": reshaped(lambda t: {k: v[None] for k, v in t.items()}, ["o_proj"]),
    "embedding-rows": reshaped(each("lora_embedding_A", narrower(columns=32)), ["embed_tokens"]),
    "head-rows": reshaped(each("lora_B", narrower(rows=32)), ["lm_head"]),
    "head-rows-more": reshaped(each("lora_B", wider(rows=32)), ["lm_head"]),
    "layers-beyond": reshaped(lambda t: _beyond(t, 2)),
    "layers-some-beyond": reshaped(lambda t: _beyond(t, 1)),
    # the configuration
    "config-r-4": reconfigured(r=4),
    "config-r-16": reconfigured(r=16),
    "config-alpha-32": reconfigured(lora_alpha=32),
    "config-r-0": reconfigured(r=0),
    "config-r-64": reconfigured(r=64),
    "config-r-null": reconfigured(r=None),
    "config-r-string": reconfigured(r="8"),
    "config-r-float": reconfigured(r=8.0),
    "config-alpha-0": reconfigured(lora_alpha=0),
    "config-alpha-null": reconfigured(lora_alpha=None),
    "config-no-r": reconfigured(["r"]),
    "config-no-alpha": reconfigured(["lora_alpha"]),
    "config-no-targets": reconfigured(["target_modules"]),
    "config-minimal": reconfigured(
        ["peft_type", "task_type", "base_model_name_or_path", "bias", "peft_version"]
    ),
    "config-targets-other": reconfigured(target_modules=["o_proj"]),
    "config-peft-type-missing": reconfigured(["peft_type"]),
    "config-peft-type-other": reconfigured(peft_type="ADALORA"),
    "config-rank-pattern-0": reconfigured(rank_pattern={"q_proj": 0}),
    "config-rslora-true": reconfigured(use_rslora=True),
    "config-pissa": reconfigured(init_lora_weights="pissa"),
    "config-pissa-niter": reconfigured(init_lora_weights="pissa_niter_4"),
    "config-olora": reconfigured(init_lora_weights="olora"),
    "config-corda": reconfigured(init_lora_weights="corda"),
    "config-loftq": reconfigured(init_lora_weights="loftq"),
    "config-eva": reconfigured(init_lora_weights="eva"),
    "config-orthogonal": reconfigured(init_lora_weights="orthogonal"),
    "config-lora-ga": reconfigured(init_lora_weights="lora_ga"),
    "config-init-false": reconfigured(init_lora_weights=False),
    "config-layer-replication": reconfigured(layer_replication=[[0, 2], [1, 2]]),
    "config-alora": reconfigured(alora_invocation_tokens=[5, 6]),
    "config-qalora": reconfigured(use_qalora=True),
    "config-bdlora": reconfigured(use_bdlora={"nblocks": 2, "target_modules_bd_a": ["q_proj"]}),
    "config-dora-and-rank": reconfigured(use_dora=True, r=64, bias="all"),
    "config-base-other": reconfigured(base_model_name_or_path="somebody/else", revision="abc"),
    "config-fan-in": reconfigured(fan_in_fan_out=True),
    "config-unknown-key": reconfigured(surprise=1),
    "config-save-score": reconfigured(modules_to_save=["score"]),
    "config-save-empty": reconfigured(modules_to_save=[]),
    # files
    "bin": pickled("adapter_model.bin"),
    "pt": pickled("adapter_model.pt"),
    "bin-other-name": pickled("pytorch_model.bin"),
    "both-files": both_files,
    "sharded": sharded,
    "mlx": mlx,
    "float16": cast(torch.float16),
    "bfloat16": cast(torch.bfloat16),
    "float64": cast(torch.float64),
    # other methods
    "ia3": method("IA3Config", target_modules=QV, feedforward_modules=[]),
    "vera": method("VeraConfig", r=8, target_modules=["q_proj"]),
    "loha": method("LoHaConfig", r=4, alpha=8, target_modules=QV),
    "lokr": method("LoKrConfig", r=4, alpha=8, target_modules=QV),
    "adalora": method("AdaLoraConfig", init_r=8, target_r=4, total_step=10, target_modules=QV),
    "oft": method("OFTConfig", oft_block_size=32, target_modules=QV),
    "prefix-tuning": method("PrefixTuningConfig", num_virtual_tokens=4),
    "prompt-tuning": method("PromptTuningConfig", num_virtual_tokens=4),
}
ROUNDED = {"float16": 2e-2, "bfloat16": 2e-1}
"""Saved in fewer bits than trained."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TABLE = (
    *(
        Recipe(f"llama/{name}", "llama", make, tolerance=ROUNDED.get(name, 2e-3))
        for name, make in LLAMA.items()
    ),
    Recipe("llama-rank-32/rank-32", "llama", trained(r=32), RANK_32),
    Recipe("llama-rank-32/plain", "llama", trained(), RANK_32),
    Recipe("llama-only-q/q", "llama", trained(["q_proj"]), ONLY_Q),
    Recipe("llama-only-q/q-and-v", "llama", trained(), ONLY_Q),
    Recipe("llama-only-q/v", "llama", trained(["v_proj"]), ONLY_Q),
    Recipe("llama-only-q/o", "llama", trained(["o_proj"]), ONLY_Q),
    Recipe("llama-only-q/attention", "llama", trained(ATTENTION), ONLY_Q),
    Recipe("llama-only-o/plain", "llama", trained(), ONLY_O),
    Recipe("llama-only-o/attention", "llama", trained(ATTENTION), ONLY_O),
    Recipe("qwen3-tied/plain", "qwen3-tied", trained()),
    Recipe("qwen3-tied/all-linear", "qwen3-tied", trained("all-linear")),
    Recipe("qwen3-tied/lm-head", "qwen3-tied", trained(["lm_head"])),
    Recipe("qwen3-tied/q-and-lm-head", "qwen3-tied", trained(["q_proj", "lm_head"])),
    Recipe("qwen3-tied/embed-tokens", "qwen3-tied", trained(["embed_tokens"])),
    Recipe("qwen3-tied/q-and-embed", "qwen3-tied", trained(["q_proj", "embed_tokens"])),
    Recipe(
        "qwen3-tied/embed-tied",
        "qwen3-tied",
        trained(["q_proj", "embed_tokens"], ensure_weight_tying=True),
    ),
    Recipe("qwen3-tied/embed-and-head", "qwen3-tied", trained(["embed_tokens", "lm_head"])),
    Recipe("qwen3-tied/model-missing", "qwen3-tied", LLAMA["model-missing"]),
    Recipe("phi3/all-linear", "phi3", trained("all-linear")),
    Recipe("phi3/qkv", "phi3", trained(["qkv_proj"])),
    Recipe("phi3/gate-up", "phi3", trained(["gate_up_proj"])),
    Recipe("phi3/o-and-down", "phi3", trained(["o_proj", "down_proj"])),
    Recipe("phi3/split-qkv", "phi3", split("qkv_proj", "self_attn", QKV)),
    Recipe("phi3/split-qkv-rank-8", "phi3", split("qkv_proj", "self_attn", QKV, 8)),
    Recipe("phi3/split-gate-up", "phi3", split("gate_up_proj", "mlp", GATE_AND_UP)),
    Recipe("phi3/split-q", "phi3", renamed(inside("qkv_proj", "q_proj"), ["qkv_proj"])),
    Recipe(
        "phi3/split-q-and-o", "phi3", renamed(inside("qkv_proj", "q_proj"), ["qkv_proj", "o_proj"])
    ),
    Recipe("opt/plain", "opt", trained()),
    Recipe("opt/all-linear", "opt", trained("all-linear")),
    Recipe("opt/decoder-missing", "opt", renamed(inside(".model.decoder.", "."), ["q_proj"])),
    Recipe(
        "opt/model-missing",
        "opt",
        renamed(inside("model.model.decoder.", "model.decoder."), ["q_proj"]),
    ),
    Recipe("gpt2/c-attn", "gpt2", trained(["c_attn"], fan_in_fan_out=True)),
    Recipe("gemma4/plain", "gemma4", trained()),
    Recipe("gemma4/all-linear", "gemma4", trained("all-linear")),
    Recipe("gemma4/all-projections", "gemma4", trained(r".*_proj")),
    Recipe("gemma4/per-layer-inputs", "gemma4", trained(PER_LAYER_INPUTS)),
    Recipe("gemma4/keys-of-sharing-layers", "gemma4", keys_of_sharing_layers),
    Recipe("gemma4/only-keys-of-sharing-layers", "gemma4", only_keys_of_sharing_layers),
    Recipe("glm4/all-linear", "glm4", trained("all-linear")),
    Recipe("glm4/gate-up", "glm4", trained(["gate_up_proj"])),
    Recipe("glm4/split-gate-up", "glm4", split("gate_up_proj", "mlp", GATE_AND_UP)),
    Recipe(
        "bert-classifier/plain",
        "bert-classifier",
        trained(["query", "value"], task_type="SEQ_CLS"),
    ),
    Recipe("mixtral/attention", "mixtral", trained()),
    Recipe("mixtral/router", "mixtral", trained(["gate"])),
    Recipe("mixtral/router-old-tree", "mixtral", renamed(OLD_MIXTRAL, ["gate"])),
    Recipe("mixtral/attention-and-router", "mixtral", trained([*QV, "gate"])),
    Recipe(
        "mixtral/experts-old-tree",
        "mixtral",
        lambda bench: (bench.train(experts(GATE_UP, DOWN)), bench.keys(OLD_MIXTRAL))[0],
    ),
    Recipe("mixtral/experts", "mixtral", trained_experts(GATE_UP, DOWN)),
    Recipe("mixtral/experts-down-first", "mixtral", trained_experts(DOWN, GATE_UP)),
    Recipe("mixtral/experts-gate-up", "mixtral", trained_experts(GATE_UP)),
    Recipe("mixtral/experts-down", "mixtral", trained_experts(DOWN)),
    Recipe("mixtral/per-expert", "mixtral", per_expert("w1", "w3", "w2")),
    Recipe(
        "mixtral/per-expert-old-tree",
        "mixtral",
        per_expert("w1", "w3", "w2", "block_sparse_moe.experts"),
    ),
    Recipe("mixtral/per-expert-gate", "mixtral", per_expert("gate_proj", "up_proj", "down_proj")),
    Recipe("mixtral-only-qv/attention", "mixtral", trained(), ("--lora-target-modules", *QV)),
    Recipe("qwen3-moe/attention", "qwen3-moe", trained()),
    Recipe("qwen3-moe/router", "qwen3-moe", trained(["gate"])),
    Recipe("qwen3-moe/attention-and-router", "qwen3-moe", trained([*QV, "gate"])),
    Recipe(
        "qwen3-moe-only-gate/router",
        "qwen3-moe",
        trained(["gate"]),
        ("--lora-target-modules", "gate"),
    ),
    Recipe(
        "qwen3-moe-only-gate/attention-and-router",
        "qwen3-moe",
        trained([*QV, "gate"]),
        ("--lora-target-modules", "gate", *QV),
    ),
    Recipe("qwen3-moe/attention-linear", "qwen3-moe", trained(r".*_proj")),
    Recipe("qwen3-moe/all-linear", "qwen3-moe", trained("all-linear")),
    Recipe("qwen3-moe/experts", "qwen3-moe", trained_experts(GATE_UP, DOWN)),
    Recipe("qwen3-moe/experts-down-first", "qwen3-moe", trained_experts(DOWN, GATE_UP)),
    Recipe("qwen3-moe/experts-gate-up", "qwen3-moe", trained_experts(GATE_UP)),
    Recipe(
        "qwen3-moe/experts-rank-pattern",
        "qwen3-moe",
        trained_experts(GATE_UP, DOWN, alpha_pattern={"experts.down_proj": 4}),
    ),
    Recipe("qwen3-moe/per-expert", "qwen3-moe", per_expert("gate_proj", "up_proj", "down_proj")),
    Recipe("qwen3-moe/per-expert-w", "qwen3-moe", per_expert("w1", "w3", "w2")),
    Recipe(
        "qwen3-moe-mixed/experts",
        "qwen3-moe",
        trained_experts(GATE_UP, DOWN),
        ("--enable-mixed-moe-lora-format",),
        request=("is_3d_lora_weight",),
    ),
    Recipe(
        "qwen3-moe-mixed/experts-not-said",
        "qwen3-moe",
        trained_experts(GATE_UP, DOWN),
        ("--enable-mixed-moe-lora-format",),
    ),
    Recipe(
        "qwen3-moe-mixed/per-expert",
        "qwen3-moe",
        per_expert("gate_proj", "up_proj", "down_proj"),
        ("--enable-mixed-moe-lora-format",),
    ),
    Recipe(
        "qwen3-moe/experts-said-3d",
        "qwen3-moe",
        trained_experts(GATE_UP, DOWN),
        request=("is_3d_lora_weight",),
    ),
    *vision_language("gemma3", SIGLIP),
    *(
        replace(one, name=one.name.replace("gemma3", "gemma3-tower"), flags=TOWER_FLAG)
        for one in vision_language("gemma3", SIGLIP)
        if "tower" in one.name or one.name.endswith(("/text", "all-linear", "everywhere"))
    ),
    *vision_language("llava", SIGLIP),
    *vision_language("qwen2.5-vl", None),
    *vision_language("qwen3-vl-moe", None),
    Recipe("qwen3-vl-moe/experts", "qwen3-vl-moe", trained_experts(GATE_UP, DOWN)),
    Recipe("qwen3-vl-moe/experts-down-first", "qwen3-vl-moe", trained_experts(DOWN, GATE_UP)),
    Recipe("qwen3-vl-moe/experts-gate-up", "qwen3-vl-moe", trained_experts(GATE_UP)),
    Recipe("qwen3-vl-moe/experts-down", "qwen3-vl-moe", trained_experts(DOWN)),
    Recipe("llama-classifier/plain", "llama-classifier", classifier()),
    Recipe(
        "llama-classifier/backbone", "llama-classifier", trained(task_type="FEATURE_EXTRACTION")
    ),
    Recipe("llama-classifier/all-linear", "llama-classifier", classifier("all-linear")),
)
