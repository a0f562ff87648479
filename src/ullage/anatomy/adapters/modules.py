"""An adapter's tensors, put together by the module that they change, with ranks and sides.

Holds what one key cannot tell: which parameter an expert's LoRA is for, which tensors are a saved
module's, what the shapes say about rank and sides. The grammar of a key is `keys.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ullage.anatomy.adapters.adapter import (
    AdapterConfig,
    AdapterKey,
    AdapterModule,
    AdapterTensor,
    Matrix,
)
from ullage.anatomy.adapters.scale import expected_scale

# The order in which the experts' classes of transformers 5.24 define their parameters. PEFT wraps
# them in this order, so that the innermost wrapper is the first one's.
_EXPERT_ORDER = (
    *("gate_up_proj", "gate_up_proj_bias", "gate_proj", "w1", "up_proj", "v1", "w3"),
    *("down_proj", "down_proj_bias", "w2"),
)
_SLOTS = {
    Matrix.A: "a",
    Matrix.EMBEDDING_A: "a",
    Matrix.B: "b",
    Matrix.EMBEDDING_B: "b",
    Matrix.MAGNITUDE: "magnitude",
    Matrix.BIAS_B: "bias_b",
}
# Bare leaves of MLX (tuner/dora.py) and of mlx_vlm's older layout (trainer/peft/lora.py).
_MLX_LEAVES = {"m": Matrix.MAGNITUDE, "A": Matrix.A, "B": Matrix.B}


def as_trained(tensors: Iterable[AdapterTensor], config: AdapterConfig) -> list[AdapterTensor]:
    """`tensors` with their keys read in the light of the configuration.

    Experts' modules get the name of their parameter, MLX's bare leaves their meaning, and tensors
    of whatever name below a module to save become `Matrix.SAVED`.
    """
    tensors = list(tensors)
    depths = _nesting(tensors) if config.target_parameters else {}
    found = []
    for tensor in tensors:
        key = tensor.key
        if key.matrix is Matrix.OTHER:
            key = _other(key, config)
        elif depths and key.matrix in (Matrix.A, Matrix.B):
            key = _expert(key, config, depths)
        found.append(tensor if key is tensor.key else replace(tensor, key=key))
    return found


def _other(key: AdapterKey, config: AdapterConfig) -> AdapterKey:
    if config.writer.startswith("mlx") and key.parameter in _MLX_LEAVES:
        return replace(key, matrix=_MLX_LEAVES[key.parameter])
    parts = key.module.split(".")
    if any(_is_below(parts, name.split(".")) for name in config.modules_to_save):
        return replace(key, matrix=Matrix.SAVED)
    return key


def _is_below(parts: list[str], name: list[str]) -> bool:
    """Whether `name` stands in the path `parts` as whole components."""
    width = len(name)
    return any(parts[i : i + width] == name for i in range(len(parts) - width + 1))


def _nesting(tensors: Iterable[AdapterTensor]) -> dict[str, int]:
    """How many wrappers PEFT put around one another, by module."""
    depths: dict[str, int] = {}
    for tensor in tensors:
        if tensor.key.matrix in (Matrix.A, Matrix.B):
            depth = depth_of(tensor.key)
            depths[tensor.key.module] = max(depth, depths.get(tensor.key.module, 0))
    return depths


def depth_of(key: AdapterKey) -> int:
    """How many wrappers stand between a stack of experts and this pair."""
    depth = 0
    for word in reversed(key.wrappers):
        if word != "base_layer":
            break
        depth += 1
    return depth


def _expert(key: AdapterKey, config: AdapterConfig, depths: dict[str, int]) -> AdapterKey:
    """The key with its parameter's name at the end of its module, where that is known.

    PEFT 0.21.2 (tuners/tuners_utils.py _inject_parameters): parameters of one module are wrapped
    in the order in which the module defines them, each wrapper around the one before.
    """
    targets = _targets_of(key.module, config.target_parameters)
    if targets == ["weight"]:
        return key
    known = sorted((t for t in targets if t in _EXPERT_ORDER), key=_EXPERT_ORDER.index)
    deepest = depths[key.module]
    if len(known) != len(targets) or len(known) != deepest + 1:
        return key
    return replace(key, module=f"{key.module}.{known[deepest - depth_of(key)]}")


def _targets_of(module: str, targets: Iterable[str]) -> list[str]:
    """The parameters of `module` that `target_parameters` names: the ends of paths, as in PEFT."""
    found = []
    for target in targets:
        owner, _, parameter = target.rpartition(".")
        if not owner or module == owner or module.endswith("." + owner):
            found.append(parameter)
    return sorted(set(found))


def group(tensors: Iterable[AdapterTensor], config: AdapterConfig) -> tuple[AdapterModule, ...]:
    """The modules of an adapter, in the order of their first tensor.

    A second tensor for a place that is taken begins a second module of the same name. Raises
    MalformedConfig for a rank or alpha pattern that cannot be evaluated.
    """
    groups: dict[tuple[str, str | None], list[dict[str, AdapterTensor]]] = {}
    saved: dict[tuple[str, str | None], list[AdapterTensor]] = {}
    for tensor in tensors:
        key = (tensor.key.module, tensor.key.adapter_name)
        places = groups.setdefault(key, [{}])
        slot = _SLOTS.get(tensor.key.matrix)
        if slot is None:
            saved.setdefault(key, []).append(tensor)
            continue
        free = next((place for place in places if slot not in place), None)
        if free is None:
            free = {}
            places.append(free)
        free[slot] = tensor
    return tuple(
        _module(name, place, tuple(saved.get((name, adapter), ())) if first else (), config)
        for (name, adapter), places in groups.items()
        for first, place in ((place is places[0], place) for place in places)
    )


def _module(
    name: str,
    place: dict[str, AdapterTensor],
    saved: tuple[AdapterTensor, ...],
    config: AdapterConfig,
) -> AdapterModule:
    a, b = place.get("a"), place.get("b")
    tensors = (a, b, place.get("magnitude"), place.get("bias_b"), saved)
    if a is None and b is None:
        return AdapterModule(name, *tensors)
    declared, scale = expected_scale(config, name)
    transposed = _transposed(a, b)
    if a is None or b is None:
        sides = _Sides(fault=f"has no {'A' if a is None else 'B'}")
    else:
        sides = _sides(a, b, transposed, declared if _is_expert(name) else None)
    return AdapterModule(
        name,
        *tensors,
        rank=sides.rank,
        rank_declared=declared,
        scale=scale,
        in_features=sides.inner,
        out_features=sides.outer,
        num_experts=sides.experts,
        transposed=transposed,
        fault=sides.fault,
    )


def _transposed(a: AdapterTensor | None, b: AdapterTensor | None) -> bool:
    """Whether this is MLX's bare pair: `lora_a` [in, rank] and `lora_b` [rank, out]."""
    texts = [t.key.text.rpartition(".")[2] for t in (a, b) if t is not None]
    return bool(texts) and all(text in ("lora_a", "lora_b", "A", "B") for text in texts)


