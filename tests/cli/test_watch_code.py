"""`ullage watch rules` and `ullage watch dashboard`: whole files, or one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ullage.cli.main import main
from ullage.cli.watch_code import ENGINES
from ullage.telemetry.dialects.table import DIALECTS


def test_every_dialect_can_be_named() -> None:
    assert set(ENGINES) == {dialect.engine for dialect in DIALECTS}


def test_rules_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "rules", "--engine", "sglang", "--scrape-interval", "30s"]) == 0
    out = capsys.readouterr().out
    (group,) = yaml.safe_load(out)["groups"]
    assert (group["name"], group["interval"]) == ("ullage-sglang", "30s")
    assert "no server of it was seen" in out


def test_selector_and_labels_reach_every_expression(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "rules", "--selector", '{job="x"}', "--by", "job,instance"]) == 0
    (group,) = yaml.safe_load(capsys.readouterr().out)["groups"]
    for entry in group["rules"]:
        if "record" in entry and "vllm:" in entry["expr"]:
            assert 'job="x"' in entry["expr"], entry
        assert "namespace" not in entry["expr"]


def test_a_file_is_written_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "ullage.yml"
    target.write_text("before")
    assert main(["watch", "rules", "--out", str(target)]) == 0
    assert capsys.readouterr().out == ""
    assert yaml.safe_load(target.read_text())["groups"]
    assert [path.name for path in tmp_path.iterdir()] == ["ullage.yml"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rules", "--out", "/nowhere/at/all/x.yml"], "/nowhere/at/all/x.yml"),
        (["rules", "--engine", "unknown"], "--engine"),
        (["rules", "--selector", "job"], "--selector"),
        (["rules", "--by", "job"], "instance or pod"),
        (["rules", "--by", "a b,instance"], "label names"),
        (["rules", "--scrape-interval", "soon"], "15s"),
        (["rules", "--scrape-interval", "0"], "15s"),
        (["rules", "http://a:1"], "nothing after rules"),
        (["http://a:1", "--out", "x"], "--out"),
        (["http://a:1", "--engine", "vllm"], "--engine"),
    ],
)
def test_bad_usage_is_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert said in told.err
    assert len(told.err.strip().splitlines()) == 1
