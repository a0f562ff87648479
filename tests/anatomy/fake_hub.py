"""A server on loopback that speaks a hub's paths, and can misbehave in named ways.

It keeps every request (path, headers, bytes sent), so that tests can say what was asked for.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

ID = "some-org/tiny-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Seen:
    path: str
    range: str | None
    authorization: str | None
    num_bytes: int = 0


@dataclass
class Hub:
    """`files` are served; `misbehave` names what goes wrong, "" for nothing.

    `cdn` is the base address to which resolve redirects, None to answer itself.
    """

    files: Path
    misbehave: str = ""
    cdn: str | None = None
    revisions: tuple[str, ...] = ("main", COMMIT)
    token: str | None = None
    address: str = ""
    seen: list[Seen] = field(default_factory=list)

    def asked(self, name: str) -> list[Seen]:
        return [s for s in self.seen if urlsplit(s.path).path.endswith(name)]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        hub = self.hub
        path = urlsplit(self.path).path
        self.mine = Seen(self.path, self.headers.get("Range"), self.headers.get("Authorization"))
        hub.seen.append(self.mine)
        if self._refuses(hub):
            return
        listing = re.fullmatch(f"/api/models/{ID}/revision/([^/]+)", path)
        if listing:
            self._list(unquote(listing[1]))
            return
        resolve = re.fullmatch(f"/{ID}/resolve/([^/]+)/(.+)", path)
        if resolve and unquote(resolve[1]) in hub.revisions:
            if hub.cdn is not None:
                self.send_response(302)
                self.send_header("Location", f"{hub.cdn}/blob/{resolve[2]}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self._file(unquote(resolve[2]))
            return
        blob = re.fullmatch("/blob/(.+)", path)
        if blob:
            self._file(unquote(blob[1]))
            return
        self._status(404, "RepoNotFound")

    def _refuses(self, hub: Hub) -> bool:
        wanted = None if hub.token is None else f"Bearer {hub.token}"
        if wanted is not None and self.mine.authorization != wanted:
            self._status(401, "")
            return True
        codes = {
            "gated": (403, "GatedRepo"),
            "401": (401, ""),
            "403": (403, ""),
            "429": (429, ""),
            "503": (503, ""),
        }
        if hub.misbehave in codes:
            self._status(*codes[hub.misbehave])
            return True
        if hub.misbehave == "silent":
            time.sleep(3)
            return True
        if hub.misbehave == "loop":
            self.send_response(302)
            self.send_header("Location", self.path)
            self.end_headers()
            return True
        if hub.misbehave == "to a file":
            self.send_response(302)
            self.send_header("Location", "file:///etc/hostname")
            self.end_headers()
            return True
        if hub.misbehave == "garbage":
            self.wfile.write(b"\x00\x01 not http at all\r\n\r\n")
            return True
        return False

    def _status(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _list(self, revision: str) -> None:
        if revision not in self.hub.revisions:
            self._status(404, "RevisionNotFound")
            return
        names = sorted(p.name for p in self.hub.files.iterdir())
        body = json.dumps(
            {"sha": COMMIT, "siblings": [{"rfilename": n} for n in [*names, "sub/x.json"]]}
        ).encode()
        if self.hub.misbehave == "no list":
            body = b'{"siblings": 7}'
        if self.hub.misbehave == "escape":
            body = json.dumps({"siblings": [{"rfilename": "../config.json"}]}).encode()
        self._send(200, body, {})

    def _file(self, name: str) -> None:
        data = (self.hub.files / name).read_bytes()
        found = re.fullmatch("bytes=([0-9]+)-([0-9]+)", self.mine.range or "")
        if not found or self.hub.misbehave == "no ranges":
            self._send(200, data, {})
            return
        first, last = int(found[1]), min(int(found[2]), len(data) - 1)
        said = f"bytes {first}-{last}/{len(data)}"
        if self.hub.misbehave == "other range":
            said = f"bytes {first + 1}-{last + 1}/{len(data)}"
        if self.hub.misbehave == "no total":
            said = f"bytes {first}-{last}/*"
        part = data[first : last + 1]
        if self.hub.misbehave == "short" and len(part) > 1:
            self.mine.num_bytes = len(part) // 2
            self.send_response(206)
            self.send_header("Content-Range", said)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
            return
        self._send(206, part, {"Content-Range": said})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.mine.num_bytes = len(body)
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.hub.misbehave == "drips":
            for byte in body:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(0.05)
            return
        self.wfile.write(body)


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """The hub on a free port of loopback, until the block ends."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
