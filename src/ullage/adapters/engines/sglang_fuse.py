"""How SGLang 0.5.23 puts weights together and where it copies them, by words in their names.

Holds srt/lora/lora.py's normalisation of one layer's weights and srt/lora/mem_pool.py's choice of
a buffer for each (`place`), with shapes alone. What that means for the verdict is `sglang.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_EXPERT = re.compile(r"experts\.(\d+)\.")
_EXPERTS = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
# srt/lora/utils.py, get_stacked_multiply.
STACKED = {"qkv_proj": 3, "gate_up_proj": 2, "fused_qkv_a_proj_with_mqa": 2, "in_proj_qkvz": 4,
           "in_proj": 2}  # fmt: skip


class Refused(Exception):
    """SGLang raises; the text is what it prints."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight: its shape, and the numbers of the adapter's modules that it is made of."""

    shape: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape


@dataclass(slots=True)
class Slot:
    """What is copied into one buffer of a layer. `is_expert`: of one of a mixture's experts."""

    target: str
    is_expert: bool
    a: Weight | None = None
    b: Weight | None = None
    replaced: dict[int, str] = field(default_factory=dict)


def place(weights: Mapping[str, Weight], targets: frozenset[str]) -> list[Slot]:
    """The buffers of one layer that `weights` (by name, in their order) are copied into.

    A weight that another one of the same buffer replaces stands in `replaced`, with its name.
    Raises Refused for a name that no target is a part of.
    """
    slots: dict[tuple[str, str], Slot] = {}
    for name, weight in weights.items():
        target = _target(name, targets)
        match = _EXPERT.search(name)
        expert = match.group(1) if match else ""
        if match is None and "experts" in name and len(weight.shape) == 3:
            expert = "*"
        slot = slots.setdefault((target, expert), Slot(target, bool(expert)))
        before = slot.a if "lora_A" in name else slot.b
        if before is not None:
            gone = set(before.owners) - set(weight.owners)
            slot.replaced.update(dict.fromkeys(gone, name))
        if "lora_A" in name:
            slot.a = weight
        else:
            slot.b = weight
    return list(slots.values())


def _target(name: str, targets: frozenset[str]) -> str:
    """utils.py, get_target_module_name: the longest target that is a part of the name."""
    found = [target for target in targets if target in name]
    if not found:
        text = "{" + ", ".join(repr(target) for target in sorted(targets)) + "}"
        raise Refused(
            f"Cannot find target module name for {name} in {text if targets else 'set()'}"
        )
    return max(found, key=len)


def normalise(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """One layer's weights after lora.py's _normalize_weights, in its order.

    Raises Refused: a half that is not there, halves of other sizes.
    """
    made = dict(weights)
    _qkv(made)
    for name in list(made):
        for old, new in _EXPERTS.items():
            if old in name:
                made[name.replace(old, new)] = made.pop(name)
                break
    _whole(made, "gate_proj", ("x_proj",), "in_proj")
    _whole(made, "in_proj_q.", ("in_proj_k.", "in_proj_v.", "in_proj_z."), "in_proj_qkvz.")
    _gate_up(made)
    for name in list(made):
        if "q_a_proj" in name and "fused_qkv_a_proj_with_mqa" not in name:
            q, other = made.pop(name), name.replace("q_a_proj", "kv_a_proj_with_mqa")
            new = name.replace("q_a_proj", "fused_qkv_a_proj_with_mqa")
            made[new] = _joined([q, made.pop(other, _zeros(q))])
    return made


def _qkv(made: dict[str, Weight]) -> None:
    """normalize_qkv_proj: keys may be absent from a layer altogether, values may not."""
    keys = any("k_proj" in name for name in made)
    for name in list(made):
        if "q_proj" in name:
            k_name, v_name = name.replace("q_proj", "k_proj"), name.replace("q_proj", "v_proj")
            k = _taken(made, k_name) if keys else _zeros(_taken(made, v_name))
            new = name.replace("q_proj", "qkv_proj")
            made[new] = _joined([_taken(made, name), k, _taken(made, v_name)])
            for old in (name, v_name, *((k_name,) if keys else ())):
                made.pop(old, None)
        elif "qkv_proj" in name and "lora_A" in name:
            made[name] = _repeated(made[name], 3)


def _gate_up(made: dict[str, Weight]) -> None:
    """normalize_gate_up_proj: zeros stand for an absent up_proj."""
    for name in list(made):
        if "gate_proj" in name:
            up_name = name.replace("gate_proj", "up_proj")
            gate, up = made.pop(name), made.pop(up_name, None)
            up = _zeros(gate) if up is None or up.is_empty else up
            made[name.replace("gate_proj", "gate_up_proj")] = _joined([gate, up])
        elif "gate_up_proj" in name and "lora_A" in name:
            made[name] = _repeated(made[name], 2)


def _whole(made: dict[str, Weight], first: str, others: tuple[str, ...], whole: str) -> None:
    """Weights that are put together only where all of them are there."""
    for name in list(made):
        names = [name.replace(first, other) for other in others]
        if first in name and all(other in made for other in names):
            parts = [made.pop(part) for part in (name, *names)]
            made[name.replace(first, whole)] = _joined(parts)


def _taken(made: Mapping[str, Weight], name: str) -> Weight:
    try:
        return made[name]
    except KeyError:
        raise Refused(repr(name)) from None


def _zeros(weight: Weight) -> Weight:
    return Weight(weight.shape, ())


def _repeated(weight: Weight, times: int) -> Weight:
    if len(weight.shape) < 2:
        return weight
    *front, rows, columns = weight.shape
    return Weight((*front, rows * times, columns), weight.owners)


def _joined(parts: Iterable[Weight]) -> Weight:
    """torch.cat along the rows: all other sizes have to be equal."""
    parts = list(parts)
    first = parts[0].shape
    axis = max(len(first) - 2, 0)
    for number, part in enumerate(parts):
        if len(part.shape) != len(first):
            raise Refused(
                f"Tensors must have same number of dimensions: got {len(first)} and "
                f"{len(part.shape)}"
            )
        for place_, (wanted, given) in enumerate(zip(first, part.shape, strict=True)):
            if place_ != axis and wanted != given:
                raise Refused(
                    f"Sizes of tensors must match except in dimension {axis}. Expected size "
                    f"{wanted} but got size {given} for tensor number {number} in the list."
                )
    shape = list(first)
    shape[axis] = sum(part.shape[axis] for part in parts)
    owners = dict.fromkeys(owner for part in parts for owner in part.owners)
    return Weight(tuple(shape), tuple(owners))


def size_text(buffer: tuple[int, ...], given: tuple[int, ...]) -> str:
    """mem_pool.py's assertion (load_lora_weight_tensor)."""
    return (
        f"LoRA buffer shape torch.Size({list(buffer)}) does not match weight shape "
        f"torch.Size({list(given)})."
    )
