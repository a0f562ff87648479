"""What the live comparisons share: where vLLM is, and the seed of what is drawn."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from plugin_server import Servers

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # for what the plugin's tests share: `tests.plugins`
SETUP = ROOT / "tools" / "vllm_setup.sh"


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """vLLM's Python; made by tools/vllm_setup.sh when it is not there yet."""
    home = os.environ.get("ULLAGE_VLLM_VENV") or "~/.cache/ullage/vllm-0.32"
    python = Path(home).expanduser() / "bin" / "python"
    if not python.exists():
        subprocess.run(["bash", str(SETUP)], check=True)
    return python


@pytest.fixture(scope="session")
def launched(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Starts vLLM servers with the plugin, one at a time."""
    from plugin_server import save_model, servers

    with servers(vllm_python, save_model(tmp_path_factory.mktemp("plugin") / "model")) as started:
        yield started


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
