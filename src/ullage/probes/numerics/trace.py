"""One run of a model under instrumentation: which module makes NaN or Inf, and every operator.

Holds the hooks and the operators' marks. Departures from a reference are `apart`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ullage.errors import BadUsage
from ullage.probes.numerics.bundle import OperatorMark, TensorMark
from ullage.probes.numerics.numerics import Direction, Fault, Place
from ullage.probes.numerics.places import place_of
from ullage.probes.sameness.values import sketch

_FIRST_VALUES = 4
# Their outputs hold whatever the memory held.
_UNWRITTEN = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"))
# Write what they are told to, -inf for a mask; what they write is nobody's mistake.
_TOLD = frozenset(
    ("full", "full_like", "new_full", "fill_", "fill", "masked_fill", "masked_fill_", "where",
     "scalar_tensor", "lift_fresh", "lift_fresh_copy", "copy_", "clone", "triu", "tril",
     "cat", "stack", "index", "index_put_", "constant_pad_nd", "gather", "slice_backward",
     "select_backward")
)  # fmt: skip
# The rest of what they return (seeds, offsets) is not part of the result.
_ONE_RESULT = "_scaled_dot_product"


@dataclass(slots=True)
class Traced:
    """What a run left: faults in the order in which modules ended, operators in that of running."""

    faults: list[Fault] = field(default_factory=list)
    operators: list[OperatorMark] = field(default_factory=list)
    tensors: dict[str, TensorMark] = field(default_factory=dict)


def trace(
    model: Any, token_ids: tuple[int, ...], *, backward: bool = False, marks: bool = False
) -> Traced:
    """Runs the model once over the prompt (with `backward` a training step without the update).

    `marks`: keep a mark of every operator too. Gradients and the model are left as they were.
    Raises BadUsage for a training step over one token.
    """
    if backward and len(token_ids) < 2:
        raise BadUsage("a token alone has no next one to learn", file="prompt", expected="two")
    watch = _Watch(model, marks)
    ids_1T = torch.tensor([token_ids], device=model.device)
    was = [(one, one.requires_grad, one.grad) for one in model.parameters()]
    try:
        for one, _, _ in was:
            one.requires_grad_(backward and one.is_floating_point())
            one.grad = None
        with watch.watching(backward), torch.set_grad_enabled(backward):
            logits = model(ids_1T, use_cache=False)[0]
            if backward:
                next_token_loss(logits, ids_1T).backward()  # type: ignore[no-untyped-call]
        watch.end()
    finally:
        for one, needed, grad in was:
            one.requires_grad_(needed)
            one.grad = grad
    return watch.found


def next_token_loss(logits_1TV: torch.Tensor, ids_1T: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each next token, in float32 as trainers compute it."""
    return torch.nn.functional.cross_entropy(logits_1TV[0, :-1].float(), ids_1T[0, 1:])


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The floating tensors in arguments or outputs, however nested."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            if "mask" not in str(name):  # -inf is what a mask is made of
                yield from tensors_in(one)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)


def finite(value: Any) -> bool:
    """Whether every floating tensor in it is."""
    return all(bool(one.isfinite().all()) for one in tensors_in(value))


@dataclass(slots=True, eq=False)
class _Call:
    """A module that is running, and where among the fresh operators it began."""

    place: Place
    began: int


@dataclass(slots=True, eq=False)
class _BackwardCall:
    """The way back through one call of a module; `clean`: the gradients that came in are finite."""

    module: Any
    clean: bool | None = None
    has_inputs: bool = False
    running: _Call | None = None


