"""Adapters that nobody wrote down: drawn targets, ranks, scales, spellings and damage.

The same draw gives the same adapter. What vLLM does with them is asked live, never recorded.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from .recipes import STEM, Recipe, lora
from .training import Bench

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SPLIT = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
MODULES = {
    "llama": (*SPLIT, "embed_tokens", "lm_head"),
    "qwen3-tied": SPLIT,
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "glm4": (*ATTENTION, "down_proj"),
    "gemma3": SPLIT,
    "llava": SPLIT,
    "qwen3-moe": ATTENTION,
}
"""Model → the last names of modules that a draw adapts."""
TEXT_ONLY = {"gemma3": r".*language_model.*\.({})", "llava": r".*language_model.*\.({})"}
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "module", "_checkpoint_wrapped_module")
Rename = Callable[[str], str]


def draw(seed: int) -> Recipe:
    """One adapter: how it is trained, then perhaps how its keys were spoilt."""
    dice = random.Random(seed)  # noqa: S311
    model = dice.choice(sorted(MODULES))
    names = dice.sample(MODULES[model], dice.randint(1, min(4, len(MODULES[model]))))
    targets = TEXT_ONLY[model].format("|".join(names)) if model in TEXT_ONLY else names
    config = _config(dice, names)
    if isinstance(targets, str):
        config.pop("layers_to_transform", None)  # PEFT takes it with a list of names alone
    rename = dice.choice((_as_it_is, _as_it_is, _wrapped, _other_root, _one_layer, _unknown))(dice)
    drop = dice.choice((None, None, None, None, "lora_A", "lora_B"))

    def make(bench: Bench) -> list[float] | None:
        said = bench.train(lora(targets, **config))
        bench.keys(rename)
        if drop is None:
            return said
        dropped = random.Random(seed).choice(_keys(bench, drop) or [""])  # noqa: S311
        bench.keys(lambda key: None if key == dropped else key)
        return None

    return Recipe(f"drawn/{seed}", model, make)


def _config(dice: random.Random, names: list[str]) -> dict[str, object]:
    config: dict[str, object] = {
        "r": dice.choice((1, 2, 4, 5, 8, 8, 12, 16, 16, 20)),
        "lora_alpha": dice.choice((4, 8, 16, 24, 7.5)),
        "use_rslora": dice.random() < 0.3,
    }
    if dice.random() < 0.3:
        config["rank_pattern"] = {dice.choice(names): dice.choice((2, 4, 6, 17))}
    if dice.random() < 0.3:
        config["alpha_pattern"] = {rf"layers\.{dice.randrange(2)}\..*": dice.choice((3, 32))}
    if dice.random() < 0.2 and not {"lm_head", "embed_tokens"} & {*names}:
        config["layers_to_transform"] = [dice.randrange(2)]
    return config


def _as_it_is(dice: random.Random) -> Rename:
    return lambda key: key


def _wrapped(dice: random.Random) -> Rename:
    """A wrapper's name at some depth of every key."""
    wrapper, depth = dice.choice(WRAPPERS), dice.randrange(5)

    def rename(key: str) -> str:
        parts = key.split(".")
        return ".".join([*parts[:depth], wrapper, *parts[depth:]])

    return rename


def _other_root(dice: random.Random) -> Rename:
    """Something else before the model's own tree, or nothing."""
    root = dice.choice(("", "base_model.", STEM * 2, STEM + "model.", STEM + "language_model."))
    return lambda key: root + key.removeprefix(STEM)


def _one_layer(dice: random.Random) -> Rename:
    """The keys of one layer lead elsewhere."""
    number = dice.randrange(2)
    return lambda key: key.replace(f"layers.{number}.", f"blocks.{number}.")


def _unknown(dice: random.Random) -> Rename:
    """One module's name is misspelt."""
    name = dice.choice(ATTENTION)
    return lambda key: key.replace(f".{name}.", f".{name}s.")


def _keys(bench: Bench, matrix: str) -> list[str]:
    import safetensors

    with safetensors.safe_open(bench.adapter / "adapter_model.safetensors", "pt") as file:
        return sorted(key for key in file.keys() if matrix in key)  # noqa: SIM118
