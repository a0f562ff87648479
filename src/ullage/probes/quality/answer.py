"""One answer as its tokens come: how much of it repeats, how sure the model was, in which script.

Holds the state of one request, of bounded size, and the reading that is left when it ends: numbers
only, no token and no text. What many answers say together is `watch`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ullage.probes.quality.scripts import (
    SCRIPTS,
    count_letters,
    main_script,
    mixed,
    switched,
)

TAIL_TOKENS = 256
"""So many last tokens of a running answer are looked at when it ends."""
MAX_PERIOD = 64
GRAM = 4
LEAST_GRAMS = 29
"""Below 32 tokens a share of repeated 4-grams says nothing."""
LOOP_REPEATS, LOOP_TOKENS = 4, 32
"""A tail is a loop when its cycle came so often and filled so many tokens: a row of dashes or a
list of three like lines is none."""
STUCK_REPEATS, STUCK_PERIOD = 20, 8


@dataclass(frozen=True, slots=True)
class Cycle:
    """The last `num_tokens` tokens repeat every `period` tokens."""

    period: int
    num_tokens: int

    @property
    def repeats(self) -> float:
        return self.num_tokens / self.period


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """What is kept of an answer. `script`: what it is written in; None of too few letters.

    `at_limit`: it was cut by a token limit, else it ended by itself. `repetition_ratio`: share of
    the 4-grams of its last 256 tokens that had come before among them; None of a short answer.
    `confidence`: mean probability of the likeliest next token over `num_looks` looks, None of none.
    `switched`: in a script that the prompt did not ask for; None where that is open.
    """

    num_tokens: int
    at_limit: bool
    cycle: Cycle | None
    repetition_ratio: float | None
    confidence: float | None
    num_looks: int
    prompt_script: str | None
    script: str | None
    switched: bool | None
    mixed: bool
    temperature: float

    @property
    def looping(self) -> bool:
        """It ends in a loop."""
        cycle = self.cycle
        return (
            cycle is not None and cycle.repeats >= LOOP_REPEATS and cycle.num_tokens >= LOOP_TOKENS
        )

    @property
    def stuck(self) -> bool:
        """A few tokens over and over until the limit: nothing that anybody asks for."""
        cycle = self.cycle
        return (
            self.at_limit
            and cycle is not None
            and cycle.period <= STUCK_PERIOD
            and cycle.repeats >= STUCK_REPEATS
        )


@dataclass(slots=True)
class QualityOfAnswer:
    """The state of one answer while it runs; `prompt_letters` by script, as `count_letters` does.

    At most TAIL_TOKENS token ids, for as long as the answer runs, and otherwise sums.
    """

    prompt_letters: Sequence[int]
    num_tokens: int = 0
    _letters: list[int] = field(default_factory=lambda: [0] * len(SCRIPTS))
    _tail: deque[int] = field(default_factory=lambda: deque(maxlen=TAIL_TOKENS))
    _sureness: float = 0.0
    _num_looks: int = 0

    def take(self, token_id: int | None, text: str) -> None:
        """One token, and the text that became certain with it."""
        if token_id is not None:
            self.num_tokens += 1
            self._tail.append(token_id)
        if text:
            count_letters(text, self._letters)

    def look(self, probability: float) -> None:
        """The probability of the likeliest next token, at one of the answer's tokens."""
        self._sureness += probability
        self._num_looks += 1

    def reading(self, *, at_limit: bool, temperature: float) -> AnswerReading:
        """What is kept once it has ended."""
        tail = list(self._tail)
        asked, given = main_script(self.prompt_letters), main_script(self._letters)
        return AnswerReading(
            self.num_tokens,
            at_limit,
            tail_cycle(tail),
            repetition_ratio(tail),
            self._sureness / self._num_looks if self._num_looks else None,
            self._num_looks,
            None if asked is None else SCRIPTS[asked],
            None if given is None else SCRIPTS[given],
            switched(self.prompt_letters, self._letters),
            mixed(self._letters),
            temperature,
        )


def tail_cycle(tokens: Sequence[int], max_period: int = MAX_PERIOD) -> Cycle | None:
    """The cycle that fills most of the end of `tokens`, at least twice; the shortest that does.

    Periods beyond `max_period` are not looked for.
    """
    best: Cycle | None = None
    count = len(tokens)
    for period in range(1, min(max_period, count // 2) + 1):
        at = count - 1
        while at >= period and tokens[at] == tokens[at - period]:
            at -= 1
        # Those before `at` are not compared, but the first period of the cycle lies there.
        length = count - 1 - at + period
        if length >= 2 * period and (best is None or length > best.num_tokens):
            best = Cycle(period, length)
        if best is not None and best.num_tokens >= best.period + max_period:
            # Fine and Wilf: any longer cycle that fills as much is a multiple of this one.
            break
    return best


def repetition_ratio(tokens: Sequence[int]) -> float | None:
    """Share of the 4-grams that had come before; None of fewer than LEAST_GRAMS."""
    grams = list(zip(*(tokens[start:] for start in range(GRAM)), strict=False))
    if len(grams) < LEAST_GRAMS:
        return None
    return 1.0 - len(set(grams)) / len(grams)
