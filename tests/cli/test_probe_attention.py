"""`ullage probe attention`: outputs, choices and refusals of the command."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.engine.families import write_model

from ullage.cli.main import main
from ullage.cli.probe_attention import add_arguments
from ullage.cli.probe_attention_table import FIGURES, MAX_WIDTH, lines
from ullage.probes.attention.readings import AttentionReading, HeadReading, LayerReading, Spread

Directory = Callable[[str], Path]
TEXT = "It is a truth universally acknowledged, that a single man"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """The directory of a tiny random model of a family, written once."""

    @cache
    def directory(family: str) -> Path:
        return write_model(family, tmp_path_factory.mktemp(family))

    return directory


def probed(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main(["probe", "attention", *map(str, arguments), "--output", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_figures_of_every_head(
    models: Directory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = probed(capsys, models("llama"), "--prompt", TEXT)
    assert document["model"] == str(models("llama"))
    assert document["source"] == "embedded engine"
    assert document["tokens"] == document["rows"] == len(TEXT)
    assert [layer["layer"] for layer in document["layers"]] == [0, 1, 2]
    for layer in document["layers"]:
        assert [head["head"] for head in layer["heads"]] == [0, 1, 2, 3]
        for head in layer["heads"]:
            entropy = head["entropy_nats"]
            assert 0 < entropy["p5"] < entropy["mean"] < entropy["p95"] < 5
            for share in ("entropy_normalized", "sink_mass", "band_mass"):
                assert 0 < head[share] < 1
            assert 1 < head["effective_context"] < len(TEXT)
            assert head["max_score"] > 0 and head["not_finite"] == 0


def test_rows_and_layers_are_those_asked_for(
    models: Directory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = probed(capsys, models("llama"), "--prompt", TEXT, "--rows", 7, "--layers", "0,1-2")
    assert document["rows"] == 7 and len(document["layers"]) == 3
    document = probed(capsys, models("llama"), "--prompt", TEXT * 8, "--layers", "2")
    assert (document["tokens"], document["rows"]) == (len(TEXT) * 8, 256)
    assert [layer["layer"] for layer in document["layers"]] == [2]
    document = probed(capsys, models("llama"), "--prompt", TEXT * 8, "--rows", "all")
    assert document["rows"] == document["tokens"]


def test_a_prompt_comes_from_a_file_or_stdin(
    models: Directory,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    direct = probed(capsys, models("llama"), "--prompt", TEXT)
    (tmp_path / "prompt").write_text(TEXT)
    assert probed(capsys, models("llama"), "--prompt-file", tmp_path / "prompt") == direct
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert probed(capsys, models("llama"), "--prompt-file", "-") == direct


def test_transformers_runs_what_was_asked_of_it(
    models: Directory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = probed(capsys, models("gemma2"), "--prompt", TEXT, "--engine", "transformers")
    other = probed(capsys, models("gemma2"), "--prompt", TEXT)
    assert document["source"] == "transformers" and other["source"] == "embedded engine"
    for one, two in zip(document["layers"], other["layers"], strict=True):
        for head, same in zip(one["heads"], two["heads"], strict=True):
            assert head["sink_mass"] == pytest.approx(same["sink_mass"], abs=1e-4)


@pytest.mark.parametrize("engine", ["embedded", "transformers"])
def test_bfloat16_is_read_near_float32(
    engine: str, models: Directory, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (models("llama"), "--prompt", TEXT, "--engine", engine)
    exact = probed(capsys, *asked)
    lower = probed(capsys, *asked, "--dtype", "bfloat16")
    assert exact != lower
    for one, other in zip(exact["layers"], lower["layers"], strict=True):
        for head, same in zip(one["heads"], other["heads"], strict=True):
            assert head["entropy_normalized"] == pytest.approx(same["entropy_normalized"], abs=0.1)


def test_what_the_embedded_engine_does_not_run_goes_to_transformers_and_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """gpt-oss: learned sinks. Asked for by name, the embedded engine's refusal is the answer."""
    from tests.engine.families import write_byte_tokenizer
    from tests.probes.test_through_transformers import made

    made("gpt-oss").save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path)
    assert main(["probe", "attention", str(tmp_path), "--prompt", TEXT, "--output", "json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["source"] == "transformers"
    assert "is not run by the embedded engine" in captured.err
    assert all("learned_sink_mass" in head for head in document["layers"][0]["heads"])
    asked = ["probe", "attention", str(tmp_path), "--prompt", TEXT, "--engine", "embedded"]
    assert main(asked) == 2
    assert "is not run by the embedded engine" in capsys.readouterr().err


def test_attention_that_is_not_finite_is_exit_1_and_named(
    models: Directory,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    for file in models("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][20, 3] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    asked = ["probe", "attention", str(tmp_path), "--prompt", TEXT, "--layers", "0,1"]
    assert main(asked) == 1
    out = capsys.readouterr().out
    assert f"not finite       layer 1 head 1: {len(TEXT)} of {len(TEXT)} rows" in out
    assert main([*asked, "--output", "json"]) == 1
    heads = json.loads(capsys.readouterr().out)["layers"][1]["heads"]
    assert heads[1]["entropy_nats"] is None and heads[1]["not_finite"] == len(TEXT)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--prompt --prompt-file is required"),
        (["--prompt", "a", "--prompt-file", "b"], "not allowed with"),
        (["--prompt", ""], "no tokens"),
        (["--prompt", "a" * 600], "600 tokens"),
        (["--prompt", "a" * 200_000], "more than 1,024 tokens"),
        (["--prompt-file", "/no/such/file"], "/no/such/file"),
        (["--prompt-file", "/dev/null/x"], "/dev/null/x"),
        (["--prompt", "a", "--rows", "none"], "--rows"),
        (["--prompt", "a", "--rows", "-1"], "--rows"),
        (["--prompt", "a", "--layers", "3"], "layer 3; expected 0 to 2"),
        (["--prompt", "a", "--layers", "1-"], "--layers"),
        (["--prompt", "a", "--layers", ""], "--layers"),
        (["--prompt", "a", "--max-model-len", "513"], "--max-model-len"),
        (["--prompt", "a", "--engine", "transformers", "--max-model-len", "9"], "--max-model-len"),
        (["--prompt", "a", "--show", "nonsense"], "--show"),
    ],
)
def test_refusals_are_one_sentence_and_exit_2(
    arguments: list[str],
    said: str,
    models: Directory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["probe", "attention", str(models("llama")), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert said in captured.err and captured.err.startswith("ullage probe: ")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("http://127.0.0.1:8000", "a live server"),
        ("/no/such/model", "/no/such/model"),
    ],
)
def test_models_that_are_none_are_refused(
    model: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "attention", model, "--prompt", "a"]) == 2
    assert said in capsys.readouterr().err


def test_a_prompt_that_is_no_text_is_refused(
    models: Directory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "prompt").write_bytes(b"abc\xff")
    asked = [str(models("llama")), "--prompt-file", str(tmp_path / "prompt")]
    assert main(["probe", "attention", *asked]) == 2
    assert "byte 3 is no UTF-8" in capsys.readouterr().err


# --- the table -----------------------------------------------------------------------------------


def head(number: int, entropy: float | None, not_finite: int = 0) -> HeadReading:
    nats = None if entropy is None else Spread(4 * entropy, 4 * entropy - 0.1, 4 * entropy + 0.1)
    return HeadReading(
        head=number,
        rows=10,
        not_finite=not_finite,
        entropy_nats=nats,
        entropy_normalized=entropy,
        sink_mass=0.25,
        band_mass=0.5,
        band_entropy_nats=1.0,
        effective_context=123.4,
        max_score=7.0,
    )


def reading(num_heads: int, *layers: dict[int, float | None]) -> AttentionReading:
    """Heads at 50%, but for those of `layers`."""
    return AttentionReading(
        "m",
        "embedded engine",
        100,
        10,
        tuple(
            LayerReading(index, tuple(head(n, layer.get(n, 0.5)) for n in range(num_heads)))
            for index, layer in enumerate(layers)
        ),
    )


def test_the_table_is_layers_by_heads_and_names_the_extremes() -> None:
    text = lines(reading(3, {1: 0.05}, {2: 0.91}), "entropy")
    assert [line.split() for line in text[3:6]] == [
        ["layer", "0", "1", "2"],
        ["0", "50", "5", "50"],
        ["1", "50", "50", "91"],
    ]
    lowest, highest = (next(s for s in text if s.startswith(w)) for w in ("lowest", "highest"))
    assert lowest.split(":")[0].endswith("layer 0 head 1") and "5.0%" in lowest
    assert highest.split(":")[0].endswith("layer 1 head 2") and "91.0%" in highest


@pytest.mark.parametrize("show", FIGURES)
@pytest.mark.parametrize("num_heads", [1, 9, 32, 64])
def test_the_table_is_narrow_however_many_heads_there_are(show: str, num_heads: int) -> None:
    text = lines(reading(num_heads, {}, {0: None}), show)
    assert max(map(len, text)) <= MAX_WIDTH
    rows = [line for line in text if line[:7].strip() in ("0", "1")]
    assert len(rows) == 2


def test_wide_models_have_a_digit_per_head() -> None:
    text = lines(reading(64, {0: 0.0, 1: 1.0, 2: 0.999, 3: None}), "entropy")
    assert text[4] == "    0  099·5555" + " 55555555" * 7


def test_what_is_not_finite_comes_first_and_is_marked() -> None:
    broken = AttentionReading(
        "m", "s", 10, 10, (LayerReading(4, (head(0, None, not_finite=10), head(1, 0.5))),)
    )
    text = lines(broken, "entropy")
    assert text[4].split() == ["4", "·!", "50"]
    assert text[6] == "not finite       layer 4 head 0: 10 of 10 rows"


def test_a_single_token_has_a_table_too(
    models: Directory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["probe", "attention", str(models("llama")), "--prompt", "a"]) == 0
    assert "·" in capsys.readouterr().out


# --- the page ------------------------------------------------------------------------------------


def _section() -> str:
    page = (Path(__file__).parents[2] / "docs" / "probes.md").read_text(encoding="utf-8")
    return page.split("\n## Attention: ", 1)[1].split("\n## ", 1)[0]


def test_the_page_explains_every_figure_of_a_head() -> None:
    rows = [line.split("|")[1] for line in _section().splitlines() if line.startswith("| `")]
    explained = {name for row in rows for name in row.replace("`", "").replace(",", "").split()}
    assert explained == {f.name for f in fields(HeadReading)} - {"head"}


def test_the_page_names_every_flag_and_figure() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = {o for action in parser._actions for o in action.option_strings if o[:2] == "--"}
    section = _section()
    for flag in flags - {"--help"}:
        assert flag in section, flag
    for figure in FIGURES:
        assert f"`--show {figure}`" in section, figure


def test_the_page_shows_the_table_as_it_is(
    models: Directory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lines begin as those of any model's table."""
    example = _section().split("```\n", 2)[1].splitlines()[1:]
    assert main(["probe", "attention", str(models("llama")), "--prompt", TEXT]) == 0
    out = capsys.readouterr().out.splitlines()
    assert example[2] == out[2]
    titles = [line[:17] for line in example[-5:]]
    assert titles == [line[:17] for line in out[-5:]]
