"""One request's life: what was asked (`SamplingParams`), where it stands and when it moved.

Holds state only. Who runs is `scheduler`, which tokens come is `sampler`, text is `tokenizer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ullage.engine.lora import LoraAdapter


class State(StrEnum):
    """Where a request stands. A preempted request is WAITING again, with its output kept."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended, in vLLM's words (v1/engine FINISH_REASON_STRINGS)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to end, with OpenAI's and vLLM's names.

    `temperature` 0 is greedy. `top_k` 0 means all. `stop` are strings that end the text and are
    not part of it. `logprobs` is how many alternatives to report per token (None: nothing).
    `n` answers to one prompt; answer i of a seeded request draws from seed + i. `logit_bias` are
    pairs of token id and what is added to its logit. `min_tokens` must come before any end.
    """

    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    include_stop_str_in_output: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress; times are `time.monotonic()` seconds.

    `num_computed` tokens (prompt first, then output) have their KV in the blocks of `tables`, one
    per group of the KV layout, empty while it holds nothing.
    The rest, `num_tokens - num_computed`, must run: one for a decode, more for a prefill or for
    the recomputation after a preemption. `most_computed` is how far it ever was. `lora` is the
    adapter it runs with, held until it ends.

    `index` says which of its prompt's answers it is; until the prompt is computed the others are
    `followers` of one `leader`, and only that one runs. `num_cached_tokens` of the prompt came
    from the prefix cache at its first start. A lower `priority` runs first where the policy says
    so, then a lower `arrival`. Past `deadline_s` it is aborted, `expired` tells this from other
    aborts.

    `tables` keeps the rest: of each table the first `num_freed` entries are given back; the first
    `num_published` blocks can be found by others under `block_names`, a chain begun by `salt`.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float = 0.0
    lora: LoraAdapter | None = None
    index: int = 0
    priority: int = 0
    deadline_s: float | None = None
    expired: bool = False
    arrival: int = -1
    salt: bytes = b""
    leader: Request | None = None
    followers: list[Request] = field(default_factory=list)
    state: State = State.WAITING
    finish_reason: FinishReason | None = None
    output_ids: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    num_freed: list[int] = field(default_factory=list)
    num_published: int = 0
    block_names: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    most_computed: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is not in the cache: 1 while decoding."""
        return self.num_tokens - self.num_computed

    def tokens(self, start: int, count: int) -> list[int]:
        """The token ids at positions start … start+count−1."""
        num_prompt = len(self.prompt_ids)
        if start >= num_prompt:
            return self.output_ids[start - num_prompt : start - num_prompt + count]
        head = list(self.prompt_ids[start : start + count])
        return head + self.output_ids[: count - len(head)]
