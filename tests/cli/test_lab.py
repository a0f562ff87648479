"""`ullage lab`: outputs, files and refusals of the command."""

from __future__ import annotations

import json

import pytest

from ullage.cli.main import main
from ullage.lab.registry import EXPERIMENTS


def test_one_experiment_prints_its_table_and_what_was_learnt(capsys):
    assert main(["lab", "layout", "--quick"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("layout\n") and EXPERIMENTS["layout"].question.split("?")[0][:30] in out
    assert "three matrices" in out and "measured on" in out


def test_json_is_one_document_and_files_are_written_whole(capsys, tmp_path):
    place = tmp_path / "new" / "lab"
    assert main(["lab", "gqa", "--quick", "--output", "json", "--save", str(place)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["results"][0]["name"] == "gqa"
    assert json.loads((place / "lab.json").read_text()) == document
    page = (place / "lab.html").read_text()
    assert page.startswith("<!doctype html>") and page.endswith("</html>\n")
    assert sorted(path.name for path in place.iterdir()) == ["lab.html", "lab.json"]


def test_html_goes_to_stdout(capsys):
    assert main(["lab", "layout", "--quick", "--output", "html"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "invalid choice"),
        (["kv-quant"], "random weights do not have"),
        (["gqa", "/no/such/model"], "/no/such/model"),
        (["gqa", "--url", "http://127.0.0.1:9"], "looks inside the engine"),
        (["block-size", "--url", "http://127.0.0.1:9"], "--serve-command"),
        (["batching", "--url", "ftp://x"], "--url"),
        (["prefix", "--serve-command", "serve {port}"], "--url with it"),
        (["batching", "--quick", "--trace", "/no/such.csv"], "--trace"),
    ],
)
def test_refusals_are_one_sentence_and_exit_2(arguments, said, capsys):
    assert main(["lab", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.strip().splitlines()[-1]
    assert said in last and "Traceback" not in captured.err


def test_nobody_at_the_url_is_exit_3(capsys):
    assert main(["lab", "prefix", "--quick", "--url", "http://127.0.0.1:9"]) == 3
    assert "http://127.0.0.1:9" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, capsys):
    taken = tmp_path / "file"
    taken.write_text("")
    assert main(["lab", "layout", "--quick", "--save", str(taken)]) == 2
    assert "layout: begins" not in capsys.readouterr().err
