"""The output-quality watch on the embedded engine: from its outputs and logits to findings.

Holds the table of running answers and what is asked of the logits. It keeps no text: of a running
answer its last token ids and sums, of an ended one a reading.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ullage.engine.request import FinishReason, Request
from ullage.engine.steps import Output
from ullage.findings.finding import Finding
from ullage.findings.json import finding_document
from ullage.probes.quality.answer import AnswerReading, QualityOfAnswer
from ullage.probes.quality.rules import findings_on
from ullage.probes.quality.scripts import SCRIPTS, count_letters
from ullage.probes.quality.watch import QualityWatch

if TYPE_CHECKING:
    import torch

    from ullage.engine.text.tokenizer import Tokenizer

SCHEMA = "ullage.quality/1"
LOOK_EVERY_STEPS = 8
"""The likeliest token's probability takes a pass over the vocabulary: at every eighth step."""
PROMPT_TOKENS = 128
"""So much of a prompt's end tells the script it is written in."""
JUDGED = "judged"
ENDS = (JUDGED, "ignore_eos", "aborted", "failed")
"""How answers end, for this watch. Those that may not end by themselves are not judged, nor are
those that somebody cut."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An answer that ended: how, one of ENDS; if judged its reading, and which traits it has.

    A trait that it could not have, or of which nothing is known yet, is not among `traits`.
    """

    how: str
    reading: AnswerReading | None = None
    traits: Mapping[str, bool] = field(default_factory=dict)


class Quality:
    """One engine's watch; called by the engine's thread only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.watch = QualityWatch()
        self.ended: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._running: dict[Request, QualityOfAnswer] = {}
        self._num_steps = 0

    def look(self, requests: Sequence[Request], logits_BV: torch.Tensor) -> None:
        """The logits of a step, one row for each request, as the model gave them."""
        self._num_steps += 1
        if (self._num_steps - 1) % LOOK_EVERY_STEPS:
            return
        for request, logits_V in zip(requests, logits_BV, strict=True):
            # Who has no token yet is not known yet: a warm-up's requests never are.
            answer = self._running.get(request)
            if answer is not None:
                probability = likeliest(logits_V)
                if math.isfinite(probability):
                    answer.look(probability)

    def take(self, output: Output) -> Ended | None:
        """What a step gave one request; what became of the answer, when it has ended."""
        request = output.request
        self._of(request).take(output.token_id, output.text)
        return self.end(request) if output.finished else None

    def end(self, request: Request) -> Ended:
        """Account for a request that has ended, and forget it."""
        answer = self._running.pop(request, None)
        how = _how(request)
        self.ended[how] += 1
        if how != JUDGED or answer is None:
            return Ended(how)
        reading = answer.reading(
            at_limit=request.finish_reason is FinishReason.LENGTH,
            temperature=request.params.temperature,
        )
        return Ended(how, reading, self.watch.take(reading))

    def runs(self, request: Request) -> bool:
        """Whether its answer is still being followed."""
        return request in self._running

    def findings(self) -> tuple[Finding, ...]:
        """What every rule says now."""
        return findings_on(self.watch.report())

    def document(self) -> dict[str, Any]:
        """What GET /ullage/quality says."""
        report = self.watch.report()
        return {
            "schema": SCHEMA,
            "running": len(self._running),
            "ended": {how: self.ended[how] for how in ENDS},
            "begun_anew": report.begun_anew,
            **{
                when: {
                    "answers": num,
                    **asdict(means),
                    "traits": {name: asdict(rate) for name, rate in rates.items()},
                }
                for when, num, means, rates in (
                    ("recent", report.recent, report.recent_means, report.recent_rates),
                    ("past", report.past, report.past_means, report.past_rates),
                )
            },
            "findings": [finding_document(one) for one in findings_on(report)],
        }

    def _of(self, request: Request) -> QualityOfAnswer:
        found = self._running.get(request)
        if found is None:
            letters = [0] * len(SCRIPTS)
            count_letters(self._tokenizer.decode(request.prompt_ids[-PROMPT_TOKENS:]), letters)
            found = self._running[request] = QualityOfAnswer(letters)
        return found


def likeliest(logits_V: torch.Tensor) -> float:
    """The probability of the likeliest token; NaN of logits that are not finite.

    By numpy, in this thread: torch would wake its threads, which then spin for longer than this
    takes.
    """
    row_V = logits_V.float().numpy()
    with np.errstate(all="ignore"):
        return float(1.0 / np.exp(row_V - row_V.max()).sum())


def _how(request: Request) -> str:
    """Which of ENDS."""
    if request.finish_reason is FinishReason.ERROR:
        return "failed"
    if request.finish_reason is FinishReason.ABORT:
        return "aborted"
    return "ignore_eos" if request.params.ignore_eos else JUDGED