class _Gate(torch.autograd.Function):
    """Passes a tensor on, and tells of its gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, told: Any, call: _BackwardCall) -> torch.Tensor:
        ctx.told, ctx.call = told, call
        return given.clone()  # a view could not be changed in place by what comes next

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.told(ctx.call, gradient)
        return gradient, None, None


def _gate(given: torch.Tensor, told: Any, call: _BackwardCall) -> Any:
    return _Gate.apply(given, told, call)  # type: ignore[no-untyped-call]


def _gated(value: Any, gate: Any) -> Any:
    """The same, with every tensor that has a gradient behind a gate."""
    if isinstance(value, torch.Tensor):
        return gate(value) if value.is_floating_point() and value.requires_grad else value
    if type(value) in (tuple, list):
        return type(value)(_gated(one, gate) for one in value)
    if type(value) is dict:
        return {name: _gated(one, gate) for name, one in value.items()}
    return value


class _Watch:
    """Hooks on every module and, beneath them, every operator."""

    def __init__(self, model: Any, marks: bool) -> None:
        self.found = Traced()
        self.marks = marks
        self.modules = {module: place_of(path, module) for path, module in model.named_modules()}
        self.owned = {one.data_ptr() for one in model.parameters()}
        self.running: list[_Call] = []
        self.fresh: list[tuple[str, str]] = []
        self.backward = False
        self.paused = False
        self.backward_calls: dict[Any, list[_BackwardCall]] = {}
        self.faulty: list[tuple[Fault, Any]] = []

    @contextmanager
    def watching(self, backward: bool) -> Iterator[None]:
        handles = []
        for module, place in self.modules.items():
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
            if backward and _takes_gradients(place, module):
                handles.append(module.register_forward_pre_hook(self._gate_in, with_kwargs=True))
                handles.append(module.register_forward_hook(self._gate_out))
        try:
            with _Operators(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def end(self) -> None:
        """Counts the faults; gradients of parameters are whole only now."""
        for direction in ("forward", "backward"):
            faults = [fault for fault, _ in self.faulty if fault.direction == direction]
            if faults:
                self.found.faults.append(replace(faults[0], later=len(faults) - 1))
            elif direction == "backward":
                self.found.faults += self._bad_gradients()

    def _bad_gradients(self) -> list[Fault]:
        for module, calls in reversed(self.backward_calls.items()):
            own = [one.grad for one in module.parameters(recurse=False) if one.grad is not None]
            if all(call.clean for call in calls) and not finite(own):
                return [self._fault(self.modules[module], module, "backward", own, None)]
        return []

    def _enter(self, module: Any, args: Any) -> None:  # noqa: ARG002
        self.running.append(_Call(self.modules[module], len(self.fresh)))

    def _leave(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        call = self.running.pop()
        self._judge(module, call, "forward", (args, kwargs), output)

    def _gate_in(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Inputs pass a gate each, where their gradients come out: torch's own hooks see no
        keyword arguments, by which attention is called."""
        call = _BackwardCall(module)
        self.backward_calls.setdefault(module, []).append(call)
        call.has_inputs = any(one.requires_grad for one in tensors_in((args, kwargs)))
        with self._unseen():
            gated: tuple[Any, Any] = _gated((args, kwargs), lambda x: _gate(x, self._left, call))
        return gated

    def _gate_out(self, module: Any, args: Any, output: Any) -> Any:  # noqa: ARG002
        call = self.backward_calls[module][-1]
        with self._unseen():
            return _gated(output, lambda one: _gate(one, self._entered, call))

    def _entered(self, call: _BackwardCall, gradient: torch.Tensor) -> None:
        with self._unseen():
            self.backward = True
            clean = finite(gradient)
            call.clean = clean if call.clean is None else call.clean and clean
            if call.has_inputs and call.running is None:
                call.running = _Call(self.modules[call.module], len(self.fresh))
                self.running.append(call.running)

    def _left(self, call: _BackwardCall, gradient: torch.Tensor) -> None:
        if call.running in self.running:
            self.running.remove(call.running)
        if call.clean:
            place = self.modules[call.module]
            running = call.running or _Call(place, len(self.fresh))
            self._judge(call.module, running, "backward", (), gradient)

    def _judge(
        self, module: Any, call: _Call, direction: Direction, entered: Any, left: Any
    ) -> None:
        with self._unseen(), torch.no_grad():
            if finite(left) or not finite(entered):
                return
            path = call.place.path
            inner = [f.place.path for f, _ in self.faulty if f.direction == direction]
            if any(one.startswith(f"{path}.") or not path for one in inner):
                return  # one of its own modules is charged already
            fault = self._fault(call.place, module, direction, left, call.began)
            self.faulty.append((fault, module))

    def _fault(
        self, place: Place, module: Any, direction: Direction, left: Any, began: int | None
    ) -> Fault:
        tensors = list(tensors_in(left))
        num_nan = sum(int(one.isnan().sum()) for one in tensors)
        what: Literal["NaN", "Inf"] = "NaN" if num_nan else "Inf"
        num_bad = sum(int((~one.isfinite()).sum()) for one in tensors)
        since = [] if began is None else self.fresh[began:]
        operator = next((name for name, path in since if path == place.path), None)
        own = module.named_parameters(recurse=False)
        parameters = tuple(name for name, one in own if not finite(one))
        size = sum(one.numel() for one in tensors)
        return Fault(direction, place, what, num_bad, size, operator, parameters, 0)

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        was, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = was

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operator and looks at what it did."""
        name = func._schema.name.partition("::")[2]
        if self.paused or name in _UNWRITTEN or _is_view(func):
            return func(*args, **kwargs)
        place = self.running[-1].place if self.running else Place("", None, "model", "")
        entered = [one for one in _tensors(args, kwargs) if one.data_ptr() not in self.owned]
        clean = finite(entered)
        inputs = tuple(map(self._mark, entered)) if self.marks else ()
        output = func(*args, **kwargs)
        results = list(_tensors(output))
        results = results[:1] if name.startswith(_ONE_RESULT) else results
        if clean and name not in _TOLD and not finite(results):
            self.fresh.append((name, place.path))
        if self.marks and results:
            outputs = tuple(map(self._mark, results))
            self.found.operators.append(
                OperatorMark(
                    name, place.path, place.kind, place.layer, self.backward, inputs, outputs
                )
            )
        return output

    def _mark(self, tensor: torch.Tensor) -> str:
        digest = digest_of(tensor)
        if digest not in self.found.tensors:
            self.found.tensors[digest] = mark_of(tensor, digest)
        return digest


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, watch: _Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.watch.operator(func, args, kwargs or {})


def _takes_gradients(place: Place, module: Any) -> bool:
    """Whole stacks return named outputs, whose tensors no hook may change."""
    return place.kind != "model" or not any(module.children())


def _is_view(func: Any) -> bool:
    """Whether its outputs are other looks at its inputs: nothing is computed."""
    returns = func._schema.returns
    aliases = [one.alias_info for one in returns]
    return bool(returns) and all(one is not None and not one.is_write for one in aliases)


def _tensors(*values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(*value)
        elif isinstance(value, dict):
            yield from _tensors(*value.values())


def digest_of(tensor: torch.Tensor) -> str:
    """A checksum of dtype, shape and bytes."""
    held = tensor.detach().cpu()
    summed = hashlib.blake2b(f"{held.dtype}{list(held.shape)}".encode(), digest_size=8)
    if held.numel():
        # One element may have any stride, and a clone has its own.
        flat = held.reshape(-1).clone(memory_format=torch.contiguous_format)
        summed.update(flat.view(torch.uint8).numpy().data)
    return summed.hexdigest()


def mark_of(tensor: torch.Tensor, digest: str) -> TensorMark:
    """What a bundle keeps of a tensor."""
    held = tensor.detach().cpu()
    num_nan, num_inf = int(held.isnan().sum()), int(held.isinf().sum())
    numbers = held.to(torch.float64).nan_to_num(0.0, 0.0, 0.0).reshape(-1)
    norm, buckets = sketch(numbers)
    return TensorMark(
        digest,
        str(held.dtype).removeprefix("torch."),
        tuple(held.shape),
        num_nan,
        num_inf,
        norm,
        float(numbers.sum()),
        float(numbers.abs().max()) if numbers.numel() else 0.0,
        buckets,
        tuple(numbers[:_FIRST_VALUES].tolist()),
    )
