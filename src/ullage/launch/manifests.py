"""YAML deployments: Kubernetes pods of any kind, and the choice among them, compose and Helm.

Holds what pods say around a server's command: devices, shared memory, grace, probes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ullage.errors import BadInput
from ullage.launch.commands import Start, container_starts, launch_of
from ullage.launch.launch import Host, Kind, Launch, Probe, SharedMemory, Word
from ullage.launch.values import parse_quantity
from ullage.launch.yaml_reading import Node, read_yaml, walk

DEVICE_KEYS = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe")
DEFAULT_GRACE_S = 30.0
"""Kubernetes: terminationGracePeriodSeconds."""
PROBE_DEFAULTS = (0.0, 10.0, 3)
"""Kubernetes: initialDelaySeconds, periodSeconds, failureThreshold."""


def yaml_launches(text: str, file: str) -> list[Launch]:
    """The servers of every document. Raises BadInput."""
    from ullage.launch.compose import compose_launches
    from ullage.launch.helm import helm_launches

    found: list[Launch] = []
    documents = read_yaml(text, file)
    if any("serving.kserve.io" in (_text(d.at("apiVersion")) or "") for d in documents):
        from ullage.launch.kserve import kserve_launches

        found, done = kserve_launches(documents, file)
        documents = [document for document in documents if all(document is not d for d in done)]
    for document in documents:
        if document.at("applications") is not None or document.at("spec", "serveConfigV2"):
            from ullage.launch.ray_serve import ray_launches

            found += ray_launches(document, file)
        elif document.at("kind") is not None and document.at("apiVersion") is not None:
            found += pods(document, file, "kubernetes")
        elif isinstance(services := document.at("services"), Node) and services.members():
            found += compose_launches(document, file)
        else:
            found += helm_launches(document, file)
    return found


def pods(document: Node, file: str, kind: Kind) -> list[Launch]:
    """The servers of every pod in the document: whatever has a list of `containers`."""
    found: list[Launch] = []
    name = document.at("metadata", "name")
    group = document.at("spec", "leaderWorkerTemplate")
    for node in walk(document):
        for container in node.list_at("containers"):
            label = container.at("name") or name
            shown = (label.text() if label else None) or "server"
            host = pod_host(node, container)
            if group is not None:
                size = group.at("size")
                number = 1.0 if size is None else size.number()
                host = replace(host, pods=None if number is None else int(number))
            found += container_launches(container, file, kind, shown, host)
    return found


def container_launches(
    container: Node, file: str, kind: Kind, name: str, host: Host, image: str | None = None
) -> list[Launch]:
    """The servers of one container (command, args, env)."""
    told = container.at("image")
    image = image or (told.text() if told else None)
    environment = variables(container)
    command = words_of(container.at("command"), environment)
    args = words_of(container.at("args"), environment)
    try:
        starts: list[Start] = container_starts(image, command, args, container.line)
    except ValueError as error:
        raise BadInput(str(error), file=file, field=f"line {container.line}") from error
    return [
        launch_of(
            start, name=name, file=file, kind=kind, image=image, environment=environment, host=host
        )
        for start in starts
    ]


def variables(container: Node) -> dict[str, str | None]:
    """The container's environment; "*" stands for what envFrom brings, whose names are unknown."""
    found: dict[str, str | None] = {}
    if container.at("envFrom") is not None:
        found["*"] = None
    for entry in container.list_at("env"):
        name, value = entry.at("name"), entry.at("value")
        if name is not None and (text := name.text()) is not None:
            literal = value.text() if value else None
            if value is None and entry.at("valueFrom") is None:
                literal = ""
            found[text] = None if literal is None or "$(" in literal else literal
    return found


def words_of(node: Node | None, environment: dict[str, str | None]) -> tuple[Word, ...]:
    """The words of an exec list; `$(NAME)` is replaced where the environment says the value."""
    if node is None:
        return ()
    elements: Iterable[Node] = node.elements() or ((node,) if node.text() else ())
    return tuple(_word(element, environment) for element in elements)


