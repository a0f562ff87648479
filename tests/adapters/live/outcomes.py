"""What a real vLLM did with an adapter, measured, with the message.

`no_start`: the server refuses to start with LoRA for this model. `rejected`: the adapter is not
loaded. `dies`: loaded, and the first request brings the server down. Else by the prompt's log
probabilities: `base` (nothing changed), `as_trained` (what PEFT says), `otherwise`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from . import models
from .recipes import Recipe
from .server import Launcher, Server, ServerDied
from .training import PROMPT, Bench
from .verdicts import neutral

SAME = 2e-3
"""Largest difference of a log probability that rounding in float32 explains (seen: under 1e-4)."""
DIFFERENT = 0.05
"""Smallest one that counts as a change; whatever falls between the two is a fault of the recipe."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`distance_*`: the largest difference of a log probability, None where not measured."""

    outcome: str
    message: str | None = None
    raised: str | None = None
    """The exception in the server's log behind a refusal, for those whose message is empty."""
    distance_to_base: float | None = None
    distance_to_training: float | None = None
    tolerance: float = SAME
    adapted: tuple[str, ...] | None = None
    """The served modules that vLLM filled, as its log names them; None when it refused."""


@dataclass(frozen=True, slots=True)
class Made:
    """A recipe whose adapter lies in a folder; `meant` is what training says of the prompt."""

    recipe: Recipe
    base: Path
    adapter: Path
    meant: list[float] | None


def make(recipes: Iterable[Recipe], folder: Path) -> list[Made]:
    """Write the base models and the adapters under `folder`."""
    made = []
    for recipe in recipes:
        model = models.MODELS[recipe.model]
        base = folder / "models" / recipe.model
        if not base.exists():
            model.save(base)
        adapter = folder / "adapters" / recipe.name
        adapter.parent.mkdir(parents=True, exist_ok=True)
        made.append(Made(recipe, base, adapter, recipe.make(Bench(model, base, adapter))))
    return made


def ask(launcher: Launcher, made: Iterable[Made]) -> Iterator[tuple[Made, Outcome]]:
    """Load each adapter into a server for its model and flags; a server that dies is replaced."""
    for _, group in groupby(made, key=lambda one: (one.recipe.model, one.recipe.flags)):
        waiting = list(group)
        while waiting:
            yield from _ask_one_server(launcher, waiting)


def _ask_one_server(launcher: Launcher, waiting: list[Made]) -> Iterator[tuple[Made, Outcome]]:
    """Take adapters off `waiting` until it is empty or the server is gone."""
    first = waiting[0]
    try:
        with launcher.serve(first.base, _flags(first)) as server:
            model = models.MODELS[first.recipe.model]
            untouched = _ask(server, model, "base")
            expected = Bench(model, first.base, first.adapter).answer(model.load(first.base))
            assert _distance(untouched, expected) < SAME, "vLLM and transformers differ on the base"
            while waiting:
                one = waiting.pop(0)
                outcome = _outcome(server, one, untouched)
                yield one, outcome
                if outcome.outcome == "dies":
                    return
    except ServerDied as death:
        message = str(death)
        while waiting:  # a server that does not start takes no adapter at all
            yield waiting.pop(0), Outcome("no_start", message)


def _flags(made: Made) -> tuple[str, ...]:
    return (*models.MODELS[made.recipe.model].flags, *made.recipe.flags)


def _outcome(server: Server, made: Made, untouched: list[float]) -> Outcome:
    refusal = server.load(made.recipe.name, made.adapter, made.recipe.request)
    if refusal is not None:
        return Outcome("rejected", neutral(refusal, made.adapter), server.raised())
    adapted = tuple(server.adapted())
    try:
        said = _ask(server, models.MODELS[made.recipe.model], made.recipe.name)
    except ServerDied as death:
        return Outcome("dies", neutral(str(death), made.adapter), adapted=adapted)
    server.unload(made.recipe.name)
    from_base = _distance(said, untouched)
    from_training = None if made.meant is None else _distance(said, made.meant)
    return Outcome(
        _name(from_base, from_training, made.recipe.tolerance),
        distance_to_base=round(from_base, 5),
        distance_to_training=None if from_training is None else round(from_training, 5),
        tolerance=made.recipe.tolerance,
        adapted=adapted,
    )


def _ask(server: Server, model: models.TinyModel, name: str) -> list[float]:
    ask = server.scores if model.task == "SEQ_CLS" else server.logprobs
    return ask(name, PROMPT)


def _distance(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def _name(from_base: float, from_training: float | None, tolerance: float) -> str:
    if from_base < SAME:
        return "base"
    if from_training is not None and from_training < tolerance:
        return "as_trained"
    if from_base < DIFFERENT or (from_training is not None and from_training < DIFFERENT):
        return "unclear"
    return "otherwise"
