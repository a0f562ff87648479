"""`--probe` on a server: rows read along and told, judged by a baseline, and prompts on request.

That faults are found and healthy texts are not is `probes.judging`'s; here they reach whoever asks.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.engine.adapters import write_adapter
from tests.engine.families import write_model
from tests.serving.clients import eventually, metrics
from ullage.cli.main import main
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.errors import BadInput
from ullage.findings.finding import Finding
from ullage.probes.baseline import baseline as baselines
from ullage.probes.baseline.learning import learn
from ullage.probes.baseline.live import LiveReader
from ullage.probes.baseline.rules import RULES
from ullage.probes.baseline.serving_check import check_server
from ullage.probes.baseline.verdicts import Located
from ullage.serving.app import ServerHandle, start_server
from ullage.serving.live_probe import MANY, MOST_SERIES, series_of
from ullage.serving.metric_table import PROBE_COUNTERS, PROBE_FINDINGS, PROBE_GAUGES
from ullage.telemetry.reading import snapshot_of
from ullage.watch.rules import probe as watch_probe
from ullage.watch.rules.table import judge_all
from ullage.watch.view import View
from ullage.watch.web.attention import document_of

KEY = "secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
PROMPT = "hello there, what is new? " * 3
ASK = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
TEXTS = ("A short text", "Another one, 1 2 3", "def f(x):")
QUANTILES = ("p5", "p50", "p95")


@pytest.fixture(scope="module")
def options() -> EngineOptions:
    return EngineOptions(
        kv_cache_memory_bytes=1 << 22, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256
    )


@pytest.fixture(scope="module")
def baseline(
    model_dir: Path, options: EngineOptions, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    file = tmp_path_factory.mktemp("baseline") / "healthy.safetensors"
    baselines.save(learn(model_dir, TEXTS, options, name="tiny", new_tokens=24), str(file))
    return file


Serve = Callable[..., tuple[ServerHandle, httpx.Client]]


@pytest.fixture
def serve(model_dir: Path, options: EngineOptions) -> Iterator[Serve]:
    """Starts a server with control routes and the flags given."""
    started: list[tuple[ServerHandle, httpx.Client]] = []

    def start(**flags: Any) -> tuple[ServerHandle, httpx.Client]:
        handle = start_server(
            model_dir, options, served_model_name="tiny", api_key=KEY,
            enable_control_routes=True, **flags,
        )  # fmt: skip
        started.append((handle, httpx.Client(base_url=handle.url, timeout=120, headers=HEADERS)))
        return started[-1]

    yield start
    for handle, http in started:
        http.close()
        handle.stop()
        assert handle.engine.pool.num_used == 0


def answer(http: httpx.Client, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    asked = http.get(path) if body is None else http.post(path, json=body)
    assert asked.status_code == 200, asked.text
    found: dict[str, Any] = asked.json()
    return found


def heads(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [head for layer in document["layers"] for head in layer["heads"]]


# --- off ---


def test_off_is_nothing_no_reader_and_no_series(serve: Serve) -> None:
    handle, http = serve()
    assert handle.engine.reader is None
    refused = http.get("/ullage/entropy")
    assert refused.status_code == 404
    assert "--probe" in refused.json()["error"]["message"]
    assert "ullage_probe" not in http.get("/metrics").text
    assert "ullage_attn" not in http.get("/metrics").text


def test_off_imports_nothing_of_it() -> None:
    code = (
        "import sys, ullage.serving.app, ullage.serving.routes\n"
        "print([n for n in sys.modules if n.startswith('ullage.probes.') and "
        "n.split('.')[2] in ('live', 'live_attention', 'judging', 'relations', 'embedded', "
        "'served_prompt')], 'ullage.serving.live_probe' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[] False"


# --- reading along ---


def test_nobodys_rows_are_told_before_the_first_request(serve: Serve) -> None:
    """The warm-up is read, so that its costs are over, and forgotten."""
    _, http = serve(probe=True, probe_every=1)
    told = answer(http, "/ullage/entropy")
    assert (told["rows"], told["steps"], told["seconds"], told["layers"]) == (0, 0, 0, [])
    assert (told["every"], told["findings"], told["baseline"]) == (1, None, None)
    series = metrics(http)
    assert series["ullage_probe_rows_total"] == series["ullage_probe_seconds_total"] == 0
    assert all(math.isnan(series[f"ullage_attn_entropy_{q}_nats|0"]) for q in QUANTILES)


def test_a_row_read_along_is_the_row_of_the_prompt(serve: Serve) -> None:
    """One token of one request is one row, the prompt's last: as a prompt's probe reads it."""
    _, http = serve(probe=True, probe_every=1)
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"][:60]
    http.post("/v1/completions", json={**ASK, "prompt": ids, "max_tokens": 1}).raise_for_status()
    live = answer(http, "/ullage/entropy")
    asked = answer(http, "/ullage/attention", {"prompt": ids, "rows": 1})
    assert live["rows"] == asked["rows"] == 1
    pairs = list(zip(heads(live), heads(asked), strict=True))
    assert len(pairs) == 12
    for one, other in pairs:
        assert set(one) == set(other)
        assert one["band_entropy_nats"] is None  # not read along
        for name in set(one) - {"band_entropy_nats"}:
            assert one[name] == pytest.approx(other[name], abs=2e-4), name


def test_one_step_in_so_many_is_read_and_counted(serve: Serve) -> None:
    _, http = serve(probe=True, probe_every=4)
    http.post("/v1/completions", json={**ASK, "max_tokens": 40}).raise_for_status()
    told = answer(http, "/ullage/entropy")
    assert told["every"] == 4
    assert told["steps"] >= 40
    assert told["rows"] == told["rows_kept"] == told["steps"] // 4
    series = metrics(http)
    assert series["ullage_probe_rows_total"] == told["rows"]
    assert series["ullage_probe_seconds_total"] == pytest.approx(told["seconds"])
    assert told["seconds"] > 0
    for layer in told["layers"]:
        low, middle, high = (
            series[f"ullage_attn_entropy_{q}_nats|{layer['layer']}"] for q in QUANTILES
        )
        means = [head["entropy_nats"]["mean"] for head in layer["heads"]]
        assert 0 <= low <= middle <= high
        assert low <= max(means) and min(means) <= high
        assert all(head["rows"] == told["rows"] for head in layer["heads"])


def test_answers_are_the_same_with_and_without(serve: Serve) -> None:
    (_, with_it), (_, without) = serve(probe=True, probe_every=1), serve()
    texts = [answer(http, "/v1/completions", ASK)["choices"] for http in (with_it, without)]
    assert texts[0] == texts[1]


# --- a prompt on request ---


def test_a_prompt_is_read_beside_those_who_run(serve: Serve) -> None:
    handle, http = serve()
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(answer, http, "/v1/completions", ASK) for _ in range(3)]
        told = answer(http, "/ullage/attention", {"prompt": PROMPT * 2, "rows": 1024})
        texts = {run.result()["choices"][0]["text"] for run in running}
    assert len(texts) == 1
    assert told["tokens"] == told["rows"] <= 256
    assert len(heads(told)) == 12
    assert handle.engine.reader is None
    eventually(lambda: handle.engine.pool.num_used == 0, 60)


def test_weights_are_told_of_one_row_only_when_asked(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ullage.probes.attention import served_prompt

    _, http = serve()
    ask = {"prompt": PROMPT, "rows": 1, "layers": [1]}
    told = answer(http, "/ullage/attention", ask)
    assert "weights" not in told
    assert [layer["layer"] for layer in told["layers"]] == [1]
    last = told["tokens"] - 1
    of = {"layer": 1, "head": 2, "row": last}
    whole = answer(http, "/ullage/attention", {**ask, "weights": of})["weights"]
    assert whole["positions"] == list(range(last + 1))
    assert sum(whole["values"]) == pytest.approx(1)
    entropy = -sum(v * math.log(v) for v in whole["values"] if v > 0)
    assert entropy == pytest.approx(told["layers"][0]["heads"][2]["entropy_nats"]["mean"], abs=1e-4)
    assert (whole["left_out"], whole["left_out_mass"]) == (0, 0)
    monkeypatch.setattr(served_prompt, "MOST_WEIGHTS", 5)
    some = answer(http, "/ullage/attention", {**ask, "weights": of})["weights"]
    assert sorted(some["values"]) == sorted(whole["values"])[-5:]
    assert [whole["values"][at] for at in some["positions"]] == some["values"]
    assert some["left_out"] == last + 1 - 5
    assert some["left_out_mass"] == pytest.approx(1 - sum(some["values"]))


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [3] * 257}, "prompt"),
        ({"prompt": [99_999]}, "prompt"),
        ({"rows": 1025}, "rows"),
        ({"rows": 0}, "rows"),
        ({"layers": [3]}, "layers"),
        ({"layers": []}, "layers"),
        ({"weights": {"layer": 0, "head": 4, "row": 0}}, "weights.head"),
        ({"weights": {"layer": 3, "head": 0, "row": 0}}, "weights.layer"),
        ({"weights": {"layer": 0, "head": 0, "row": 99}}, "weights.row"),
        ({"weights": {"layer": 0, "head": 0}}, "weights.row"),
        ({"top": 3}, "top"),
    ],
)
def test_what_cannot_be_read_gets_a_sentence(
    shared: httpx.Client, more: dict[str, Any], field: str
) -> None:
    refused = shared.post("/ullage/attention", json={"prompt": [5, 6, 7], **more})
    assert refused.status_code == 400
    assert field in refused.json()["error"]["message"]


def test_the_routes_want_the_key(shared: httpx.Client) -> None:
    nobody = {"Authorization": "Bearer none"}
    assert shared.get("/ullage/entropy", headers=nobody).status_code == 401
    body = {"prompt": "x"}
    asked = shared.post("/ullage/attention", json=body, headers=nobody)
    assert asked.status_code == 401


@pytest.fixture(scope="module")
def shared(model_dir: Path, options: EngineOptions) -> Iterator[httpx.Client]:
    handle = start_server(model_dir, options, api_key=KEY, enable_control_routes=True)
    with httpx.Client(base_url=handle.url, timeout=120, headers=HEADERS) as http:
        yield http
    handle.stop()


# --- against a baseline ---


def test_a_healthy_server_says_that_it_was_judged(serve: Serve, baseline: Path) -> None:
    _, http = serve(probe_baseline=baseline, probe_every=2)
    before = answer(http, "/ullage/entropy")
    assert {one["state"] for one in before["findings"]} == {"not_evaluable"}
    assert math.isnan(metrics(http)["ullage_probe_findings|P001||"])
    http.post("/v1/completions", json=ASK).raise_for_status()
    told = answer(http, "/ullage/entropy")
    assert [one["id"] for one in told["findings"]] == [rule.id for rule in RULES]
    assert "fired" not in {one["state"] for one in told["findings"]}
    assert told["findings"][0]["state"] == "clear"
    assert told["baseline"]["model"] == "tiny"
    assert told["baseline"]["precision"]["dtype"] == "float32"
    series = metrics(http)
    assert series["ullage_probe_findings|P001||"] == 0  # its labels in order: id, kind, layer
    for head in heads(told):
        assert set(head["usual_entropy_normalized"]) == {"mean", "spread"}
        assert head["outside"] is False


def test_adapters_are_nothing_to_judge_until_one_runs_that_the_baseline_does_not_know(
    model_dir: Path, options: EngineOptions, baseline: Path, tmp_path: Path
) -> None:
    handle = start_server(
        model_dir, replace(options, enable_lora=True), served_model_name="tiny", api_key=KEY,
        enable_control_routes=True, probe_baseline=baseline, probe_every=2,
    )  # fmt: skip
    with httpx.Client(base_url=handle.url, timeout=120, headers=HEADERS) as http:
        http.post("/v1/completions", json=ASK).raise_for_status()
        assert metrics(http)["ullage_probe_findings|P006||"] == 0
        handle.engine.load_lora("other", write_adapter(model_dir, tmp_path))
        http.post("/v1/completions", json={**ASK, "model": "other"}).raise_for_status()
        told = {one["id"]: one for one in answer(http, "/ullage/entropy")["findings"]}
        assert math.isnan(metrics(http)["ullage_probe_findings|P006||"])
    handle.stop()
    assert told["P006"]["state"] == "not_evaluable"
    assert "does not know" in told["P006"]["missing"][0]
    assert told["P001"]["state"] == "clear"


def test_who_asks_it_elsewhere_understands_it(serve: Serve, baseline: Path) -> None:
    """`ullage probe check URL` passes its findings on, `ullage watch --web` draws it."""
    handle, http = serve(probe_baseline=baseline, probe_every=2)
    http.post("/v1/completions", json=ASK).raise_for_status()
    told = answer(http, "/ullage/entropy")
    checked = check_server(handle.url, baselines.read(str(baseline)), str(baseline), KEY)
    assert (checked.judged_by, checked.rows) == ("server", told["rows"])
    assert checked.findings == told["findings"]
    drawn = document_of(told)
    assert (drawn["why"], drawn["layers"], drawn["heads"]) == ("", [0, 1, 2], [0, 1, 2, 3])
    shown = [value for row in drawn["entropy"] for value in row]
    assert shown == pytest.approx([head["entropy_normalized"] for head in heads(told)], rel=1e-5)
    assert [one["id"] for one in drawn["findings"]] == [rule.id for rule in RULES]


def test_who_watches_it_is_told_what_it_finds(serve: Serve, baseline: Path) -> None:
    """`ullage watch` knows of its findings by /metrics alone (W026)."""
    handle, http = serve(probe_baseline=baseline, probe_every=2)

    def watched() -> Finding:
        page = http.get("/metrics").raise_for_status().content
        view = View(handle.url, snapshot_of(page, time_s=time.time()), "", None, None, None)
        (judged,) = judge_all((view,), time.time(), watch_probe.RULES)
        return judged.finding

    assert watched().state == "not_evaluable"
    http.post("/v1/completions", json=ASK).raise_for_status()
    assert watched().state == "clear"
    norm = handle.engine.decoder.layers[1].mixer_norm
    assert norm is not None and norm.weight is not None
    norm.weight[7] *= 64
    http.post("/v1/completions", json={**ASK, "prompt": "go on"}).raise_for_status()
    found = watched()
    assert (found.state, found.severity.name) == ("fired", "error")
    assert "P002, norm, layer 1" in found.cause


def test_without_a_baseline_a_check_from_outside_judges_its_entropy(
    serve: Serve, baseline: Path
) -> None:
    handle, http = serve(probe=True, probe_every=2)
    http.post("/v1/completions", json=ASK).raise_for_status()
    checked = check_server(handle.url, baselines.read(str(baseline)), str(baseline), KEY)
    assert checked.judged_by == "entropy"
    assert [one["state"] for one in checked.findings] == ["clear"]


def test_a_check_from_outside_does_not_call_clear_what_is_no_number(
    serve: Serve, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Entropies that are NaN are far from none of the baseline's."""
    handle, http = serve(probe=True, probe_every=1)
    http.post("/v1/completions", json=ASK).raise_for_status()
    down = handle.engine.decoder.layers[1].linears[3]
    assert down.tensors is not None
    down.tensors[0][5, 7] = math.nan
    for number in range(4):
        http.post("/v1/completions", json={**ASK, "prompt": f"go on {number}"})
    checked = check_server(handle.url, baselines.read(str(baseline)), str(baseline), KEY)
    broken, entropy = checked.findings
    assert (broken["id"], broken["state"], broken["layer"]) == ("P007", "fired", 2)
    assert broken["severity"] == "error" and "layer 2" in broken["cause"]
    assert (entropy["id"], entropy["state"]) == ("P008", "not_evaluable")
    flags = ["--baseline", str(baseline), "--api-key", KEY]
    assert main(["probe", "check", handle.url, *flags]) == 1
    assert "P007 error" in capsys.readouterr().out


