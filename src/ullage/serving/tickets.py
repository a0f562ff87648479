"""One HTTP request as the HTTP side holds it while the engine works on it, and how it may end.

Data only; who fills and empties it is `loop`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ullage.engine.engine import Output
from ullage.engine.lora import LoraAdapter
from ullage.engine.request import FinishReason, Request, SamplingParams
from ullage.errors import UllageError
from ullage.serving.refusals import Cancelled, DeadlinePassed, NotFinite


@dataclass(eq=False, slots=True)
class Ticket:
    """One HTTP request as the HTTP side holds it: prompts, each with params.n choices.

    Choice c answers prompt c // n. `requests` is filled, by choice, once the engine has them.
    """

    id: str
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    lora: LoraAdapter | None = None
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    outputs: asyncio.Queue[tuple[int, Output] | UllageError] = field(default_factory=asyncio.Queue)
    requests: list[Request] = field(default_factory=list)
    prefilling: bool = True
    closed: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n


def raise_if_cut(request: Request) -> None:
    """An end without a reason of its own is no answer: raises what it was."""
    if request.finish_reason is FinishReason.ERROR:
        raise NotFinite("the model's logits were not finite: no token could be chosen")
    if request.finish_reason is not FinishReason.ABORT:
        return
    num_said = len(request.output_ids)
    if request.expired:
        raise DeadlinePassed(f"deadline_seconds passed after {num_said} generated tokens")
    raise Cancelled(f"cancelled by the operator after {num_said} generated tokens", 5)
