"""`ullage probe baseline` and `check`: files, sentences, exit codes, a fault on disk found."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.conftest import family_dir, one_thread  # noqa: F401

from ullage.cli.main import main
from ullage.probes.baseline.prompts import CHECKED, LEARNED, read_prompts

PROMPTS = "A short text\nAnother one, 1 2 3\ndef f(x):\n"


@pytest.fixture(scope="module")
def model(family_dir: Callable[[str], Path]) -> Path:  # noqa: F811
    return family_dir("llama")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "prompts.txt"
    file.write_text(PROMPTS)
    return file


@pytest.fixture(scope="module")
def baseline(model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("baseline") / "healthy.safetensors"
    arguments = [str(model), "--prompts", str(texts), "--tokens", "24", "--save", str(file)]
    assert main(["probe", "baseline", *arguments]) == 0
    return file


def check(model: Path, baseline: Path, *more: str) -> int:
    return main(
        ["probe", "check", str(model), "--baseline", str(baseline), "--tokens", "16", "--every",
         "8", *more]
    )  # fmt: skip


def answered(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def changed_copy(model: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def test_a_baseline_says_what_it_is_of(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "b"
    arguments = [str(model), "--prompts", str(texts), "--tokens", "24", "--save", str(file)]
    assert main(["probe", "baseline", *arguments, "--output", "json"]) == 0
    told = answered(capsys)
    assert told["prompts"] == 3 and told["rows"] >= 72 and told["layers"] == 3
    assert told["file"] == str(file) and told["file_bytes"] == file.stat().st_size
    assert (told["dtype"], told["quantization"], told["adapters"]) == ("float32", "none", [])


def test_the_model_itself_is_clean(
    model: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(model, baseline, "--output", "json") == 0
    told = answered(capsys)
    assert {one["state"] for one in told["findings"]} <= {"clear", "not_evaluable"}
    assert told["first_alarm_row"] is None and told["rows"] > 0
    assert told["tokens"] == 16 * len(CHECKED)
    assert check(model, baseline) == 0
    assert "P001 clear" in capsys.readouterr().out


def test_a_fault_in_the_files_is_found_and_located(
    model: Path, baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(tensors: dict[str, Any]) -> None:
        tensors["model.layers.1.self_attn.q_proj.weight"][16:32] *= 4

    other = changed_copy(model, tmp_path / "faulty", fault)
    assert check(other, baseline, "--output", "json") == 1
    told = answered(capsys)
    (fired,) = [one for one in told["findings"] if one["state"] == "fired"]
    assert (fired["id"], fired["kind"], fired["layer"], fired["heads"]) == ("P001", "q", 1, [1])
    assert "4 times as large" in fired["cause"] and fired["remedy"]
    assert told["first_alarm_row"] == 1 and told["first_alarm_tokens"] <= 8
    assert check(other, baseline) == 1
    shown = capsys.readouterr().out
    assert (
        "P001 error" in shown and "q, layer 1 head 1" in shown and "first alarm at row 1" in shown
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("tensor", "kind", "layer"),
    [
        ("model.embed_tokens", "embedding", None),
        ("model.layers.0.input_layernorm", "norm", 0),
        ("model.layers.1.self_attn.q_proj", "q", 1),
        ("model.layers.1.self_attn.k_proj", "k", 1),
        ("model.layers.1.self_attn.v_proj", "v", 1),
        ("model.layers.1.self_attn.o_proj", "o", 1),
        ("model.layers.2.mlp.gate_proj", "mlp", 2),
        ("model.layers.2.mlp.down_proj", "mlp", 2),
        ("model.norm", "norm", None),
        ("lm_head", "embedding", None),
    ],
)
def test_a_model_whose_every_request_ends_at_once_is_no_clean_one(
    tensor: str, kind: str, layer: int | None, value: float, model: Path, baseline: Path,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The engine ends a request whose numbers are not finite before a sampled step is due."""

    def fault(tensors: dict[str, Any]) -> None:
        tensors[f"{tensor}.weight"][..., 3] = value

    other = changed_copy(model, tmp_path / "faulty", fault)
    assert check(other, baseline, "--output", "json") == 1
    told = answered(capsys)
    (fired,) = [one for one in told["findings"] if one["id"] == "P007"]
    assert (fired["state"], fired["kind"], fired["layer"]) == ("fired", kind, layer)


