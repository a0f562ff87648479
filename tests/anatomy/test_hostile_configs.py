"""Configurations that lie: any JSON value in any field gives a spec or one sentence."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ullage.anatomy.config.defaults import class_defaults
from ullage.anatomy.config.read import read_config
from ullage.anatomy.families.table import FAMILIES, MEMBERS
from ullage.errors import BadInput

SHARED = Path(__file__).parents[3] / "shared" / "configs"

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from([10**9, 2**63, -(2**80), 1e308, "auto", "full_attention", "mamba"]),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["full_attention", "rope_theta", "factor", "hidden_size", "0"]), inner
        )
    ),
    max_leaves=10,
)


def bases() -> dict[str, dict[str, object]]:
    """One configuration per family: the class's own defaults, and the real ones where present."""
    made: dict[str, dict[str, object]] = {}
    for name in sorted({*FAMILIES, *MEMBERS} - {"generic"}):
        known = class_defaults(name)
        if known is not None:
            made[name] = {"model_type": name, "torch_dtype": "bfloat16", **known.defaults}
    for name in (
        "google--gemma-4-26B-A4B",
        "deepseek-ai--DeepSeek-V4-Flash",
        "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
        "MiniMaxAI--MiniMax-M3",
        "moonshotai--Kimi-K2.5-NVFP4",
        "Qwen--Qwen3.5-27B",
    ):
        path = SHARED / f"{name}_config.json"
        if path.exists():
            made[name] = json.loads(path.read_text())
    return made


BASES = bases()


def paths(value: object, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    if isinstance(value, dict):
        for key, inner in value.items():
            found.append((*prefix, key))
            if len(prefix) < 3:
                found += paths(inner, (*prefix, key))
    return found


def changed(
    base: dict[str, object], path: tuple[str, ...], value: object, *, remove: bool
) -> dict[str, object]:
    made = copy.deepcopy(base)
    inner: object = made
    for key in path[:-1]:
        assert isinstance(inner, dict)
        inner = inner[key]
    assert isinstance(inner, dict)
    if remove:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return made


def check(config: dict[str, object]) -> None:
    start = time.perf_counter()
    try:
        made = read_config(config, file="config.json")
    except BadInput as error:
        text = str(error)
        assert text.startswith("config.json: ") and text.isprintable() and len(text) < 2000
    else:
        assert made.spec.num_layers <= 4096
        hash(made.spec)
    assert time.perf_counter() - start < 2


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_value_in_any_field(data: st.DataObject) -> None:
    base = BASES[data.draw(st.sampled_from(sorted(BASES)))]
    path = data.draw(st.sampled_from(paths(base)))
    check(changed(base, path, data.draw(JSON), remove=data.draw(st.booleans())))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(class_defaults("llama").defaults)), JSON), JSON)  # type: ignore[union-attr]
def test_any_object_as_a_configuration(values: dict[str, object], model_type: object) -> None:
    check({**values, "model_type": model_type})


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=10), JSON, max_size=6))
def test_any_json_as_a_configuration(values: dict[str, object]) -> None:
    check(values)


@pytest.mark.parametrize("name", sorted(BASES))
def test_every_field_of_every_family_survives_the_usual_mistakes(name: str) -> None:
    base = BASES[name]
    for path in paths(base):
        for bad in (None, -1, 0, True, 10**12, "x", [], {}, 0.5, [None]):
            check(changed(base, path, bad, remove=False))
        check(changed(base, path, None, remove=True))


class TestRunawaySizes:
    """Numbers that would take all memory are refused before anything is allocated."""

    LLAMA: ClassVar[dict[str, object]] = {"model_type": "llama", "torch_dtype": "bfloat16"}

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("num_hidden_layers", 10**9),
            ("num_hidden_layers", 0),
            ("hidden_size", 2**60),
            ("vocab_size", 2**60),
            ("num_attention_heads", 2**40),
            ("intermediate_size", 2**50),
        ],
    )
    def test_absurd_sizes(self, field: str, value: int) -> None:
        with pytest.raises(BadInput, match=f"{field}: found {value}; expected an integer from 1"):
            read_config({**self.LLAMA, field: value}, file="config.json")

    def test_a_long_pattern(self) -> None:
        with pytest.raises(BadInput, match="hybrid_override_pattern"):
            read_config(
                {"model_type": "nemotron_h", "hybrid_override_pattern": "M" * 10**6}, file="f"
            )

    def test_many_mtp_layers(self) -> None:
        with pytest.raises(BadInput, match="num_nextn_predict_layers"):
            read_config({"model_type": "deepseek_v3", "num_nextn_predict_layers": 10**8}, file="f")

    def test_contradictions_are_named(self) -> None:
        cases = [
            ({"num_key_value_heads": 7}, "num_key_value_heads: found 7; expected a divisor"),
            ({"hidden_size": 100}, "hidden_size: found 100; expected a multiple"),
            ({"layer_types": ["full_attention"]}, "expected a list of 32"),
            ({"layer_types": ["woven"] * 32}, r"layer_types\[0\]: found \"woven\""),
            ({"torch_dtype": "int3"}, "dtype"),
            ({"architectures": "Llama"}, "architectures"),
            ({"model_type": 3}, "model_type"),
        ]
        for change, message in cases:
            with pytest.raises(BadInput, match=message):
                read_config({**self.LLAMA, **change}, file="config.json")
