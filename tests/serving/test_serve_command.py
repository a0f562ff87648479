"""`ullage serve` as a process: one line when ready, SIGTERM finishes what runs, exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

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


def test_sigterm_finishes_what_runs_and_exits_0(model_dir: Path) -> None:
    with serve(str(model_dir), "--port", "0", *FLAGS) as process:
        url = ready_url(process)
        lines: list[str] = []
        started = threading.Event()

        def stream() -> None:
            body = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    started.set()
                    if line:
                        lines.append(line)

        streaming = threading.Thread(target=stream)
        streaming.start()
        assert started.wait(30)
        process.send_signal(signal.SIGTERM)
        streaming.join(60)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert lines[-1] == "data: [DONE]"
        assert len(lines) == 401
        assert (out, err) == ("", "")


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
    ],
)
def test_bad_usage_is_one_sentence_and_exit_2(
    model_dir: Path, arguments: list[str], said: str
) -> None:
    arguments = [str(model_dir) if a == "MODEL" else a for a in arguments]
    with serve(*arguments) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1
