"""Adapters made to harm are refused in one sentence, in two seconds and 500 MB, without running."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.adapters.hostile_adapters import CASES, MARK, SOUND
from ullage.anatomy.adapters.adapter import AdapterConfig
from ullage.anatomy.adapters.config import config_from
from ullage.anatomy.adapters.pickled import read_pickled
from ullage.anatomy.adapters.scale import expected_scale
from ullage.errors import BadInput, MalformedCheckpoint, MalformedConfig


def _outcome(case: str) -> dict[str, object]:
    script = Path(__file__).with_name("hostile_adapters.py")
    done = subprocess.run(
        [sys.executable, str(script), case], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcome = json.loads(done.stdout)
    assert outcome["seconds"] < 2
    return outcome


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_in_one_sentence(case: str) -> None:
    MARK.unlink(missing_ok=True)
    found = str(_outcome(case)["found"])
    assert found.startswith("refused "), found
    assert "\n" not in found
    assert len(found) < 600
    assert not MARK.exists()


@pytest.mark.parametrize("case", SOUND)
def test_what_is_odd_but_sound_is_read(case: str) -> None:
    assert str(_outcome(case)["found"]).startswith("read ")


def _legacy_pickle() -> bytes:
    buffer = io.BytesIO()
    tensors = {"q_proj.lora_A.weight": torch.zeros(2, 3), "q_proj.lora_B.weight": torch.zeros(4, 2)}
    torch.save(tensors, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


PICKLE = _legacy_pickle()


@given(
    st.binary(max_size=200).map(b"\x80\x02".__add__)
    | st.lists(
        st.tuples(st.integers(0, len(PICKLE) - 1), st.integers(0, 255)), min_size=1, max_size=8
    ).map(
        lambda changes: bytes(dict(changes).get(place, byte) for place, byte in enumerate(PICKLE))
    )
)
@example(b"\x80\x02c\\z\nx\n.")  # an escape that Python does not know
def test_a_pickle_of_any_bytes_is_listed_or_refused(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "adapter_model.bin"
        file.write_bytes(raw)
        try:
            tensors = read_pickled(file)
        except MalformedCheckpoint as error:
            assert "\n" not in str(error)
        else:
            assert all(tensor.num_bytes >= 0 and tensor.key.text for tensor in tensors)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        *(field for field in AdapterConfig.__dataclass_fields__ if field.startswith("use_")),
        *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules"),
        *("modules_to_save", "layers_to_transform", "layers_pattern", "layer_replication", "bias"),
        *("trainable_token_indices", "auto_mapping", "lora_parameters", "fine_tune_type", "rank"),
        *(
            "init_lora_weights",
            "task_type",
            "base_model_name_or_path",
            "target_parameters",
            "alpha",
        ),
    ]
)


@given(st.dictionaries(FIELDS | st.text(max_size=5), VALUES, max_size=8), st.booleans())
def test_a_configuration_of_any_values_is_read_or_refused(
    values: dict[str, object], lora: bool
) -> None:
    try:
        config = config_from({**values, **({"peft_type": "LORA"} if lora else {})}, "file")
    except MalformedConfig as error:
        assert str(error).startswith("file: ")
        return
    try:
        rank, scale = expected_scale(config, "model.layers.0.q_proj")
    except BadInput:
        return
    assert rank is None or rank >= 1
    assert scale is None or 0 <= scale < float("inf")
