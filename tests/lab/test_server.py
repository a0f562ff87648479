"""Servers that an experiment starts itself: templates, refusals, and ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ullage.errors import BadUsage, Unreachable
from ullage.lab.neighbours import Clock, elsewhere_ratio, read_clock
from ullage.lab.server import require_answered, require_restarts, served
from ullage.lab.setting import Setting

# A server that answers /v1/models and streams one token per request, in the standard library.
FAKE = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        found = self.path == "/v1/models"
        body = json.dumps({"data": [{"id": "fake", "max_model_len": int(sys.argv[2])}]}).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers(); self.wfile.write(body)
    def do_POST(self):
        size = int(self.headers["Content-Length"]); asked = json.loads(self.rfile.read(size))
        if self.path != "/v1/completions":
            self.send_response(404); self.send_header("Content-Length", "0")
            self.end_headers(); return
        self.send_response(200); self.send_header("Connection", "close"); self.end_headers()
        for i in range(asked["max_tokens"]):
            last = i == asked["max_tokens"] - 1
            choice = {"text": " w", "finish_reason": "length" if last else None}
            self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\\n\\n")
        usage = {"prompt_tokens": 16, "completion_tokens": asked["max_tokens"]}
        last = json.dumps({"choices": [], "usage": usage}).encode()
        self.wfile.write(b"data: " + last + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n"); self.close_connection = True
open(sys.argv[3], "w").write(str(__import__("os").getpid()))
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def setting(**more):
    return Setting(Path("unused"), True, lambda _: None, **more)


def template(tmp_path, *, field="{block_size}"):
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    return f"{sys.executable} {script} {{port}} {field} {tmp_path / 'pid'}"


def test_a_command_is_started_with_its_flag_measured_and_ended(tmp_path):
    with served(setting(serve_command=template(tmp_path)), {"block_size": 321}) as server:
        assert server.max_model_len == 321
        assert server.target.model == "fake"
        assert "321" in server.what
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_command_that_ends_is_unreachable():
    command = f"{sys.executable} -c 'import sys; sys.exit(7)' {{port}} {{block_size}}"
    with (
        pytest.raises(Unreachable, match="ended with code 7"),
        served(setting(serve_command=command), {"block_size": 1}),
    ):
        pass


@pytest.mark.parametrize(
    "command", ["{nonsense}", "run '{port}", "{0}", "", "/no/such/program {port}"]
)
def test_templates_that_cannot_be_run_are_refused(command):
    with (
        pytest.raises(BadUsage, match="--serve-command"),
        served(setting(serve_command=command), {"block_size": 1}),
    ):
        pass


def test_restarts_are_asked_for_where_they_are_needed():
    require_restarts(setting(), "x", "block_size")  # the embedded engine restarts
    require_restarts(setting(serve_command="serve {block_size}"), "x", "block_size")
    with pytest.raises(BadUsage, match="starts the server again"):
        require_restarts(setting(url="http://127.0.0.1:1"), "x", "block_size")
    with pytest.raises(BadUsage, match=r"\{block_size\} in it"):
        require_restarts(setting(serve_command="serve {port}"), "x", "block_size")


def test_nobody_there_is_unreachable():
    with (
        pytest.raises(Unreachable, match=r"http://127\.0\.0\.1:9"),
        served(setting(url="http://127.0.0.1:9")),
    ):
        pass


def test_failed_requests_are_never_measured():
    class Failed:
        error = "HTTP 500: no"

    with pytest.raises(Unreachable, match="1 of 1 requests failed: HTTP 500"):
        require_answered((Failed(),), "loading")  # type: ignore[arg-type]


def test_what_others_took_is_what_is_neither_ours_nor_idle():
    begin, end = Clock(0.0, 100.0, 5.0), Clock(10.0, 112.0, 9.0)
    assert elsewhere_ratio(begin, end, 2) == pytest.approx((12 - 4) / 20)
    assert elsewhere_ratio(begin, None, 2) is None
    assert elsewhere_ratio(begin, begin, 2) is None
    assert elsewhere_ratio(begin, Clock(1.0, 100.0, 50.0), 2) == 0.0


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux tells")
def test_the_clocks_run_forward():
    first = read_clock()
    sum(i * i for i in range(300_000))
    second = read_clock()
    assert first is not None and second is not None
    assert second.wall_s > first.wall_s and second.busy_s >= first.busy_s
    assert second.own_s >= first.own_s
