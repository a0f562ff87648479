"""The embedded engine's process: ready, refused, ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ullage.traffic.embedded import EngineDidNotStart, embedded_engine, private_bytes


def test_a_model_that_does_not_exist_gives_the_childs_own_sentence() -> None:
    with pytest.raises(EngineDidNotStart) as caught, embedded_engine("/nowhere/at/all"):
        pass
    assert "/nowhere/at/all" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert not str(caught.value).startswith("ullage serve:")


def test_an_engine_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    before = children()
    with (
        pytest.raises(EngineDidNotStart, match="not ready in time"),
        embedded_engine("/nowhere", start_timeout_s=0.0),
    ):
        pass
    assert children() == before


def children() -> list[str]:
    task = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return task.read_text(encoding="ascii").split() if task.exists() else []


def test_private_memory_of_a_process() -> None:
    mine = private_bytes(os.getpid())
    assert mine is not None and mine > 1 << 20
    assert private_bytes(2**22 + 1) is None
