"""Every option of the engine has a flag of `ullage serve`, with the values the engine knows."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest

from ullage.cli import serve
from ullage.engine.attention import AUTO, PATHS
from ullage.engine.linear import LINEARS
from ullage.engine.options import CHOICES, EngineOptions

KNOWN = {**CHOICES, "attention": (AUTO, *(path.name for path in PATHS)), "quantization": LINEARS}


@pytest.fixture(scope="module")
def actions() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return {action.dest: action for action in parser._actions}


@pytest.mark.parametrize("name", [field.name for field in fields(EngineOptions)])
def test_an_option_has_a_flag(actions: dict[str, argparse.Action], name: str) -> None:
    action = actions[name]
    assert action.help
    if name in KNOWN:
        assert action.choices is not None
        assert list(action.choices) == list(KNOWN[name])


def test_without_flags_the_engines_own_defaults_hold() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    given = serve._given(parser.parse_args(["model"]), EngineOptions)
    assert EngineOptions(**given) == EngineOptions()


def test_flags_reach_the_options() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    flags = (
        *("--kv-cache-dtype", "int8_per_token_head", "--no-enable-prefix-caching"),
        *("--scheduling", "static", "--attention-backend", "reference", "--enforce-eager"),
        *("--long-prefill-token-threshold", "0", "--max-num-seqs", "3"),
    )
    given = serve._given(parser.parse_args(["model", *flags]), EngineOptions)
    assert EngineOptions(**given) == EngineOptions(
        kv_cache_dtype="int8_per_token_head",
        enable_prefix_caching=False,
        scheduling="static",
        attention="reference",
        enforce_eager=True,
        long_prefill_token_threshold=0,
        max_num_seqs=3,
    )
