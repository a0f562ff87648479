"""LoRA adapters beside the base weights: read once, added to a linear's output for their rows only.

Holds the deltas, where they go, and who is refused. Any mix of adapters runs in one batch, since
nothing is merged. What adapter files say is read by `anatomy`; requests name theirs in `request`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ullage.anatomy.adapters.adapter import Adapter, AdapterConfig, AdapterModule
from ullage.anatomy.adapters.read import read_adapter
from ullage.anatomy.adapters.scale import changes_base
from ullage.anatomy.checkpoint import TensorEntry
from ullage.anatomy.files.safetensors import read_safetensors
from ullage.anatomy.spec import ModelSpec
from ullage.anatomy.tensors.slots import Slots
from ullage.engine.model.families import FORWARDS
from ullage.engine.model.support import attention_of
from ullage.engine.model.weights import read_tensor
from ullage.engine.sites import Site, block_rows, site_slots
from ullage.errors import BadInput

SITES: Sequence[Site] = ("qkv", "output", "gate_up", "down")
# What an adapter may ask for that would be ignored here: (does it ask, what to say).
UNSUPPORTED: Sequence[tuple[Callable[[AdapterConfig], bool], str]] = (
    (lambda c: c.peft_type.upper() != "LORA", "adapters other than LoRA are not run"),
    (lambda c: c.use_dora, "DoRA is not run"),
    (lambda c: c.bias != "none" or c.lora_bias, "adapters with biases are not run"),
    (lambda c: bool(c.modules_to_save), "modules_to_save are not run"),
    (lambda c: bool(c.layer_replication), "layer_replication is not run"),
    (lambda c: bool(c.alora_invocation_tokens), "activated LoRA is not run"),
    (lambda c: bool(c.use_qalora), "QALoRA is not run"),
    (lambda c: bool(c.use_bdlora), "block-diagonal LoRA is not run"),
    (lambda c: bool(c.trainable_token_indices), "trainable tokens are not run"),
    (
        lambda c: changes_base(c.init_lora_weights),
        "an init that changes the base weights is not run",
    ),
)


class LoraRefused(BadInput):
    """An adapter that would not do here what it was trained to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module's output lies: columns first … last−1 of a site of one layer.

    `order` is how the module's rows are put there, None: as they are.
    """

    layer: int
    site: Site
    first: int
    last: int
    in_features: int
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """x·Aᵀ·Bᵀ, float32, for columns first … last−1 of a site; the scale is in B."""

    first: int
    last: int
    a_RI: torch.Tensor
    b_OR: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """A loaded adapter. Requests hold it, so it outlives being unloaded while they run."""

    name: str
    path: str
    rank: int
    num_modules: int
    deltas: Mapping[tuple[int, Site], tuple[Delta, ...]]
    # No two adapters that were ever read share it, whatever their names: KV is told apart by it.
    serial: int = field(default_factory=itertools.count(1).__next__)

    @property
    def num_bytes(self) -> int:
        held = [t for parts in self.deltas.values() for d in parts for t in (d.a_RI, d.b_OR)]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a batch that one adapter changes; None: all of them."""

    adapter: LoraAdapter
    rows: torch.Tensor | None

    def add(self, layer: int, site: Site, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        """Add what the adapter says of x to y, in place."""
        deltas = self.adapter.deltas.get((layer, site), ())
        if not deltas:
            return
        x = (x_TI if self.rows is None else x_TI.index_select(0, self.rows)).float()
        for delta in deltas:
            change = ((x @ delta.a_RI.T) @ delta.b_OR.T).to(y_TO.dtype)
            columns = y_TO[:, delta.first : delta.last]
            if self.rows is None:
                columns += change
            else:
                columns.index_add_(0, self.rows, change)


def rows_by_adapter(adapters: Sequence[LoraAdapter | None]) -> tuple[Rows, ...]:
    """One `Rows` per adapter that occurs in `adapters`, which has an entry per row."""
    rows: dict[LoraAdapter, list[int]] = {}
    for row, adapter in enumerate(adapters):
        if adapter is not None:
            rows.setdefault(adapter, []).append(row)
    return tuple(
        Rows(adapter, None if len(of) == len(adapters) else torch.tensor(of, dtype=torch.int64))
        for adapter, of in rows.items()
    )


def places(spec: ModelSpec) -> dict[str, Place]:
    """Module path in the Hugging Face tree → where its output lies, for every linear."""
    found: dict[str, Place] = {}
    slots, forward = Slots(spec), FORWARDS[spec.family]
    for index, layer in enumerate(spec.layers):
        for site in SITES:
            first = 0
            for name in site_slots(slots, site, index):
                tensor = slots.find(name, index)
                assert tensor is not None
                width, size = tensor.shape[tensor.in_dim], tensor.shape[1 - tensor.in_dim]
                order = block_rows(forward, attention_of(layer)) if name == "qkv" else None
                rows = None if order is None else tuple(order.tolist())
                found[tensor.module] = Place(index, site, first, first + size, width, rows)
                first += size
    return found


def placed(
    adapter: Adapter, spec: ModelSpec, max_lora_rank: int
) -> list[tuple[AdapterModule, Place | None]]:
    """The adapter's modules with their places in a model of `spec`, None for those it lacks.

    Raises LoraRefused for an adapter that asks for more than LoRA pairs, and for pairs that do not
    fit their place or the rank's limit.
    """
    _require_supported(adapter)
    where = places(spec)
    found: list[tuple[AdapterModule, Place | None]] = []
    taken: set[Place] = set()
    for module in adapter.modules:
        place = where.get(module.module)
        found.append((module, place))
        if place is None:
            continue
        if place in taken:
            raise _refusal(adapter, module, "adapted twice", "one pair")
        taken.add(place)
        _require_fits(adapter, module, place, max_lora_rank)
    return found


def require_coverage(
    adapter: Adapter,
    found: Sequence[tuple[AdapterModule, Place | None]],
    spec: ModelSpec,
    *,
    allow_partial: bool,
) -> None:
    """Raise LoraRefused when no module, or not every one, has a place in a model of `spec`."""
    unmapped = [module.module for module, place in found if place is None]
    if len(unmapped) == len(found) or (unmapped and not allow_partial):
        raise LoraRefused(
            f"{len(unmapped)} of {len(found)} modules are not of this model"
            + (f", the first {unmapped[0][:120]!r}" if unmapped else ""),
            file=adapter.path,
            expected=f"modules like {next(iter(places(spec)), '')!r}",
        )


def read_lora(
    name: str, path: str | Path, spec: ModelSpec, max_lora_rank: int, *, allow_partial: bool = False
) -> LoraAdapter:
    """Read the adapter at `path` for a model of `spec`.

    Raises LoraRefused when part of it would do nothing (unless `allow_partial`) or the wrong thing,
    and what `read_adapter` raises for files that lie.
    """
    adapter = read_adapter(Path(path))
    found = placed(adapter, spec, max_lora_rank)
    require_coverage(adapter, found, spec, allow_partial=allow_partial)
    entries = _entries(adapter)
    deltas: dict[tuple[int, Site], tuple[Delta, ...]] = {}
    taken = [(module, place) for module, place in found if place is not None]
    for module, place in taken:
        key = (place.layer, place.site)
        deltas[key] = (*deltas.get(key, ()), _delta(module, place, entries))
    rank = max(module.rank or 0 for module, _ in taken)
    return LoraAdapter(name, str(path), rank, len(taken), deltas)


def _require_supported(adapter: Adapter) -> None:
    if adapter.from_pickle:
        raise LoraRefused(
            "a pickle, which is never loaded", file=adapter.path, expected="safetensors"
        )
    for asks, sentence in UNSUPPORTED:
        if asks(adapter.config):
            raise LoraRefused(f"{sentence} by the embedded engine", file=adapter.path)


def _entries(adapter: Adapter) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for file in dict.fromkeys(tensor.file for tensor in adapter.tensors):
        entries |= {entry.name: entry for entry in read_safetensors(Path(file))[0]}
    return entries


def _refusal(adapter: Adapter, module: AdapterModule, found: str, expected: str) -> LoraRefused:
    return LoraRefused(found, file=adapter.path, field=module.module, expected=expected)


def _require_fits(
    adapter: Adapter, module: AdapterModule, place: Place, max_lora_rank: int
) -> None:
    """Raise LoraRefused unless the module is one plain pair of the place's shape."""
    if module.magnitude is not None or module.bias_b is not None or module.saved:
        raise _refusal(adapter, module, "more than lora_A and lora_B", "plain LoRA")
    if module.a is None or module.b is None or module.rank is None or module.scale is None:
        expected = "lora_A and lora_B of one rank, and its alpha"
        raise _refusal(adapter, module, "half of a pair", expected)
    if module.transposed:
        raise _refusal(adapter, module, "matrices the other way round (MLX)", "PEFT's layout")
    if module.rank > max_lora_rank:
        expected = f"at most {max_lora_rank} (--max-lora-rank)"
        raise _refusal(adapter, module, f"rank {module.rank}", expected)
    shapes = ((module.rank, place.in_features), (place.last - place.first, module.rank))
    if (module.a.shape, module.b.shape) != shapes:
        found = f"lora_A {list(module.a.shape)}, lora_B {list(module.b.shape)}"
        raise _refusal(adapter, module, found, " and ".join(str(list(s)) for s in shapes))


def _delta(module: AdapterModule, place: Place, entries: Mapping[str, TensorEntry]) -> Delta:
    assert module.a is not None
    assert module.b is not None
    assert module.scale is not None
    a_RI, b_OR = (read_tensor(entries[tensor.key.text]) for tensor in (module.a, module.b))
    if place.order is not None:
        b_OR = b_OR[list(place.order)]
    return Delta(place.first, place.last, a_RI, b_OR * module.scale)
