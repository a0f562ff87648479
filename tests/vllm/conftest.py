"""What the live comparisons share: where vLLM is, and the seed of what is drawn."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "tools" / "vllm_setup.sh"


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """vLLM's Python; made by tools/vllm_setup.sh when it is not there yet."""
    home = os.environ.get("ULLAGE_VLLM_VENV") or "~/.cache/ullage/vllm-0.32"
    python = Path(home).expanduser() / "bin" / "python"
    if not python.exists():
        subprocess.run(["bash", str(SETUP)], check=True)
    return python


DEFAULT_SEED = 62_786
"""What a plain run draws: always the same, so that it fails for a change and not for its luck."""


@pytest.fixture(scope="session")
def seed(request) -> int:
    """DEFAULT_SEED, or ULLAGE_VLLM_SEED: a number, or `random` for a draw that nobody has seen.
    Printed at once, so that a failure can be drawn again."""
    asked = os.environ.get("ULLAGE_VLLM_SEED") or str(DEFAULT_SEED)
    seed = random.SystemRandom().randrange(10**6) if asked == "random" else int(asked)
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nseed {seed}: ULLAGE_VLLM_SEED={seed} repeats these draws", flush=True)
    return seed
