"""Any value under any GGUF key gives a model or one sentence, through the door that users take."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from checkpoint_files import GgufBuilder, Value, header_of, safetensors_bytes
from gguf_cases import CASES, gguf_tensors, written_metadata
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ullage.anatomy import load, read_config
from ullage.errors import BadInput

quick = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

whole = st.sampled_from([0, 1, 2, 3, 7, 64, 2**31, 2**32 - 1])
values = st.one_of(
    st.tuples(st.just("uint32"), whole),
    st.tuples(st.just("int32"), st.sampled_from([-(2**31), -1, 0, 5])),
    st.tuples(st.just("uint64"), st.sampled_from([0, 2**40, 2**64 - 1])),
    st.tuples(st.just("float32"), st.floats(width=32)),
    st.tuples(st.just("bool"), st.booleans()),
    st.tuples(st.just("string"), st.sampled_from(["", "llama", "yarn", "none", "7"])),
    st.tuples(st.just("[uint32]"), st.lists(whole, max_size=5)),
    st.tuples(st.just("[bool]"), st.lists(st.booleans(), max_size=5)),
    st.tuples(st.just("[string]"), st.just(["a"])),
    st.tuples(st.just("[[uint8]]"), st.just([[1]])),
)
suffixes = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.kv_lora_rank",
    "rope.dimension_count",
    "rope.dimension_sections",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "leading_dense_block_count",
    "nextn_predict_layers",
    "ssm.inner_size",
    "ssm.time_step_rank",
    "ssm.state_size",
    "full_attention_interval",
]


@cache
def model(name: str) -> tuple[str, dict[str, Value], dict[str, tuple[str, tuple[int, ...]]]]:
    case, architecture = CASES[name], name.partition(":")[0].partition(",")[0]
    spec = read_config(case.config, file="config.json").spec
    return architecture, written_metadata(architecture, case), gguf_tensors(architecture, spec)


@quick
@given(
    name=st.sampled_from(sorted(CASES)),
    changes=st.dictionaries(
        st.sampled_from([*suffixes, "general.architecture", "split.count", "split.no"]),
        values | st.none(),
        min_size=1,
        max_size=3,
    ),
    dropped=st.integers(0, 40),
)
def test_any_metadata_give_a_model_or_one_sentence(
    tmp_path: Path, name: str, changes: dict[str, Value | None], dropped: int
) -> None:
    architecture, metadata, tensors = model(name)
    changed = dict(metadata)
    for key, value in changes.items():
        full = key if key.startswith(("general.", "split.")) else f"{architecture}.{key}"
        if value is None:
            changed.pop(full, None)
        else:
            changed[full] = value
    kept = {k: t for i, (k, t) in enumerate(tensors.items()) if i != dropped}
    file = tmp_path / "m.gguf"
    file.write_bytes(GgufBuilder().file(changed, kept))
    try:
        found = load(file)
    except BadInput as error:
        assert len(str(error)) < 2000
        return
    assert found.anatomy.spec.num_layers <= 8


names = st.sampled_from(
    [
        "model.embed_tokens.weight",
        "embed_tokens.weight",
        "lm_head.weight",
        *[
            f"model.layers.{i}.{part}"
            for i in ("0", "1", "x", "99999999999")
            for part in (
                "self_attn.q_proj.weight",
                "self_attn.k_proj.weight",
                "self_attn.v_proj.weight",
                "self_attn.q_norm.weight",
                "mlp.up_proj.weight",
                "mlp.experts.0.gate_proj.weight",
                "block_sparse_moe.experts.1.w1.weight",
            )
        ],
    ]
)
shapes = st.lists(st.sampled_from([0, 1, 3, 32, 64]), max_size=3).map(tuple)


@quick
@given(
    tensors=st.dictionaries(names, st.tuples(st.sampled_from(["BF16", "U8"]), shapes), max_size=12)
)
def test_any_lone_tensors_give_a_model_or_one_sentence(
    tmp_path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(safetensors_bytes(*header_of(tensors)))
    try:
        load(file)
    except BadInput as error:
        assert "m.safetensors" in str(error)


def test_the_command_line_says_it_in_one_line_and_exits_with_2(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "config.json").write_text(json.dumps({**CASES["llama"].config}))
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({}, 0, length=2**63))
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(40))
    for path in (tmp_path, tmp_path / "m.gguf", tmp_path / "model.safetensors"):
        done = subprocess.run(
            [sys.executable, "-m", "ullage", "audit", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert done.stdout == ""
        assert len(done.stderr.strip().splitlines()) == 1
        assert "Traceback" not in done.stderr
