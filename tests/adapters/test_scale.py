"""The rank and scale that training meant: peft's own layers are the oracle."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.adapters.peft_adapters import CASES, make_adapter, make_model
from ullage.anatomy.adapters.adapter import AdapterConfig
from ullage.anatomy.adapters.automaton import automaton_of
from ullage.anatomy.adapters.config import config_from
from ullage.anatomy.adapters.patterns import first_match
from ullage.anatomy.adapters.read import read_adapter
from ullage.anatomy.adapters.scale import expected_scale
from ullage.errors import MalformedConfig

SCALED = [
    *("plain", "rank 32", "rslora", "dora", "patterns", "rslora patterns", "embeddings", "gpt2"),
    *(
        "subtracted",
        "fused",
        "moe experts",
        "moe gate_up",
        "moe down",
        "moe router",
        "vision-language",
    ),
]
PLACES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "mlp.up_proj",
    "mlp.gate_proj",
)
MODULES = [f"model.layers.{i}.{place}" for i in (0, 1, 2, 10, 11) for place in PLACES]


@pytest.mark.parametrize("name", SCALED)
def test_rank_and_scale_are_those_of_pefts_own_layers(name: str, tmp_path) -> None:
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    meant = {}
    adapter_name = CASES[name].adapter_name
    for path, layer in make_model(name).base_model.model.named_modules():
        if isinstance(layer, LoraLayer):
            path = path.replace(".base_layer", "")
            if isinstance(layer, ParamWrapper) and layer.parameter_name != "weight":
                path = f"{path}.{layer.parameter_name}"
            meant[path] = (layer.r[adapter_name], layer.scaling[adapter_name])
    found = {
        module.module: (module.rank_declared, module.scale)
        for module in read_adapter(make_adapter(name, tmp_path)).modules
        if module.a is not None
    }
    assert {path: rank for path, (rank, _) in found.items()} == {
        path: rank for path, (rank, _) in meant.items()
    }
    assert {path: scale for path, (_, scale) in found.items()} == pytest.approx(
        {path: scale for path, (_, scale) in meant.items()}
    )


def test_what_the_file_does_not_say_is_what_peft_takes() -> None:
    import peft

    meant = peft.LoraConfig()
    config = config_from({"peft_type": "LORA"}, "adapter_config.json")
    assert expected_scale(config, "q_proj") == (meant.r, meant.lora_alpha / meant.r)


def test_mlx_names_the_scale_and_other_methods_have_none() -> None:
    mlx = config_from({"lora_parameters": {"rank": 8, "scale": 20.0}}, "adapter_config.json")
    vera = config_from({"peft_type": "VERA", "r": 256}, "adapter_config.json")
    legacy = config_from({"rank": 10, "alpha": 0.5, "dropout": 0.1}, "adapter_config.json")
    assert expected_scale(mlx, "q_proj") == (8, 20.0)
    assert expected_scale(vera, "q_proj") == (None, None)
    assert expected_scale(legacy, "q_proj") == (10, 0.05)


PATTERNS = [
    *("q_proj", "k_proj", "attn.q_proj", "layers.1.mlp.up_proj", "proj", ".*", "", "x?_proj"),
    *(r"layers\.1\.mlp\..*", r"model\.layers\.0\.self_attn\.(k|v|q)_proj", "^model.layers.1.*"),
    *(r"(?!.*layers\.0)[^.]*\.?.*o_proj", r".*\.(1|2)\..*up_proj", "[^x]+gate_proj", r"\bmlp\b.*"),
    *(r"\d+\.mlp\.up_proj", "model.layers.1..self_attn.q_proj", r"layers\.[0-9]{2,3}\..*$"),
    *("self.attn.q.proj", "m.p.up_proj", ".ayers.1.mlp.up_proj", r"(?:self_attn|mlp)\.[a-z]_proj"),
]


@given(
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=4),
    st.sampled_from([*MODULES, "q_proj", "", "a.q_proj\n", "a.b\n", "selfXattn.q_proj"]),
)
def test_the_first_pattern_that_peft_takes_is_taken(patterns: list[str], module: str) -> None:
    from peft.utils.other import get_pattern_key

    index = first_match(tuple(patterns), module)
    assert get_pattern_key(patterns, module) == (module if index is None else patterns[index])


@given(
    st.from_regex(
        r"(a|b|\.|[ab]|[^a]|a\*|b\?|\(a\|b\)|\(ab\)\+|a\{1,2\}|\.\*|b\$|\^a){0,6}", fullmatch=True
    ),
    st.text("ab.", max_size=7),
)
def test_an_automaton_says_what_pythons_engine_says(expression: str, text: str) -> None:
    try:
        compiled = re.compile(expression)
    except re.error:
        with pytest.raises(ValueError, match="cannot be used"):
            automaton_of(expression, expression)
        return
    assert automaton_of(expression, expression).matches(text) is bool(compiled.fullmatch(text))


EVIL = [
    *(
        "(a+)+$",
        "(a|a)*b",
        "(a|aa)+b",
        "((a*)*)*b",
        ".*" * 30 + "x",
        "(.*a){20}b",
        "(a?){200}a{200}",
    ),
    *(
        "(x+x+)+y",
        "(.*)*q",
        "(?=(a+)+b)*",
        "(?!.*.*.*.*x).*",
        "(" * 2000 + ")" * 2000,
        "a" * 20_000,
    ),
    *("(((a{150}){150}){150}){150}", "[", r"(a)\1", "(?i)a", "(?<=a)b", "a{99999999999}", "(?P<x"),
]


@pytest.mark.parametrize("pattern", EVIL, ids=lambda text: text[:20])
def test_a_hostile_pattern_is_answered_or_refused_at_once(pattern: str) -> None:
    config = AdapterConfig("LORA", "peft", rank=4, alpha=8.0, rank_pattern=((pattern, 8),))
    begin = time.process_time()
    for module in ("a." * 50 + "a" * 200, "x" * 300, "a" * 5000):
        try:
            assert expected_scale(config, module)[0] in (4, 8)
        except MalformedConfig as error:
            assert "rank_pattern" in str(error)
            assert "\n" not in str(error)
    assert time.process_time() - begin < 2


def test_a_pattern_for_each_of_a_large_models_modules_costs_little() -> None:
    places = [f"model.layers.{i}.{p}" for i, p in itertools.product(range(126), PLACES)]
    ranks = tuple((place, 1 + index % 64) for index, place in enumerate(places))
    config = AdapterConfig("LORA", "peft", rank=4, alpha=8.0, rank_pattern=ranks)
    begin = time.process_time()
    found = [expected_scale(config, place)[0] for place in places]
    assert time.process_time() - begin < 1
    assert found == [rank for _, rank in ranks]
