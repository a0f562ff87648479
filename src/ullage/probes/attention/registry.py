"""Attention watched in any transformers model that asks the attention-interface registry.

Holds the attention function that reads and passes on. The arithmetic is `entropy`, masks are
`sights`, whole prompts `through_transformers`. Imports transformers when it is used, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

import torch

from ullage.engine.rule import AttentionRule
from ullage.errors import BadUsage, UnsupportedModel
from ullage.probes.attention.entropy import RowReadings, attention_rows
from ullage.probes.attention.sights import View, view_without_mask, views_of_mask

NAME = "ullage_probe"
# Tensors that attention functions are passed and that change no score. Whatever else comes as a
# tensor (a bias, indices of a sparse attention) is not understood, and refused.
_NO_SCORES = frozenset(("position_ids", "cache_position", "position_embeddings"))
# Rows whose output is compared with the attention that the model goes on with.
_COMPARED_ROWS = 4
# Rows that are read and attended at once: what is kept of each while that lasts is not much then.
_FUSED_ROWS = 4096
# Of the largest output: what rounding does to it, by the width of the mantissa.
_TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


@dataclass(frozen=True, slots=True)
class Place:
    """Which rows were read: `positions` of sequence `sequence` of the batch, in layer `layer`.

    A sequence's first token has position 0; what pads it at the left has less.
    """

    layer: int
    sequence: int
    positions: tuple[int, ...]


Choose = Callable[[int], Collection[int]]
Take = Callable[[Place, RowReadings], None]


@dataclass(slots=True)
class _Probe:
    """`tokens` that a sequence has with those of the forward that runs, the first `paddings` of
    which are none; None where the model itself was not called, but a part of it."""

    choose: Choose
    take: Take
    layers: Collection[int] | None
    tokens: int | None = None
    paddings: list[int] | None = None
    of_layer: dict[int, torch.nn.Module] = field(default_factory=dict)

    def layer(self, module: torch.nn.Module) -> int:
        """The model's own number for the layer, else the order in which they were met."""
        own = getattr(module, "layer_idx", None)
        known = next((n for n, one in self.of_layer.items() if one is module), None)
        layer = known if known is not None else own if own is not None else len(self.of_layer)
        if self.of_layer.setdefault(layer, module) is not module:
            raise UnsupportedModel(
                f"two attentions in layer {layer}", file=type(module).__name__, expected="one"
            )
        return int(layer)

    def begin(self, model: Any, args: Any, kwargs: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Before a forward of the whole model: where its sequences begin."""
        names = ("input_ids", "inputs_embeds")
        inputs = next((kwargs[name] for name in names if kwargs.get(name) is not None), None)
        inputs = args[0] if inputs is None and args else inputs
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        mask = kwargs.get("attention_mask")
        self.tokens = self.paddings = None
        if isinstance(inputs, torch.Tensor):
            self.tokens = inputs.shape[1] + (0 if cache is None else int(cache.get_seq_length()))
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            self.paddings = mask.to(torch.uint8).argmax(-1).tolist()

    def rows(self, layer: int, q_BHTD: torch.Tensor) -> torch.Tensor:
        """Indices of the queries to read, in order."""
        wanted = self.layers is None or layer in self.layers
        rows = sorted(self.choose(q_BHTD.shape[2])) if wanted else []
        return torch.tensor(rows, dtype=torch.int64, device=q_BHTD.device)

    def tell(self, layer: int, sequence: int, view: View, readings: RowReadings) -> None:
        positions_R = view.positions - view.sight.padding
        self.take(Place(layer, sequence, tuple(positions_R.tolist())), readings)

    def first(self, sequence: int, num_keys: int) -> int | None:
        """The number of the first token among the keys; below 0 where a cache has dropped it."""
        if self.tokens is None:
            return None
        padding = 0 if self.paddings is None else self.paddings[sequence]
        return padding - max(self.tokens - num_keys, 0)


_PROBES: dict[torch.nn.Module, _Probe] = {}


@contextmanager
def probing(
    model: Any, choose: Choose, take: Take, layers: Collection[int] | None = None
) -> Iterator[None]:
    """While it lasts, `take` is given readings of the query rows that `choose(number)` picks.

    `choose` is asked for indices into the queries of each call; `layers` None: all. The model's
    output stays the same. Raises UnsupportedModel for a model whose attention is not looked up in
    the registry, and from within a forward for attention that is not understood; BadUsage for one
    that is being probed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if not model._can_set_attn_implementation():
        raise UnsupportedModel(
            "computes attention in code of its own",
            file=type(model).__name__,
            expected="one that asks transformers' attention registry",
        )
    if model in _PROBES:
        raise BadUsage("is being probed already", file=type(model).__name__)
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    modules = list(model.modules())
    probe = _Probe(choose, take, layers)
    with attention_of(model, NAME):
        hook = model.register_forward_pre_hook(probe.begin, with_kwargs=True)
        _PROBES.update(dict.fromkeys(modules, probe))
        try:
            yield
        finally:
            hook.remove()
            for module in modules:
                _PROBES.pop(module, None)


@contextmanager
def attention_of(model: Any, implementation: str) -> Iterator[None]:
    """Another attention for a while; then each part has its own again."""
    before = {id(c): (c, c._attn_implementation_internal) for c in _configs(model)}
    try:
        model.set_attn_implementation(implementation)
        yield
    finally:
        for config, own in before.values():
            config._attn_implementation_internal = own


def _configs(model: Any) -> Iterator[Any]:
    """Every configuration that names an attention: of the model, its parts, and nested ones."""
    todo = [module.config for module in model.modules() if hasattr(module, "config")]
    while todo:
        config = todo.pop()
        if not hasattr(config, "_attn_implementation_internal"):
            continue
        yield config
        todo += [
            nested
            for name in config.sub_configs
            if (nested := getattr(config, name, None)) is not None
        ]


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: attention as ever, and readings of the rows chosen on the way."""
    probe = _PROBES[module]
    call = _call(probe, module, query, key, value, attention_mask, settings)
    layer = probe.layer(module)
    rows_R = probe.rows(layer, query)
    if call.fits_sdpa and (len(rows_R) < query.shape[2] or call.trains):
        out_BTHD = _inner(call, settings)
        with torch.no_grad():
            for sequence in range(len(query) if len(rows_R) else 0):
                if not call.dropout:
                    _require_same(call, layer, sequence, rows_R, out_BTHD)
                for view in call.views(sequence, rows_R):
                    probe.tell(layer, sequence, view, call.read(sequence, view))
        return out_BTHD, None
    return _fused(call, layer, rows_R), None


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One call of the attention function, checked: nothing else changes its scores."""

    probe: _Probe
    module: torch.nn.Module
    q_BHTD: torch.Tensor
    k_BKSD: torch.Tensor
    v_BKSD: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    rule: AttentionRule
    sinks_H: torch.Tensor | None
    dropout: float

    @property
    def fits_sdpa(self) -> bool:
        """SDPA knows neither soft caps nor learned sinks."""
        return self.rule.soft_cap is None and self.sinks_H is None

    @property
    def trains(self) -> bool:
        """Whether gradients or dropout are wanted, which the pass of the readings has none of."""
        wants_gradients = torch.is_grad_enabled() and self.q_BHTD.requires_grad
        return wants_gradients or self.dropout > 0

    def views(self, sequence: int, rows_R: torch.Tensor) -> Iterator[View]:
        num_queries, num_keys = self.q_BHTD.shape[2], self.k_BKSD.shape[2]
        first = self.probe.first(sequence, num_keys)
        if self.mask is None:
            yield view_without_mask(rows_R, num_queries, num_keys, self.causal, first or 0)
            return
        visible_TS = self.mask[sequence if len(self.mask) > 1 else 0, 0]
        yield from views_of_mask(visible_TS.expand(num_queries, -1), rows_R, first)

    def read(self, sequence: int, view: View, *, with_values: bool = False) -> RowReadings:
        rule = AttentionRule(self.rule.scale, view.window, self.rule.soft_cap)
        return attention_rows(
            self.q_BHTD[sequence].transpose(0, 1)[view.rows],
            self.k_BKSD[sequence].transpose(0, 1),
            view.positions,
            rule,
            sight=view.sight,
            sinks_H=self.sinks_H,
            values_SKD=self.v_BKSD[sequence].transpose(0, 1) if with_values else None,
        )


def _call(
    probe: _Probe,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    settings: Mapping[str, Any],
) -> _Call:
    """Raises UnsupportedModel for what would change scores in a way that is not known here."""
    who = type(module).__name__
    known = ("s_aux", *_NO_SCORES)
    for name, setting in settings.items():
        if isinstance(setting, torch.Tensor) and name not in known:
            raise UnsupportedModel(f"{name} is not read by the probe", file=who)
    if mask is not None:
        mask = _visible(mask, who)
    causal = settings.get("is_causal")
    scale = settings.get("scaling")
    return _Call(
        probe,
        module,
        query,
        key,
        value,
        mask,
        bool(getattr(module, "is_causal", True) if causal is None else causal),
        AttentionRule(
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            soft_cap=settings.get("softcap"),
        ),
        settings.get("s_aux"),
        float(settings.get("dropout") or 0.0),
    )


def _visible(mask: torch.Tensor, who: str) -> torch.Tensor:
    """bool [sequences or 1, 1, queries or 1, keys], True where a key is seen."""
    if mask.ndim != 4 or (mask.shape[1] > 1 and not (mask == mask[:, :1]).all()):
        raise UnsupportedModel(
            f"a mask of shape {tuple(mask.shape)}", file=who, expected="one for all heads"
        )
    mask = mask[:, :1]
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    if not (visible | (mask <= torch.finfo(mask.dtype).min / 2)).all():
        raise UnsupportedModel("a bias of its own in the mask", file=who, expected="0 or hidden")
    return visible


def _inner(call: _Call, settings: Mapping[str, Any]) -> torch.Tensor:
    """SDPA, [sequences, queries, heads, dim]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out_BTHD, _ = sdpa_attention_forward(
        call.module, call.q_BHTD, call.k_BKSD, call.v_BKSD, call.mask, **settings
    )
    return out_BTHD


def _fused(call: _Call, layer: int, rows_R: torch.Tensor) -> torch.Tensor:
    """Readings and attention itself from one pass over all queries.

    Raises UnsupportedModel where gradients or dropout are wanted.
    """
    if call.trains:
        raise UnsupportedModel(
            "soft caps and learned sinks are read without gradients and dropout",
            file=type(call.module).__name__,
            expected="model.eval() and torch.no_grad()",
        )
    num_sequences, num_heads, num_queries, _ = call.q_BHTD.shape
    shape = (num_sequences, num_queries, num_heads, call.v_BKSD.shape[-1])
    out_BTHD = call.q_BHTD.new_zeros(shape)
    every_R = torch.arange(num_queries, device=out_BTHD.device)
    for sequence, some_R in product(range(num_sequences), torch.split(every_R, _FUSED_ROWS)):
        for view in call.views(sequence, some_R):
            found = call.read(sequence, view, with_values=True)
            assert found.output_RHD is not None
            out_BTHD[sequence, view.rows] = found.output_RHD.to(out_BTHD.dtype)
            chosen_R = torch.isin(view.rows, rows_R).nonzero()[:, 0]
            if len(chosen_R):
                some = View(view.rows[chosen_R], view.positions[chosen_R], view.window, view.sight)
                call.probe.tell(layer, sequence, some, _those(found, chosen_R))
    return out_BTHD


def _those(readings: RowReadings, rows_R: torch.Tensor) -> RowReadings:
    """Some of the rows, without the output."""
    columns: dict[str, Any] = {}
    for field_of in fields(RowReadings):
        column = getattr(readings, field_of.name)
        columns[field_of.name] = None if column is None else column[rows_R]
    return RowReadings(**{**columns, "output_RHD": None})


def _require_same(
    call: _Call, layer: int, sequence: int, rows_R: torch.Tensor, out_BTHD: torch.Tensor
) -> None:
    """Raise unless a few rows' output, by the probe's pass, is what the model goes on with.

    What is not finite on either side is left to the readings to tell.
    """
    few = rows_R[:: max(len(rows_R) // _COMPARED_ROWS, 1)]
    for view in call.views(sequence, few):
        found = call.read(sequence, view, with_values=True).output_RHD
        assert found is not None
        wanted = out_BTHD[sequence, view.rows].to(found.dtype)
        both = (found.isfinite() & wanted.isfinite()).all(-1).all(-1)
        found, wanted = found[both], wanted[both]
        largest = float(wanted.abs().max()) if len(wanted) else 0.0
        off = float((found - wanted).abs().max()) if len(wanted) else 0.0
        if off > _TOLERANCES.get(out_BTHD.dtype, 0.05) * max(largest, 1e-6):
            raise UnsupportedModel(
                f"layer {layer}'s attention is not the one that was read: outputs differ by "
                f"{off:.2g} of {largest:.2g}",
                file=type(call.module).__name__,
            )
