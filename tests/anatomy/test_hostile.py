"""Crafted files can cost neither memory nor time: one sentence, or a valid index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_files import CASES, LIMIT_BYTES

HERE = Path(__file__).parent
# Files of 100 MB take longer to write than to refuse.
HEAVY = {case for case in CASES if " MB of " in case and not case.startswith("gguf")} | {
    "safetensors: a million empty tensors",
    "safetensors: braces 30 million deep",
    "index: two million tensors",
}
# Those that are merely strange: they are read, not refused.
READ = {"safetensors: 99 MB of spaces", "gguf: 2 million strings", "gguf: 400 MB of numbers"}
# Far above what any case takes (1 s), far below a hang.
MAX_CPU_SECONDS = 5


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in HEAVY else ()) for case in CASES],
)
def test_a_crafted_file_costs_neither_memory_nor_time(case: str) -> None:
    paths = [str(HERE), *sys.path]
    done = subprocess.run(
        [sys.executable, str(HERE / "hostile_files.py"), case],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["error"] is None) == (case in READ)
    assert len(result["error"] or "") < 600
    assert result["peak_bytes"] < LIMIT_BYTES
    assert result["seconds"] < MAX_CPU_SECONDS
