"""The shared real configurations: audited without a crash, and no rule cries wolf on them."""

from __future__ import annotations

import json

import pytest
from audit_pool import NO_SHARED, SHARED, config_path, plain_model, shared_names

from ullage.audit import RULES, audit, prepare
from ullage.cli.main import main
from ullage.costs.deployment import Deployment, Parallel
from ullage.costs.hardware import parse_gpus
from ullage.findings import Severity

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason=NO_SHARED)

TRUE_WARNINGS = {
    # The range of float32 angles is a fact of a ten-million-token table.
    ("meta-llama--Llama-4-Scout-17B-16E-Instruct", "A027"),
    # Neither theta nor scaling is in this file; with the class's default 10,000 positions repeat.
    ("stepfun-ai--Step-3.7-Flash-FP8", "A021"),
}
"""Warnings that fire with the default deployment, and why they are right. No error does."""

TRUE_ERRORS = {
    # ColumnParallel and RowParallel layers must hold whole blocks (fp8_utils.py,
    # validate_fp8_block_shape): the shared expert's 1280 over 4 and 8 ranks is 320 and 160.
    ("stepfun-ai--Step-3.7-Flash-FP8", "A081"): {4, 8},
    # 704 / 8 = 88 and 1856 / 8 = 232 are no multiples of 16: vLLM loads each expert's scales
    # shifted (tests/audit/test_vllm_facts.py runs its loader).
    ("nvidia--Gemma-4-26B-A4B-NVFP4", "A082"): {8},
    ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", "A082"): {8},
}
"""Errors that a number of ranks brings forth, by that number, and why they are true. The others
are of memory (A141, A142), and are held to what the releases say they weigh."""

STATED = {
    # family: billions of parameters that its releases state (MiniMax-M3: that its sizes give)
    "MiniMax-M2": 229, "MiniMax-M3": 426, "Qwen3-235B": 235, "Qwen3-VL-235B": 235,
    "Qwen3.5-122B": 122, "Qwen3.5-397B": 397, "DeepSeek-R1": 671, "DeepSeek-V3": 671,
    "DeepSeek-V4-Flash": 284, "DeepSeek-V4-Pro": 1600, "Llama-4-Scout": 109, "Llama-3.1-405B": 405,
    "Llama-3.1-70B": 70, "Kimi-K2": 1030, "GLM-5": 744, "Nemotron-3-Ultra": 550, "Step-3.7": 196,
}  # fmt: skip
FOUR_BITS = ("NVFP4", "DeepSeek-V4", "Kimi-K2.5")
"""Words in the names of releases whose experts take four bits and a scale."""
BYTES_OF_DEVICE = {"H100": 85.0e9, "B200": 191.5e9}  # as their drivers report


def _weigh(name: str) -> float:
    """Bytes of a release's weights, from what it says of itself and nothing of ours."""
    billions = next(number for family, number in STATED.items() if family in name)
    fp8 = "FP8" in name or "DeepSeek" in name or "Kimi-K2-" in name
    each = 0.53 if any(word in name for word in FOUR_BITS) else 1.0 if fp8 else 2.0
    return billions * 1e9 * each


DEPLOYMENTS = [
    pytest.param(Deployment(), None, id="default"),
    pytest.param(Deployment(platform="cpu"), None, id="cpu"),
    pytest.param(Deployment(parallel=Parallel(tensor=8)), "B200:8", id="tp8"),
    pytest.param(
        Deployment(parallel=Parallel(tensor=2, pipeline=2, data=4, expert=True)), "H200:16",
        id="tp2-pp2-dp4-ep",
    ),
    pytest.param(Deployment(engine="sglang", engine_version="0.5.23"), "H100", id="sglang"),
    pytest.param(Deployment(max_model_len=-1, kv_cache_memory_bytes=1 << 30), None, id="auto-len"),
]  # fmt: skip


@pytest.mark.parametrize(("deployment", "gpu"), DEPLOYMENTS)
def test_every_rule_has_an_answer_for_every_configuration(deployment, gpu):
    gpus = parse_gpus(gpu) if gpu else None
    for name in shared_names():
        findings = audit(prepare(plain_model(name), deployment, gpus)[0])
        assert [f.id for f in findings] == [rule.id for rule in RULES], name


def test_nothing_grave_fires_without_a_true_reason():
    fired = set()
    for name in shared_names():
        for finding in audit(prepare(plain_model(name), Deployment())[0]):
            if finding.state == "fired" and finding.severity >= Severity.warning:
                assert finding.severity != Severity.error, (name, finding)
                fired.add((name, finding.id))
    assert fired == TRUE_WARNINGS


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("gpu", ["H100", "B200"])
def test_every_error_on_real_devices_has_a_true_reason(gpu, ranks):
    fired = set()
    devices = parse_gpus(f"{gpu}:{ranks}")
    memory = BYTES_OF_DEVICE[gpu]
    for name in shared_names():
        deployment = Deployment(parallel=Parallel(tensor=ranks))
        for finding in audit(prepare(plain_model(name), deployment, devices)[0]):
            if finding.state != "fired" or finding.severity != Severity.error:
                continue
            facts = {fact.name: fact.value for fact in finding.evidence}
            if finding.id == "A141":
                # what is copied to every rank, and layers left unquantised, make up the rest
                assert _weigh(name) / ranks * 1.2 > memory, (name, finding)
            elif finding.id == "A142":
                request = facts["KV of one such request"]
                # 0.92 of the device is vLLM's; some of it goes to activations and graphs
                assert _weigh(name) / ranks * 1.2 + request > 0.85 * memory, (name, finding)
            else:
                fired.add((name, finding.id))
    assert fired == {key for key, numbers in TRUE_ERRORS.items() if ranks in numbers}


@pytest.mark.parametrize("name", shared_names())
def test_the_command_line_gives_one_document(name, capsys):
    assert main(["audit", str(config_path(name)), "--output", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "ullage.audit/1"
    counts = document["counts"]
    assert counts["fired"] + counts["clear"] + counts["not_evaluable"] == len(RULES)
    assert counts["clear"] >= 30


def test_another_engine_leaves_engine_rules_open():
    """What vLLM decides is not said of an engine whose rules are not known."""
    deployment = Deployment(engine="sglang", engine_version="0.5.23")
    name = "meta-llama--Meta-Llama-3.1-8B"
    findings = {f.id: f for f in audit(prepare(plain_model(name), deployment)[0])}
    for rule_id in ("A003", "A025", "A061", "A064", "A066", "A084"):
        assert findings[rule_id].state == "not_evaluable"
        assert "sglang 0.5.23" in findings[rule_id].missing[0]
    assert findings["A021"].state == "clear"
