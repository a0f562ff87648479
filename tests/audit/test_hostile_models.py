"""Whatever a configuration says, each rule gives an answer or the loader one sentence."""

from __future__ import annotations

import copy

import pytest
from audit_pool import config_of, own_names, text_part
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ullage.anatomy import Model, read_config
from ullage.anatomy.open import ModelFiles
from ullage.audit import RULES, audit, prepare
from ullage.costs.deployment import Deployment, Parallel
from ullage.costs.hardware import parse_gpus
from ullage.errors import BadInput

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5000),
    st.sampled_from([0, 1, 3, 63, 64, 1 << 20, 1 << 40, 0.0, 1e-45, 0.5, 1e30, "yarn", "x"]),
    st.floats(allow_nan=False),
    st.lists(st.integers(-1, 300), max_size=4),
    st.dictionaries(
        st.sampled_from(["type", "rope_type", "factor", "rope_theta", "quant_method"]),
        st.one_of(st.floats(0.1, 100), st.sampled_from(["yarn", "linear", "llama3", "awq"])),
        max_size=3,
    ),
)
EXTRA_KEYS = [
    "rope_scaling", "rope_parameters", "partial_rotary_factor", "sliding_window", "head_dim",
    "use_sliding_window", "layer_types", "quantization_config", "auto_map", "n_group", "topk_group",
    "num_nextn_predict_layers", "pad_token_id", "eos_token_id",
]  # fmt: skip


@st.composite
def hostile(draw):
    config = copy.deepcopy(config_of(draw(st.sampled_from(own_names()))))
    part = text_part(config)
    for _ in range(draw(st.integers(1, 3))):
        part[draw(st.sampled_from([*sorted(part), *EXTRA_KEYS]))] = draw(VALUES)
    return config


DEPLOYMENTS = st.builds(
    Deployment,
    platform=st.sampled_from(["cuda", "cuda", "cpu"]),
    parallel=st.builds(
        Parallel,
        tensor=st.integers(1, 9),
        pipeline=st.integers(1, 4),
        data=st.integers(1, 3),
        expert=st.booleans(),
    ),
    kv_cache_dtype=st.sampled_from(["auto", "fp8", "nvfp4", "nonsense"]),
    max_model_len=st.sampled_from([None, -1, 1, 100_000_000]),
    max_num_seqs=st.sampled_from([None, 1, 4096]),
)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(hostile(), DEPLOYMENTS, st.sampled_from([None, "H100", "L40S:8"]))
def test_every_rule_answers_or_the_loader_says_why(config, deployment, gpu):
    try:
        anatomy = read_config(config, file="config.json")
    except BadInput as error:
        assert str(error) and "\n" not in str(error)
        return
    files = ModelFiles(path=None, kind="config", config=config, config_file="config.json")
    gpus = parse_gpus(gpu) if gpu else None
    subject, _ = prepare(Model(files, anatomy, None), deployment, gpus)
    findings = audit(subject)
    assert [finding.id for finding in findings] == [rule.id for rule in RULES]
    for finding in findings:
        assert all(isinstance(item.source, str) for item in finding.evidence)
