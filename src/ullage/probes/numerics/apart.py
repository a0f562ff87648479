"""Modules that depart from a reference of more bits, each from the reference's own inputs.

Holds the runs side by side and the bound. NaN and Inf as a model really runs are `trace`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ullage.probes.numerics.bundle_compare import HALF_STEPS
from ullage.probes.numerics.numerics import Departure, Direction, Place
from ullage.probes.numerics.places import place_of
from ullage.probes.numerics.trace import finite, tensors_in

REFERENCES: Mapping[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
}
"""In which dtype the reference of a dtype runs."""
SLACK = 4.0
"""A module may be off by this many times what rounding explains: its own, half a step for each of
OWN_ROUNDINGS in every module in it (as the root of how many), and that of its inputs and weights.
The latter is measured, as what the reference's output moves when its inputs are rounded; weights
are rounded alike. Sound random models of 66 kinds (tests/engine/families.py) stay below 0.6 of the
bound, most below 0.4."""
OWN_ROUNDINGS: Mapping[torch.dtype, float] = {
    torch.bfloat16: 2.0,
    torch.float16: 2.0,
    torch.float32: 8.0,
}
"""The half types round results, and sums are kept in float32; float32 rounds within its sums."""
SMALL = 1e-30
NOT_FINITE = 1e9
"""How far an output that is not finite is off; JSON has no Inf."""


@dataclass(slots=True)
class Apart:
    """What a comparison left. `ratios` has off ÷ allowed of every module judged."""

    departures: list[Departure] = field(default_factory=list)
    ratios: dict[tuple[Direction, str], float] = field(default_factory=dict)
    not_judged: dict[str, str] = field(default_factory=dict)


def departures(
    model: Any, reference: Any, token_ids: tuple[int, ...], *, backward: bool = False
) -> Apart:
    """Runs `reference` once; each of its modules' inputs also go, rounded, through `model`'s.

    `backward`: the module's gradients for one fixed random gradient of its output too.
    """
    sides = _Sides(model, reference, backward)
    ids_1T = torch.tensor([token_ids], device=reference.device)
    with sides.watching(), torch.no_grad():
        reference(ids_1T, use_cache=False)
    return sides.found


class _Sides:
    def __init__(self, model: Any, reference: Any, backward: bool) -> None:
        self.found = Apart()
        self.dtype, self.exact = model.dtype, reference.dtype
        self.half_step = HALF_STEPS[str(self.dtype).removeprefix("torch.")]
        self.backward = backward
        self.twins = dict(model.named_modules())
        self.reference = reference
        self.names: dict[Any, str] = {}
        self.busy = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        for name, module in self.reference.named_modules():
            place = place_of(name, module)
            if place.kind == "model" and any(module.children()):
                continue  # whole stacks add up what their layers are off
            self.names[module] = name
            handles.append(module.register_forward_hook(self._judge, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _judge(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        name = self.names[module]
        if self.busy or name in self.found.not_judged:
            return
        if reason := _cannot_repeat(args, kwargs):
            self.found.not_judged[name] = reason
            return
        self.busy = True
        try:
            self._hold(module, self.twins[name], place_of(name, module), (args, kwargs), output)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
            # A module that only runs among others, by something that they left somewhere.
            self.found.not_judged[name] = f"{type(error).__name__}: {str(error)[:80]}"
        finally:
            self.busy = False

    def _hold(self, module: Any, twin: Any, place: Place, given: Any, output: Any) -> None:
        rounded = _cast(given, self.dtype)
        widened = _cast(rounded, self.exact)
        expected = module(*widened[0], **widened[1])
        found = twin(*rounded[0], **rounded[1])
        self._charge("forward", place, module, output, found, expected)
        # A whole layer's own work is two additions, and behind them rounding turns many a ReLU
        # or router the other way: its gradient tells less than those of the modules within it.
        if self.backward and place.kind not in ("rope", "layer"):
            with torch.enable_grad():
                left = [
                    _gradients(one, *inputs)
                    for one, inputs in ((module, given), (twin, rounded), (module, widened))
                ]
            if all(one is not None for one in left):
                self._charge("backward", place, module, *left)

    def _charge(
        self,
        direction: Direction,
        place: Place,
        module: Any,
        output: Any,
        found: Any,
        expected: Any,
    ) -> None:
        """Notes how far the output is off, and the module unless one within it is charged."""
        # Roundings of random sign add up as the root of their number.
        inner = math.sqrt(sum(1 for _ in module.modules()))
        middle = any("experts" in name for name, _ in module.named_modules())
        floor = self.half_step * OWN_ROUNDINGS[self.dtype] * inner
        worst, departed = 0.0, None
        sides = zip(tensors_in(found), tensors_in(expected), tensors_in(output), strict=True)
        for got, exact, plain in sides:
            if not exact.isfinite().all():
                continue
            if not got.isfinite().all():
                worst, departed = NOT_FINITE, (NOT_FINITE, SLACK * floor)
                break
            off = _off(got, exact, middle)
            moved = _off(plain, exact, middle)
            allowed = SLACK * (floor + moved)
            if off / allowed > worst:
                worst, departed = off / allowed, (off, allowed)
        self.found.ratios[direction, place.path] = worst
        charged = [one.place.path for one in self.found.departures if one.direction == direction]
        within = any(one.startswith(f"{place.path}.") for one in charged)
        if departed and worst > 1 and not within:
            self.found.departures.append(Departure(direction, place, *departed))


def _off(found: torch.Tensor, exact: torch.Tensor, middle: bool) -> float:
    """‖found − exact‖/‖exact‖. `middle`: of the middle row, where experts are chosen: rounding may
    choose another for some."""
    exact = exact.to(torch.float64)
    gap = found.to(torch.float64) - exact
    if middle and exact.ndim > 1:
        sizes = exact.norm(dim=-1).reshape(-1)
        return float((gap.norm(dim=-1).reshape(-1) / sizes.clamp(min=SMALL)).median())
    return float(gap.norm()) / max(float(exact.norm()), SMALL)


def _gradients(module: Any, args: Any, kwargs: Any) -> list[torch.Tensor] | None:
    """Of the first floating input, and of the own parameters of a module without children.

    None where there are none, as of an embedding's tokens that are in no matrix.
    """
    free = _cast((args, kwargs), None)
    first = next(tensors_in(free), None)
    wanted = [] if first is None else [first.requires_grad_(True)]
    leaf = not any(module.children())
    own = [one for one in module.parameters() if one.is_floating_point()] if leaf else []
    was = [(one, one.requires_grad) for one in own]
    try:
        for one in own:
            one.requires_grad_(True)
        output = next(tensors_in(module(*free[0], **free[1])), None)
        if output is None or not output.requires_grad or not (wanted or own):
            return None
        chance = torch.Generator().manual_seed(output.numel())
        gradient = torch.randn(output.shape, generator=chance).to(output)
        left = torch.autograd.grad(output, [*wanted, *own], gradient, allow_unused=True)
        return [one for one in left if one is not None]
    finally:
        for one, needed in was:
            one.requires_grad_(needed)


def _cannot_repeat(args: Any, kwargs: Any) -> str | None:
    """Why a module must not be run again with its inputs, or None: a state would be changed."""
    if not list(tensors_in((args, kwargs))) and not _any_tensor((args, kwargs)):
        return "takes no tensor"
    for value in (*args, *kwargs.values()):
        plain = isinstance(value, (torch.Tensor, tuple, list, dict, str, int, float))
        if not plain and hasattr(value, "update"):
            return f"keeps state in a {type(value).__name__}"
    return None


def _any_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_any_tensor, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(_any_tensor, value))
    return isinstance(value, torch.Tensor)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Copies with every floating tensor in `dtype` (None: as it is). A mask's lowest number stays
    the lowest: rounded to float16 it would be -inf."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            return value
        held = value.detach()
        if dtype is None or dtype == held.dtype:
            return held.clone()
        lowest = torch.finfo(held.dtype).min
        cast = held.to(dtype)
        return torch.where(held <= lowest, torch.finfo(dtype).min, cast)
    if isinstance(value, dict):
        return {name: _cast(one, dtype) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(one, dtype) for one in value)
    return value


def not_finite_parameters(module: Any) -> tuple[str, ...]:
    """Names of parameters that hold NaN or Inf."""
    return tuple(name for name, one in module.named_parameters() if not finite(one))
