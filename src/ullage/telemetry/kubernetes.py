"""A cluster's pods by lightkube: kubeconfig or the service account → lists of `pods.Pod`.

Holds the configuration, the question and what can go wrong with it, each as one sentence. What a
pod means to watching is `pods.py`'s. lightkube is imported with this module: import it late.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec
import yaml
from lightkube import AsyncClient, operators
from lightkube.config.kubeconfig import SERVICE_ACCOUNT, KubeConfig, SingleConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ApiError, ConfigError
from lightkube.resources.core_v1 import Pod as PodResource

from ullage.errors import BadUsage, Unreachable
from ullage.telemetry.pods import ALL_NAMESPACES, MOST_CHARS, Comparison, Pod, Selection, Term

if TYPE_CHECKING:
    from lightkube.models.core_v1 import ContainerStatus, PodStatus

WITHIN_S = 10.0
CHUNK = 500
"""Pods per answer, as kubectl asks for them."""
DEFAULT_FILE = "~/.kube/config"
PATHS_IN_CLUSTER = ("certificate-authority",)
PATHS_IN_USER = ("client-certificate", "client-key", "tokenFile")


# --- which cluster --------------------------------------------------------------------------------


def config_of(environ: Mapping[str, str], context: str = "") -> SingleConfig:
    """How the cluster is reached, as kubectl decides it: the files that KUBECONFIG names, else
    ~/.kube/config, else the service account of the pod that this runs in.

    Raises:
        BadUsage: there is none of these, or it cannot be read, or has no such context.
    """
    given = [name for name in environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    paths = [Path(name).expanduser() for name in given or [DEFAULT_FILE]]
    there = [path for path in paths if path.is_file()]
    account = Path(SERVICE_ACCOUNT)
    try:
        if there:
            config = _of_files(there).get(context or None)
        elif given:
            raise BadUsage("no such file", file=given[0], expected="a kubeconfig")
        elif (account / "token").is_file() and environ.get("KUBERNETES_SERVICE_HOST"):
            config = KubeConfig.from_service_account(account).get()
        else:
            raise BadUsage("no cluster is known", field="--k8s",
                           expected="a kubeconfig (KUBECONFIG or ~/.kube/config), or to run in a "
                           "pod")  # fmt: skip
    except (ConfigError, KeyError, msgspec.ValidationError, OSError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else _line(str(error))
        where = ", ".join(map(str, there)) or str(account)
        raise BadUsage(what, file=where, expected="a kubeconfig") from error
    assert config is not None, "get() without a default raises"
    # lightkube refuses a context without a user, as proxies and tests have; kubectl does not.
    return config if config.user is not None else config._replace(user=User())


def _of_files(paths: Iterable[Path]) -> KubeConfig:
    """The files as one. As kubectl has it, the first that names a thing defines it."""
    whole: dict[str, Any] = {"clusters": [], "contexts": [], "users": []}
    for path in paths:
        try:
            document = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
            raise BadUsage("it cannot be read", file=path, expected="a kubeconfig") from error
        if not isinstance(document, dict):
            raise BadUsage("not a mapping", file=path, expected="a kubeconfig")
        if document.get("current-context") and not whole.get("current-context"):
            whole["current-context"] = document["current-context"]
        for kind in ("clusters", "contexts", "users"):
            entries = document.get(kind) or []
            if not isinstance(entries, list) or not all(_is_entry(one, kind) for one in entries):
                raise BadUsage("not a list of names and what they mean", file=path, field=kind)
            known = {one["name"] for one in whole[kind]}
            whole[kind] += [_absolute(one, path) for one in entries if one["name"] not in known]
    return KubeConfig.from_dict(whole)


def _is_entry(entry: object, kind: str) -> bool:
    return isinstance(entry, dict) and "name" in entry and isinstance(entry.get(kind[:-1]), dict)


def _absolute(entry: dict[str, Any], file: Path) -> dict[str, Any]:
    """The entry with its paths, which are relative to the file that names them, made absolute."""
    for kind, names in (("cluster", PATHS_IN_CLUSTER), ("user", PATHS_IN_USER)):
        values: dict[str, Any] = entry.get(kind) or {}
        for name in names:
            if isinstance(values.get(name), str):
                values[name] = str(file.absolute().parent / values[name])
    return entry


# --- asking ---------------------------------------------------------------------------------------


class Cluster:
    """One cluster's API. Inside one event loop; `close()` when done."""

    def __init__(self, config: SingleConfig, *, within_s: float = WITHIN_S) -> None:
        self._within_s = within_s
        self.server = config.cluster.server
        try:
            self._client = AsyncClient(config=config, timeout=httpx2.Timeout(within_s))
        except (ConfigError, OSError, ValueError, httpx2.InvalidURL) as error:
            # OSError holds what TLS makes of certificates and keys.
            raise BadUsage(
                _line(str(error)) or type(error).__name__,
                field=f"kubeconfig context {config.context_name}",
                expected="a server and certificates that can be used",
            ) from error

    async def close(self) -> None:
        await self._client.close()

    async def pods(self, selection: Selection) -> tuple[Pod, ...]:
        """The pods that are selected, by name; none is an answer too.

        Raises:
            Unreachable: the API did not answer, or would not say.
        """
        try:
            async with asyncio.timeout(2 * self._within_s):
                try:
                    return await self._list(selection)
                except ApiError as error:
                    if error.response.status_code != 410:
                        raise
                    # The list grew too old between two of its parts: begin anew.
                    return await self._list(selection)
        except Exception as error:  # of lightkube, of a plugin for credentials, of the network
            raise Unreachable(f"{self.server}: {_why(error, selection)}") from error

    async def _list(self, selection: Selection) -> tuple[Pod, ...]:
        # Pairs, of which a dict would lose all but one with the same key; its types name dicts.
        labels: Any = [(term.key, _OPERATORS[term.comparison](term)) for term in selection.terms]
        found = self._client.list(
            PodResource, namespace=selection.namespace, labels=labels, chunk_size=CHUNK
        )
        pods = [pod_of(resource) async for resource in found]
        return tuple(sorted(pods, key=lambda pod: pod.called))


