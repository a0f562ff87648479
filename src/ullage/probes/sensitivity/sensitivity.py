"""Which weights matter: layers × kinds by how far the answers move when one weight is changed.

Holds the plan within a budget of passes, and what comes of it. How a weight is changed is
`changes`, how far answers moved `pass`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ullage.anatomy import Model
from ullage.engine.linear import FloatLinear
from ullage.engine.model.decoder import Decoder
from ullage.engine.model.weights import Weights
from ullage.errors import BadUsage
from ullage.probes.attention.embedded import spread_rows
from ullage.probes.sensitivity import changes as changes
from ullage.probes.sensitivity.changes import Target
from ullage.probes.sensitivity.passes import Moved, Prompts, Runner, apart, run

YARDSTICK = "bfloat16"
"""The precision whose own movement a change must exceed to be seen in answers."""
DEFAULT_BUDGET = 200
MAX_TOKENS = 16
"""Of each prompt: all of them go through the model at once, in every pass."""
LEAST_TOKENS = 2

Tell = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Change:
    """One weight changed by one step: how large that was against the weight (None: not finite), and
    what moved."""

    name: str
    layer: int | None
    kind: str
    step: float
    relative_size: float | None
    moved: Moved

    def beyond(self, yardstick: Moved) -> bool:
        """Whether the answers moved by more than the yardstick, or are no numbers any more."""
        if self.moved.logprob_nats is None or yardstick.logprob_nats is None:
            return True
        return self.moved.logprob_nats > yardstick.logprob_nats

    def to_json(self, yardstick: Moved) -> dict[str, Any]:
        told = asdict(self)
        return {**told, **told.pop("moved"), "beyond_rounding": self.beyond(yardstick)}


@dataclass(frozen=True, slots=True)
class Ladder:
    """One weight, changed by rising steps. `smallest`: the first that the answers show.

    Of a perturbation that rises with its steps some are left out: what lies below one that is not
    seen is not seen, what lies above one that is, is.
    """

    perturbation: str
    kind: str
    rank: str
    name: str
    changes: tuple[Change, ...]
    smallest: Change | None

    def to_json(self, yardstick: Moved) -> dict[str, Any]:
        return {
            "perturbation": self.perturbation,
            "kind": self.kind,
            "rank": self.rank,
            "name": self.name,
            "smallest_step": None if self.smallest is None else self.smallest.step,
            "changes": [one.to_json(yardstick) for one in self.changes],
        }


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What a run found. `ranking`: the same step of `perturbations[0]` for `tested` weights of
    `selected`, what moves most first. `untested`: ladders that the budget left no passes for.
    """

    model: str
    prompts: int
    tokens: int
    seed: int
    budget: int
    passes: int
    perturbations: tuple[str, ...]
    yardstick: Moved
    selected: int
    ranking: tuple[Change, ...]
    ladders: tuple[Ladder, ...]
    untested: tuple[str, ...]
    checksum: str
    restored: bool

    def cells(self) -> tuple[Change, ...]:
        """Of each layer and kind the weight that moves most, in the order of the ranking."""
        first: dict[tuple[int | None, str], Change] = {}
        for one in self.ranking:
            first.setdefault((one.layer, one.kind), one)
        return tuple(first.values())

    def to_json(self) -> dict[str, Any]:
        plain = ("model", "prompts", "tokens", "seed", "budget", "passes", "perturbations")
        return {
            **{name: getattr(self, name) for name in plain},
            "yardstick": {"precision": YARDSTICK, **asdict(self.yardstick)},
            "ranking": {
                "perturbation": self.perturbations[0],
                "step": changes.REFERENCE[self.perturbations[0]],
                "tested": len(self.ranking),
                "selected": self.selected,
                "weights": [one.to_json(self.yardstick) for one in self.ranking],
                "cells": [
                    {"layer": one.layer, "kind": one.kind, "name": one.name,
                     "logprob_nats": one.moved.logprob_nats}
                    for one in self.cells()
                ],
            },
            "ladders": [one.to_json(self.yardstick) for one in self.ladders],
            "untested": list(self.untested),
            "restored": {"same": self.restored, "sha256": self.checksum},
        }  # fmt: skip


def read(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_model_len: int,
    *,
    name: str,
    perturbations: Sequence[str] = changes.PERTURBATIONS,
    patterns: Sequence[str] = ("*",),
    budget: int = DEFAULT_BUDGET,
    seed: int = 0,
    tell: Tell = lambda _: None,
) -> Sensitivity:
    """Change weights of `model`, one at a time, within `budget` passes over all prompts.

    The first of `perturbations` ranks. Raises BadUsage for a budget that is none, for weights that
    are none or for a model whose answers are not finite; UnsupportedModel.
    """
    if any(len(ids) < LEAST_TOKENS for ids in prompts) or not prompts:
        raise BadUsage("a prompt of one token", expected="two or more")
    spec, layout = model.anatomy.spec, Prompts(prompts)
    rounded = Decoder(spec, Weights(model), FloatLinear, max_model_len, torch.bfloat16)
    other = run(rounded, layout)
    del rounded
    decoder = Decoder(spec, Weights(model), FloatLinear, max_model_len)
    chosen = changes.targets(decoder, patterns)
    before = changes.checksum(decoder)
    runner = Runner(decoder, layout)
    yardstick = apart(layout, runner.exact, other)
    if yardstick.logprob_nats is None:
        raise BadUsage("the answers are NaN or Inf before anything is changed", file=name)
    work = _Work(runner, seed, budget, yardstick, tell)
    ranking, ladders, untested = work.all(chosen, perturbations)
    return Sensitivity(
        model=name,
        prompts=layout.num_prompts,
        tokens=len(layout.ids_T),
        seed=seed,
        budget=budget,
        passes=work.passes,
        perturbations=tuple(perturbations),
        yardstick=yardstick,
        selected=len(chosen),
        ranking=ranking,
        ladders=ladders,
        untested=untested,
        checksum=before,
        restored=changes.checksum(decoder) == before,
    )


