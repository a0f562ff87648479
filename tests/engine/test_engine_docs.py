"""docs/engine.md names what there is to choose from: attention paths and storages, in order."""

from __future__ import annotations

import re
from pathlib import Path

from ullage.engine.attention import PATHS
from ullage.engine.kv import KV_FORMATS

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"


def first_column(heading: str) -> list[str]:
    """The names in backquotes that begin the rows of the first table under a heading."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)[1]
    table = section[section.index("\n|") :].split("\n\n", 1)[0]
    return re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)


def test_the_page_lists_the_attention_paths_in_order_of_preference() -> None:
    assert first_column("Attention") == [path.name for path in PATHS]


def test_the_page_lists_the_storages_and_their_bytes() -> None:
    assert first_column("How keys and values are stored") == list(KV_FORMATS)
    page = PAGE.read_text(encoding="utf-8")
    for name, stored in KV_FORMATS.items():
        assert f"| `{name}` | {stored.head_bytes(64)} |" in page
