"""Pods as watching sees them: what Kubernetes says of one, and where its engine may be asked.

Holds the values, the selector that chooses them and what they mean in words. Asking the API is
`kubernetes.py`'s. Source of the fields: the Kubernetes API, core/v1, and `kubectl get --help`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ullage.errors import BadUsage

FLAG = "--k8s"
EXPECTED = "NAMESPACE/SELECTOR as kubectl's, for example llm/app=vllm"
ALL_NAMESPACES = "*"
METRICS_PORTS = ("metrics", "http-metrics")
"""Names of container ports that are meant for this."""
USUAL_PORTS = (8000, 30000, 8080, 23333, 8002, 80)
"""vLLM and trtllm-serve, SGLang, llama.cpp, LMDeploy, Triton's metrics, TGI's image."""
REVISION_LABELS = (
    "pod-template-hash",
    "controller-revision-hash",
    "leaderworkerset.sigs.k8s.io/template-revision-hash",
    "app.kubernetes.io/version",
)
MOST_CHARS = 160

Comparison = Literal["=", "!=", "in", "notin", "exists", "!"]


@dataclass(frozen=True, slots=True)
class Term:
    """One condition of a label selector. `values` is empty for exists and !."""

    key: str
    comparison: Comparison
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """Which pods: all of a namespace (or of every one, `*`) that meet every term."""

    namespace: str
    terms: tuple[Term, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod. Times are Unix seconds. "" or None: Kubernetes does not say.

    `because` says why it is not ready, "" when it is, and `unready_s` since when;
    `last_termination` how a container of it last ended, the latest of all. It is asked to end at
    `terminating_s` and killed at `gone_by_s`. `ports` are the containers' TCP ports by name.
    """

    namespace: str
    name: str
    uid: str = ""
    ip: str = ""
    node: str = ""
    phase: str = ""
    ready: bool = False
    because: str = ""
    unready_s: float | None = None
    restarts: int = 0
    last_termination: str = ""
    image: str = ""
    created_s: float | None = None
    terminating_s: float | None = None
    gone_by_s: float | None = None
    ended_s: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[tuple[str, int], ...] = ()

    @property
    def called(self) -> str:
        """`namespace/name`: what a replica in it is called."""
        return f"{self.namespace}/{self.name}"

    @property
    def runs(self) -> bool:
        """Whether its containers can be asked anything."""
        return self.phase == "Running" and bool(self.ip)


def selection_of(text: str) -> Selection:
    """`NAMESPACE/SELECTOR` → Selection. Raises BadUsage that names the part at fault."""
    namespace, slash, selector = text.strip().partition("/")
    if not slash or not selector.strip():
        raise BadUsage(f"{text[:80]!r} has no selector", field=FLAG, expected=EXPECTED)
    if namespace != ALL_NAMESPACES and not _NAMESPACE.fullmatch(namespace):
        raise BadUsage(f"{namespace[:80]!r} is no namespace", field=FLAG, expected=EXPECTED)
    terms = tuple(_term(part.strip()) for part in _SPLIT.split(selector))
    return Selection(namespace, terms, selector.strip())


# Source: k8s.io/apimachinery/pkg/labels and pkg/util/validation.
_NAMESPACE = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_SPLIT = re.compile(r",(?![^(]*\))")
_KEY = r"(?:[a-z0-9][-a-z0-9.]{0,252}/)?[A-Za-z0-9](?:[-\w.]{0,61}[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[-\w.]{0,61}[A-Za-z0-9])?)?"
_EQUAL = re.compile(rf"({_KEY})\s*(==|=|!=)\s*({_VALUE})", re.ASCII)
_SET = re.compile(rf"({_KEY})\s+(in|notin)\s*\(([^()]*)\)", re.ASCII)
_EXISTS = re.compile(rf"(!?)\s*({_KEY})", re.ASCII)
_WHOLE_VALUE = re.compile(_VALUE, re.ASCII)


