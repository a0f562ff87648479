"""Dashboards made for vLLM work: names, types, labels and buckets are those of a real vLLM 0.32."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from ullage.engine.options import EngineOptions
from ullage.serving.app import start_server
from ullage.serving.metric_table import COUNTERS, GAUGES, HISTOGRAMS

RECORDED = Path(__file__).parent / "fixtures" / "vllm-0.32-metrics.json"
FAMILIES: dict[str, Any] = json.loads(RECORDED.read_text())["families"]
# vLLM exports these as 0 unless it runs with --enable-mfu-metrics; nothing is estimated here, and
# a 0 would say otherwise.
NOT_HERE = {name for name in FAMILIES if name.startswith("vllm:estimated_")}


PATHS_HERE = ("paged", "gathered")  # what "auto" may choose


@pytest.fixture(scope="module")
def exposition(model_dir: Path) -> Iterator[str]:
    """After a few requests, of a server with the limits that vLLM had when it was recorded."""
    options = EngineOptions(kv_cache_memory_bytes=1 << 22, max_model_len=256, enable_lora=True)
    handle = start_server(model_dir, options, served_model_name="tiny")
    with httpx.Client(base_url=handle.url, timeout=60) as http:
        body = {"prompt": "hello" * 9, "max_tokens": 3, "n": 2, "ignore_eos": True}
        for _ in range(2):
            http.post("/v1/completions", json=body).raise_for_status()
        yield http.get("/metrics").text
    handle.stop()


@pytest.fixture(scope="module")
def exported(exposition: str) -> dict[str, Metric]:
    families = text_string_to_metric_families(exposition)
    return {family.name: family for family in families if not family.name.endswith("_created")}


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - NOT_HERE))
def test_a_metric_of_vllm_is_exported_as_vllm_does_it(
    exported: dict[str, Metric], name: str
) -> None:
    recorded, ours = FAMILIES[name], exported[name]
    assert ours.type == recorded["type"]
    labels = {label for sample in ours.samples for label in sample.labels} - {"le"}
    if name == "vllm:cache_config_info":
        assert labels <= set(recorded["labels"])
    elif name != "vllm:lora_requests_info":  # vLLM had none to show before its first request
        assert labels == set(recorded["labels"])
    for series in recorded.get("series", ()):
        assert any(series.items() <= sample.labels.items() for sample in ours.samples), series
    if "le" in recorded:
        bounds = list(dict.fromkeys(s.labels["le"] for s in ours.samples if "le" in s.labels))
        assert bounds == recorded["le"]


def test_no_other_metric_has_vllms_prefix(exported: dict[str, Metric]) -> None:
    assert {name for name in exported if name.startswith("vllm:")} == FAMILIES.keys() - NOT_HERE


def test_our_own_names_follow_prometheus(exported: dict[str, Metric]) -> None:
    units = ("_bytes", "_seconds", "_ratio", "_info", "_tokens", "_freed", "_exceeded")
    for name, family in exported.items():
        if name.startswith("ullage_"):
            assert name.endswith((*units, "_cancelled")), name
            assert family.documentation
    for name in (*GAUGES, *COUNTERS, *HISTOGRAMS):
        assert name.startswith(("vllm:", "ullage_"))


def test_prompts_and_choices_are_counted_as_vllm_counts_them(exported: dict[str, Metric]) -> None:
    def value(name: str, **labels: str) -> float:
        family = exported[name.removesuffix("_total").removesuffix("_sum").removesuffix("_count")]
        (found,) = (
            sample.value
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )
        return found

    # Two prompts of 45 tokens; of the second, two blocks of 16 were there already.
    assert value("vllm:prompt_tokens_total") == 90
    assert value("vllm:prompt_tokens_cached_total") == 32
    assert value("vllm:prompt_tokens_by_source_total", source="local_compute") == 58
    assert value("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 32
    assert value("vllm:prefix_cache_hits_total") == 32
    assert value("vllm:prefix_cache_queries_total") == 90
    assert value("vllm:generation_tokens_total") == 12
    assert value("vllm:request_params_n_count") == 2
    assert value("vllm:request_params_n_sum") == 4
    assert value("vllm:request_success_total", finished_reason="length") == 4
    assert value("vllm:request_max_num_generation_tokens_sum") == 6
    assert value("vllm:engine_sleep_state", sleep_state="awake") == 1


def test_the_configuration_says_what_holds(exported: dict[str, Metric]) -> None:
    (cache,) = exported["vllm:cache_config_info"].samples
    assert cache.labels["cache_dtype"] == "float32"
    assert cache.labels["enable_prefix_caching"] == "True"
    (engine,) = exported["ullage_engine_info"].samples
    assert engine.labels["rope_fingerprint"]
    assert engine.labels["attention"] in PATHS_HERE
    assert engine.labels["step"] in ("compiled", "torch")


def test_promtool_finds_nothing_to_complain_about(exposition: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian's prometheus) is not installed")
    ran = subprocess.run(
        [promtool, "check", "metrics"], input=exposition, capture_output=True, text=True
    )
    # vLLM's names have a colon, which promtool keeps for recording rules.
    ours = [line for line in ran.stderr.splitlines() if line.startswith("ullage_")]
    assert ran.returncode in (0, 3), ran.stderr
    assert not ours


def test_before_the_first_request_gauges_say_what_holds(model_dir: Path) -> None:
    options = EngineOptions(kv_cache_memory_bytes=1 << 22, max_model_len=256)
    handle = start_server(model_dir, options, served_model_name="tiny")
    with httpx.Client(base_url=handle.url, timeout=60) as http:
        page = http.get("/metrics").text
    handle.stop()
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert values["ullage_kv_cache_total_bytes"] == handle.engine.kv.num_bytes > 0
    assert values["ullage_kv_cache_used_bytes"] == 0
    assert math.isnan(values["ullage_oldest_request_age_seconds"])
    assert math.isnan(values["ullage_kv_page_utilization_ratio"])
