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


@pytest.fixture(scope="session")
def seed() -> int:
    """ULLAGE_VLLM_SEED, or a new one; printed, so that a failure can be drawn again."""
    seed = int(os.environ.get("ULLAGE_VLLM_SEED") or random.SystemRandom().randrange(10**6))
    print(f"\nseed {seed}: ULLAGE_VLLM_SEED={seed} repeats these draws")
    return seed
