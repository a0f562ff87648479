"""The embedded engine's metrics: vLLM's names, and ullage_ where vLLM has none. Data only.

`serving/metric_table.py` writes them; an embedding server exports the few that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ullage.telemetry.dialects.source import Arithmetic, Dialect, Metric, Source
from ullage.telemetry.dialects.vllm import CAPACITY, COMMON, INFO
from ullage.telemetry.snapshot import Name

UNJUDGED = "the probe cannot evaluate that rule"
OWN: Mapping[Name, tuple[Source, ...]] = {
    "kv_cached_tokens": (
        Arithmetic(
            Arithmetic(
                Metric("ullage_kv_cache_cached_bytes"), "÷", Metric("ullage_kv_cache_total_bytes")
            ),
            "×",
            CAPACITY,
            near=True,
        ),
    ),
    "probe_findings": (Metric("ullage_probe_findings", combine="max", by="id", nan=UNJUDGED),),
}

ULLAGE = Dialect(
    engine="ullage",
    title="embedded engine",
    proof="recorded",
    versions="0.1",
    marks=("ullage_engine_info",),
    # Of vLLM's names the newest, which it has in every version.
    fields={
        **{name: (replace(sources[0], versions=""),) for name, sources in COMMON.items()},
        **OWN,
    },
    absent={},
    info=INFO,
    hints={
        "kv_used_ratio": "an embedding server has no KV cache",
        "probe_findings": "a server judges its model with --probe-baseline",
    },
)
