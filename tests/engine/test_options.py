"""The length that the embedded engine serves: the model's own, a flag's, or neither's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.families import write_model
from ullage.anatomy import load
from ullage.engine.options import EngineOptions
from ullage.errors import BadUsage


def test_the_longest_length_is_the_models_or_a_flags(tmp_path: Path) -> None:
    own = load(write_model("llama", tmp_path)).anatomy.spec
    none = replace(own, max_positions=0)
    assert EngineOptions().resolve_max_model_len(own) == own.max_positions
    assert EngineOptions(max_model_len=7).resolve_max_model_len(own) == 7
    assert EngineOptions(max_model_len=10**6).resolve_max_model_len(none) == 10**6
    for options, spec, words in (
        (EngineOptions(), none, "names no longest length"),
        (EngineOptions(max_model_len=0), none, "at least 1"),
        (EngineOptions(max_model_len=own.max_positions + 1), own, "the model's own limit"),
    ):
        with pytest.raises(BadUsage, match=words):
            options.resolve_max_model_len(spec)
