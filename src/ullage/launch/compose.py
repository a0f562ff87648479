"""Compose files: each service's image, command, environment and limits → the servers started.

Holds the compose spelling of things; `${NAME}` is left unknown.
"""

from __future__ import annotations

from dataclasses import replace

from ullage.errors import BadInput
from ullage.launch.commands import container_starts, launch_of
from ullage.launch.launch import Host, Launch, Word
from ullage.launch.shell import plain_words
from ullage.launch.values import parse_bytes, parse_duration
from ullage.launch.yaml_reading import Node

DEFAULT_GRACE_S = 10.0
"""Compose: stop_grace_period."""


def compose_launches(document: Node, file: str) -> list[Launch]:
    """The servers of all services, named by them. Raises BadInput."""
    found: list[Launch] = []
    for name, service in (document.at("services") or document).members().items():
        told = service.at("image")
        image = told.text() if told else None
        try:
            starts = container_starts(
                image, _words(service.at("entrypoint")), _words(service.at("command")), service.line
            )
        except ValueError as error:
            raise BadInput(str(error), file=file, field=f"services.{name}") from error
        found += [
            launch_of(
                start, name=name, file=file, kind="compose", image=image,
                environment=_environment(service), host=_host(service),
            )
            for start in starts
        ]  # fmt: skip
    return found


def _words(node: Node | None) -> tuple[Word, ...]:
    if node is None:
        return ()
    text = node.text()
    if text is not None:
        return plain_words(text, node.line)
    return tuple(_word(element.text() or "", element.line) for element in node.elements())


def _word(text: str, line: int) -> Word:
    """An element of a list: `$$` is a dollar, `${NAME}` and `$NAME` are unknown."""
    plain = text.replace("$$", "")
    return Word(text.replace("$$", "$"), line, text if "$" in plain else "")


def _environment(service: Node) -> dict[str, str | None]:
    found: dict[str, str | None] = {"*": None} if service.at("env_file") is not None else {}
    node = service.at("environment")
    if node is None:
        return found
    pairs = [(key, value.text()) for key, value in node.members().items()]
    for element in node.elements():
        name, equals, value = (element.text() or "").partition("=")
        pairs.append((name, value if equals else None))
    found.update({n: None if v is None or "$" in v.replace("$$", "") else v for n, v in pairs})
    return found


def _host(service: Node) -> Host:
    grace = service.at("stop_grace_period")
    host = Host(
        shm="default",
        grace_s=DEFAULT_GRACE_S if grace is None else parse_duration(grace.text() or ""),
        probes_known=True,  # a failed healthcheck restarts nothing
        exposed=_exposed(service),
    )
    size, ipc = service.at("shm_size"), service.at("ipc")
    if size is not None:
        number = parse_bytes(size.text() or "")
        host = replace(host, shm="unknown" if number is None else "limited", shm_bytes=number)
    if ipc is not None and ipc.text() == "host":
        host = replace(host, shm="unlimited", shm_bytes=None)
    devices = service.at("deploy", "resources", "reservations", "devices")
    for device in devices.elements() if devices else ():
        count, ids = device.at("count"), device.at("device_ids")
        if ids is not None:
            names = tuple(element.text() or "" for element in ids.elements())
            return replace(host, gpus_said=True, gpus=len(names), gpu_ids=names)
        number_of = count.number() if count else None
        return replace(host, gpus_said=True, gpus=None if number_of is None else int(number_of))
    return host


def _exposed(service: Node) -> bool:
    """Whether other machines reach the port: host networking, or a published port."""
    mode = service.at("network_mode")
    if mode is not None and mode.text() == "host":
        return True
    ports = service.at("ports")
    for port in ports.elements() if ports else ():
        address = port.at("host_ip")
        text = port.text() or (address.text() if address else "") or ""
        if not text.startswith(("127.0.0.1", "localhost", "[::1]")):
            return True
    return False
