"""`ullage watch`: what it prints, its exit codes, and one sentence for whatever is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ullage.cli.main import main
from ullage.watch.document import SCHEMA

LABELS = 'engine="0",model_name="acme/m"'


class Engine(ThreadingHTTPServer):
    """A server whose cache fills by a hundredth with each scrape, as vLLM would tell it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.num_scrapes = 0
        self.posted: list[str] = []
        self.keys: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def page(self) -> str:
        self.num_scrapes += 1
        num = self.num_scrapes
        return "\n".join(
            [
                "# TYPE vllm:kv_cache_usage_perc gauge",
                f"vllm:kv_cache_usage_perc{{{LABELS}}} {0.96 + num / 10_000}",
                f"vllm:num_requests_running{{{LABELS}}} 3.0",
                f"vllm:num_requests_waiting{{{LABELS}}} 2.0",
                f"vllm:num_preemptions_total{{{LABELS}}} {num}.0",
                f'vllm:cache_config_info{{kv_cache_size_tokens="64000",{LABELS}}} 1.0',
                "",
            ]
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization", ""))
        found = self.path == "/metrics"
        self._answer(200 if found else 404, self.server.page() if found else "{}")

    def do_POST(self) -> None:
        self.server.posted.append(self.path)
        dry = "dry_run=true" in self.path
        report = {"request_ids": ["r1"], "promised_bytes": 500, "freed_bytes": 0 if dry else 400}
        self._answer(200, json.dumps({**report, "dry_run": dry}))

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Engine]:
    server = Engine()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def nobody() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def once(*arguments: str) -> int:
    return main(["watch", *arguments, "--once", "--interval", "0.2"])


def test_once_is_two_scrapes_and_one_document(engine, capsys):
    assert once(engine.url, "--output", "json") == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert printed.out.count("\n") == 1
    assert document["schema"] == SCHEMA
    (replica,) = document["replicas"]
    assert engine.num_scrapes == 2
    assert (replica["url"], replica["engine"], replica["waiting"]) == (engine.url, "vllm", 2)
    assert replica["preemptions_per_s"] > 0
    assert replica["kv_total_tokens"] == 64_000
    assert replica["kv_used_bytes"] is None
    assert "kv_used_bytes" in replica["absent"]
    assert {finding["url"] for finding in document["findings"]} <= {engine.url, ""}
    assert document["counts"]["not_evaluable"] > 0


def test_once_as_a_table(engine, capsys):
    assert once(engine.url) == 0
    printed = capsys.readouterr()
    assert engine.url in printed.out
    assert "waiting 2" in printed.out
    assert "KV bytes –" in printed.out
    assert printed.err == ""