def _word(node: Node, environment: dict[str, str | None]) -> Word:
    text, opened = node.text() or "", ""
    if "{{" in text:
        opened = text
    parts = text.split("$(")
    made = parts[0]
    for part in parts[1:]:
        name, end, rest = part.partition(")")
        value = environment.get(name)
        if end and value is not None and not made.endswith("$"):
            made += value + rest
        else:
            opened = opened or (f"$({name})" if end and not made.endswith("$") else "")
            made += f"$({part}"
    return Word(made, node.line, opened)


def pod_host(pod: Node, container: Node) -> Host:
    """What a pod allows the container. Defaults are Kubernetes' own, which are known."""
    grace = pod.at("terminationGracePeriodSeconds")
    shm, shm_bytes = shared_memory(pod, container)
    host = Host(
        shm="unlimited" if truth(pod.at("hostIPC")) else shm,
        shm_bytes=shm_bytes,
        grace_s=DEFAULT_GRACE_S if grace is None else grace.number(),
        pre_stop_s=_pre_stop(container),
        probes_known=True,
        liveness=probe(container.at("livenessProbe")),
        startup=probe(container.at("startupProbe")),
        exposed=True if truth(pod.at("hostNetwork")) else None,
    )
    return with_devices(host, container.at("resources"))


def with_devices(host: Host, resources: Node | None) -> Host:
    """The number of devices that `resources` give (limits; requests must be equal)."""
    for part in ("limits", "requests"):
        for key in DEVICE_KEYS:
            node = resources.at(part, key) if resources else None
            if node is not None:
                number = node.number()
                return replace(host, gpus_said=True, gpus=None if number is None else int(number))
    return host


def shared_memory(pod: Node, container: Node) -> tuple[SharedMemory, int | None]:
    """(how /dev/shm is bounded, bytes): a memory volume mounted there, or the runtime's default."""
    mounted = {
        node.text()
        for mount in container.list_at("volumeMounts")
        if (place := mount.at("mountPath")) is not None
        and (place.text() or "").rstrip("/") == "/dev/shm"
        and (node := mount.at("name")) is not None
    }
    for volume in pod.list_at("volumes"):
        name = volume.at("name")
        if name is None or name.text() not in mounted:
            continue
        medium, limit = volume.at("emptyDir", "medium"), volume.at("emptyDir", "sizeLimit")
        if medium is not None and medium.text() == "Memory":
            size = parse_quantity(limit.text() or "") if limit else None
            if limit is None:
                return "unlimited", None
            return ("unknown", None) if size is None else ("limited", size)
        return "unlimited", None  # a disk or host path: not bounded as shared memory is
    return ("unknown", None) if mounted else ("default", None)


def probe(node: Node | None) -> Probe | None:
    """A probe's patience; None without one. Values that are no numbers count as the defaults."""
    if node is None or not node.members():
        return None
    keys = ("initialDelaySeconds", "periodSeconds", "failureThreshold")
    numbers = [
        default if (found := node.at(key)) is None or found.number() is None else found.number()
        for key, default in zip(keys, PROBE_DEFAULTS, strict=True)
    ]
    delay, period, failures = (float(number or 0) for number in numbers)
    return Probe(delay, max(period, 1.0), max(int(failures), 1), node.line)


def _pre_stop(container: Node) -> float | None:
    """Seconds that the preStop hook takes, None when that is not known."""
    hook = container.at("lifecycle", "preStop")
    if hook is None:
        return 0.0
    seconds = hook.at("sleep", "seconds")
    if seconds is not None:
        return seconds.number()
    command = hook.at("exec", "command")
    words = " ".join(n.text() or "" for n in command.elements()).split() if command else []
    if len(words) >= 2 and words[-2] == "sleep" and words[-1].isdecimal():
        return float(words[-1][:9])
    return None


def _text(node: Node | None) -> str | None:
    return None if node is None else node.text()


def truth(node: Node | None) -> bool:
    return node is not None and node.truth() is True
