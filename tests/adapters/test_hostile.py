"""Adapters made to harm are refused in one sentence, in two seconds and 500 MB, without running."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.adapters.hostile_adapters import CASES, MARK, SOUND


def _outcome(case: str) -> dict[str, object]:
    script = Path(__file__).with_name("hostile_adapters.py")
    done = subprocess.run(
        [sys.executable, str(script), case], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcome = json.loads(done.stdout)
    assert outcome["seconds"] < 2
    return outcome


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_in_one_sentence(case: str) -> None:
    MARK.unlink(missing_ok=True)
    found = str(_outcome(case)["found"])
    assert found.startswith("refused "), found
    assert "\n" not in found
    assert len(found) < 600
    assert not MARK.exists()


@pytest.mark.parametrize("case", SOUND)
def test_what_is_odd_but_sound_is_read(case: str) -> None:
    assert str(_outcome(case)["found"]).startswith("read ")
