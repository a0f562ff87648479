"""Talking to a server in tests: metrics by name, raw sockets, waiting for what must happen."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx2 as httpx
from prometheus_client.parser import text_string_to_metric_families


def metrics(http: httpx.Client) -> dict[str, float]:
    """Every sample by name; labels other than model and engine are appended."""
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            rest = [
                v for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine")
            ]
            found["|".join([sample.name, *rest])] = sample.value
    return found


def eventually(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def raw_post(path: str, body: Mapping[str, Any], **headers: str) -> bytes:
    """A whole request as bytes."""
    text = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(text)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + text


def answer_of(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    pieces = []
    while piece := connection.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)