def test_a_server_that_is_named_twice_is_watched_once_and_summed_once(engine, capsys):
    port = engine.url.rpartition(":")[2]
    again = f"127.0.0.1:{port}/metrics"
    assert once(engine.url, again, "--output", "json") == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert [replica["url"] for replica in document["replicas"]] == [engine.url]
    assert document["totals"]["running"] == {"value": 3, "num_replicas": 1}
    assert printed.err == f"ullage watch: {again} is {engine.url}: watched once\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rule"], "'rule'; expected the word rules and no URL, or http://rule for a host"),
        (["h:80", "dashboards"], "expected the word dashboard and no URL"),
        (["h:80", "rules"], "expected the word rules and no URL"),
        (["h:80", "--select", "W001", "--ignore", "W001"], "--ignore: it leaves no rule"),
        (["h:80", "--exporter", "0.0.0.0:0"], "expected a key (--listen-api-key), or 127.0.0.1"),
        (["h:80", "--web", ""], "--web: ''; expected [HOST]:PORT"),
    ],
)
def test_what_was_surely_not_meant_is_one_sentence(arguments, says, capsys):
    assert main(["watch", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_one_that_is_down_is_a_replica_with_an_error_and_no_failure(engine, nobody, capsys):
    assert once(engine.url, nobody, "--output", "json") == 0
    replicas = json.loads(capsys.readouterr().out)["replicas"]
    assert [bool(replica["error"]) for replica in replicas] == [False, True]


def test_when_nobody_answers_it_is_said_and_3(nobody, capsys):
    assert once(nobody, "--output", "json") == 3
    printed = capsys.readouterr()
    assert json.loads(printed.out)["replicas"][0]["error"]
    assert printed.err.count("\n") == 1
    assert nobody in printed.err


def test_findings_fail_by_their_severity(engine, capsys):
    """A cache above 0.95 is W001's; it is the user's to say how grave that is to a script."""
    common = ["watch", engine.url, "--once", "--interval", "0.2", "--output", "json"]
    assert main(common) == 0
    document = json.loads(capsys.readouterr().out)
    fired = {f["severity"] for f in document["findings"] if f["state"] == "fired"}
    for fail_on, grave in (("info", 1), ("warning", 2), ("error", 3)):
        expected = any({"info": 1, "warning": 2, "error": 3}[s] >= grave for s in fired)
        assert main([*common, "--fail-on", fail_on]) == int(expected)
    assert main([*common, "--select", "W012", "--fail-on", "info"]) == 0
    capsys.readouterr()


def test_rules_are_selected_and_ignored(engine, capsys):
    def ids(*flags: str) -> set[str]:
        once(engine.url, "--output", "json", *flags)
        return {finding["id"] for finding in json.loads(capsys.readouterr().out)["findings"]}

    everything = ids()
    assert ids("--select", "w001,W003") == {"W001", "W003"}
    assert ids("--ignore", "W001") == everything - {"W001"}


def test_the_key_is_sent_to_what_is_watched(engine, capsys):
    once(engine.url, "--api-key", "secret")
    assert set(engine.keys) == {"Bearer secret"}
    printed = capsys.readouterr()
    assert "secret" not in printed.out + printed.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to watch"),
        (["http://a", "--prometheus", "http://b"], "more than one way"),
        (["ftp://a"], "ftp://a"),
        (["http://a:99999"], "99999"),
        (["http://"], "http://"),
        (["http://a", "--interval", "0"], "--interval"),
        (["http://a", "--interval", "nan"], "--interval"),
        (["http://a", "--select", "W999"], "--select"),
        (["http://a", "--ignore", "A001"], "--ignore"),
        (["http://a", "--yes"], "--yes"),
        (["http://a", "--act", "/nowhere.toml"], "/nowhere.toml"),
        (["http://a", "--once", "--web", ":0"], "--web"),
        (["http://a", "--exporter", ":99999"], "--exporter"),
        (["http://a", "--exporter", "host"], "--exporter"),
        (["http://a", "--exporter", "0.0.0.0:0"], "a key"),
        (["http://a", "--listen-api-key", "k"], "--listen-api-key"),
        (["http://a", "--api-key", " "], "--api-key"),
        (["http://a", "--prometheus-selector", "{}"], "--prometheus-selector"),
        (["--prometheus", "http://a", "--act", "x"], "--act"),
        (["http://a", "--model", "/nowhere"], "/nowhere"),
        (["http://a", "--output", "yaml"], "--output"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("ullage watch: ")
    assert said in printed.err
    assert list(tmp_path.iterdir()) == []


# --- as it is run ---------------------------------------------------------------------------------


def started(*arguments: str, **more) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ullage", "watch", "--interval", "0.2", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Under nohup this would be inherited, and respected.
    heard = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        return subprocess.Popen(command, **{**pipes, **more})
    finally:
        signal.signal(signal.SIGHUP, heard)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_goes_on_line_by_line_until_it_is_stopped(engine, number):
    watch = started(engine.url, "--output", "json")
    assert watch.stdout is not None
    documents = [json.loads(watch.stdout.readline()) for _ in range(3)]
    watch.send_signal(number)
    out, err = watch.communicate(timeout=20)
    assert (watch.returncode, err) == (0, "")
    assert [d["replicas"][0]["error"] for d in documents] == [None] * 3
    assert all(json.loads(line)["schema"] == SCHEMA for line in out.splitlines())


def test_metrics_and_the_page_are_served_while_it_watches(engine):
    watch = started(engine.url, "--exporter", ":0", "--web", ":0", stdout=subprocess.DEVNULL)
    assert watch.stderr is not None
    lines = [watch.stderr.readline() for _ in range(2)]
    urls = [re.search(r"http://\S+", line)[0] for line in lines]
    until_s = time.monotonic() + 15
    page = ""
    while "ullage_watch_kv_used_ratio" not in page and time.monotonic() < until_s:
        page = urllib.request.urlopen(urls[0], timeout=5).read().decode()  # noqa: S310
        time.sleep(0.05)
    html = urllib.request.urlopen(urls[1], timeout=5).read().decode()  # noqa: S310
    watch.send_signal(signal.SIGTERM)
    watch.communicate(timeout=20)
    assert f'ullage_watch_up{{url="{engine.url}"}} 1' in page
    assert "<html" in html


def test_it_acts_only_when_it_is_told_to(engine, tmp_path):
    """The cache is above 0.95 and stays so: with --yes one request is ended, and it is logged."""
    policy = tmp_path / "POLICY.toml"
    log = tmp_path / "acted.jsonl"
    policy.write_text(
        f'log = "{log}"\n[[action]]\nname = "shed"\nwhen = "kv_used_ratio > 0.95"\n'
        'for_s = 0.4\ndo = "cancel_oldest"\npercent = 10\n'
    )

    def acted(*flags: str) -> list[dict]:
        log.unlink(missing_ok=True)
        engine.posted.clear()
        watch = started(engine.url, "--act", str(policy), *flags, stdout=subprocess.DEVNULL)
        until_s = time.monotonic() + 15
        while time.monotonic() < until_s and not (log.exists() and log.stat().st_size > 200):
            time.sleep(0.05)
        time.sleep(0.3)
        watch.send_signal(signal.SIGINT)
        _, err = watch.communicate(timeout=20)
        assert "shed" in err
        return [json.loads(line) for line in log.read_text().splitlines()]

    (would,) = (entry for entry in acted() if entry["outcome"] != "blocked")
    assert (would["outcome"], would["dry_run"], would["promised_bytes"]) == ("would", True, 500)
    assert all("dry_run=true" in path for path in engine.posted)
    outcomes = {entry["outcome"]: entry for entry in acted("--yes")}
    assert (outcomes["done"]["promised_bytes"], outcomes["done"]["freed_bytes"]) == (500, 400)
    assert sum("dry_run=false" in path for path in engine.posted) == 1


@pytest.mark.parametrize("size", [(24, 60), (40, 160)])
def test_on_a_terminal_the_last_round_is_drawn_and_the_screen_given_back(engine, size):
    """The alternate screen is entered and left, and no line is wider than the window."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    import fcntl
    import struct
    import termios

    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    watch = started(engine.url, stdout=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    drawn = b""
    until_s = time.monotonic() + 15
    while time.monotonic() < until_s and drawn.count(b"waiting 2") < 2:
        try:
            drawn += os.read(ours, 65536)
        except BlockingIOError:
            time.sleep(0.02)
    watch.send_signal(signal.SIGINT)
    _, err = watch.communicate(timeout=20)
    try:
        while more := os.read(ours, 65536):
            drawn += more
    except OSError:
        pass
    os.close(ours)
    assert err == ""
    assert b"\x1b[?1049h" in drawn
    assert b"\x1b[?1049l" in drawn
    assert b"waiting 2" in drawn
    assert b"waiting 2" in drawn.rpartition(b"\x1b[?1049l")[2]  # the last round stays behind


class _Partial(BaseHTTPRequestHandler):
    """A Prometheus that answers in part, and says so."""

    def do_POST(self) -> None:
        body = json.dumps(
            {
                "status": "success",
                "data": {"resultType": "vector", "result": []},
                "warnings": ["only a part"],
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_the_live_screen_says_where_the_page_is_and_no_warning_is_printed_into_it():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Partial) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        ours, theirs = pty.openpty()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        environment = {**os.environ, "TERM": "xterm-256color"}
        flags = ("--prometheus", url, "--web", "127.0.0.1:0")
        watch = started(*flags, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        drawn, until_s = b"", time.monotonic() + 60
        while b"has no target" not in drawn and time.monotonic() < until_s:
            drawn += os.read(ours, 65536)
        watch.send_signal(signal.SIGTERM)
        with contextlib.suppress(OSError):  # the end of a terminal
            while more := os.read(ours, 65536):
                drawn += more
        watch.wait(20)
        os.close(ours)
        server.shutdown()
    on_screen, _, after = drawn.rpartition(b"\x1b[?1049l")
    assert b"page on http://127.0.0.1:" in on_screen.partition(b"\x1b[?1049h")[2]
    assert b"only a part" not in on_screen
    assert after.count(b"Prometheus warns: only a part") == 1
