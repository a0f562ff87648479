"""Real weights: SmolLM2's GGUF through the engine gives the tokens of transformers.

The reference is transformers' own reading of the same file, dequantised to float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.driving import finish, generate, greedy_params
from tests.engine.references import greedy, is_greedy, load_reference, smollm2_reference_dir
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.request import FinishReason, SamplingParams

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about a harbour in winter.",
    "Explain to a child why the sky is blue.",
    "List three uses of a paper clip.",
    "Translate 'good morning' into Spanish.",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
    "2 + 2 =",
    "The three laws of thermodynamics are",
    "A B C D E F G",
    "Summarise: the committee met on Tuesday and decided nothing.",
    "Who wrote Hamlet, and when?",
    "import numpy as np\n",
    "The quick brown fox",
    "Give me a recipe for pancakes.",
    "x",
    "Naïve café — déjà vu, 東京, 🙂!",
    "SELECT name FROM users WHERE",
    "In 1969, 12345 people",
    "Why do cats purr? " * 12,
)


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Engine:
    options = EngineOptions(max_num_seqs=16, max_num_batched_tokens=128, max_model_len=512)
    return Engine.load(smollm2, options)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    pytest.importorskip("accelerate", reason="transformers reads GGUF only with accelerate")
    return load_reference(smollm2_reference_dir(smollm2))


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    """Half bare text, half through the chat template: 1 to about 100 tokens."""
    assert engine.tokenizer is not None
    texts = [
        text
        if index % 2
        else engine.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        for index, text in enumerate(QUESTIONS)
    ]
    return [engine.tokenizer.encode(text) for text in texts]


def test_four_prompts_together(engine: Engine, reference: Any, prompts: list[list[int]]) -> None:
    for request in generate(engine, prompts[:8:2], greedy_params(16)):
        assert is_greedy(reference, list(request.prompt_ids), request.output_ids)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 100 s of one processor, more where others work too
def test_twenty_prompts_alone_and_in_a_batch_of_16(
    engine: Engine, reference: Any, prompts: list[list[int]]
) -> None:
    assert len(prompts) == 20
    together = [r.output_ids for r in generate(engine, prompts, greedy_params(64))]
    alone = [generate(engine, [prompt], greedy_params(64))[0].output_ids for prompt in prompts]
    for prompt, *found in zip(prompts, together, alone, strict=True):
        assert all(is_greedy(reference, prompt, tokens) for tokens in found)
    # The same by transformers' own generate(), which is slow, on a few.
    for index in (0, 7, 16, 19):
        generated = greedy(reference, prompts[index], 64)
        assert is_greedy(reference, prompts[index], generated)


def test_it_answers_a_question_and_stops(engine: Engine, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=64, temperature=0.0)
    (request,) = engine.add_request("paris", tuple(prompts[0]), params)
    text = finish(engine)["paris"]
    assert "Paris" in text
    assert "<|im_end|>" not in text
    if request.finish_reason is FinishReason.STOP:
        assert request.output_ids[-1] == 2  # <|im_end|>


def test_its_tokenizer_survives_any_text(engine: Engine) -> None:
    assert engine.tokenizer is not None
    for text in (*QUESTIONS, "  two  spaces\n\n\ttabs ", "1234567890", "<|im_start|>user"):
        ids = engine.tokenizer.encode(text)
        assert engine.tokenizer.decode(ids, skip_special=False) == text
    # SmolLM cuts numbers into digits; its special tokens are one token each.
    assert len(engine.tokenizer.encode("1234567890")) == 10
    assert engine.tokenizer.encode("<|im_start|>") == [1]
