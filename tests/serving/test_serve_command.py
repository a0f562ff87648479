"""`ullage serve` as a process: one line when ready, SIGTERM finishes what runs, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import pytest

from tests.serving.clients import eventually, metrics
from ullage.cli.main import main
from ullage.cli.serve import _say_if_it_compiles

FLAGS = ("--kv-cache-memory-bytes", str(1 << 22), "--max-num-seqs", "4")


@contextmanager
def serve(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "ullage", "serve", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ULLAGE_CHECK": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def ready_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"ready on (http://127\.0\.0\.1:\d+): [\d,]+ tokens .*\n", line)
    assert found, line
    return found[1]


def test_sigterm_under_load_completes_every_admitted_request(
    model_dir: Path, tmp_path: Path
) -> None:
    """Four run, twelve wait, some stream, some want several choices; the trace is whole."""
    trace = tmp_path / "trace.json"
    bodies = [
        {"prompt": "a" * (1 + 7 * number), "max_tokens": 60 + 5 * number, "n": 1 + number % 2}
        for number in range(8)
    ]
    with serve(str(model_dir), "--port", "0", "--trace", str(trace), *FLAGS) as process:
        url = ready_url(process)

        def ask(number: int) -> tuple[int, int]:
            """The status, and how many tokens of text or usage came for how many choices."""
            body = {**bodies[number % 8], "ignore_eos": True, "stream": number % 3 == 0}
            wanted = body["max_tokens"] * body["n"]
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
                lines = [line for line in answer.iter_lines() if line]
            if answer.status_code != 200:
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) >= 1
                return 503, 0
            if body["stream"]:
                assert lines[-1] == "data: [DONE]"
                assert "error" not in lines[-2]
                assert len(lines) == wanted + 1
            else:
                assert json.loads(lines[0])["usage"]["completion_tokens"] == wanted
            return 200, wanted

        with ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(ask, number) for number in range(16)]
            with httpx.Client(base_url=url) as http:
                # Everybody is in: whoever is refused later came later.
                eventually(lambda: in_flight(http) + sum(f.done() for f in asked) >= 22)
                process.send_signal(signal.SIGTERM)
                eventually(lambda: http.get("/ready").status_code == 503)
                assert http.post("/v1/completions", json={"prompt": "late"}).status_code == 503
            answers = [future.result(120) for future in asked]
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert [status for status, _ in answers] == [200] * 16
        assert (out, err) == ("", "")
    events = json.loads(trace.read_text())
    said = sum(event["args"]["outputs"] for event in events if event["name"] == "deliver")
    assert said == sum(tokens for _, tokens in answers)


def in_flight(http: httpx.Client) -> float:
    found = metrics(http)
    return found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]


@pytest.mark.parametrize("how", ["timeout", pytest.param("second signal", marks=pytest.mark.slow)])
def test_what_outlasts_the_shutdown_is_cut_with_a_sentence(model_dir: Path, how: str) -> None:
    flags = ("--shutdown-timeout", "0.01") if how == "timeout" else ()
    with serve(str(model_dir), "--port", "0", *FLAGS, *flags) as process:
        url = ready_url(process)
        body = {"prompt": "hi", "max_tokens": 500, "n": 4, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url) as http:
            asked = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
            eventually(lambda: in_flight(http) == 4)
            process.send_signal(signal.SIGTERM)
            if how == "second signal":
                eventually(lambda: http.get("/ready").status_code == 503)
                process.send_signal(signal.SIGTERM)
            answer = asked.result(60)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert err == "1 requests were cut by the shutdown\n"
        assert answer.status_code == 503
        assert "the server shut down before this was finished" in answer.text


def test_sigint_of_an_idle_server_exits_0(model_dir: Path) -> None:
    with serve(str(model_dir), "--port", "0", "--served-model-name", "me", *FLAGS) as process:
        url = ready_url(process)
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "me"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nowhere"], "/nowhere"),
        (["MODEL", "--host", "0.0.0.0"], "--api-key"),
        (["MODEL", "--max-model-len", "9999"], "--max-model-len: 9999; expected 1 to 512"),
        (["MODEL", "--kv-cache-memory-bytes", "9"], "--kv-cache-memory-bytes"),
        (["MODEL", "--max-num-queued-reqs", "-1"], "--max-num-queued-reqs"),
        (["MODEL", "--port", "99999"], "--port"),
        (["MODEL", "--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["MODEL", "--enable-control-routes"], "--api-key with it"),
        (["MODEL", "--trace", "/nowhere/trace.json"], "/nowhere/trace.json: --trace"),
        (["MODEL", "--long-prefill-token-threshold", "-1"], "--long-prefill-token-threshold"),
        (
            ["MODEL", "--long-prefill-token-threshold", "513"],
            "513 tokens, more than a step has; expected up to --max-num-batched-tokens 512, or 0",
        ),
        (["MODEL", "--max-loras", "2"], "--max-loras: adapters are off; expected --enable-lora"),
        (["MODEL", "--max-lora-rank", "2"], "--max-lora-rank: adapters are off; expected --ena"),
        (["MODEL", "--lora-modules", "a=b"], "--lora-modules: adapters are off; expected --ena"),
        (["MODEL", "--served-model-name", ""], "--served-model-name: ''; expected some text"),
        (["MODEL", "--api-key", " "], "--api-key: ' '; expected some text"),
        (["MODEL", "--host", "nosuch\x00host"], "--host: the name 'nosuch"),
        (["MODEL", "--host", "nosuch.invalid"], "--host: the name 'nosuch.invalid' is unknown"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_2(
    model_dir: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(model_dir) if a == "MODEL" else a for a in arguments]
    assert main(["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--kv-cache-memory-bytes", "9"), "--kv-cache-memory-bytes: 9 bytes hold 0 tokens"),
        (("--max-model-len", "9999"), "--max-model-len: 9999"),
        (("--kv-cache-dtype", "int4_per_token_head", "--block-size", "0"), "--block-size"),
    ],
)
def test_what_the_configuration_rules_out_is_said_before_torch_loads(
    model_dir: Path, flags: tuple[str, ...], said: str
) -> None:
    """And so before weights and tokenizer are read."""
    code = (
        "import sys; from ullage.cli.main import main; code = main(sys.argv[1:]);"
        "print(code, 'torch' in sys.modules, 'tokenizers' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "serve", str(model_dir), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "2 False False\n"
    assert said in done.stderr


def test_a_first_start_says_that_it_compiles_before_it_is_silent_for_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    _say_if_it_compiles(SimpleNamespace(attention="gathered"))
    assert capsys.readouterr().err == ""
    _say_if_it_compiles(SimpleNamespace(attention="paged"))
    assert str(tmp_path) in capsys.readouterr().err