def test_a_fault_in_the_running_weights_is_told_and_exported(serve: Serve, baseline: Path) -> None:
    handle, http = serve(probe_baseline=baseline, probe_every=2)
    http.post("/v1/completions", json=ASK).raise_for_status()
    norm = handle.engine.decoder.layers[1].mixer_norm
    assert norm is not None and norm.weight is not None
    norm.weight[7] *= 64
    http.post("/v1/completions", json={**ASK, "prompt": "go on"}).raise_for_status()
    fired = [one for one in answer(http, "/ullage/entropy")["findings"] if one["state"] == "fired"]
    assert [(one["id"], one["kind"], one["layer"]) for one in fired] == [("P002", "norm", 1)]
    (one,) = fired
    assert one["severity"] == "error"
    assert one["evidence"] and one["cause"] and one["remedy"]
    series = metrics(http)
    assert series["ullage_probe_findings|P002|norm|1"] == 1
    assert "ullage_probe_findings|P002||" not in series


@pytest.mark.parametrize("fails", ["rows", "take"])
def test_a_probe_that_fails_ends_no_answer_and_is_said(
    serve: Serve, baseline: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    handle, http = serve(probe_baseline=baseline, probe_every=2)
    whole = answer(http, "/v1/completions", ASK)["choices"]
    monkeypatch.setattr(LiveReader, fails, _not_to_be_called)
    assert answer(http, "/v1/completions", ASK)["choices"] == whole
    told = answer(http, "/ullage/entropy")
    assert handle.engine.reader is None
    assert told["failure"].startswith("AssertionError")
    assert {one["state"] for one in told["findings"]} == {"not_evaluable"}
    assert math.isnan(metrics(http)["ullage_probe_findings|P001||"])


@pytest.mark.parametrize(
    ("changed", "flags", "said"),
    [
        ({"dtype": "bfloat16"}, {}, "--dtype float32"),
        ({"quantization": "int8"}, {}, "--quantization none"),
        ({"kv_cache_dtype": "int8_per_token_head"}, {}, "--kv-cache-dtype auto"),
        ({}, {"probe_every": 0}, "--probe-every"),
        ({}, {"probe_baseline": "/nowhere/x.safetensors"}, "/nowhere/x.safetensors"),
        ({}, {"probe_baseline": __file__}, "safetensors"),
        ({}, {"probe_baseline": None, "probe_every": 4}, "--probe-every"),
    ],
)
def test_what_cannot_judge_is_refused_before_the_weights_are_read(
    model_dir: Path,
    options: EngineOptions,
    baseline: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    flags: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.setattr(Engine, "load", _not_to_be_called)
    with pytest.raises(BadInput, match=said.replace(".", r"\.")) as refused:
        start_server(
            model_dir, replace(options, **changed), **{"probe_baseline": baseline, **flags}
        )
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("family", "baselined", "said"),
    [("llama-tied-mha", True, "kv_heads 2"), ("mixtral", False, "experts")],
)
def test_another_shape_and_a_model_that_cannot_be_read_too(
    options: EngineOptions,
    baseline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    baselined: bool,
    said: str,
) -> None:
    model = write_model(family, tmp_path)
    monkeypatch.setattr(Engine, "load", _not_to_be_called)
    flags: dict[str, Any] = {"probe_baseline": baseline} if baselined else {"probe": True}
    with pytest.raises(BadInput, match=said):
        start_server(model, options, **flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--probe-baseline", "/nowhere/x"), "/nowhere/x"),
        (("--probe-every", "4"), "--probe-every"),
        (("--probe", "--probe-every", "0"), "--probe-every: 0; expected 1 or more steps"),
    ],
)
def test_the_verb_says_it_in_one_sentence(
    model_dir: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    assert main(["serve", str(model_dir), "--port", "0", *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0]


def _not_to_be_called(*_: object) -> None:
    raise AssertionError("the weights were read")


def test_the_series_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    names = [*PROBE_GAUGES, *(f"{name}_total" for name in PROBE_COUNTERS), *PROBE_FINDINGS]
    assert [name for name in names if f"`{name}" not in page] == []


def test_series_of_findings_are_bounded() -> None:
    from ullage.findings.finding import Evidence, Finding, Severity

    def fired(rule: str, layers: tuple[int, ...]) -> Located:
        evidence = (Evidence("q", 5.0, "", "rows"),)
        found = Finding(rule, "t", Severity.error, "fired", evidence, "A cause.", "A remedy.")
        return Located(found, "q", layers)

    few = series_of([fired("P001", (4,)), fired("P003", (1, 2)), fired("P005", ())])
    assert few == {("P001", "q", "4"): 1, ("P003", "q", MANY): 1, ("P005", "q", ""): 1}
    many = series_of(fired("P001", (layer,)) for layer in range(500))
    assert len(many) == MOST_SERIES + 1
    assert many["P001", "q", MANY] == 1
