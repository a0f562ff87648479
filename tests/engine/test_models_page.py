"""docs/models.md names the families and GGUF architectures that run, no more and no fewer."""

from __future__ import annotations

import re
from pathlib import Path

from ullage.engine.model.families import FORWARDS
from ullage.engine.model.weights import GGUF_ARCHITECTURES

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def part(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def test_families() -> None:
    rows = [line.split("|")[1] for line in part("Families").splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == sorted(FORWARDS)


def test_gguf_architectures() -> None:
    listed = part("GGUF").split(": ")[0]
    assert sorted(re.findall(r"`([\w-]+)`", listed)) == sorted(GGUF_ARCHITECTURES)
