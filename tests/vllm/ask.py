"""Putting questions to the oracles in tools/, which run in vLLM's own environment."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


def ask_vllm(python: Path, oracle: Path, questions: list[dict]) -> Iterator[dict]:
    """The oracle's answers, in order, as they come. A failure shows the end of its log."""
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as log:
        json.dump(questions, given)
        given.seek(0)
        with subprocess.Popen(
            ["nice", "-n", "5", str(python), str(oracle)],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as oracle_run:
            assert oracle_run.stdout is not None
            try:
                for line in oracle_run.stdout:
                    if line.startswith("{"):
                        yield json.loads(line)
            except GeneratorExit:  # nobody wants the rest
                oracle_run.terminate()
                raise
        log.seek(0)
        assert oracle_run.returncode == 0, log.read()[-3000:]