_OPERATORS: Mapping[Comparison, Callable[[Term], Any]] = {
    "=": lambda term: operators.equal(term.values[0]),
    "!=": lambda term: operators.not_equal(term.values[0]),
    "in": lambda term: operators.in_(term.values),
    "notin": lambda term: operators.not_in(term.values),
    "exists": lambda _: operators.exists(),
    "!": lambda _: operators.not_exists(),
}


def _why(error: Exception, selection: Selection) -> str:
    if isinstance(error, httpx2.HTTPStatusError):
        return _why_refused(error, selection)
    if isinstance(error, TimeoutError | httpx2.TimeoutException):
        return "the Kubernetes API did not answer in time"
    if isinstance(error, msgspec.MsgspecError):
        return "what answers is not the Kubernetes API: no list of pods"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the certificate of its API is not trusted: {cause.verify_message}"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx2.HTTPError):
        return f"the Kubernetes API cannot be reached: {_line(str(error)) or type(error).__name__}"
    if isinstance(error, ConfigError):
        return f"there are no credentials for it: {_line(str(error))}"
    told = _line(str(error)) or type(error).__name__
    return f"asking the Kubernetes API failed ({type(error).__name__}): {told}"


def _why_refused(error: httpx2.HTTPStatusError, selection: Selection) -> str:
    status = error.response.status_code
    told = _line(error.status.message or "") if isinstance(error, ApiError) else ""
    more = f": {told}" if told else ""
    where = (
        "all namespaces"
        if selection.namespace == ALL_NAMESPACES
        else f"namespace {selection.namespace}"
    )
    if status == 401:
        return "the Kubernetes API does not accept the credentials (has the token expired?)" + more
    if status == 403:
        return f"Kubernetes does not let this user list pods in {where}{more}"
    if status == 400:
        return f"the Kubernetes API does not understand the selector {selection.text}{more}"
    if status == 404 and not told:
        return "what answers is not the Kubernetes API: HTTP 404"
    return f"the Kubernetes API answers HTTP {status}{more}"


# --- what it answers ------------------------------------------------------------------------------


