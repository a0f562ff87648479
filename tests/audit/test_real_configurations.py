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
