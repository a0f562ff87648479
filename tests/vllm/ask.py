"""Putting questions to the oracles in tools/, which run in vLLM's own environment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path


def ask_vllm(python: Path, oracle: Path, questions: list[dict], timeout_s: float = 1800) -> list:
    """The oracle's answers, in order. Its log goes to a failing test's message only."""
    run = subprocess.run(
        ["nice", "-n", "5", str(python), str(oracle)],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
