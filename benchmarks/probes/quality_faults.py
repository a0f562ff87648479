"""What the quality watch sees of faults in SmolLM2-135M, and what not: readings, replayed.

Each way answers prompts of eight kinds (chat, code, JSON, tables, French, Chinese, long texts, one
word) at temperatures from 0 to 1, 260 of them as it is and 70 with a fault; of each answer the
quality watch's reading is kept, no text. Readings go to
tests/probes/fixtures/quality_smollm2/WAY.json, where tests replay them. `--table` draws answers
from these recordings, again and again, and writes QUALITY_FAULTS.md of what the watch makes of
them: no server has answered so many, so that its numbers of answers are of this mix of prompts and
of one small model. A way takes one to three minutes of processor time:

    .venv/bin/python benchmarks/probes/quality_faults.py healthy
    .venv/bin/python benchmarks/probes/quality_faults.py --table
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from tests.engine.references import smollm2_gguf, smollm2_reference_dir
from tests.probes.quality_answers import RECORDED, recorded

from ullage.anatomy import load
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.request import SamplingParams
from ullage.engine.text.loading import load_tokenizer
from ullage.lab.passages import docstrings
from ullage.probes.quality.answer import AnswerReading
from ullage.probes.quality.quality import Quality
from ullage.probes.quality.watch import QualityWatch

PAGE = Path(__file__).with_name("QUALITY_FAULTS.md")
REPLAYS, PAST, LONGEST = 20, 1_100, 500
Tensors = dict[str, torch.Tensor]
LAYERS = 30
PROMPTS = {
    "chat": (
        "Why is the sky blue?",
        "Give me a recipe for pancakes.",
        "Who wrote Hamlet, and when?",
        "Explain photosynthesis to a child.",
        "What should I see in Rome in two days?",
        "How do I ask for a raise?",
        "Write a short poem about autumn.",
        "What is the capital of Australia and why is it not Sydney?",
        "Tips for sleeping better?",
        "Explain inflation in two sentences.",
    ),
    "code": (
        "Write a Python function that returns the n-th Fibonacci number.",
        "Write a SQL query that counts users per country.",
        "Write a JavaScript function to debounce another function.",
        "Implement binary search in C.",
        "Write a bash script that renames all .txt files to .md.",
        "Write a unit test for a stack class in Python.",
        "Show a for loop in Rust printing 1 to 10.",
        "Write HTML for a page with a table of three rows.",
    ),
    "json": (
        "Return a JSON object with fields name, age, city for three people.",
        "Give the planets as a JSON array with name and radius.",
        "Write a package.json for a small project.",
        "Return a JSON list of ten colours with hex codes.",
    ),
    "tables": (
        "Write a markdown table of the numbers 1 to 20 with their squares.",
        "Make a CSV with 20 rows: day, open, close, all shops open 9:00 to 17:00.",
        "Write a truth table of three inputs.",
        "List the multiplication table of 7, one per line.",
    ),
    "french": (
        "Pourquoi le ciel est-il bleu ?",
        "Donne-moi une recette de crêpes.",
        "Écris un court poème sur l'automne.",
        "Explique la photosynthèse à un enfant.",
    ),
    "chinese": (
        "天空为什么是蓝色的？",
        "请介绍一下北京。",
        "写一首关于秋天的短诗。",
        "怎样学好英语？",
    ),
    "long prompts": (),
    "short answers": (
        "Answer yes or no: is water wet?",
        "Is 7 prime? Answer yes or no.",
        "Reply with one word: the colour of snow.",
        "What is 2+2? Only the number.",
    ),
}
WEIGHTS = (6, 4, 2, 2, 2, 1, 2, 2)
TEMPERATURES = (0.0, 0.3, 0.7, 0.7, 1.0)


@dataclass(frozen=True)
class Way:
    """A change of the tensors (None: as it is), of the configuration, or of the temperature."""

    words: str
    answers: int = 70
    change: Callable[[Tensors], None] | None = None
    theta: float = 1.0
    temperature: float | None = None


def _scaled(part: str, layers: Sequence[int], factor: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for layer in layers:
            tensors[f"model.layers.{layer}.{part}.weight"] *= factor

    return change


def _swapped(tensors: Tensors) -> None:
    mlp = "model.layers.3.mlp."
    gate, up = f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def _noise(tensors: Tensors) -> None:
    draw = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "embed" not in name:
            tensor += 0.35 * tensor.std() * torch.randn(tensor.shape, generator=draw)


WAYS = {
    "healthy": Way("as it is", answers=260),
    "hot": Way("asked for at a temperature of 2", temperature=2.0),
    "q4_all": Way("q times 4 in every layer", change=_scaled("self_attn.q_proj", range(LAYERS), 4)),
    "q4_five": Way(
        "q times 4 in five layers", change=_scaled("self_attn.q_proj", (5, 10, 15, 20, 25), 4)
    ),
    "k_zero": Way("k zero in layer 12", change=_scaled("self_attn.k_proj", (12,), 0)),
    "v_zero": Way("v zero in five layers", change=_scaled("self_attn.v_proj", range(0, 30, 6), 0)),
    "swapped": Way("gate and up swapped in layer 3", change=_swapped),
    "noise": Way("noise of 0.35 of its deviation on every matrix", change=_noise),
    "theta": Way("rope theta times 5", theta=5.0),
}


def prompts(engine: Engine, way: Way) -> Iterator[tuple[str, tuple[int, ...], SamplingParams]]:
    """As many as the way has answers, the same for all ways as far as they go."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    draw = random.Random(1)  # noqa: S311
    texts = [text for text in docstrings() if len(text) > 1500]
    for number in range(way.answers):
        kind = draw.choices(list(PROMPTS), WEIGHTS)[0]
        said = draw.choice(PROMPTS[kind] or texts)[: draw.choice((1500, 3000, 4500))]
        if kind == "long prompts":
            said = f"Summarise this text:\n\n{said}"
        ids = tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": said}]))
        temperature, top_p = draw.choice(TEMPERATURES), 0.95
        if way.temperature is not None:
            temperature, top_p = way.temperature, 1.0
        yield (
            kind,
            tuple(ids[-1500:]),
            SamplingParams(
                max_tokens=draw.choice((128, 200, 256)),
                temperature=temperature,
                top_p=top_p,
                seed=number,
            ),
        )


