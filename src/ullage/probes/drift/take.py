"""Reading the sizes of activations of a model over prompts, one prompt after the other.

Holds the run and the sums; nothing of a row is kept. What is made of readings is `drift`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ullage import __version__
from ullage.anatomy import Model
from ullage.engine.linear import FloatLinear
from ullage.engine.model.decoder import Decoder
from ullage.engine.model.weights import Weights
from ullage.engine.taps import Taps, why_not, widths
from ullage.errors import BadUsage, UnsupportedModel
from ullage.probes.drift.drift import (
    HIGHEST,
    LIMITS,
    LOWEST,
    MASSIVE,
    NEAR,
    PLACES,
    DriftReading,
    Largest,
    Spot,
    SpotReading,
    spots,
)
from ullage.probes.sensitivity.passes import Prompts, run

LEAST_TOKENS = 2
MAX_TOKENS = 256
"""Of each prompt; its first token is told of apart."""


class _Sums(Taps):
    """What a step could keep of its rows, added up for one spot after the other."""

    def __init__(self, num_layers: int) -> None:
        self.prompt = 0
        self.of: dict[Spot, _Sum] = {spot: _Sum() for spot in spots(num_layers)}

    def keep(self, layer: int, **values: torch.Tensor) -> None:
        for place, values_TW in values.items():
            if place in PLACES:
                self.of[Spot(place, layer)].see(values_TW.flatten(1), self.prompt)

    def narrow(self, sampled_rows: torch.Tensor) -> None:
        """All rows are sampled."""


class _Sum:
    """Of one spot, over all prompts."""

    def __init__(self) -> None:
        self.mean_squares: list[torch.Tensor] = []
        self.numbers = self.rest_numbers = self.not_finite = 0
        self.sum = 0.0
        self.squares = 0.0
        self.near = dict.fromkeys(LIMITS, 0)
        self.most_W = torch.zeros(0)
        self.largest = Largest(0.0, 0, 0, 0)

    def see(self, values_TW: torch.Tensor, prompt: int) -> None:
        good_TW = torch.nan_to_num(values_TW, nan=0.0, posinf=0.0, neginf=0.0)
        self.not_finite += int((~values_TW.isfinite()).sum())
        size_TW = good_TW.abs()
        most_W = size_TW.amax(0)
        self.most_W = torch.maximum(self.most_W, most_W) if len(self.most_W) else most_W
        if (top := float(most_W.max())) > abs(self.largest.value) or not self.numbers:
            position, channel = divmod(int(size_TW.argmax()), size_TW.shape[1])
            self.largest = Largest(float(good_TW[position, channel]), prompt, position, channel)
        for name, limit in LIMITS.items():
            if top > NEAR * limit:
                self.near[name] += int((size_TW > NEAR * limit).sum())
        self.numbers += values_TW.numel()
        rest_TW = good_TW[1:].double()
        self.rest_numbers += rest_TW.numel()
        self.sum += float(rest_TW.sum())
        squares_W = rest_TW.square().mean(0)
        self.squares += float(squares_W.sum()) * len(rest_TW)
        self.mean_squares.append(squares_W)

    def reading(self, spot: Spot) -> SpotReading:
        # Over prompts, each as heavy as the others.
        rms_W = torch.stack(self.mean_squares).mean(0).sqrt()
        times_W = rms_W / rms_W.median() if rms_W.median() > 0 else torch.zeros_like(rms_W)
        massive = (times_W >= MASSIVE).nonzero()[:, 0].tolist()
        return SpotReading(
            spot=spot,
            rms=math.sqrt(self.squares / self.rest_numbers),
            mean=self.sum / self.rest_numbers,
            largest=self.largest,
            near={name: count / self.numbers for name, count in self.near.items()},
            dead=tuple((self.most_W == 0).nonzero()[:, 0].tolist()),
            massive=tuple((channel, float(times_W[channel])) for channel in massive),
            not_finite=self.not_finite,
        )

    def log_rms(self) -> torch.Tensor:
        """[prompts, width]."""
        return (torch.stack(self.mean_squares).log() / 2).clamp(LOWEST, HIGHEST)


def _dtype(model: Model) -> str:
    """The type that activations will be in: the weights' own. What runs GGUF uses float32."""
    dtype, index = model.anatomy.spec.dtype, model.checkpoint
    return dtype if index is not None and index.format != "gguf" and dtype in LIMITS else "float32"


def _mark(ids: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]


def take(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_model_len: int,
    *,
    name: str,
    tell: Callable[[int], None] = lambda _: None,
) -> DriftReading:
    """What `model`, in float32, is like at every norm and residual while it reads `prompts`.

    Raises UnsupportedModel for one that the embedded engine does not run, or whose rows it cannot
    read; BadUsage for a prompt of one token.
    """
    if not prompts or any(len(ids) < LEAST_TOKENS for ids in prompts):
        raise BadUsage("a prompt of one token", field="prompts", expected="two or more")
    spec = model.anatomy.spec
    decoder = Decoder(spec, Weights(model), FloatLinear, max_model_len)
    if (reason := why_not(decoder)) is not None:
        raise UnsupportedModel(
            f"{reason}: its layers are not read", file=name, expected="layers that add two parts"
        )
    sums = _Sums(len(decoder.layers))
    for number, ids in enumerate(prompts):
        sums.prompt = number
        run(decoder, Prompts([ids]), sums)
        tell(number + 1)
    layer = decoder.layers[0]
    table = torch.cat([one.log_rms() for one in sums.of.values()], 1)
    every = widths(decoder)
    return DriftReading(
        model=name,
        by=f"ullage {__version__}, embedded engine",
        dtype=_dtype(model),
        num_layers=len(decoder.layers),
        widths={place: every[place] for place in PLACES},
        heads=(layer.num_heads, layer.num_kv_heads, layer.head_dim),
        tokens=tuple(len(ids) for ids in prompts),
        prompts=tuple(map(_mark, prompts)),
        spots=tuple(one.reading(spot) for spot, one in sums.of.items()),
        log_rms_PC=table.numpy().astype(np.float32),
    )
