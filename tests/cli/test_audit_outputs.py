"""`ullage audit` for machines: SARIF, JUnit, annotations, baselines, deployment files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fluidattacks_core.sarif import SarifLog

from ullage.cli.main import main

LLAMA = str(Path(__file__).parents[1] / "audit" / "models" / "llama.json")
POD = """\
apiVersion: v1
kind: Pod
spec:
  containers:
    - name: llm
      image: vllm/vllm-openai:v0.32.0
      args:
        - /models/llama
        - --tensor-parallel-size
        - "3"
        - --swap-space=4
      resources: {limits: {nvidia.com/gpu: 4}}
"""


def ask(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["audit", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def pod(tmp_path) -> str:
    path = tmp_path / "pod.yaml"
    path.write_text(POD)
    return str(path)


def test_sarif_points_at_the_lines_of_both_files(capsys, pod):
    code, out, _ = ask(capsys, LLAMA, "--deployment", pod, "--output", "sarif")
    SarifLog.model_validate_json(out)
    (run,) = json.loads(out)["runs"]
    places = {r["ruleId"]: r["locations"][0]["physicalLocation"] for r in run["results"]}
    assert code == 1
    assert places["A161"]["region"]["startLine"] == 11  # --swap-space
    assert places["A161"]["artifactLocation"]["uri"] == f"file://{pod}"
    assert places["A061"]["artifactLocation"]["uri"] in (f"file://{LLAMA}", f"file://{pod}")
    assert all(r["partialFingerprints"] for r in run["results"])


def test_junit_has_a_case_per_rule(capsys, pod):
    from ullage.audit import RULES

    code, out, _ = ask(capsys, LLAMA, "--deployment", pod, "--output", "junit")
    root = ElementTree.fromstring(out.encode())  # noqa: S314 (our own)
    cases = {c.get("name")[:4]: c for c in root.iter("testcase")}
    assert code == 1 and sorted(cases) == [rule.id for rule in RULES]
    assert "--swap-space" in cases["A161"].find("failure").get("message")
    assert cases["A163"].find("failure") is None and cases["A163"].find("skipped") is None
    assert "headers" in cases["A131"].find("skipped").get("message")


def test_github_annotates_the_file(capsys, pod):
    code, out, _ = ask(capsys, LLAMA, "--deployment", pod, "--output", "github")
    (line,) = [line for line in out.splitlines() if "title=A161" in line]
    assert code == 1 and line.startswith("::error ") and f"file={pod}" in line and "line=11" in line


def test_a_baseline_accepts_and_tells_what_is_stale(capsys, tmp_path, pod):
    base = str(tmp_path / "base.json")
    arguments = [LLAMA, "--deployment", pod]
    code, _, err = ask(capsys, *arguments, "--write-baseline", base)
    assert code == 0 and "accepted finding" in err
    code, out, _ = ask(capsys, *arguments, "--baseline", base, "--output", "json")
    made = json.loads(out)
    assert code == 0 and made["counts"]["accepted"] == made["counts"]["fired"] > 3
    Path(pod).write_text(POD.replace("        - --swap-space=4\n", "        - --seed=4\n"))
    code, out, _ = ask(capsys, *arguments, "--baseline", base, "--output", "json")
    assert code == 0 and [e["rule"] for e in json.loads(out)["stale_baseline"]] == ["A161"]
    _, out, _ = ask(capsys, *arguments, "--baseline", base)
    assert "fires no more: A161" in out and "Accepted by the baseline" in out
    _, out, err = ask(capsys, *arguments, "--baseline", base, "--output", "sarif")
    SarifLog.model_validate_json(out)
    assert "fires no more: A161" in err
    Path(pod).write_text(POD.replace("--swap-space=4", "--use-v2-block-manager"))
    code, out, _ = ask(capsys, *arguments, "--baseline", base, "--output", "json")
    new = [f["id"] for f in json.loads(out)["findings"] if f["state"] == "fired"
           and not f["accepted"]]  # fmt: skip
    assert code == 1 and new == ["A161"]


def test_the_file_says_which_model(capsys, tmp_path):
    path = tmp_path / "start.sh"
    path.write_text(f"vllm serve {LLAMA} --max-model-len 100000\n")
    code, out, _ = ask(capsys, "--deployment", str(path), "--output", "json")
    made = json.loads(out)
    states = {f["id"]: f["state"] for f in made["findings"]}
    assert code == 1 and made["model"] == LLAMA and states["A028"] == "fired"
    assert made["launch"]["flags"] == ["--max-model-len"]


def test_a_hidden_value_leaves_open_what_needs_it_and_nothing_else(capsys, tmp_path):
    path = tmp_path / "start.sh"
    path.write_text("vllm serve m --tensor-parallel-size $TP --max-num-seqs 8\n")
    _, out, _ = ask(capsys, LLAMA, "--deployment", str(path), "--gpu", "H100", "--output", "json")
    made = json.loads(out)
    findings = {f["id"]: f for f in made["findings"]}
    for rule in ("A061", "A142", "A173"):
        assert findings[rule]["missing"] == ["the value of --tensor-parallel-size ($TP)"], rule
    assert made["deployment"]["tensor_parallel_size"] is None
    assert findings["A001"]["state"] == findings["A164"]["state"] == "clear"
    _, out, _ = ask(capsys, LLAMA, "--deployment", str(path), "--tp", "2", "--output", "json")
    assert json.loads(out)["deployment"]["tensor_parallel_size"] == 2


def test_no_ledger_where_a_flag_changes_memory_uncounted(capsys, tmp_path):
    path = tmp_path / "start.sh"
    path.write_text("vllm serve m --enable-lora\n")
    _, out, _ = ask(capsys, LLAMA, "--deployment", str(path), "--gpu", "H100", "--output", "json")
    findings = {f["id"]: f for f in json.loads(out)["findings"]}
    assert findings["A142"]["missing"] == ["a memory ledger that counts --enable-lora"]


def test_a_key_is_shown_nowhere(capsys, tmp_path):
    path = tmp_path / "start.sh"
    secret = "sk-hidden"
    path.write_text(f"vllm serve m --api-key {secret} --api-key {secret}2 --apikey {secret}3\n")
    for form in ("table", "json", "sarif", "junit", "github"):
        _, out, err = ask(capsys, LLAMA, "--deployment", str(path), "--output", form, "-v")
        assert secret not in out + err, form


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--server", "x"], "--server without"),
        ([], "no MODEL"),
        (["--deployment", "none.yaml"], "no such file"),
        ([LLAMA, "--baseline", "none.json"], "none.json"),
        ([LLAMA, "--write-baseline", "no/such/place.json"], "no/such/place.json"),
    ],
)
def test_bad_usage_is_one_sentence(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = ask(capsys, *arguments)
    assert code == 2 and out == "" and says in err and len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["vllm serve org/not-here\n", "vllm serve $MODEL\n"])
def test_a_model_that_is_elsewhere_must_be_given(text, capsys, tmp_path):
    path = tmp_path / "start.sh"
    path.write_text(text)
    code, _, err = ask(capsys, "--deployment", str(path))
    assert code == 2 and "MODEL" in err and len(err.splitlines()) == 1


def test_an_audit_without_a_file_reads_no_yaml():
    code = (
        "import sys, ullage.cli.main as m; m.main(['audit', sys.argv[1], '--output', 'json']);"
        "print([n for n in ('yaml', 'hashlib', 'difflib') if n in sys.modules], file=sys.stderr)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, LLAMA], capture_output=True, text=True, check=True
    )
    assert said.stderr.strip() == "[]"
