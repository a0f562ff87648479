"""The gravest alerts for engines that do not run here, on series written by their published names.

Slow: promtool evaluates every rule of seven files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.telemetry.prometheus_server import NEEDS_PROMTOOL
from tests.watch.code.promtool import Scenario, Values, counter, level, outcome
from ullage.telemetry.dialects.table import DIALECTS
from ullage.watch.code.ruleset import rule_file, ruleset_of

pytestmark = [pytest.mark.slow, NEEDS_PROMTOOL]

ON = 'job="llm",instance="a:1"'
BEFORE, DURING, AFTER = 6.0, 8.0, 8.0
MINUTES = BEFORE + DURING + AFTER
BLOCKS = 1000.0


def times(values: Values, factor: float) -> Values:
    return [None if value is None else round(factor * value, 6) for value in values]


def sglang(kv: Values, waiting: Values, tokens: Values, ended: Values) -> dict[str, Values]:
    found: dict[str, Values] = {}
    for rank in "01":  # both say the same
        mine = f'{ON},model_name="m",engine_type="unified",tp_rank="{rank}",pp_rank="0"'
        found |= {
            f"sglang:token_usage{{{mine}}}": kv,
            f"sglang:max_total_num_tokens{{{mine}}}": level((8000, MINUTES)),
            f"sglang:num_running_reqs{{{mine}}}": level((4, MINUTES)),
            f"sglang:num_queue_reqs{{{mine}}}": waiting,
        }
    mine = f'{ON},model_name="m"'
    return {
        **found,
        f"sglang:prompt_tokens_total{{{mine}}}": tokens,
        f"sglang:generation_tokens_total{{{mine}}}": tokens,
        f"sglang:e2e_request_latency_seconds_count{{{mine}}}": ended,
    }


def trtllm(kv: Values, waiting: Values, tokens: Values, ended: Values) -> dict[str, Values]:
    mine = f'{ON},model_name="m",engine_type="trtllm"'
    return {
        f"trtllm_kv_cache_used_blocks{{{mine}}}": times(kv, BLOCKS),
        f"trtllm_kv_cache_max_blocks{{{mine}}}": level((BLOCKS, MINUTES)),
        f"trtllm_num_requests_running{{{mine}}}": level((4, MINUTES)),
        f"trtllm_num_requests_waiting{{{mine}}}": waiting,
        f"trtllm_prompt_tokens_total{{{mine}}}": tokens,
        f"trtllm_generation_tokens_total{{{mine}}}": tokens,
        f'trtllm_request_success_total{{{mine},finished_reason="stop"}}': ended,
    }


def triton(kv: Values, waiting: Values, tokens: Values, ended: Values) -> dict[str, Values]:
    mine = f'{ON},model="tensorrt_llm",version="1"'
    blocks, requests = "nv_trt_llm_kv_cache_block_metrics", "nv_trt_llm_request_metrics"
    return {
        f'{blocks}{{{mine},kv_cache_block_type="used"}}': times(kv, BLOCKS),
        f'{blocks}{{{mine},kv_cache_block_type="max"}}': level((BLOCKS, MINUTES)),
        f'{requests}{{{mine},request_type="scheduled"}}': level((4, MINUTES)),
        f'{requests}{{{mine},request_type="waiting"}}': waiting,
        f"nv_llm_output_token_len_count{{{mine}}}": ended,
    }


def tgi(kv: Values, waiting: Values, tokens: Values, ended: Values) -> dict[str, Values]:
    return {
        f"tgi_batch_current_max_tokens{{{ON}}}": times(kv, BLOCKS),
        f"tgi_batch_max_total_tokens{{{ON}}}": level((BLOCKS, MINUTES)),
        f"tgi_batch_current_size{{{ON}}}": level((4, MINUTES)),
        f"tgi_queue_size{{{ON}}}": waiting,
        f"tgi_request_input_length_sum{{{ON}}}": tokens,
        f"tgi_request_generated_tokens_sum{{{ON}}}": tokens,
        f"tgi_request_duration_count{{{ON}}}": ended,
    }


def lmdeploy(kv: Values, waiting: Values, tokens: Values, ended: Values) -> dict[str, Values]:
    mine = f'{ON},model_name="m",engine="0"'
    return {
        f"lmdeploy:gpu_cache_usage_perc{{{mine}}}": kv,
        f"lmdeploy:num_requests_running{{{mine}}}": level((4, MINUTES)),
        f"lmdeploy:num_requests_waiting{{{mine}}}": waiting,
        f"lmdeploy:prompt_tokens_total{{{mine}}}": tokens,
        f"lmdeploy:generation_tokens_total{{{mine}}}": tokens,
        f"lmdeploy:e2e_request_latency_seconds_count{{{mine}}}": ended,
    }


def llamacpp(kv: Values, waiting: Values, tokens: Values, ended: Values) -> dict[str, Values]:
    # An older one, which still told its KV use; newer ones count no requests either.
    return {
        f"llamacpp:kv_cache_usage_ratio{{{ON}}}": kv,
        f"llamacpp:requests_processing{{{ON}}}": level((4, MINUTES)),
        f"llamacpp:requests_deferred{{{ON}}}": waiting,
        f"llamacpp:tokens_predicted_total{{{ON}}}": tokens,
    }


PAGES = {
    "sglang": sglang,
    "trtllm": trtllm,
    "triton": triton,
    "tgi": tgi,
    "lmdeploy": lmdeploy,
    "llamacpp": llamacpp,
}
FULL, QUEUE, STUCK = "UllageKVCacheNearFull", "UllageQueueWhileKVFull", "UllageEngineStuck"
# llama.cpp counts no requests, the Triton backend no tokens.
WITHOUT = {"llamacpp": {QUEUE}, "triton": {STUCK}}


def on_off(usual: float, faulty: float) -> Values:
    return level((usual, BEFORE), (faulty, DURING), (usual, AFTER))


def gains(usual: float, faulty: float) -> Values:
    return counter((usual, BEFORE), (faulty, DURING), (usual, AFTER))


def at(names: set[str], engine: str) -> Mapping[float, list[str]]:
    during = sorted(names - WITHOUT.get(engine, set()))
    return {BEFORE - 0.5: [], BEFORE + DURING - 0.5: during, MINUTES - 0.5: []}


@pytest.mark.parametrize("engine", PAGES)
def test_full_queueing_and_stuck(engine: str, tmp_path: Path) -> None:
    page = PAGES[engine]
    dialect = next(dialect for dialect in DIALECTS if dialect.engine == engine)
    place = tmp_path / f"{engine}.yml"
    place.write_text(rule_file(ruleset_of(dialect)))
    steady, ends = gains(6000, 6000), gains(60, 60)
    scenarios = {
        "full": Scenario(
            page(on_off(0.6, 0.97), on_off(0, 40), steady, ends), at({FULL, QUEUE}, engine)
        ),
        "stuck": Scenario(
            page(level((0.6, MINUTES)), level((0, MINUTES)), gains(6000, 0), gains(60, 0)),
            at({STUCK}, engine),
        ),
        "healthy": Scenario(
            page(level((0.6, MINUTES)), level((0, MINUTES)), steady, ends), at(set(), engine)
        ),
    }
    assert outcome(place, scenarios) == ""
