"""A replaced key does what vLLM makes of it, does nothing and says so, or stays open by name.

The oracle is vLLM 0.32: recorded answers here, live ones with `make test-vllm`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from override_cases import CASES, MODELS, VENV, ask, config_of, recorded

from ullage.anatomy import load
from ullage.anatomy.spec import Attention, LatentAttention
from ullage.audit import find_rule, judge, prepare
from ullage.costs.deployment import Deployment
from ullage.errors import BadInput
from ullage.launch.documents import choose_launch, read_launches
from ullage.launch.overridden import started_model
from ullage.launch.overrides import overrides_of


def launch_of(place: Path, command: str):
    path = place / "start.sh"
    path.write_text(f"{command}\n")
    return choose_launch(read_launches(str(path)), None, str(path))


def model_of(place: Path, name: str):
    path = place / "config.json"
    path.write_text(json.dumps(config_of(name)))
    return load(path)


def started(place: Path, name: str, overrides: dict):
    said = f" --hf-overrides '{json.dumps(overrides)}'" if overrides else ""
    return started_model(model_of(place, name), launch_of(place, f"vllm serve a/b{said}"))


def facts(model) -> dict[str, object]:
    """What the spec says of the things that the oracle tells."""
    spec = model.anatomy.spec
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Attention | LatentAttention)
    config = model.files.config
    config = config.get("text_config", config)
    section = config.get("quantization_config") or {}
    return {
        "num_layers": len(spec.layers),
        "num_kv_heads": mixer.num_kv_heads if isinstance(mixer, Attention) else 1,
        "rope_theta": mixer.rope.theta,
        "rope_type": mixer.rope.scaling,
        "factor": mixer.rope.factor,
        "quantization": section.get("quant_method"),
    }


OPEN = ["architectures", "hidden_size", "num_experts", "sliding_window", "text_config"]
"""Keys of the cases whose effect ullage does not claim to know."""


@pytest.mark.parametrize("row", recorded(), ids=lambda r: f"{r['model']}-{list(r['overrides'])}")
def test_the_model_is_what_vllm_makes_of_it(row, tmp_path):
    model, replaced = started(tmp_path, row["model"], row["overrides"])
    if "refused" in row:  # the words are in `lost`; an object where there was none stays open
        assert replaced.fatal or replaced.open
        return
    if replaced is not None and replaced.open:
        assert [key for key, _ in replaced.open] == [k for k in row["overrides"] if k in OPEN]
        assert all(key in " ".join(replaced.missing()) for key, _ in replaced.open)
        return
    assert replaced is None or not replaced.fatal
    found = facts(model)
    for name, value in found.items():
        if row["model"] == "gemma3" and name.startswith("rope"):
            continue  # two kinds of layers, each with its own
        if row["model"].startswith("deepseek") and name.startswith(("rope_t", "num_kv")):
            continue  # vLLM renames the kind, and counts the heads before they are compressed
        assert value == row[name], name
    assert longest(model, tmp_path) == row["max_model_len"]


def longest(model, place: Path) -> int:
    """The longest request that A028 takes the model for."""
    subject, _ = prepare(model, Deployment(), launch=launch_of(place, "vllm serve a/b"))
    evidence = judge(find_rule("A028"), subject).evidence
    return next(e.value for e in evidence if e.name == "longest request")


def test_a_key_that_does_nothing_changes_nothing(tmp_path):
    for name, overrides, idle in (
        ("qwen3", {"rope_theta": 5e6}, "rope_theta"),
        ("llava", {"max_position_embeddings": 777}, "max_position_embeddings"),
        ("llava", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling"),
    ):
        model, replaced = started(tmp_path, name, overrides)
        assert [key for key, _ in replaced.idle] == [idle] and not replaced.applied
        assert model.anatomy == model_of(tmp_path, name).anatomy


def test_what_a_replacement_drops_is_said(tmp_path):
    _, replaced = started(tmp_path, "qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 2}})
    assert "10,000" in replaced.lost[0] and "1,000,000" in replaced.lost[0]
    kept = {"rope_type": "yarn", "factor": 2, "rope_theta": 1e6}
    _, replaced = started(tmp_path, "qwen3", {"rope_scaling": kept})
    assert not replaced.lost


def test_keys_that_nothing_reads_are_named(tmp_path):
    _, replaced = started(tmp_path, "llama", {"nothing_that_is_known": 3})
    assert replaced.unread == ("nothing_that_is_known",)


def test_dotted_keys_win_over_the_object(tmp_path):
    launch = launch_of(
        tmp_path,
        "vllm serve m --hf-overrides.max_position_embeddings=16K --hf-overrides '{\"a\": 1}' "
        "--hf-overrides.text_config.layer_types+ x,y --hf-overrides.text_config.layer_types+ z",
    )
    assert dict(overrides_of(launch).values) == {
        "max_position_embeddings": 16 * 1024,
        "text_config": {"layer_types": ["x", "y", "z"]},
    }


@pytest.mark.parametrize(
    ("value", "why"),
    [("$X", r"$X"), ("'{'", "no JSON"), ("'[1]'", "no JSON object"), ("", "no value"),
     (f"'{'[' * 90}{']' * 90}'", "no JSON object"), ("'{\"a\": $Y}'", "no JSON")],
)  # fmt: skip
def test_a_value_that_is_not_known_leaves_the_whole_configuration_open(value, why, tmp_path):
    launch = launch_of(tmp_path, f"vllm serve m --hf-overrides {value}")
    model, replaced = started_model(load(MODELS / "llama.json"), launch)
    assert why in replaced.missing()[0] and "the configuration" in replaced.missing()[0]
    assert model == load(MODELS / "llama.json")


def test_a_replacement_that_describes_no_model_is_one_sentence(tmp_path):
    with pytest.raises(BadInput) as caught:
        started(tmp_path, "llama", {"max_position_embeddings": "many"})
    assert "--hf-overrides" in str(caught.value) and "max_position_embeddings" in str(caught.value)


def test_sglang_keeps_the_rest_of_rope_parameters(tmp_path):
    scaling = json.dumps({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    command = f"sglang serve m --json-model-override-args '{scaling}'"
    model, replaced = started_model(load(MODELS / "qwen3.json"), launch_of(tmp_path, command))
    assert replaced.applied == ("rope_scaling",) and not replaced.lost
    assert facts(model)["rope_theta"] == 1e6 and facts(model)["factor"] == 2.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["factor", "rope_type", "text_config", "x"]), inner)
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["rope_scaling", "rope_parameters", "max_position_embeddings", "text_config", "torch_dtype",
     "num_hidden_layers", "quantization_config", "architectures", "vision_config", "layer_types"]
)  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(KEYS, JSON, min_size=1, max_size=3), st.sampled_from(["llama", "gemma3"]))
def test_any_object_gives_a_model_or_one_sentence(overrides, name):
    from ullage.launch.launch import Given, Launch

    flag = Given("--hf-overrides", "--hf-overrides", (json.dumps(overrides),), 1)
    launch = Launch("x", "x.sh", 1, "command", "vllm", (flag,))
    try:
        _, replaced = started_model(load(MODELS / f"{name}.json"), launch)
    except BadInput as error:
        assert len(str(error).splitlines()) == 1
        return
    told = {*replaced.applied, *replaced.unread, *dict(replaced.idle), *dict(replaced.open)}
    for key, value in overrides.items():
        part = isinstance(value, dict) and key.endswith("_config") and not value
        assert part or any(name == key or name.startswith(f"{key}.") for name in told), key


@pytest.mark.vllm
@pytest.mark.skipif(not (VENV / "bin/python").exists(), reason=f"no vLLM in {VENV}")
def test_the_recorded_answers_are_vllms():
    for (name, overrides), row, answer in zip(CASES, recorded(), ask(), strict=True):
        assert row == {"model": name, "overrides": overrides, **answer}
