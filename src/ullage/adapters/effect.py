"""What an adapter does whatever serves it: the scale that its shapes mean, and whether it is null.

Holds facts of the adapter alone. Of the values only B's first bytes are read, and a whole B only
while it holds nothing but zeros.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from ullage.adapters.verdict import ModuleVerdict, State
from ullage.anatomy.adapters.adapter import Adapter, AdapterModule, AdapterTensor
from ullage.anatomy.checkpoint import open_regular

_FIRST_BYTES = 256
_CHUNK_BYTES = 1 << 20


def meant_scale(module: AdapterModule) -> float | None:
    """The factor of B·A that training meant: by the rank that the shapes have, should they differ
    from the configuration's (then somebody changed it after training)."""
    scale, rank, declared = module.scale, module.rank, module.rank_declared
    if scale is None or rank is None or declared is None or rank == declared:
        return scale
    return scale * declared / rank


def module_verdict(
    module: AdapterModule,
    target: str | None,
    state: State,
    applied: float | None = None,
    detail: str = "",
) -> ModuleVerdict:
    """What becomes of `module`, beside the scale that its training meant."""
    tensor = module.a if module.a is not None else module.tensors[0]
    meant = meant_scale(module)
    return ModuleVerdict(tensor.key.text, module.module, target, meant, applied, state, detail)


def without_effect(adapter: Adapter) -> frozenset[int]:
    """The numbers of the modules that add nothing: a scale of 0, or a B of zeros (as it is before
    training). Of pickles no value is read, so that only the scale counts."""
    found = set()
    looked: dict[str, list[tuple[int, AdapterTensor]]] = {}
    for number, module in enumerate(adapter.modules):
        if module.a is None or module.b is None:
            continue
        if module.scale == 0:
            found.add(number)
        elif module.b.start is not None and module.b.num_bytes:
            looked.setdefault(module.b.file, []).append((number, module.b))
    for file, tensors in looked.items():
        with open_regular(Path(file)) as (stream, _):
            found |= {number for number, tensor in tensors if _is_zero(tensor, stream)}
    return frozenset(found)


def _is_zero(tensor: AdapterTensor, stream: BinaryIO) -> bool:
    stream.seek(tensor.start or 0)
    left, size = tensor.num_bytes, _FIRST_BYTES
    while left > 0:
        data = stream.read(min(size, left))
        if not data or data.strip(b"\0"):
            return False
        left -= len(data)
        size = _CHUNK_BYTES
    return True
