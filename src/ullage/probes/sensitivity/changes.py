"""Changes of one weight in memory, by size, and taking them back to the last bit.

Holds the ladders of sizes and the arithmetic. Which tensors are changed, and what it does to the
answers, is `sensitivity`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from ullage.engine.model.decoder import Decoder
from ullage.errors import BadUsage
from ullage.probes.sameness.values import parts

PERTURBATIONS = ("noise", "scale", "bitflip")
LADDERS: Mapping[str, tuple[float, ...]] = {
    "noise": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "scale": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "bitflip": (6, 7, 8, 9, 13, 14),
}
"""Noise: its size against the weight's rms. Scale: δ of 1 + δ. Bitflip: a bit of bfloat16, from
the highest of the mantissa (6) to the highest of the exponent (14)."""
REFERENCE: Mapping[str, float] = {"noise": 0.1, "scale": 0.1, "bitflip": 14}
"""The step that ranks tensors."""
RISES: Mapping[str, bool] = {"noise": True, "scale": True, "bitflip": False}
"""Whether a higher step of the ladder moves more: which way a bit goes depends on the number."""
# bfloat16 is the upper half of a float32.
_BFLOAT16_BITS = 16
_DRAWS = 64
_HEAD_PARTS = ("q", "k", "v", "o")


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One weight, or one head's part of it, where it lies. `layer` None: outside of the layers."""

    name: str
    layer: int | None
    kind: str
    weight: torch.Tensor

    @property
    def part(self) -> str:
        """Its name without numbers: what it is in every layer."""
        return re.sub(r"\d+", "*", self.name)

    def first_layer(self, num_layers: int) -> int | None:
        """The layer that a change of it shows in first: see `sensitivity_pass.Runner.moved`."""
        if self.layer is not None:
            return self.layer
        behind = self.name.startswith(("final_norm", "lm_head", "project_out"))
        return num_layers if behind else None


def targets(decoder: Decoder, patterns: Sequence[str] = ("*",)) -> tuple[Target, ...]:
    """The weights whose name one of the patterns fits; heads (`layers.3.q.head.7`) where a pattern
    says `.head.`. Raises BadUsage for a pattern that fits none.
    """
    every = [Target(name, layer, kind, w) for layer, (name, kind, w) in parts(decoder)]
    heads = [pattern for pattern in patterns if ".head." in pattern]
    by_name = {target.name: target for target in every}
    if heads:
        by_name |= {head.name: head for target in every for head in _heads(decoder, target)}
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in by_name):
            some = ", ".join(target.name for target in every[-4:])
            raise BadUsage(f"{pattern!r} fits no weight", file="--tensors", expected=f"as {some}")
    return tuple(
        target
        for name, target in by_name.items()
        if any(_fits(name, pattern) for pattern in patterns)
    )


def _fits(name: str, pattern: str) -> bool:
    return (".head." in name) == (".head." in pattern) and fnmatchcase(name, pattern)


def _heads(decoder: Decoder, target: Target) -> Iterator[Target]:
    part = target.name.rpartition(".")[2]
    if target.layer is None or part not in _HEAD_PARTS:
        return
    size = decoder.layers[target.layer].head_dim
    for head, weight in enumerate(target.weight.split(size, 1 if part == "o" else 0)):  # type: ignore[no-untyped-call]
        yield Target(f"{target.name}.head.{head}", target.layer, target.kind, weight)


@contextmanager
def changed(target: Target, perturbation: str, step: float, seed: int) -> Iterator[float | None]:
    """The weight is changed while the block runs, and what it was afterwards, bit for bit.

    Yields ‖Δw‖ / ‖w‖, None where a number of it became none: the highest bit of the exponent makes
    NaN or Inf of what lies between 1 and 2. The same seed and name draw the same noise, and the
    same element to flip.
    """
    weight = target.weight
    with torch.inference_mode():
        before = weight.clone()
        try:
            _CHANGES[perturbation](weight, step, _generator(target.name, seed))
            size = before.double().norm()
            share = float((weight.double() - before.double()).norm() / size) if size else 0.0
            yield share if math.isfinite(share) else None
        finally:
            weight.copy_(before)


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _noise(weight: torch.Tensor, step: float, generator: torch.Generator) -> None:
    rms = weight.double().square().mean().sqrt().item()
    weight.add_(torch.randn(weight.shape, generator=generator), alpha=step * rms)


def _scale(weight: torch.Tensor, step: float, generator: torch.Generator) -> None:  # noqa: ARG001
    weight.mul_(1.0 + step)


def _bitflip(weight: torch.Tensor, step: float, generator: torch.Generator) -> None:
    """Of an element that is not zero, if one is found."""
    for _ in range(_DRAWS):
        at = tuple(int(torch.randint(n, (), generator=generator)) for n in weight.shape)
        if weight[at] != 0:
            break
    flipped = weight[at].reshape(1).view(torch.int32) ^ (1 << (int(step) + _BFLOAT16_BITS))
    weight[at] = flipped.view(torch.float32)[0]


_CHANGES: Mapping[str, Callable[[torch.Tensor, float, torch.Generator], None]] = {
    "noise": _noise,
    "scale": _scale,
    "bitflip": _bitflip,
}


def checksum(decoder: Decoder) -> str:
    """The sha256 of every weight's bytes, in order."""
    digest = hashlib.sha256()
    for _, (name, _, weight) in parts(decoder):
        digest.update(name.encode())
        digest.update(weight.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
