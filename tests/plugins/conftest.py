"""The plugin's own distribution, where it lies in this repository."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SOURCE = Path(__file__).parents[2] / "plugins" / "vllm" / "src"

if str(SOURCE) not in sys.path:
    sys.path.insert(0, str(SOURCE))


@pytest.fixture
def vllm_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one name that the plugin takes from vLLM while it runs."""
    for name in ("vllm", "vllm.v1", "vllm.v1.request"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.v1.request"].RequestStatus = SimpleNamespace(  # type: ignore[attr-defined]
        FINISHED_ABORTED="aborted"
    )