def pod_of(resource: PodResource) -> Pod:
    """The pod of an answer. What a pod lacks (no status yet, no containers) is left unknown."""
    meta, spec, status = resource.metadata, resource.spec, resource.status
    containers = (spec.containers or []) if spec else []
    told = (status.containerStatuses or []) if status else []
    ports = [
        (port.name or "", port.containerPort)
        for container in containers
        for port in container.ports or []
        if (port.protocol or "TCP") == "TCP"
    ]
    phase = (status.phase or "") if status else ""
    ready, unready_s = _readiness(status)
    created_s = _unix(meta.creationTimestamp) if meta else None
    # What the API calls the time of deletion is its end: grace is in it already
    # (k8s.io/apimachinery, ObjectMeta.deletionTimestamp).
    gone_by_s = _unix(meta.deletionTimestamp) if meta else None
    grace_s = (meta.deletionGracePeriodSeconds or 0) if meta else 0
    return Pod(
        namespace=(meta.namespace or "") if meta else "",
        name=(meta.name or "") if meta else "",
        uid=(meta.uid or "") if meta else "",
        ip=(status.podIP or "") if status else "",
        node=(spec.nodeName or "") if spec else "",
        phase=phase,
        ready=ready,
        because="" if ready or status is None else _because(status),
        unready_s=None if ready else created_s if unready_s is None else unready_s,
        restarts=sum(one.restartCount or 0 for one in told),
        last_termination=_last_termination(told),
        image=", ".join(container.image or "" for container in containers)[:MOST_CHARS],
        created_s=created_s,
        terminating_s=None if gone_by_s is None else gone_by_s - grace_s,
        gone_by_s=gone_by_s,
        ended_s=_ended_s(phase, status) if status else None,
        labels=dict((meta.labels or {}) if meta else {}),
        annotations=dict((meta.annotations or {}) if meta else {}),
        ports=tuple(ports),
    )


def _readiness(status: PodStatus | None) -> tuple[bool, float | None]:
    """(whether it is ready, since when that is so). No condition says so of one without a node."""
    for condition in (status.conditions or []) if status else []:
        if condition.type == "Ready":
            return condition.status == "True", _unix(condition.lastTransitionTime)
    return False, None


def _because(status: PodStatus) -> str:
    """Why a pod is not ready: what a container waits for tells more than the conditions do."""
    for one in (*(status.initContainerStatuses or []), *(status.containerStatuses or [])):
        state = one.state
        if state and state.waiting and state.waiting.reason:
            return _told(f"container {one.name}: {state.waiting.reason}", state.waiting.message)
        if state and state.terminated and (state.terminated.exitCode or not one.ready):
            if status.phase == "Pending" and not state.terminated.exitCode:
                continue  # an init container that is done
            return _told(f"container {one.name} ended: {_termination(state.terminated)}", "")
    if status.reason:
        return _told(status.reason, status.message)
    conditions = {condition.type: condition for condition in status.conditions or []}
    for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready"):
        found = conditions.get(kind)
        if found is not None and found.status != "True" and (found.reason or found.message):
            return _told(found.reason or kind, found.message)
    return ""


def _last_termination(statuses: Iterable[ContainerStatus]) -> str:
    ended = [
        (state.terminated.finishedAt, one.name, state.terminated)
        for one in statuses
        for state in (one.state, one.lastState)
        if state and state.terminated
    ]
    if not ended:
        return ""
    finished, name, terminated = max(ended, key=lambda one: (_unix(one[0]) or 0.0, one[1]))
    at = "" if finished is None else f" at {finished.strftime('%Y-%m-%dT%H:%M:%SZ')}"
    return f"{name}: {_termination(terminated)}{at}"[:MOST_CHARS]


def _termination(terminated: Any) -> str:
    reason = terminated.reason or ("Completed" if terminated.exitCode == 0 else "Error")
    return f"{reason}, exit code {terminated.exitCode}"


def _ended_s(phase: str, status: PodStatus) -> float | None:
    """When a pod that will not run again ended; None where it may run, or nothing tells."""
    if phase not in ("Succeeded", "Failed"):
        return None
    times = [_unix(one.state.terminated.finishedAt) for one in status.containerStatuses or []
             if one.state and one.state.terminated]  # fmt: skip
    times += [_unix(one.lastTransitionTime) for one in status.conditions or []]
    return max((time for time in times if time is not None), default=_unix(status.startTime))


def _unix(time: datetime | None) -> float | None:
    return None if time is None else time.timestamp()


def _told(what: str, message: str | None) -> str:
    return _line(f"{what}: {message}" if message else what)


def _line(text: str) -> str:
    """One printable line of at most MOST_CHARS characters."""
    flat = " ".join(text.split())
    return "".join(c if c.isprintable() else " " for c in flat[:MOST_CHARS]).strip()
