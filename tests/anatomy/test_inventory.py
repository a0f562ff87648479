"""docs/inventory.md says what ullage does today: a sample of its rows is read again."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import generate_inventory  # noqa: E402

PAGE = (ROOT / "docs/inventory.md").read_text(encoding="utf-8")
LINES = [line for line in PAGE.splitlines() if line.startswith("| ")]
ROWS = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in LINES[1:]]
SAMPLE = """
LlamaForCausalLM Qwen3NextForCausalLM DeepseekV3ForCausalLM Gemma3nForConditionalGeneration
MambaForCausalLM AlbertForMaskedLM T5ForConditionalGeneration WhisperForConditionalGeneration
Lfm2VlForConditionalGeneration Blip2ForConditionalGeneration XLNetLMHeadModel RwkvForCausalLM
""".split()  # noqa: SIM905


def test_every_class_has_one_row() -> None:
    assert [row[0] for row in ROWS] == list(generate_inventory.classes())


@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_is_current(name: str) -> None:
    row = next(row for row in ROWS if row[0] == name)
    family, state, parameters, why = generate_inventory.read_state(name, row[1])
    assert row[2:5] == (family, state, parameters)
    if state != "exact":
        assert row[6] == why


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GlmForCausalLM"])
def test_equal_means_that_the_library_s_model_has_as_many(name: str) -> None:
    row = next(row for row in ROWS if row[0] == name)
    assert row[5] == generate_inventory.EQUAL
    assert f"{generate_inventory.counted(name, row[1]):,}" == row[4]


def test_the_numbers_at_the_top_are_those_of_the_rows() -> None:
    found = re.search(r"Of (\d+) architecture classes \*\*(\d+) .* For (\d+) classes", PAGE)
    assert found is not None
    total, exact, equal = map(int, found.groups())
    assert (total, exact) == (len(ROWS), sum(row[3] == "exact" for row in ROWS))
    assert equal == sum(row[5] == generate_inventory.EQUAL for row in ROWS) >= 60


def test_an_exact_reading_is_equal_or_says_why_not() -> None:
    for row in ROWS:
        if row[3] == "exact" and row[5] not in (
            generate_inventory.EQUAL,
            generate_inventory.BUILT_NOT,
        ):
            assert row[0] in generate_inventory.DIFFERS, row
