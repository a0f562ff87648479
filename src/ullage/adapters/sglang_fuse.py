"""How SGLang 0.5.23 puts the halves of fused modules together, by words in their names: `fuse`.

Holds srt/lora/lora.py's normalisation and the sizes that srt/lora/mem_pool.py copies. What a
half means for the verdict is `sglang.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ullage.adapters.adapter import AdapterModule, AdapterTensor
from ullage.adapters.base import BaseModule

_PARAMETERS = (".lora_", ".base_layer.bias", ".base_layer.weight", ".weight", ".bias")
_RENAMED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
# RowParallelLinear cuts A by the width of its input, the others B by the height of their output
# (srt/lora/layers.py, slice_lora_a_weights, slice_lora_b_weights).
_ROW = ("o_proj", "down_proj", "out_proj", "wo_ud")


class Refused(Exception):
    """SGLang raises; the text is what it prints."""


@dataclass(frozen=True, slots=True)
class Half:
    """One adapter module of a layer; `text` is the key of its first tensor."""

    number: int
    module: AdapterModule
    text: str
    layer: int

    @property
    def path(self) -> str:
        """The key without its parameter, with experts' newer names."""
        ends = [at for word in _PARAMETERS if (at := self.text.find(word)) > 0]
        path = self.text[: min(ends)] if ends else self.text
        stem, dot, leaf = path.rpartition(".")
        return f"{stem}{dot}{_RENAMED.get(leaf, leaf)}"

    @property
    def stem(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_bias(self) -> bool:
        return self.module.a is None and self.module.b is None


@dataclass(frozen=True, slots=True)
class Target:
    """Where a half goes: `target` is SGLang's module name, `leaf` the half's own, `parts` all
    halves that go there together, in order (None: zeros in its place)."""

    half: Half
    target: str
    leaf: str
    parts: tuple[Half | None, ...]

    @property
    def stem(self) -> str:
        return self.half.stem

    @property
    def slot(self) -> str:
        """The buffer's key within the layer; each expert has its own place."""
        expert = self.stem.partition("experts.")[2].partition(".")[0]
        return f"{self.target}:{expert}" if expert.isdecimal() else self.target

    def fit(self, bases: list[BaseModule], rank: int) -> str | None:
        """How the matrices are cut to fit, None when they do fit.

        Raises Refused where the buffer and the matrix do not agree (mem_pool.py,
        load_lora_weight_tensor).
        """
        a, b = self.half.module.a, self.half.module.b
        fused = len(self.parts) == 1 and len(bases) > 1
        repeats = len(bases) if fused else len(self.parts)
        inner = bases[0].in_features
        own = [base for base in bases if base.path.rpartition(".")[2] == self.half.leaf] or bases
        outer = sum(base.out_features for base in (bases if fused else own))
        row = self.target in _ROW
        cut = None
        if a is not None:
            cut = _side(a, 1, inner, (rank * repeats, inner), row, f"{inner} inputs")
            if a.shape[0] != rank:
                raise Refused(size_text((rank * repeats, inner), (a.shape[0] * repeats, inner)))
        if b is None:
            if not row:
                raise Refused("'NoneType' object is not subscriptable")
            return cut
        cut = _side(b, 0, outer, (outer, rank), not row, f"{outer} outputs") or cut
        if b.shape[1:] != (rank,):
            raise Refused(size_text((outer, rank), b.shape))
        return cut


def _side(
    tensor: AdapterTensor, axis: int, wanted: int, buffer: tuple[int, ...], cuts: bool, what: str
) -> str | None:
    if len(tensor.shape) != 2:
        raise Refused(size_text(buffer, tensor.shape))
    given = tensor.shape[axis]
    if given == wanted:
        return None
    if cuts and given > wanted:
        letter = "A" if axis else "B"
        return f"{letter} is cut from {given} to the {what} of the served module"
    shape = list(buffer)
    shape[axis] = given
    raise Refused(size_text(buffer, tuple(shape)))


def size_text(buffer: tuple[int, ...], given: tuple[int, ...]) -> str:
    """mem_pool.py's assertion."""
    return (
        f"LoRA buffer shape torch.Size({list(buffer)}) does not match weight shape "
        f"torch.Size({list(given)})."
    )


def fuse(halves: Iterable[Half], targets: frozenset[str]) -> list[Target]:
    """Every half with where it goes, in the order of layers and names, as SGLang copies them.

    Raises Refused: a half that is missing, halves of different ranks, a name that no target module
    is a part of.
    """
    ordered = sorted(halves, key=lambda half: (half.layer, half.text))
    named: dict[tuple[int, str], Half] = {}
    leaves: dict[int, set[str]] = {}
    for half in ordered:
        if not half.is_bias:
            named.setdefault((half.layer, half.path), half)
            leaves.setdefault(half.layer, set()).add(half.leaf)
    made = []
    for half in ordered:
        parts, name = _parts(half, named, leaves.get(half.layer, set()))
        target = _target(name, targets)
        _same_rank(parts)
        made.append(Target(half, target, half.leaf, parts))
    return made


def _parts(
    half: Half, named: dict[tuple[int, str], Half], leaves: set[str]
) -> tuple[tuple[Half | None, ...], str]:
    """The halves that are put together with this one, and the name of what they become."""

    def other(leaf: str) -> Half | None:
        return named.get((half.layer, f"{half.stem}.{leaf}"))

    if half.leaf in ("q_proj", "k_proj", "v_proj") and (half.leaf == "q_proj" or other("q_proj")):
        q, k, v = (other(leaf) for leaf in ("q_proj", "k_proj", "v_proj"))
        # Zeros stand for keys, in the shape of the values', where no module of the layer has any.
        for missing, leaf in ((k, "k_proj"), (v, "v_proj")):
            if missing is None and (leaf == "v_proj" or "k_proj" in leaves):
                raise Refused(repr(half.text.replace(half.leaf, leaf)))
        return (q or half, k, v), _named(half, "qkv_proj")
    if half.leaf == "gate_proj" or (half.leaf == "up_proj" and other("gate_proj")):
        # Zeros stand for an absent up_proj.
        return (other("gate_proj") or half, other("up_proj")), _named(half, "gate_up_proj")
    if half.leaf == "q_a_proj" or (half.leaf == "kv_a_proj_with_mqa" and other("q_a_proj")):
        pair = (other("q_a_proj") or half, other("kv_a_proj_with_mqa"))
        return pair, _named(half, "fused_qkv_a_proj_with_mqa")
    return (half,), half.text


def _named(half: Half, leaf: str) -> str:
    return half.text.replace(f".{half.leaf}.", f".{leaf}.")


def _target(name: str, targets: frozenset[str]) -> str:
    """utils.py, get_target_module_name: the longest target that is a part of the name."""
    found = [target for target in targets if target in name]
    if not found:
        text = "{" + ", ".join(repr(target) for target in sorted(targets)) + "}"
        raise Refused(
            f"Cannot find target module name for {name} in {text if targets else 'set()'}"
        )
    return max(found, key=len)


def _same_rank(parts: tuple[Half | None, ...]) -> None:
    """torch.cat along the first dimension wants the others to be equal."""
    whole = [part.module for part in parts if part is not None]
    for tensors in ([m.a for m in whole], [m.b for m in whole]):
        sizes = [t.shape[1] for t in tensors if t is not None and len(t.shape) == 2]
        for number, size in enumerate(sizes):
            if size != sizes[0]:
                raise Refused(
                    "Sizes of tensors must match except in dimension 0. Expected size "
                    f"{sizes[0]} but got size {size} for tensor number {number} in the list."
                )