class _Sides(NamedTuple):
    """What both shapes of a pair tell, or what is wrong with them."""

    rank: int | None = None
    inner: int | None = None
    outer: int | None = None
    experts: int | None = None
    fault: str | None = None


def _sides(a: AdapterTensor, b: AdapterTensor, transposed: bool, expert_rank: int | None) -> _Sides:
    """Rank and sides of the pair. `expert_rank`: the declared rank where it covers experts.

    PEFT's A of a stack of experts is [experts · rank, in], B is [out, rank · experts].
    """
    for letter, tensor in (("A", a), ("B", b)):
        if len(tensor.shape) < 2 or 0 in tensor.shape:
            # What ZeRO-3 leaves of a parameter that was not gathered before saving.
            shape = list(tensor.shape)
            return _Sides(fault=f"{letter} has the shape {shape}, so it holds no matrix")
    experts = None
    if transposed and len(a.shape) == len(b.shape) == 3:
        (experts, rank, inner), (experts_b, outer, rank_b) = a.shape, b.shape
        rank_b = rank_b if experts == experts_b else 0
    elif transposed:
        inner, rank, rank_b, outer = a.shape[0], a.shape[-1], b.shape[0], b.shape[-1]
    else:
        rank, inner, outer, rank_b = a.shape[0], a.shape[1], b.shape[0], b.shape[1]
    if rank != rank_b:
        shapes = f"A {list(a.shape)} and B {list(b.shape)}"
        return _Sides(fault=f"{shapes} do not have one rank in common")
    if expert_rank and not transposed and rank % expert_rank == 0:
        rank, experts = expert_rank, rank // expert_rank
    return _Sides(rank, inner, outer, experts)


def _is_expert(module: str) -> bool:
    """Whether the module is a parameter of a stack of experts, or such a stack itself."""
    return "experts" in module.rsplit(".", 2)[-2:]
