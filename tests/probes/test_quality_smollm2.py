"""The quality watch on a real model: recorded answers of SmolLM2 replayed, and live ones (slow).

Recorded by `benchmarks/probes/quality_faults.py`; docs/probes.md has what each fault shows.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from statistics import fmean

import pytest
import torch

from tests.probes.quality_answers import RECORDED, recorded
from ullage.engine.batch import Batch
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.request import SamplingParams
from ullage.probes.quality.answer import AnswerReading
from ullage.probes.quality.quality import Quality
from ullage.probes.quality.rules import findings_on
from ullage.probes.quality.watch import QualityWatch

PAGE = (Path(__file__).parents[2] / "docs" / "probes.md").read_text()


def well(num: int, seed: int) -> QualityWatch:
    readings = [reading for _, reading in recorded("healthy")]
    draw, watch = random.Random(seed), QualityWatch()  # noqa: S311
    for _ in range(num):
        watch.take(draw.choice(readings))
    return watch


def fired(watch: QualityWatch) -> set[str]:
    return {one.id for one in findings_on(watch.report()) if one.state == "fired"}


def test_the_recording_is_of_ten_thousand_tokens_of_every_kind() -> None:
    found = recorded("healthy")
    assert sum(reading.num_tokens for _, reading in found) > 10_000
    assert {kind for kind, _ in found} == {
        *("chat", "code", "json", "tables", "french", "chinese", "long prompts", "short answers")
    }


@pytest.mark.parametrize("seed", range(4))
def test_healthy_answers_raise_nothing_in_the_order_of_bursts(seed: int) -> None:
    """A client asks for up to 60 answers of one kind in a row."""
    by_kind: dict[str, list[AnswerReading]] = {}
    for kind, reading in recorded("healthy"):
        by_kind.setdefault(kind, []).append(reading)
    draw, watch = random.Random(seed), QualityWatch()  # noqa: S311
    while watch.num_judged < 4_000:
        kind = draw.choice(list(by_kind))
        for _ in range(draw.choice((1, 5, 20, 60))):
            watch.take(draw.choice(by_kind[kind]))
            assert not watch.fired, (watch.num_judged, kind)


# What the recorded faults do to answers, by docs/probes.md: a fault that leaves half of them fluent
# is the business of other probes.
SEEN = {"hot": ("Q004", 100), "q4_all": ("Q004", 150), "noise": ("Q004", 110)}
UNSEEN = ("q4_five", "k_zero", "v_zero", "swapped", "theta")


@pytest.mark.parametrize("way", SEEN)
def test_nonsense_is_seen(way: str) -> None:
    rule_id, within = SEEN[way]
    ill, healthy = ([reading for _, reading in recorded(name)] for name in (way, "healthy"))
    draw, watch = random.Random(2), well(1_200, 2)  # noqa: S311
    for _ in range(within):
        watch.take(draw.choice(ill))
    assert rule_id in fired(watch)
    for _ in range(300):
        watch.take(draw.choice(healthy))
    assert not fired(watch)


def test_the_page_says_of_each_recording_whether_it_is_seen() -> None:
    """Who makes the net finer says so there."""
    rows = re.findall(r"^\|.*\| (\d+) of 20 \|", PAGE, re.M)
    assert {path.stem for path in RECORDED.iterdir()} == {"healthy", *SEEN, *UNSEEN}
    assert sorted(rows) == sorted(["20"] * len(SEEN) + ["0"] * (1 + len(UNSEEN)))


@pytest.mark.parametrize("way", UNSEEN)
def test_what_the_page_calls_unseen_is(way: str) -> None:
    draw, watch = random.Random(4), well(1_100, 4)  # noqa: S311
    ill = [reading for _, reading in recorded(way)]
    for _ in range(500):
        watch.take(draw.choice(ill))
        assert not watch.fired


ASKED = (
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "Return a JSON object with name and age.",
    "Pourquoi le ciel est-il bleu ?",
    "天空为什么是蓝色的？",
    "Write a markdown table of the numbers 1 to 9 with their squares.",
    "Summarise: " + "the sea lies between two lands and carries what both need. " * 20,
)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # two minutes of two processors
def test_ten_thousand_live_tokens_raise_nothing_and_an_unsure_model_does(
    smollm2: Path,
) -> None:
    options = EngineOptions(quantization="int8", max_num_seqs=16, max_model_len=512)
    engine = Engine.load(smollm2, options)
    assert engine.tokenizer is not None
    quality = Quality(engine.tokenizer)

    def answers(num: int) -> list[AnswerReading]:
        """Of `num` answers, as they end."""
        assert engine.tokenizer is not None
        for number in range(num):
            said = [{"role": "user", "content": ASKED[number % len(ASKED)]}]
            prompt = engine.tokenizer.encode(engine.tokenizer.apply_chat_template(said))
            params = SamplingParams(
                max_tokens=96, temperature=(0.0, 0.7)[number % 2], top_p=0.95, seed=number
            )
            engine.add_request(str(number), tuple(prompt), params)
        found = []
        while engine.has_work:
            for output in engine.step().outputs:
                ended = quality.take(output)
                if ended is not None and ended.reading is not None:
                    found.append(ended.reading)
            assert not quality.watch.fired
        return found

    engine.on_logits = quality.look
    live = answers(140)
    assert sum(reading.num_tokens for reading in live) > 10_000
    # The recording is still what the engine does.
    usual = fmean(r.confidence for _, r in recorded("healthy") if r.confidence is not None)
    assert fmean(r.confidence for r in live if r.confidence is not None) == pytest.approx(
        usual, abs=0.12
    )
    flatten(engine)
    quality.watch = QualityWatch()
    ill, watch, draw = answers(32), well(1_200, 3), random.Random(3)  # noqa: S311
    for _ in range(150):
        watch.take(draw.choice(ill))
    assert fired(watch)


def flatten(engine: Engine) -> None:
    """A model that is sure of nothing: its logits lose most of what they said."""
    forward = engine._forward

    def flat(batch: Batch) -> torch.Tensor:
        return forward(batch) * 0.3

    engine._forward = flat  # type: ignore[method-assign]
