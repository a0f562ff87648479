"""A real Prometheus on loopback that scrapes what a test names, fast, and a page for it to scrape.

Holds both as context managers; they leave nothing behind.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

NEEDS_PROMETHEUS = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus on this machine"
)
NEEDS_PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool on this machine"
)


@dataclass
class Pages:
    """Pages by path, that a server shows and a test may change; a missing one is 404."""

    port: int = 0
    pages: dict[str, bytes] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextlib.contextmanager
def page_server(pages: Mapping[str, bytes]) -> Iterator[Pages]:
    shown = Pages(pages=dict(pages))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = shown.pages.get(self.path.partition("?")[0])
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            with contextlib.suppress(OSError):  # a scrape that was over its time
                self.wfile.write(body or b"")

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    shown.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield shown
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass(frozen=True)
class Prometheus:
    url: str

    def api(self, path: str, **query: str) -> Any:
        answer = httpx2.get(f"{self.url}/api/v1/{path}", params=query, trust_env=False, timeout=60)
        document = answer.json()
        assert document["status"] == "success", document
        return document["data"]

    def query(self, promql: str) -> list[Any]:
        found = self.api("query", query=promql)["result"]
        assert isinstance(found, list)
        return found

    def until(self, ready: Callable[[], bool], within_s: float, what: str) -> None:
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if ready():
                return
            time.sleep(0.05)
        raise AssertionError(f"not within {within_s:g} s: {what}")


@contextlib.contextmanager
def prometheus(
    directory: Path,
    jobs: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    scrape: str = "1s",
    paths: Mapping[str, str] | None = None,
    rules: Sequence[Path] = (),
    flags: Sequence[str] = (),
) -> Iterator[Prometheus]:
    """`jobs`: name → static_configs, such as `{"targets": ["127.0.0.1:80"], "labels": {…}}`;
    `paths`: name → where its page is, else /metrics."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = {
        "global": {
            "scrape_interval": scrape,
            "scrape_timeout": scrape,
            "evaluation_interval": scrape,
        },
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {
                "job_name": name,
                "metrics_path": (paths or {}).get(name, "/metrics"),
                "static_configs": list(targets),
            }
            for name, targets in jobs.items()
        ],
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "prometheus.yml").write_text(json.dumps(config))
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                *flags,
            ],
            stdout=log,
            stderr=log,
            env={"PATH": "/usr/bin:/bin", "GOMAXPROCS": "1"},
        )
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        server.until(lambda: _ready(server), 60.0, f"ready; see {directory / 'log'}")
        yield server
    finally:
        process.terminate()
        process.wait(timeout=20)


def _ready(server: Prometheus) -> bool:
    try:
        return httpx2.get(f"{server.url}/-/ready", trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False