def test_where_no_row_is_read_nothing_is_decided(
    model: Path, baseline: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(model, baseline, "--every", "100000") == 1
    assert "not decided: nothing could be judged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["baseline", "/nowhere", "--save", "x"], "/nowhere"),
        (["baseline", "{model}", "--save", "/nowhere/at/all"], "--save"),
        (["baseline", "{model}", "--save", "x", "--prompts", "/nowhere.txt"], "/nowhere.txt"),
        (["baseline", "{model}", "--save", "x", "--lora", "nonsense"], "NAME=ADAPTER"),
        (["baseline", "{model}", "--save", "{tmp}/x", "--dtype", "bfloat16",
          "--quantization", "int8"], "--dtype"),
        (["baseline", "{model}", "--save", "{tmp}/x", "--tokens", "100000"], "--tokens"),
        (["check", "{model}", "--baseline", "/nowhere"], "/nowhere"),
        (["check", "{model}", "--baseline", "{texts}"], "safetensors"),
        (["check", "{model}", "--baseline", "{model}/model.safetensors"], "schema"),
        (["check", "{model}", "--baseline", "{baseline}", "--lora", "a=b"], "no adapter"),
        (["check", "{model}", "--baseline", "{baseline}", "--prompts", "/no.txt"], "/no.txt"),
        (["check", "http://127.0.0.1:1", "--baseline", "{baseline}", "--every", "3"], "--every"),
        (["check", "http://127.0.0.1:0", "--baseline", "{baseline}"], "URL"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(
    arguments: list[str],
    sentence: str,
    model: Path,
    texts: Path,
    baseline: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"model": model, "texts": texts, "baseline": baseline, "tmp": tmp_path}
    assert main(["probe", *(one.format(**places) for one in arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and sentence in said.err


def test_a_baseline_of_another_shape_is_refused(
    family_dir: Callable[[str], Path],  # noqa: F811
    baseline: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check(family_dir("llama-tied-mha"), baseline) == 2
    assert "kv_heads" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"max_position_embeddings": 64}, {"num_hidden_layers": 2}])
def test_a_configuration_that_is_another_is_said_in_words_of_the_baseline(
    change: dict[str, Any], model: Path, baseline: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A check has no flag for what its engine is given: no refusal names one."""
    other = changed_copy(model, tmp_path / "other", lambda _: None)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | change))
    assert check(other, baseline) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ullage probe: {baseline}: ") and said.count("\n") == 1


def test_a_server_that_does_not_answer_is_exit_code_3(
    baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "check", "http://127.0.0.1:9", "--baseline", str(baseline)]) == 3
    assert capsys.readouterr().err.count("\n") == 1


# --- prompts ---


def test_no_text_of_a_check_is_a_baselines() -> None:
    assert not set(CHECKED) & set(LEARNED)
    assert len(LEARNED) >= 12 and max(map(len, LEARNED)) > 1_500


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "one\n\n  two  \n", ("one", "two")),
        ("a.txt", '{"name": 1}\nplain\n', ('{"name": 1}', "plain")),
        ("a.txt", '{"prompt": "one\\ntwo"}\n{"prompt": "three"}\n', ("one\ntwo", "three")),
        ("a.jsonl", '{"prompt": "one", "id": 7}\n', ("one",)),
        ("a.txt", "\ufeffone\u2028still one\r\ntwo", ("one\u2028still one", "two")),
    ],
)
def test_prompts_are_lines_or_json_lines(
    name: str, content: str, expected: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content.encode())
    assert read_prompts([str(file)]) == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b"\n \n"),
        ("a.txt", b"\xff\xfe"),
        ("a.jsonl", b'{"prompt": "one"}\n{"text": "two"}\n'),
        ("a.jsonl", b'{"prompt": ["one"]}\n'),
        ("a.jsonl", b"plain\n"),
        ("a.txt", b'{"prompt": "one"}\nnot json\n'),
        ("a.jsonl", b"[" * 100_000),
    ],
)
def test_a_file_without_prompts_is_one_sentence(name: str, content: bytes, tmp_path: Path) -> None:
    from ullage.errors import BadUsage

    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(BadUsage, match=name):
        read_prompts([str(file)])


# --- a server, by what it tells ---


def served(
    url_of: Callable[[Any], str], document: Any, baseline: Path, *more: str
) -> Callable[[], int]:
    return lambda: main(
        ["probe", "check", url_of(document), "--baseline", str(baseline), "--output", "json", *more]
    )


@pytest.fixture
def telling() -> Any:
    """A server whose GET /ullage/entropy answers with a document, or with a status."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from threading import Thread

    servers = []

    def start(document: Any) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status = document if isinstance(document, int) else 200
                body = b"" if isinstance(document, int) else json.dumps(document).encode()
                self.send_response(status if self.path == "/ullage/entropy" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def told_of(baseline: Path, rows: int = 40, **more: Any) -> dict[str, Any]:
    """What a healthy server would tell: the baseline's own means."""
    from ullage.probes.baseline.baseline import read

    found = read(str(baseline))
    form = found.sketch.form
    means = found.usual.mean[: form.layers * form.heads].reshape(form.layers, form.heads)
    layers = [
        {"layer": n, "heads": [{"entropy_normalized": float(mean)} for mean in row]}
        for n, row in enumerate(means)
    ]
    judged_by = {
        "file": str(baseline), "model": found.model, "by": found.by, "rows": found.rows,
        "prompts": found.prompts, "precision": asdict(found.precision),
    }  # fmt: skip
    return {
        "layers": layers, "rows": rows, "steps": rows * 16, "findings": None,
        "baseline": judged_by, **more,
    }  # fmt: skip


def test_a_server_without_a_baseline_is_judged_by_entropy_alone(
    telling: Any, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy = told_of(baseline)
    assert served(telling, healthy, baseline)() == 0
    told = answered(capsys)
    assert told["judged_by"] == "entropy" and "only entropy" in told["not_seen"]
    (clear,) = told["findings"]
    assert clear["state"] == "clear"
    assert re.match(r"[1-9]\d* of 12 heads", clear["evidence"][1]["value"])
    healthy["layers"][1]["heads"][2]["entropy_normalized"] = 0.0
    assert served(telling, healthy, baseline)() == 1
    (fired,) = answered(capsys)["findings"]
    assert (fired["id"], fired["layers"], fired["heads"]) == ("P008", [1], [2])


def test_entropies_of_which_none_could_be_far_enough_are_not_clear(
    telling: Any, baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads that texts move as far as from one end to the other say nothing by their means."""
    from ullage.probes.baseline.baseline import read, save

    known = read(str(baseline))
    wide = replace(known, usual=replace(known.usual, spread=np.ones_like(known.usual.spread)))
    save(wide, str(tmp_path / "wide.safetensors"))
    told = told_of(tmp_path / "wide.safetensors")
    assert served(telling, told, tmp_path / "wide.safetensors")() == 1
    (finding,) = answered(capsys)["findings"]
    assert finding["state"] == "not_evaluable" and "far enough" in finding["missing"][0]


def test_a_server_that_read_too_little_is_not_judged(
    telling: Any, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served(telling, told_of(baseline, rows=2), baseline)() == 1
    (finding,) = answered(capsys)["findings"]
    assert finding["state"] == "not_evaluable" and "2 were read" in finding["missing"][0]
    # Many rows, few of them of one layer, whose means would be those of a few rows.
    few = told_of(baseline)
    for layer in few["layers"]:
        for head in layer["heads"]:
            head["rows"] = 3 if layer["layer"] == 1 else 40
    assert served(telling, few, baseline)() == 1
    (finding,) = answered(capsys)["findings"]
    assert finding["state"] == "not_evaluable" and "3 were read" in finding["missing"][0]


def test_findings_of_a_server_with_a_baseline_are_passed_on(
    telling: Any, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = {
        "id": "P001", "title": "t", "state": "fired", "severity": "error", "kind": "q", "layer": 1,
        "layers": [1], "heads": [0], "evidence": [], "cause": "c", "remedy": "r", "missing": [],
    }  # fmt: skip
    assert served(telling, told_of(baseline, findings=[finding]), baseline)() == 1
    told = answered(capsys)
    assert told["findings"] == [finding] and told["judged_by"] == "server"


def test_the_table_says_of_a_clear_rule_what_of_it_was_not_judged(
    telling: Any, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers too: a server that runs an adapter which its baseline does not know is clear of P001
    in the rows that could be judged only."""
    seen = {"rows read": 9, "not judged": "k: none", "rows not judged, of adapters": 4}
    finding = {
        "id": "P001", "title": "Products", "state": "clear", "severity": "error", "kind": "q",
        "layers": [], "heads": [], "cause": "", "remedy": "", "missing": [],
        "evidence": [{"name": n, "value": v, "unit": ""} for n, v in seen.items()],
    }  # fmt: skip
    url = telling(told_of(baseline, findings=[finding]))
    assert main(["probe", "check", url, "--baseline", str(baseline)]) == 0
    why = "(not judged: k: none; rows not judged, of adapters: 4)"
    assert f"P001 clear          Products {why}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "another"),
        ("rows", 1),
        ("prompts", 99),
        ("by", "ullage 0.0.1"),
        ("precision", {"dtype": "bfloat16", "quantization": "none", "kv_cache_dtype": "auto"}),
    ],
)
def test_a_server_that_judges_itself_by_another_baseline_does_not_pass_for_this_one(
    name: str, value: object, telling: Any, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = told_of(baseline, findings=[])
    document["baseline"] |= {name: value, "file": "theirs.safetensors"}
    assert served(telling, document, baseline)() == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert name in said.err and "theirs.safetensors" in said.err


@pytest.mark.parametrize(
    "document",
    [404, 401, 500, [], {"layers": []}, {"layers": [{}], "rows": 90, "steps": 2, "findings": None},
     {"layers": [], "rows": 1, "steps": 1, "findings": []},
     {"layers": [], "rows": -1, "steps": 0}, {"layers": [], "rows": 1, "steps": 1, "findings": [3]},
     {"layers": [{"heads": [{"entropy_normalized": 1}]}], "rows": 90, "steps": 2},
     {"layers": [{"heads": [{"entropy_normalized": 1, "rows": "x"}]}], "rows": 9, "steps": 2}],
)  # fmt: skip
def test_a_server_that_tells_something_else_is_one_sentence(
    telling: Any, document: Any, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served(telling, document, baseline)() == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1


def test_means_of_a_healthy_server_are_within_the_stated_rate() -> None:
    from ullage.probes.baseline.serving_check import FALSE_ALARMS, far_z

    count = 270
    normal = np.random.default_rng(4).standard_normal((4_000, count))
    alarms = (np.abs(normal).max(axis=1) > far_z(count)).mean()
    assert alarms <= FALSE_ALARMS
