"""`ullage checkup` end to end on a tiny random model, and against servers that are not ours."""

from __future__ import annotations

import html.parser
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkup.fake_server import BYTES_PER_TOKEN, FakeServer, serving
from tests.engine import driving
from tests.engine.families import COMMON, write_model
from ullage.checkup import machine, measure
from ullage.checkup.html.page import render
from ullage.cli.main import main
from ullage.traffic import embedded

pytest.importorskip("transformers")

SHORT = ["--requests", "6", "--duration", "4", "--max-model-len", "480"]
# 2 (K and V) × layers × KV heads × head_dim × 4 bytes, by hand from the configuration.
KV_BYTES_PER_TOKEN = (
    2
    * COMMON["num_hidden_layers"]
    * COMMON["num_key_value_heads"]
    * (COMMON["hidden_size"] // COMMON["num_attention_heads"])
    * 4
)
# Before the engine's process becomes `ullage`: each step of it has a length.
PACED = f"""
import sys
sys.path.insert(0, {str(Path(driving.__file__).parents[2])!r})
import pytest
from tests.engine.driving import slow_steps
slow_steps(pytest.MonkeyPatch())
"""
HOSTILE = "<script>alert('x')</script> &\"'"


@pytest.fixture(scope="module", autouse=True)
def one_pace() -> Iterator[None]:
    """A tiny model only loses time to threads that wait for each other on a busy machine; on a fast
    one it would be done before its cache is looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "CHILD", PACED + embedded.CHILD)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(measure, "GROWTH_BUDGET_S", 4.0)
        patch.setattr(machine, "BUDGET_S", 0.5)
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with real files, in a directory whose name would like to be a script."""
    place = tmp_path_factory.mktemp("tiny") / HOSTILE.replace("/", "\N{FRACTION SLASH}")
    return write_model("llama", place)


@pytest.fixture(scope="module")
def saved(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whole checkup on the embedded engine; the directory that it wrote."""
    place = tmp_path_factory.mktemp("report") / "deep" / "er"
    assert main(["checkup", str(tiny), "--save", str(place), *SHORT]) == 0
    return place


@pytest.fixture(scope="module")
def document(saved: Path) -> dict[str, Any]:
    return json.loads((saved / "report.json").read_text(encoding="utf-8"))


def figures(value: Any) -> list[dict[str, Any]]:
    """Every figure anywhere in the document."""
    if isinstance(value, dict):
        if "unit" in value and ("value" in value or "min" in value):
            return [value]
        return [f for inner in value.values() for f in figures(inner)]
    if isinstance(value, list):
        return [f for inner in value for f in figures(inner)]
    return []


# --- the document --------------------------------------------------------------------------------


def test_nothing_but_the_two_files_is_left(saved: Path) -> None:
    assert sorted(p.name for p in saved.iterdir()) == ["report.html", "report.json"]


def test_every_request_of_the_slice_was_answered(document: dict[str, Any]) -> None:
    run = document["run"]
    assert (run["num_planned"], run["num_succeeded"]) == (6, 6)
    assert [r["error"] for r in run["requests"]] == [None] * 6
    for request in run["requests"]:
        # ignore_eos holds the answers to the trace's lengths, so the sum is known beforehand.
        assert request["output_tokens"] == request["planned_output_tokens"]
        assert len(request["inter_token_s"]) == request["output_tokens"] - 1
    planned = {row["name"]: row["figure"]["value"] for row in run["scaling"]["figures"]}
    assert planned["output tokens"] == sum(r["output_tokens"] for r in run["requests"])


def test_the_ledger_adds_up_to_the_byte(document: dict[str, Any]) -> None:
    (ledger,) = document["ledgers"]
    assert ledger["total_bytes"] == sum(row["bytes"] for row in ledger["rows"])
    assert all(row["bytes"] >= 0 for row in ledger["rows"])
    rows = {row["name"]: row["bytes"] for row in ledger["rows"]}
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    assert ledger["total_bytes"] == int(meminfo.split()[1]) * 1024
    # Two sequences of 480 tokens and a block of 16 each, at the price of a token by hand.
    assert rows["KV cache"] == 2 * (480 + 16) * KV_BYTES_PER_TOKEN


def test_kv_grows_as_predicted_and_both_are_right(document: dict[str, Any]) -> None:
    growth = document["kv_growth"]
    assert growth["bytes_per_token_predicted"]["value"] == KV_BYTES_PER_TOKEN
    measured = growth["bytes_per_token_measured"]["value"]
    assert measured is not None
    assert measured == pytest.approx(KV_BYTES_PER_TOKEN, rel=growth["tolerance"])
    block = growth["block_size"]["value"]
    for tokens, used in growth["measured"]:
        # Between steps the next token's place may already be taken.
        blocks = {-(-tokens // block), -(-(tokens + 1) // block), -(-(tokens - 1) // block)}
        assert used in {n * block * KV_BYTES_PER_TOKEN for n in blocks}


def test_a_short_answer_that_comes_haltingly_does_not_cost_the_growth(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By such a pace some eight tokens fill the time; at the true one that is no growth to see."""
    told, true_rate = [], measure._lone_rate

    def halting(result: Any) -> float | None:
        told.append(true_rate(result))
        return 2.0 if len(told) == 1 else told[-1]

    monkeypatch.setattr(measure, "_lone_rate", halting)
    assert main(["checkup", str(tiny), "--save", str(tmp_path), *SHORT]) == 0
    growth = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["kv_growth"]
    assert growth["bytes_per_token_measured"]["value"] is not None


def test_errors_are_those_of_the_figures_beside_them(document: dict[str, Any]) -> None:
    rows = document["comparison"]["rows"]
    names = [row["name"] for row in rows]
    assert "KV bytes per token" in names
    assert "decode, one sequence" in names
    assert any(name.startswith("TTFT") for name in names)
    for row in rows:
        predicted, actual = row["predicted"]["value"], row["actual"]["value"]
        assert predicted > 0 and actual > 0
        assert row["error"]["value"] == pytest.approx((actual - predicted) / predicted)


def test_weights_in_memory_are_those_of_the_file_to_the_byte(
    document: dict[str, Any], tiny: Path
) -> None:
    from safetensors import safe_open

    with safe_open(tiny / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    (row,) = [r for r in document["comparison"]["rows"] if r["name"] == "weights in memory"]
    assert row["predicted"]["value"] == row["actual"]["value"] == stored
    rows = {r["name"]: r["bytes"] for r in document["ledgers"][0]["rows"]}
    assert rows["weights"] == stored


def test_every_figure_says_where_it_comes_from(document: dict[str, Any]) -> None:
    found = figures(document)
    assert len(found) > 50
    assert all(figure["source"] for figure in found)


def test_what_was_not_evaluated_is_named(document: dict[str, Any]) -> None:
    whats = [item["what"] for item in document["not_evaluated"]]
    assert "memory ledger of a GPU" in whats
    assert all(item["why"] for item in document["not_evaluated"])
    audit = document["audit"]
    missing = [f for f in audit["findings"] if f["state"] == "not_evaluable"]
    assert all(f["missing"] for f in missing)
    rules = [item for item in document["not_evaluated"] if item["kind"] == "rule"]
    assert sum(item["count"] for item in rules) == len(missing)
    assert f"{len(missing)} rules" in document["verdict"]["paragraph"]


def test_rules_of_another_question_take_one_line_and_keep_their_ids_in_the_json(
    document: dict[str, Any], saved: Path
) -> None:
    missing = {
        f["id"]: f["title"] for f in document["audit"]["findings"] if f["state"] == "not_evaluable"
    }
    assert {"A151", "A160", "A161", "A177"} <= missing.keys()
    whats = {item["what"]: item["why"] for item in document["not_evaluated"]}
    assert "--deep" in whats["10 audit rules on the values of tensors"]
    assert "--deployment" in whats["16 audit rules on a deployment file"]
    page = (saved / "report.html").read_text(encoding="utf-8")
    assert "A151 to A160" in page and "A161 to A177" in page
    assert missing["A153"] not in page and missing["A168"] not in page


def test_the_verdict_does_not_claim_more_than_the_run(document: dict[str, Any]) -> None:
    verdict = document["verdict"]
    assert "answered all 6 requests" in verdict["paragraph"]
    # An error beside an exact prediction is shown with what could be resolved at all.
    rows = {row["name"]: row for row in document["comparison"]["rows"]}
    assert "sampling resolves ±" in rows["KV bytes per token"]["note"]
    assert "exactly as predicted: KV blocks " in verdict["paragraph"]
    tolerance = document["kv_growth"]["tolerance"]
    assert f"agrees within ±{tolerance:.1%}" in verdict["paragraph"]
    counts = document["audit"]["counts"]
    worst = next((s for s in ("error", "warning") if counts[s]), None)
    expected = {"error": "fault", "warning": "attention", None: "sound"}[worst]
    if expected == "sound" and document["run"]["num_preemptions"]:
        expected = "attention"
    assert verdict["state"] == expected


# --- the page ------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [
            f"{name}={value}"
            for name, value in attrs
            if name in ("src", "href", "xlink:href", "action", "data", "srcset")
            or name.startswith("on")
        ]


def test_the_page_stands_alone_and_runs_nothing(saved: Path) -> None:
    text = (saved / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.links == []
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert "prefers-color-scheme: dark" in style


def test_the_page_is_well_formed_and_its_sections_are_there(saved: Path) -> None:
    text = (saved / "report.html").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text.removeprefix("<!doctype html>\n"))  # noqa: S314 - ours
    sections = [s.get("id") for s in root.iter("section")]
    assert sections == [
        "findings",
        "ledger",
        "fits",
        "kv-growth",
        "roofline",
        "run",
        "comparison",
        "not-evaluated",
        "machine",
    ]
    assert len(list(root.iter("svg"))) >= 14


def test_hostile_names_are_shown_and_never_markup(saved: Path, tiny: Path) -> None:
    text = (saved / "report.html").read_text(encoding="utf-8")
    assert "<script" not in text
    root = ElementTree.fromstring(text.removeprefix("<!doctype html>\n"))  # noqa: S314 - ours
    heading = next(root.iter("h1"))
    assert heading.text == tiny.name


def test_markup_in_any_text_of_a_document_stays_text(document: dict[str, Any]) -> None:
    """Every string of the document replaced by hostile ones: still well formed, still no script."""

    def poison(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: poison(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [poison(v, key) for v in value]
        # These choose what is drawn and how; they are ours, never a file's.
        closed = key in {"state", "severity", "unit", "kind", "schema"}
        return f"{HOSTILE}\x00]]>" if isinstance(value, str) and not closed else value

    text = render(poison(document))
    assert "<script" not in text
    assert "\x00" not in text
    ElementTree.fromstring(text.removeprefix("<!doctype html>\n"))  # noqa: S314 - ours


# --- servers that are not ours -------------------------------------------------------------------


def run_against(
    server: FakeServer, tiny: Path, place: Path, *more: str
) -> tuple[int, dict[str, Any]]:
    with serving(server):
        command = ["checkup", str(tiny), "--engine", server.url, "--save", str(place)]
        code = main([*command, "--requests", "5", "--duration", "2", *more])
    return code, json.loads((place / "report.json").read_text(encoding="utf-8"))


def test_a_server_without_metrics_gives_a_run_and_says_what_is_absent(
    tiny: Path, tmp_path: Path
) -> None:
    server = FakeServer(metrics=False, tokenizes=False, usage=False, takes_ignore_eos=False)
    code, document = run_against(server, tiny, tmp_path)
    assert code == 0
    assert document["run"]["num_succeeded"] == 5
    assert document["run"]["peak_kv_usage"] is None
    assert document["run"]["num_preemptions"] is None
    assert document["kv_growth"] is None
    assert document["roofline"] is None
    gaps = {item["what"]: item["why"] for item in document["not_evaluated"]}
    assert "vllm:kv_cache_usage_perc" in gaps["metrics that the engine does not export"]
    assert "--gpu" in gaps["roofline and predicted speeds"]
    assert "growth of the KV cache" in gaps
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert 'id="kv-growth"' not in page and "KV cache occupancy" not in page


def test_a_model_whose_whole_length_is_over_in_no_time_is_seen_to_grow(
    tiny: Path, tmp_path: Path
) -> None:
    """One sequence is over between two looks or three, so that it takes many."""
    server = FakeServer(token_s=0.0005, first_s=0.0, max_model_len=96)
    code, document = run_against(server, tiny, tmp_path)
    assert code in (0, 1)
    growth = document["kv_growth"]
    measured = growth["bytes_per_token_measured"]["value"]
    assert measured == pytest.approx(BYTES_PER_TOKEN, rel=growth["tolerance"])
    assert growth["tolerance"] < 0.1
    assert [tokens for tokens, _ in growth["measured"]] == sorted(t for t, _ in growth["measured"])


def test_a_vllm_without_byte_metrics_is_measured_in_blocks(tiny: Path, tmp_path: Path) -> None:
    server = FakeServer(bytes_metrics=False, token_s=0.01)
    code, document = run_against(server, tiny, tmp_path, "--gpu", "H100-SXM")
    assert code in (0, 1)
    growth = document["kv_growth"]
    assert "no bytes are exported" in growth["bytes_per_token_measured"]["note"]
    assert "the engine tells blocks, not bytes" in document["verdict"]["paragraph"]
    (row,) = [r for r in document["comparison"]["rows"] if r["name"] == "tokens to fill a KV block"]
    assert row["predicted"]["value"] == 16
    assert row["actual"]["value"] == pytest.approx(16, rel=growth["tolerance"] + 0.01)
    assert document["roofline"]["flops"]["value"] == pytest.approx(989.4e12)
    assert len(document["ledgers"]) == 1
    ledger = document["ledgers"][0]
    assert ledger["total_bytes"] == sum(row["bytes"] for row in ledger["rows"])


def test_a_server_whose_kv_grows_otherwise_is_not_called_right(tiny: Path, tmp_path: Path) -> None:
    """The fake takes 1,000 bytes a token, which is not what the spec says."""
    _, document = run_against(FakeServer(token_s=0.01), tiny, tmp_path)
    assert document["verdict"]["state"] in ("attention", "fault")
    assert "but " in document["verdict"]["paragraph"]
    assert "as predicted" not in document["verdict"]["paragraph"]
    assert "and the engine says 3.20 MB" in document["verdict"]["paragraph"]


# As vLLM 0.32 on a CPU exported it for this very model (float32, 1 GiB for the KV cache,
# --max-model-len 480).
VLLM_CACHE_INFO = (
    'vllm:cache_config_info{_block_size_resolved="True",block_size="128",cache_dtype="auto",'
    'cache_hit_alignment_tokens="None",effective_attention_block_size="128",'
    'enable_mamba_shared_prefix_checkpoint="False",enable_prefix_caching="True",engine="0",'
    'gpu_memory_utilization="0.92",hash_block_size="None",is_attention_free="False",'
    'kv_cache_dtype_skip_layers="[]",kv_cache_layout="None",kv_cache_max_concurrency="2730.5",'
    'kv_cache_memory_bytes="1073741824",kv_cache_size_tokens="1310640",'
    'mamba_block_size="None",num_cpu_blocks="None",num_gpu_blocks="10922",'
    'num_gpu_blocks_override="None",sliding_window="None",user_specified_block_size="False"} 1.0'
)


def a_vllm(cache_info: str) -> FakeServer:
    return FakeServer(
        bytes_metrics=False,
        token_s=0.01,
        max_model_len=480,
        num_blocks=10922,
        block_size=128,
        cache_info=cache_info,
    )


def test_what_a_real_vllm_allocated_stands_first_and_is_as_predicted(
    tiny: Path, tmp_path: Path
) -> None:
    flags = ["--gpu", "this-machine", "--dtype", "float32"]
    _, document = run_against(a_vllm(VLLM_CACHE_INFO), tiny, tmp_path, *flags)
    rows = document["comparison"]["rows"][:4]
    assert [(r["note"], r["predicted"]["value"], r["actual"]["value"]) for r in rows] == [
        ("num_gpu_blocks", 10_922, 10_922),
        ("block_size", 128, 128),
        ("kv_cache_size_tokens", 1_310_640, 1_310_640),
        ("kv_cache_max_concurrency", 2730.5, 2730.5),
    ]
    assert "vLLM's own KV allocation is exactly as predicted" in document["verdict"]["paragraph"]


def test_a_vllm_that_allocated_otherwise_needs_attention(tiny: Path, tmp_path: Path) -> None:
    flags = ["--gpu", "this-machine", "--dtype", "float32"]
    other = VLLM_CACHE_INFO.replace('num_gpu_blocks="10922"', 'num_gpu_blocks="5461"')
    _, document = run_against(a_vllm(other), tiny, tmp_path, *flags)
    assert document["verdict"]["state"] in ("attention", "fault")
    assert (
        "for KV blocks 10,922 were predicted and the engine says 5,461"
        in document["verdict"]["paragraph"]
    )


def test_a_server_on_this_machine_has_a_device(tiny: Path, tmp_path: Path) -> None:
    _, document = run_against(FakeServer(), tiny, tmp_path, "--gpu", "this-machine")
    (ledger,) = document["ledgers"]
    assert ledger["device"].startswith("this machine")
    assert ledger["total_bytes"] == sum(row["bytes"] for row in ledger["rows"])
    assert "on cpu" in document["audit"]["judged_for"]
    lacks = [lack for f in document["audit"]["findings"] for lack in f["missing"]]
    assert not [lack for lack in lacks if "--gpu NAME[:N]" in lack or "no device" in lack]
    assert "no device is named" not in json.dumps(document)
    # Whether it fits on bought devices is another question, and is still answered.
    cells = [cell for row in document["fits"]["rows"] for cell in row["cells"]]
    assert all(cell["min"] is not None for cell in cells)


def test_a_server_that_takes_text_only_is_given_text(tiny: Path, tmp_path: Path) -> None:
    server = FakeServer(takes_ids=False)
    code, document = run_against(server, tiny, tmp_path)
    assert code == 0
    assert document["run"]["num_succeeded"] == 5
    assert "approximate" in document["run"]["prompts"]
    assert isinstance(server.bodies[-1]["prompt"], str)


# --- failures ------------------------------------------------------------------------------------


def test_an_unreachable_server_leaves_a_report_without_a_run_and_exit_code_3(
    tiny: Path, tmp_path: Path
) -> None:
    command = ["checkup", str(tiny), "--engine", "127.0.0.1:9", "--save", str(tmp_path)]
    assert main(command) == 3
    document = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert document["run"] is None
    assert document["verdict"]["state"] in ("incomplete", "fault")
    assert document["not_evaluated"][0]["what"] == "the run"
    assert "/v1/models" in document["not_evaluated"][0]["why"]
    assert "was not run" in document["verdict"]["paragraph"]


def test_a_model_that_the_engine_cannot_run_is_audited_and_sized_and_says_why(
    tmp_path: Path,
) -> None:
    import transformers

    config = transformers.MambaConfig(
        vocab_size=320, hidden_size=64, num_hidden_layers=2, state_size=8
    )
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "model")
    place = tmp_path / "out"
    assert main(["checkup", str(tmp_path / "model"), "--save", str(place)]) == 3
    document = json.loads((place / "report.json").read_text(encoding="utf-8"))
    assert document["run"] is None
    # The engine's own sentence, which names the first field that it cannot run.
    assert "is not run by the embedded engine" in document["not_evaluated"][0]["why"]
    assert document["audit"]["findings"]
    assert document["fits"]["rows"]
    assert (place / "report.html").stat().st_size > 10_000


def test_a_configuration_alone_is_audited_and_sized_for_the_named_device(
    tiny: Path, tmp_path: Path
) -> None:
    flags = ["--gpu", "H100:2", "--save", str(tmp_path)]
    assert main(["checkup", str(tiny / "config.json"), *flags]) == 3
    document = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert document["not_evaluated"][0]["why"] == "there are no weights beside the configuration"
    (ledger,) = document["ledgers"]
    assert ledger["total_bytes"] == sum(row["bytes"] for row in ledger["rows"])
    assert "tensor_parallel_size 2" in ledger["caption"]
    # Judged with the two ranks that the ledger plans, so no device is said to stand idle.
    fired = {f["id"] for f in document["audit"]["findings"] if f["state"] == "fired"}
    assert "A070" not in fired
    ElementTree.fromstring(  # noqa: S314 - ours
        (tmp_path / "report.html").read_text(encoding="utf-8").removeprefix("<!doctype html>\n")
    )


def test_flags_of_a_server_need_a_server(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (["--gpu", "this-machine"], ["--dtype", "bfloat16"]):
        assert main(["checkup", str(tiny), "--save", str(tmp_path / "out"), *flags]) == 2
        assert "--engine URL" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--engine", "ftp://127.0.0.1"],
        ["--engine", "http://"],
        ["--engine", ""],
        ["--engine", "http://127.0.0.1:99999"],
        ["--engine", "http://no host/"],
        ["--gpu", "H900"],
        ["--save", "{file}/below"],
    ],
)
def test_bad_usage_is_one_sentence_and_no_file(
    flags: list[str], tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    flags = [flag.format(file=taken) for flag in flags]
    if "--engine" not in flags:
        flags += ["--engine", "127.0.0.1:9"]
    if "--save" not in flags:
        flags += ["--save", str(tmp_path / "out")]
    assert main(["checkup", str(tiny), *flags]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("ullage checkup: ")
    assert not (tmp_path / "out").exists()


def first_child(pid: int) -> int:
    """The child of a process, waited for until it is there."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                words = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2]
            except OSError:
                continue
            if int(words.split()[1]) == pid:
                return int(stat.parent.name)
        time.sleep(0.01)
    raise AssertionError("it started no engine")


@pytest.mark.parametrize(
    ("number", "phase"),
    [(signal.SIGINT, "warming up"), (signal.SIGKILL, "starting the embedded engine")],
)
def test_whatever_ends_the_checkup_ends_the_engine_and_leaves_no_half_file(
    number: signal.Signals, phase: str, tiny: Path, tmp_path: Path
) -> None:
    place = tmp_path / "out"
    # A shell's background jobs ignore SIGINT and hand that down; a user at a terminal does not.
    heeding = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from ullage.cli.main import main; sys.exit(main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", heeding, "checkup", str(tiny), "--save", str(place), *SHORT],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = ""
        while phase not in said:
            line = process.stderr.readline()
            assert line, f"it ended before its run: {said}"
            said += line
        engine = first_child(process.pid)
        process.send_signal(number)
        assert process.wait(20) != 0
    deadline = time.monotonic() + 10
    while Path(f"/proc/{engine}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    alive = Path(f"/proc/{engine}").exists()
    if alive:
        os.kill(engine, signal.SIGKILL)
    assert not alive
    assert not place.exists() or list(place.iterdir()) == []