def _term(text: str) -> Term:
    if found := _EQUAL.fullmatch(text):
        return Term(found[1], "!=" if found[2] == "!=" else "=", (found[3],))
    if found := _SET.fullmatch(text):
        values = tuple(value.strip() for value in found[3].split(","))
        if all(_WHOLE_VALUE.fullmatch(value) for value in values):
            return Term(found[1], "in" if found[2] == "in" else "notin", values)
    elif found := _EXISTS.fullmatch(text):
        return Term(found[2], "!" if found[1] else "exists")
    raise BadUsage(f"{text[:80]!r} is no condition on labels", field=FLAG, expected=EXPECTED)


_PORT_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,13}[a-z0-9])?")


def _number(text: str) -> int | None:
    """A port's number, None where the text is none."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 5):
        return None
    return int(text) if 0 < int(text) < 65_536 else None


def port_of(text: str) -> str:
    """A port's number or its name, as `candidates` takes it. Raises BadUsage for what is none."""
    fine = _number(text) is not None if text.isdecimal() else _PORT_NAME.fullmatch(text)
    if not fine:
        raise BadUsage(repr(text[:40]), field="--k8s-port",
                       expected="1 to 65535, or the name of a container port")  # fmt: skip
    return text


def candidates(pod: Pod, port: str = "") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """URLs at which the pod's engine may be: those that the pod declares, and the usual ones.

    The likeliest is first. With `port` (a number, or a container port's name) only that.
    """
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    by_name = {name: number for name, number in pod.ports if name}
    if port:
        number = _number(port) or by_name.get(port)
        return (() if number is None else (f"http://{host}:{number}",)), ()
    meant = [by_name[name] for name in METRICS_PORTS if name in by_name]
    likely = [*meant, *([by_name["http"]] if "http" in by_name else []), *(n for _, n in pod.ports)]
    declared = [f"http://{host}:{number}" for number in dict.fromkeys(likely)]
    told = _annotated(pod.annotations, host)
    if told:
        declared.insert(len(meant), told)
    usual = [f"http://{host}:{number}" for number in USUAL_PORTS if number not in likely]
    return tuple(dict.fromkeys(declared)), tuple(usual)


def _annotated(annotations: Mapping[str, str], host: str) -> str:
    """Where Prometheus' customary annotations say that the page is, "" where they do not."""
    port = _number(annotations.get("prometheus.io/port", ""))
    if port is None:
        return ""
    scheme = annotations.get("prometheus.io/scheme", "http").lower()
    path = annotations.get("prometheus.io/path", "")
    if scheme not in ("http", "https") or (path and not re.fullmatch(r"/[\w./-]*", path)):
        return ""
    return f"{scheme}://{host}:{port}{path if path != '/' else ''}"


def facts_of(pod: Pod, address: str = "") -> dict[str, str]:
    """What `View.pod` holds: only what is known, and nothing that moves by itself."""
    facts = {
        "name": pod.name,
        "namespace": pod.namespace,
        "uid": pod.uid,
        "address": address,
        "node": pod.node,
        "phase": pod.phase,
        "ready": "true" if pod.ready else "false",
        "reason": pod.because,
        "unready_since": _iso(pod.unready_s),
        "restarts": str(pod.restarts),
        "last_termination": pod.last_termination,
        "image": pod.image,
        "revision": next((pod.labels[n] for n in REVISION_LABELS if pod.labels.get(n)), ""),
        "created": _iso(pod.created_s),
        "terminating_since": _iso(pod.terminating_s),
        "gone_by": _iso(pod.gone_by_s),
    }
    return {name: text for name, text in facts.items() if text}


def _iso(time_s: float | None) -> str:
    return "" if time_s is None else iso(time_s)


def iso(time_s: float) -> str:
    """RFC 3339, in UTC and whole seconds."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def state_in_words(pod: Pod) -> str:
    """Why the pod may give no answer; "" of one that runs and is ready."""
    if pod.terminating_s is not None:
        return f"the pod is terminating since {iso(pod.terminating_s)}"
    if pod.ready and pod.runs:
        return ""
    why = f": {pod.because}" if pod.because else ""
    if pod.phase != "Running":
        return f"the pod is {pod.phase or 'in no known phase'}{why}"
    return f"the pod {'is not ready' if pod.ip else 'has no address'}{why}"