class _Work:
    """The passes within a budget. A change that was tried once is not tried again."""

    def __init__(
        self, runner: Runner, seed: int, budget: int, yardstick: Moved, tell: Tell
    ) -> None:
        self._runner, self._seed, self._budget = runner, seed, budget
        self._yardstick, self._tell = yardstick, tell
        self._known: dict[tuple[str, str, float], Change] = {}

    @property
    def passes(self) -> int:
        return len(self._known)

    def all(
        self, chosen: Sequence[Target], perturbations: Sequence[str]
    ) -> tuple[tuple[Change, ...], tuple[Ladder, ...], tuple[str, ...]]:
        kinds = tuple(dict.fromkeys(target.kind for target in chosen))
        ladders = sum(_most_passes(one) for one in perturbations) * len(kinds)
        first = perturbations[0]
        ranked = spread(chosen, max(self._budget - ladders, self._budget // 2, 1))
        step = changes.REFERENCE[first]
        ranking = sorted((self._try(t, first, step) for t in ranked), key=_moved, reverse=True)
        by_name = {target.name: target for target in chosen}
        found: list[Ladder] = []
        untested: list[str] = []
        for rank, at in (("most", 0), ("least", -1)):
            for perturbation in perturbations:
                for kind in kinds:
                    of = [by_name[one.name] for one in ranking if one.kind == kind]
                    if not of or (rank == "least" and len(of) == 1):
                        continue
                    ladder = self._ladder(of[at], perturbation, rank)
                    if ladder is None:
                        untested.append(f"{perturbation} of {of[at].name}")
                    else:
                        found.append(ladder)
        return tuple(ranking), tuple(found), tuple(untested)

    def _try(self, target: Target, perturbation: str, step: float) -> Change:
        key = (target.name, perturbation, step)
        if key not in self._known:
            first = target.first_layer(len(self._runner.decoder.layers))
            with changes.changed(target, perturbation, step, self._seed) as size:
                moved = self._runner.moved(first)
            told = (target.name, target.layer, target.kind, step, size)
            self._known[key] = Change(*told, moved)
            self._tell(self.passes)
        return self._known[key]

    def _ladder(self, target: Target, perturbation: str, rank: str) -> Ladder | None:
        """None where the budget does not reach."""
        tried: list[Change] = []
        for step in self._steps(perturbation, tried):
            key = (target.name, perturbation, step)
            if key not in self._known and self.passes >= self._budget:
                return None
            tried.append(self._try(target, perturbation, step))
        tried.sort(key=lambda one: one.step)
        seen = [one for one in tried if one.beyond(self._yardstick)]
        return Ladder(
            perturbation, target.kind, rank, target.name, tuple(tried), seen[0] if seen else None
        )

    def _steps(self, perturbation: str, tried: Sequence[Change]) -> Iterator[float]:
        """Where to look next: all steps, or of a ladder that rises half of what is left."""
        ladder = changes.LADDERS[perturbation]
        if not changes.RISES[perturbation]:
            yield from ladder
            return
        low, high = 0, len(ladder)
        middle = ladder.index(changes.REFERENCE[perturbation])
        while low < high:
            yield ladder[middle]
            if tried[-1].beyond(self._yardstick):
                high = middle
            else:
                low = middle + 1
            middle = (low + high) // 2


def _most_passes(perturbation: str) -> int:
    steps = len(changes.LADDERS[perturbation])
    return steps.bit_length() if changes.RISES[perturbation] else steps


def _moved(change: Change) -> float:
    return float("inf") if change.moved.logprob_nats is None else change.moved.logprob_nats


def spread(chosen: Sequence[Target], count: int) -> tuple[Target, ...]:
    """At most `count` of the weights: every part of a layer at as many layers, evenly apart."""
    if count >= len(chosen):
        return tuple(chosen)
    by_part: dict[str, list[Target]] = {}
    for target in chosen:
        by_part.setdefault(target.part, []).append(target)
    shares = _shares({part: len(of) for part, of in by_part.items()}, count)
    picked = {
        of[at].name
        for part, of in by_part.items()
        if shares[part]
        for at in spread_rows(len(of), shares[part])
    }
    return tuple(target for target in chosen if target.name in picked)


def _shares(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """How many of each part: as equal as their sizes allow."""
    shares = dict.fromkeys(sizes, 0)
    while count > 0:
        open_ = [part for part, size in sizes.items() if shares[part] < size][:count]
        for part in open_:
            shares[part] += 1
        count -= len(open_) or count
    return shares
