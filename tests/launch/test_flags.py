"""Flags are matched as argparse matches them; the oracle is argparse, built from the same table."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.audit.launch_replaced import REPLACED, SGLANG_REPLACED
from ullage.launch.flags import known_flags, nearest, read_flags
from ullage.launch.launch import Word

VENV = Path(os.environ.get("ULLAGE_VLLM_VENV", Path.home() / ".cache/ullage/vllm-0.32"))
ROOT = Path(__file__).parents[2]
VLLM = sorted(set(known_flags("vllm").values()), key=lambda flag: flag.name)


class _Refused(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise _Refused(message)


def oracle() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False)
    parser.add_argument("model_tag", nargs="?")
    for flag in VLLM:
        if flag.arity == "none":
            negative = any(name.startswith("--no-") for name in flag.names)
            positive = [n for n in flag.names if not n.startswith("--no-")]
            action = argparse.BooleanOptionalAction if negative else "store_true"
            parser.add_argument(*positive, action=action, dest=flag.name)
        else:
            nargs = {"one": None, "many": "+", "optional": "?", "any": "*"}[flag.arity]
            parser.add_argument(*flag.names, nargs=nargs, dest=flag.name)
    return parser


ORACLE = oracle()
NAMES = sorted(known_flags("vllm"))
VALUE = st.sampled_from(["8", "auto", "x/y", "0.9", "-1", "true"])


@st.composite
def pieces(draw) -> list[str]:
    name = draw(st.sampled_from(NAMES))
    if name.startswith("--") and draw(st.integers(0, 3)) == 0:
        name = name[: draw(st.integers(3, len(name)))]
    form = draw(st.sampled_from(["alone", "space", "equals", "many"]))
    if form == "equals":
        return [f"{name}={draw(VALUE)}"]
    values = {"alone": 0, "space": 1, "many": 2}[form]
    return [name, *(draw(VALUE) for _ in range(values))]


@settings(deadline=None)  # a busy machine is no fault
@given(st.lists(pieces(), min_size=1, max_size=4))
def test_a_command_line_is_read_as_argparse_reads_it(parts):
    arguments = ["model", *(word for part in parts for word in part)]
    given, strays = read_flags("vllm", [Word(text, 1) for text in arguments])
    try:
        expected, extra = ORACLE.parse_known_args(arguments)
    except _Refused:
        assert any(flag.trouble for flag in given), arguments
        return
    unknown = [flag for flag in given if flag.trouble]
    assert bool(unknown) <= bool(extra), (arguments, unknown)
    if extra:
        return
    assert [word.text for word in strays] == ["model"]
    last = {flag.name: flag for flag in given}
    for name, flag in last.items():
        value = getattr(expected, name)
        shown = value if isinstance(value, list) else [value]
        if flag.values in (("true",), ("false",)) and isinstance(value, bool):
            assert value is (flag.values == ("true",))
        else:
            assert list(flag.values) == [str(v) for v in shown if v is not None]


@pytest.mark.parametrize(
    ("text", "name", "values", "trouble"),
    [
        ("--tensor_parallel_size=4", "--tensor-parallel-size", ("4",), ""),
        ("-tp 4", "--tensor-parallel-size", ("4",), ""),
        ("--no-enable-prefix-caching", "--enable-prefix-caching", ("false",), ""),
        ("--enable_prefix_caching", "--enable-prefix-caching", ("true",), ""),
        ("-O3", "--optimization-level", (), ""),
        ("--compilation-config.mode 3", "--compilation-config.", ("3",), ""),
        ("--tensor-paral 2", "--tensor-parallel-size", ("2",), ""),
        ("--max-model-len -1", "--max-model-len", ("-1",), ""),
        ("--swap-space 4", "", ("4",), "unknown"),
        ("--max-num 4", "", ("4",), "ambiguous"),
        ("--dtype", "--dtype", (), "no value"),
        ("--enforce-eager=1", "--enforce-eager", ("1",), "takes no value"),
    ],
)
def test_spellings(text, name, values, trouble):
    given, _ = read_flags("vllm", [Word(word, 7) for word in text.split()])
    assert [(f.name, f.values, f.trouble, f.line) for f in given] == [(name, values, trouble, 7)]


def test_a_hidden_value_is_open():
    ((given,), _) = read_flags("vllm", [Word("--tensor-parallel-size", 1), Word("$TP", 1, "$TP")])
    assert given.open == "$TP"


def test_the_nearest_name():
    assert nearest("vllm", "--max_model_length") == "--max-model-len"
    assert nearest("vllm", "--zzz") == ""


@pytest.mark.parametrize(("engine", "table"), [("vllm", REPLACED), ("sglang", SGLANG_REPLACED)])
def test_flags_said_to_be_gone_are_gone(engine, table):
    assert not set(table) & set(known_flags(engine))
    named = {w for text in table.values() for w in text.replace(":", " ").replace(",", " ").split()}
    assert {word for word in named if word[:2] == "--"} <= set(known_flags(engine))


@pytest.mark.vllm
@pytest.mark.skipif(not (VENV / "bin/python").exists(), reason=f"no vLLM in {VENV}")
def test_the_table_is_what_vllm_says():
    tool = ROOT / "tools" / "record_vllm_flags.py"
    done = subprocess.run([VENV / "bin/python", tool, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