def changed(way: Way, folder: Path) -> Path:
    """The model with the fault in it."""
    gguf = smollm2_gguf()
    assert gguf is not None, "make setup brings SmolLM2"
    if way.change is None and way.theta == 1.0:
        return gguf
    from safetensors.torch import load_file, save_file

    model = folder / "model"
    shutil.copytree(smollm2_reference_dir(gguf), model)
    tensors = load_file(model / "model.safetensors")
    if way.change is not None:
        way.change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    for place in (config, config.get("rope_parameters") or {}):
        if "rope_theta" in place:
            place["rope_theta"] *= way.theta
    (model / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(load(gguf))
    tokenizer.fast.save(str(model / "tokenizer.json"))
    settings = {"chat_template": tokenizer.chat_template, "eos_token": tokenizer.eos_token}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def record(way: Way) -> list[tuple[str, AnswerReading]]:
    """Kind and reading of every answer, sixteen at a time."""
    with tempfile.TemporaryDirectory() as folder:
        options = EngineOptions(quantization="int8", max_num_seqs=16, max_model_len=2048)
        engine = Engine.load(changed(way, Path(folder)), options)
    assert engine.tokenizer is not None
    quality = Quality(engine.tokenizer)
    engine.on_logits = quality.look
    kinds: dict[str, str] = {}
    for number, (kind, ids, params) in enumerate(prompts(engine, way)):
        kinds[str(number)] = kind
        engine.add_request(str(number), ids, params)
    found = []
    while engine.has_work:
        for output in engine.step().outputs:
            ended = quality.take(output)
            if ended is not None and ended.reading is not None:
                found.append((kinds[output.request.id], ended.reading))
    return found


def _rounded(values: dict[str, object]) -> dict[str, object]:
    return {k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()}


@dataclass(frozen=True)
class Replays:
    """Of `REPLAYS`: after how many answers each was seen that was, and by which traits."""

    after: tuple[int, ...]
    traits: tuple[str, ...]

    def words(self) -> str:
        if not self.after:
            return f"0 of {REPLAYS} | |"
        return (
            f"{len(self.after)} of {REPLAYS} | {median(self.after):.0f} "
            f"({min(self.after)} to {max(self.after)}) | {', '.join(self.traits)}"
        )


def replays(well: Sequence[AnswerReading], ill: Sequence[AnswerReading]) -> Replays:
    """Each after a past of healthy answers, drawn at random as those of the sick model are."""
    after, traits = [], set[str]()
    for seed in range(REPLAYS):
        draw, watch = random.Random(seed), QualityWatch()  # noqa: S311
        for _ in range(PAST):
            watch.take(draw.choice(well))
        for number in range(1, LONGEST + 1):
            watch.take(draw.choice(ill))
            if watch.fired:
                after.append(number)
                traits |= watch.fired
                break
    return Replays(tuple(after), tuple(sorted(traits)))


def page() -> str:
    """What the recorded readings show, and in how many replays it is seen."""
    well = [reading for _, reading in recorded("healthy")]
    lines = [
        "# What the output-quality watch sees of faults",
        "",
        "SmolLM2-135M in int8, answers to eight kinds of prompts; made by "
        "`benchmarks/probes/quality_faults.py`. The watch replays recorded readings: it learns "
        f"from {PAST:,} answers drawn from the healthy ones, then takes up to {LONGEST} drawn from "
        f"those of the way, and whether anything fires is looked at after each. {REPLAYS} replays "
        "with other draws; the first row is the control. 70 answers are drawn seven times each, so "
        "that between real servers the number of answers varies by more than here.",
        "",
        "| | answers | confidence | repeated | in a loop | at the limit | seen in "
        "| after answers: median (least to most) | by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, way in WAYS.items():
        found = [reading for _, reading in recorded(name)]
        lines.append(
            f"| {way.words} | {len(found)} | {_mean([r.confidence for r in found]):.2f} | "
            f"{_mean([r.repetition_ratio for r in found]):.2f} | "
            f"{_mean([r.looping for r in found]):.2f} | {_mean([r.at_limit for r in found]):.2f} "
            f"| {replays(well, found).words()} |"
        )
    return "\n".join(lines)


def _mean(values: Sequence[float | None]) -> float:
    return fmean(value for value in values if value is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", choices=[*WAYS, []])
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    for name in args.ways:
        started = time.monotonic()
        found = record(WAYS[name])
        RECORDED.mkdir(parents=True, exist_ok=True)
        rows = [{"kind": kind, **_rounded(asdict(reading))} for kind, reading in found]
        text = ",\n".join(json.dumps(row) for row in rows)
        (RECORDED / f"{name}.json").write_text(f"[\n{text}\n]\n")
        num = sum(reading.num_tokens for _, reading in found)
        print(f"{name}: {num:,} tokens in {time.monotonic() - started:.0f} s", file=sys.stderr)
    if args.table:
        PAGE.write_text(page() + "\n")
        print(PAGE.read_text())


if __name__ == "__main__":
    main()
