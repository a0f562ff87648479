"""docs/telemetry.md says of every engine and field what the dialects say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from ullage.telemetry.gpus import METRICS

ROOT = Path(__file__).parents[2]


def test_the_tables_are_what_the_dialects_give() -> None:
    path = ROOT / "tools" / "telemetry_docs.py"
    spec = importlib.util.spec_from_file_location("telemetry_docs", path)
    assert spec and spec.loader
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    text = writer.DOCUMENT.read_text(encoding="utf-8")
    assert text.count(writer.BEGIN) == text.count(writer.END) == 1
    between = text.partition(writer.BEGIN)[2].partition(writer.END)[0]
    assert between == writer.tables(), "write it anew: python tools/telemetry_docs.py"


def test_every_metric_of_gpus_is_named_and_none_that_is_not_read() -> None:
    text = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
    section = text.partition("\n## GPUs\n")[2].partition("\n## ")[0]
    assert sorted(set(re.findall(r"DCGM_FI_\w+", section))) == sorted(METRICS)
