"""Where each module of an adapter belongs in the base, also when it was trained fused or split.

Holds names, layers, roles and rows. Nothing is read from tensors; what cannot be sure is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ullage.adapters.base import BaseModule, BaseTree
from ullage.adapters.parts import FUSED, ROLES, layer_and_leaf
from ullage.adapters.rewriting.pairs import NewPair, joined_pair, split_pair, whole_pair
from ullage.anatomy.adapters.adapter import AdapterModule, Matrix
from ullage.anatomy.adapters.modules import depth_of
from ullage.anatomy.spec import Attention
from ullage.errors import BadInput

Ranges = tuple[tuple[int, int], ...]

# Megatron-Core keeps Q, K and V of each group of query heads together.
_BY_GROUP = ("linear_qkv",)


class FixRefused(BadInput):
    """An adapter that cannot be rewritten with certainty."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A pair that is named as the base's checkpoint names its module; `trained` is its old name,
    None where it was split or joined."""

    pair: NewPair
    trained: str | None


def place_all(modules: tuple[AdapterModule, ...], tree: BaseTree, file: str) -> list[Placed]:
    """Every pair of the adapter at its place. Raises FixRefused, naming the module."""
    placed: list[Placed] = []
    parts: dict[str, list[tuple[NewPair, int]]] = {}
    for module in modules:
        if is_whole(module):
            continue
        _require_plain(module, file)
        found = _direct(module, tree)
        if found is not None:
            placed.append(found)
        elif (split := list(_split(module, tree))) != []:
            placed += split
        elif (part := _part(module, tree)) is not None:
            fused, pair, first = part
            parts.setdefault(fused.path, []).append((pair, first))
        else:
            raise _lost(module, tree, file)
    for path, pairs in parts.items():
        size = tree.modules[path].out_features
        placed.append(Placed(joined_pair(path, pairs, size), None))
    _require_once(placed, file)
    return placed


def is_whole(module: AdapterModule) -> bool:
    """Whether the module was trained whole (modules_to_save) and has no pair."""
    return (
        module.a is None
        and module.b is None
        and all(tensor.key.matrix is Matrix.SAVED for tensor in module.tensors)
    )


def _require_plain(module: AdapterModule, file: str) -> None:
    found = None
    if module.fault is not None:
        found = module.fault
    elif module.magnitude is not None:
        found = "a DoRA magnitude, which no sum of B·A can hold"
    elif module.bias_b is not None:
        found = "a bias on lora_B"
    elif (others := [s.key for s in module.saved if s.key.matrix is not Matrix.BASE]) != []:
        beside = "beside its pair" if module.a is not None else "and no pair"
        found = f"holds {others[0].parameter} {beside}"
    elif module.a is None or module.b is None or module.scale is None or module.rank is None:
        found = "no whole pair of A and B"
    if found is not None:
        raise FixRefused(found, file=file, field=module.module, expected="lora_A and lora_B")


def _direct(module: AdapterModule, tree: BaseTree) -> Placed | None:
    match = tree.find(module.module)
    if match is None or not _fits(module, match.module):
        return None
    path = match.module.path
    if match.expert is not None:
        path = path.replace("{e}", str(match.expert))
    layout = ("lora_A.weight", "lora_B.weight")
    if match.module.kind == "embedding":
        layout = ("lora_embedding_A", "lora_embedding_B")
    elif match.module.kind == "fused_expert":
        return _stacked(module, path)
    return Placed(whole_pair(module, path, layout), module.module)


def _stacked(module: AdapterModule, path: str) -> Placed:
    """Experts' parameters keep PEFT's way of writing: nested below the module, not by name."""
    assert module.a is not None
    nest = "base_layer." * depth_of(module.a.key)
    owner, _, _ = path.rpartition(".")
    trained, _, _ = module.module.rpartition(".")
    layout = (f"{nest}lora_A.weight", f"{nest}lora_B.weight")
    return Placed(replace(whole_pair(module, owner, layout), module=owner), trained)


def _fits(module: AdapterModule, base: BaseModule) -> bool:
    sides = (module.in_features, module.out_features)
    if base.kind == "fused_expert":
        # PEFT turns the sides round for some stacks; the shape says which.
        return sides in (
            (base.in_features, base.out_features),
            (base.out_features, base.in_features),
        ) and module.num_experts in (None, base.num_experts)
    return sides == (base.in_features, base.out_features)


def _split(module: AdapterModule, tree: BaseTree) -> Iterator[Placed]:
    """The parts of a module that was trained fused and is apart in the base; none: it is not so."""
    layer, leaf = layer_and_leaf(module.module)
    if leaf in ROLES and layer is not None:
        base = _by_role(tree, layer, ROLES[leaf])
        if base is not None and _fits(module, base):
            layout = ("lora_A.weight", "lora_B.weight")
            yield Placed(whole_pair(module, base.path, layout), None)
        return
    roles = FUSED.get(leaf)
    if roles is None or layer is None:
        return
    bases = [_by_role(tree, layer, role) for role in roles]
    parts = [base for base in bases if base is not None]
    if len(parts) != len(roles):
        return
    sizes = [base.out_features for base in parts]
    if sum(sizes) != module.out_features or module.in_features != parts[0].in_features:
        return
    rows = _rows_by_group(sizes, parts[1].groups) if leaf in _BY_GROUP else _rows(sizes)
    if rows is None:
        return
    pair = whole_pair(module, module.module, ("lora_A.weight", "lora_B.weight"))
    named = [(base.path, ranges) for base, ranges in zip(parts, rows, strict=True)]
    for part in split_pair(pair, named):
        yield Placed(part, None)


def _rows(sizes: list[int]) -> list[Ranges]:
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [((end - size, end),) for end, size in zip(ends, sizes, strict=True)]


def _rows_by_group(sizes: list[int], groups: int) -> list[Ranges] | None:
    """Rows of Q, K and V where each group of query heads has its own next to one another."""
    if not groups or any(size % groups for size in sizes):
        return None
    shares = [size // groups for size in sizes]
    stride = sum(shares)
    starts = [sum(shares[:n]) for n in range(len(shares))]
    return [
        tuple((g * stride + start, g * stride + start + share) for g in range(groups))
        for start, share in zip(starts, shares, strict=True)
    ]


def _part(module: AdapterModule, tree: BaseTree) -> tuple[BaseModule, NewPair, int] | None:
    """The fused module of the base that this one is a part of, and the first of its rows there."""
    layer, leaf = layer_and_leaf(module.module)
    role = ROLES.get(leaf)
    if role is None or layer is None:
        return None
    for fused_leaf, roles in FUSED.items():
        if role not in roles or fused_leaf in _BY_GROUP:
            continue
        base = _by_role(tree, layer, "".join(roles) if len(roles) == 3 else "_".join(roles))
        if base is None or base.path.rpartition(".")[2] != fused_leaf:
            continue
        sizes = _part_sizes(base, roles, tree, layer)
        if sizes is None or sizes[roles.index(role)] != module.out_features:
            return None
        if module.in_features != base.in_features:
            return None
        pair = whole_pair(module, base.path, ("lora_A.weight", "lora_B.weight"))
        return base, pair, sum(sizes[: roles.index(role)])
    return None


def _part_sizes(
    base: BaseModule, roles: tuple[str, ...], tree: BaseTree, layer: int
) -> list[int] | None:
    if len(roles) == 2:
        return [base.out_features // 2] * 2
    mixer = tree.spec.layers[layer].mixer
    if not isinstance(mixer, Attention):
        return None
    kv_heads = mixer.num_kv_heads
    sizes = [
        mixer.num_heads * mixer.head_dim, kv_heads * mixer.head_dim, kv_heads * mixer.v_head_dim
    ]  # fmt: skip
    return sizes if sum(sizes) == base.out_features else None


def _by_role(tree: BaseTree, layer: int, role: str) -> BaseModule | None:
    found = [m for m in tree.modules.values() if m.layer == layer and m.role == role]
    return found[0] if len(found) == 1 else None


def _lost(module: AdapterModule, tree: BaseTree, file: str) -> FixRefused:
    match = tree.find(module.module)
    if match is None:
        tower = " (its towers' names are not known here)" if tree.spec.towers else ""
        return FixRefused(
            f"names no module of this base model's language model{tower}", file=file,
            field=module.module, expected=f"a module like {_example(tree)!r}",
        )  # fmt: skip
    base = match.module
    return FixRefused(
        f"adapts a matrix of {module.in_features} → {module.out_features}",
        file=file,
        field=module.module,
        expected=f"{base.in_features} → {base.out_features}, as {base.path} has it",
    )


def _example(tree: BaseTree) -> str:
    """A module that adapters usually change: the first of a layer."""
    return next(
        (path for path, base in tree.modules.items() if base.layer is not None),
        next(iter(tree.modules)),
    )


def _require_once(placed: list[Placed], file: str) -> None:
    seen: set[tuple[str, str]] = set()
    for one in placed:
        place = (one.pair.module, one.pair.layout[0])
        if place in seen:
            raise FixRefused(
                "two pairs for one module", file=file, field=one.pair.module, expected="one"
            )
        seen.add(place)
