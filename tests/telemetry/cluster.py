"""A Kubernetes API server of pods alone, over HTTP, and the pods that it has.

Holds the answers, in the shape of Kubernetes 1.32's: core/v1 PodList in parts, Status for errors,
and as much of discovery as kubectl needs. Selecting is by a reading of its own of the selector.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

TOKEN = "a-token"
CREATED = "2026-11-30T04:00:00Z"


def pod(
    name: str,
    *,
    namespace: str = "llm",
    ip: str = "",
    phase: str = "Running",
    ready: bool | None = None,
    ports: dict[str, int] | None = None,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    image: str = "vllm/vllm-openai:v0.32.0",
    uid: str = "",
    restarts: int = 0,
    state: dict[str, Any] | None = None,
    last_state: dict[str, Any] | None = None,
    deleted: str = "",
    conditions: list[dict[str, Any]] | None = None,
    node: str = "node-a",
    **status: Any,
) -> dict[str, Any]:
    """One pod as the API tells it; `ready` defaults to whether it runs."""
    ready = phase == "Running" if ready is None else ready
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "uid": uid or f"uid-{name}",
        "resourceVersion": "7",
        "creationTimestamp": CREATED,
        "labels": {"app": "vllm"} if labels is None else labels,
        "annotations": annotations or {},
    }
    if deleted:
        metadata |= {"deletionTimestamp": deleted, "deletionGracePeriodSeconds": 30}
    container = {"name": "vllm", "image": image, "resources": {}}
    container["ports"] = [
        {"name": port, "containerPort": number, "protocol": "TCP"}
        for port, number in (ports or {}).items()
    ]
    found: dict[str, Any] = {
        "phase": phase,
        "conditions": conditions
        or [{"type": "Ready", "status": str(ready), "lastTransitionTime": CREATED}],
        "containerStatuses": [
            {
                "name": "vllm",
                "image": image,
                "imageID": "",
                "ready": ready,
                "restartCount": restarts,
                "state": state or {"running": {"startedAt": CREATED}},
                "lastState": last_state or {},
            }
        ],
        **status,
    }
    if ip:
        found |= {"podIP": ip, "podIPs": [{"ip": ip}], "hostIP": "10.0.0.1"}
    spec = {"containers": [container], "nodeName": node, "restartPolicy": "Always"}
    return {"metadata": metadata, "spec": spec, "status": found}


class ApiServer(ThreadingHTTPServer):
    """`pods` are there; `refusal` (status, reason, message) or `body` is answered instead, where
    there is one, `pause_s` late. Without `token` everybody is let in. `asked` is what came."""

    daemon_threads = True

    def __init__(self, *pods: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pods = list(pods)
        self.token = True
        self.refusal: tuple[int, str, str] | None = None
        self.refuse_parts_after_first = False
        self.body: bytes | None = None
        self.pause_s = 0.0
        self.most_at_once = 500
        self.asked: list[tuple[str, dict[str, list[str]]]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone before its answer is no news."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def kubeconfig(self, folder: Path, **user: Any) -> Path:
        """A kubeconfig of this server, written into the folder."""
        path = folder / "kubeconfig"
        named = {"name": "here"}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [named | {"cluster": {"server": self.url}}],
            "contexts": [named | {"context": {"cluster": "here", "user": "me"}}],
            "users": [{"name": "me", "user": user or {"token": TOKEN}}],
        }
        path.write_text(yaml.safe_dump(document))
        return path


@contextmanager
def api_server(*pods: dict[str, Any]) -> Iterator[ApiServer]:
    server = ApiServer(*pods)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ApiServer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        asked = parse_qs(parts.query)
        self.server.asked.append((parts.path, asked))
        time.sleep(self.server.pause_s)
        if self.server.body is not None:
            self._answer(200, self.server.body)
        elif self.server.token and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "Unauthorized", "Unauthorized")
        elif self.server.refusal is not None:
            self._refuse(*self.server.refusal)
        elif parts.path in DISCOVERY:
            self._answer(200, json.dumps(DISCOVERY[parts.path]).encode())
        else:
            self._list(parts.path, asked)

    def _list(self, path: str, asked: dict[str, list[str]]) -> None:
        found = re.fullmatch(r"/api/v1(?:/namespaces/([^/]+))?/pods", path)
        if found is None:
            self._refuse(404, "NotFound", "the server could not find the requested resource")
            return
        selector = asked.get("labelSelector", [""])[0]
        chosen = [
            one
            for one in self.server.pods
            if found[1] in (None, one["metadata"]["namespace"])
            and matches(one["metadata"]["labels"], selector)
        ]
        begin = int(asked.get("continue", ["0"])[0])
        if begin and self.server.refuse_parts_after_first:
            self.server.refuse_parts_after_first = False
            self._refuse(410, "Expired", "The provided continue parameter is too old")
            return
        most = min(int(asked.get("limit", ["500"])[0]), self.server.most_at_once)
        metadata = {"resourceVersion": "9"}
        if begin + most < len(chosen):
            metadata["continue"] = str(begin + most)
        items = chosen[begin : begin + most]
        document = {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items}
        self._answer(200, json.dumps(document).encode())

    def _refuse(self, code: int, reason: str, message: str) -> None:
        status = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }
        self._answer(code, json.dumps(status).encode())

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


DISCOVERY = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            {
                "name": "pods",
                "singularName": "pod",
                "namespaced": True,
                "kind": "Pod",
                "verbs": ["get", "list"],
                "shortNames": ["po"],
            }
        ],
    },
}


def matches(labels: dict[str, str], selector: str) -> bool:
    """Whether labels meet a selector, read word by word."""
    for term in re.findall(r"[^,(]+(?:\([^)]*\))?", selector):
        word = term.strip()
        if not word:
            continue
        if word.endswith(")"):
            key, how = word.partition("(")[0].split()
            values = [v.strip() for v in word[word.index("(") + 1 : -1].split(",")]
            if (labels.get(key) in values) != (how == "in"):
                return False
        elif "!=" in word:
            key, value = word.split("!=")
            if labels.get(key.strip()) == value.strip():
                return False
        elif "=" in word:
            key, value = word.replace("==", "=").split("=")
            if labels.get(key.strip()) != value.strip():
                return False
        elif (word.lstrip("! ") in labels) == word.startswith("!"):
            return False
    return True
