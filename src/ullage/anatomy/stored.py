"""The tensors of a `CheckpointIndex` gathered by name pattern, experts together, in one naming.

Holds the gathering and the alignment of prefixes; what is missing or wrong is `compare.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ullage.anatomy.checkpoint import CheckpointIndex
from ullage.anatomy.tensors.tensor import TensorSpec

_EXPERT = re.compile(r"\.experts\.([0-9]{1,9})\.")
_ANY_EXPERT = ".experts.{e}."
_LAYER_ZERO = re.compile(r"^(.*?)((?:layers|layer|h|blocks|block)\.0\..+)$")
_OTHER_STACKS = ("vis", "audio", "image", "tower", "mtp", "encoder_", "draft")


@dataclass(slots=True)
class StoredGroup:
    """Tensors whose names differ by the expert index only, or GGUF parts of one tensor.

    `shape` is of each, None once parts of different shape were put together. `odd` names the first
    tensor whose shape or dtype differs from the others'.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    file: str
    count: int = 0
    num_elements: int = 0
    num_bytes: int = 0
    odd: str | None = None


def name_pattern(name: str) -> str:
    """`…experts.17.up_proj.weight` → `…experts.{e}.up_proj.weight`; other names as they are."""
    return _EXPERT.sub(_ANY_EXPERT, name, count=1) if ".experts." in name else name


def name_patterns(names: Sequence[str]) -> list[str]:
    """`name_pattern` of each."""
    text = "\n".join(names)
    patterns = _EXPERT.sub(_ANY_EXPERT, text).split("\n")
    # Whoever puts line ends into names, or experts into experts, waits a little longer.
    if len(patterns) != len(names) or any(p.count(_ANY_EXPERT) > 1 for p in set(patterns)):
        return [name_pattern(name) for name in names]
    return patterns


def stored_groups(index: CheckpointIndex) -> tuple[dict[str, StoredGroup], list[str]]:
    """Groups by name pattern (Hugging Face's names for GGUF too), and names without a counterpart.

    GGUF tensors that only GGUF stores are left out; those of no known name are the second value.
    """
    if index.format == "gguf":
        return _gguf_groups(index)
    # 60,000 experts' tensors are some 1,000 kinds: all that is done per tensor is done in C.
    tensors = index.tensors
    patterns = name_patterns([tensor.name for tensor in tensors])
    kinds = list(zip(patterns, [t.dtype for t in tensors], [t.shape for t in tensors], strict=True))
    firsts = dict(zip(reversed(kinds), reversed(tensors), strict=True))
    groups: dict[str, StoredGroup] = {}
    for kind, count in Counter(kinds).items():  # in the order of each one's first tensor
        pattern, dtype, shape = kind
        first = firsts[kind]
        group = groups.get(pattern)
        if group is None:
            group = StoredGroup(pattern, shape, dtype, first.file)
            groups[pattern] = group
        elif group.odd is None:
            group.odd = first.name
        group.count += count
        group.num_elements += first.num_elements * count
        group.num_bytes += first.num_bytes * count  # dtype and shape say how many
    return groups, []


def _gguf_groups(index: CheckpointIndex) -> tuple[dict[str, StoredGroup], list[str]]:
    from ullage.anatomy.gguf.names import GGUF_ONLY, hf_tensor_name  # only GGUF files need these

    architecture = dict(index.metadata).get("general.architecture", "")
    groups: dict[str, StoredGroup] = {}
    strangers = []
    for tensor in index.tensors:
        name = hf_tensor_name(architecture, tensor.name)
        if name is None:
            if tensor.name.removesuffix(".weight") not in GGUF_ONLY:
                strangers.append(tensor.name)
            continue
        stacked = "{e}" in name
        count = tensor.shape[0] if stacked and tensor.shape else 1
        shape = tensor.shape[1:] if stacked else tensor.shape
        group = groups.get(name)
        if group is None:
            group = StoredGroup(name, shape, tensor.dtype, tensor.file, count)
            groups[name] = group
        else:
            group.shape = None
        group.num_elements += tensor.num_elements
        group.num_bytes += tensor.num_bytes
    return groups, strangers


def aligned_prefix(expected: Iterable[TensorSpec], names: Iterable[str]) -> tuple[str, str]:
    """Expected and stored prefix of the main layers: ("model.", "language_model.model.").

    The same model is stored with and without `model.` or `language_model.` in front; the first
    layer's names decide by majority. Equal prefixes when nothing can be told.
    """
    rests: dict[str, str] = {}
    for tensor in expected:
        if tensor.layer == 0 and tensor.stack in ("decoder", "encoder"):
            found = _LAYER_ZERO.match(tensor.name)
            if found:
                rests[found.group(2)] = found.group(1)
    votes: Counter[tuple[str, str]] = Counter()
    for name in names:
        found = _LAYER_ZERO.match(name)
        if found and found.group(2) in rests:
            prefix = found.group(1)
            if not any(word in prefix for word in _OTHER_STACKS):
                votes[(rests[found.group(2)], prefix)] += 1
    return votes.most_common(1)[0][0] if votes else ("", "")


def without_common_end(one: str, other: str) -> tuple[str, str]:
    """Two dotted prefixes less the components they end in alike: ("", "language_model.")."""
    first, second = one.split("."), other.split(".")
    while len(first) > 1 and len(second) > 1 and first[-2:] == second[-2:]:
        del first[-2], second[-2]
    return ".".join(first), ".".join(second)
