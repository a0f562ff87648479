"""What a flag says is shown as the flag's, not as the file's, by every rule on every model."""

from __future__ import annotations

import pytest
from audit_pool import own_names, plain_model
from launch_cases import command, started

from ullage.audit import audit, prepare
from ullage.costs.deployment import Deployment

LENGTH = 1234
"""A length that no configuration says; a last position is one less."""


def sources(subject) -> set[str]:
    return {
        evidence.source
        for finding in audit(subject)
        for evidence in finding.evidence
        if evidence.value in (LENGTH, LENGTH - 1) and not isinstance(evidence.value, bool)
    }


@pytest.mark.parametrize("name", own_names())
def test_a_length_that_a_flag_says(name):
    subject, _ = prepare(plain_model(name), Deployment(max_model_len=LENGTH))
    assert sources(subject) == {"flag: --max-model-len"}


@pytest.mark.parametrize("name", own_names())
def test_a_length_that_an_override_says(name, tmp_path):
    file = command(f"--hf-overrides '{{\"max_position_embeddings\": {LENGTH}}}'")
    launch, deployment = started(file, Deployment(), tmp_path)
    subject, _ = prepare(plain_model(name), deployment, launch=launch)
    assert sources(subject) == {"flag: --hf-overrides"}


def test_a_base_that_an_override_says(tmp_path):
    rope = '{"rope_scaling": {"rope_type": "default", "rope_theta": 77}}'
    launch, deployment = started(command(f"--hf-overrides '{rope}'"), Deployment(), tmp_path)
    subject, _ = prepare(plain_model("llama"), deployment, launch=launch)
    finding = next(f for f in audit(subject) if f.id == "A021")
    assert finding.state == "fired" and "a default" not in finding.cause
    theta = next(e for e in finding.evidence if e.name == "rope_theta")
    assert (theta.value, theta.source) == (77, "flag: --hf-overrides")


def test_a_shortage_is_never_nothing():
    """One block is kept back: the KV of one request exactly is two MiB short, and says so."""
    deployment = Deployment(max_model_len=4096, kv_cache_memory_bytes=1)
    finding = next(f for f in audit(prepare(plain_model("llama"), deployment)[0]) if f.id == "A142")
    one = next(e.value for e in finding.evidence if e.name == "KV of one such request")
    for memory in (one, one // 2, one - 1):
        deployment = Deployment(max_model_len=4096, kv_cache_memory_bytes=memory)
        finding = next(
            f for f in audit(prepare(plain_model("llama"), deployment)[0]) if f.id == "A142"
        )
        assert finding.state == "fired"
        assert "0.00" not in finding.cause and " to " not in finding.cause.split(" short")[0]
