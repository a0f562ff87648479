"""A deployment file → the servers that it starts, whatever its format.

Holds the choice of format and the sentences for files that start none. Each format has a module.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ullage.errors import BadInput
from ullage.launch.commands import launch_of, starts_in_shell
from ullage.launch.launch import Launch

MAX_BYTES = 256 << 10
MAX_SERVERS = 200
EXPECTED = (
    "a vllm or SGLang command line, a Dockerfile, a compose file, a Kubernetes manifest or Helm "
    "values that start one"
)


def read_launches(path: str) -> tuple[Launch, ...]:
    """Every server that the file starts, in order, each knowing its neighbours.

    Raises:
        BadInput: the file cannot be read, is malformed, or starts no server that is known.
    """
    text = _read(path)
    found = _launches(text, path)
    if not found:
        raise _no_server(text, path)
    if len(found) > MAX_SERVERS:
        raise BadInput(f"starts more than {MAX_SERVERS} servers", file=path)
    found = _with_own_names(found)
    return tuple(
        replace(launch, neighbours=tuple(o for o in found if o is not launch)) for launch in found
    )


def choose_launch(launches: Sequence[Launch], wanted: str | None, path: str) -> Launch:
    """The server of that name, or the only one that takes requests.

    Raises:
        BadInput: no such name, or several and none was named.
    """
    names = ", ".join(launch.name for launch in launches)
    if wanted is not None:
        for launch in launches:
            if launch.name == wanted:
                return launch
        raise BadInput(f"no server {wanted[:60]!r}", file=path, field="--server", expected=names)
    serving = [launch for launch in launches if not launch.headless] or list(launches)
    if len(serving) == 1:
        return serving[0]
    raise BadInput(
        f"starts {len(serving)} servers", file=path, expected=f"--server with one of: {names}"
    )


def _no_server(text: str, path: str) -> BadInput:
    """The sentence for a file without a server; for values of a chart, what was looked for."""
    expected = EXPECTED
    if path.lower().endswith((".yaml", ".yml")) or _looks_like_yaml(text):
        from ullage.launch.helm import LOOKED_FOR
        from ullage.launch.yaml_reading import read_yaml

        expected = LOOKED_FOR
        keys = [key for document in read_yaml(text, path) for key in document.members()]
        if keys:
            shown = ", ".join(key[:40] for key in keys[:8])
            return BadInput(
                f"starts no server that is known here; its keys are {shown}",
                file=path,
                expected=expected,
            )
    return BadInput("starts no server that is known here", file=path, expected=expected)


def _launches(text: str, path: str) -> list[Launch]:
    name = Path(path).name.lower()
    if name.startswith(("dockerfile", "containerfile")) or name.endswith(".dockerfile"):
        from ullage.launch.dockerfile import dockerfile_launches

        return dockerfile_launches(text, path)
    if name.endswith((".yaml", ".yml", ".json")) or _looks_like_yaml(text):
        from ullage.launch.manifests import yaml_launches

        return yaml_launches(text, path)
    first = next(iter(_significant(text)), "")
    if first.split(" ")[0].upper() in ("FROM", "ARG"):
        from ullage.launch.dockerfile import dockerfile_launches

        return dockerfile_launches(text, path)
    try:
        starts = starts_in_shell(text)
    except ValueError as error:
        raise BadInput(str(error), file=path, expected="a shell command line") from error
    # One more than the cap is enough to say that it is exceeded.
    return [
        launch_of(start, name="command", file=path, kind="command")
        for start in starts[: MAX_SERVERS + 1]
    ]


def _looks_like_yaml(text: str) -> bool:
    """Whether the first significant line is a document mark or `key:`."""
    first = next(iter(_significant(text)), "")
    key, colon, rest = first.partition(":")
    plain = key.replace("-", "").replace("_", "").isalnum()
    return first == "---" or (bool(colon) and plain and (not rest or rest[0] == " "))


def _significant(text: str) -> list[str]:
    lines = (line.strip() for line in text.splitlines()[:500])
    return [line for line in lines if line and not line.startswith("#")]


def _with_own_names(launches: Sequence[Launch]) -> list[Launch]:
    """Names made unique: `vllm`, `vllm-2`, …"""
    taken: set[str] = set()
    found = []
    for launch in launches:
        name, number = launch.name, 1
        while name in taken:
            number += 1
            name = f"{launch.name}-{number}"
        taken.add(name)
        found.append(replace(launch, name=name))
    return found


def _read(path: str) -> str:
    try:
        if not Path(path).is_file():
            there = os.path.lexists(path)
            found = "not a regular file" if there else "no such file"
            raise BadInput(found, file=path, expected=EXPECTED)
        with Path(path).open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a usable path"
        raise BadInput(f"cannot be read ({reason})", file=path) from error
    if len(data) > MAX_BYTES:
        raise BadInput(f"more than {MAX_BYTES:,} bytes", file=path, expected=EXPECTED)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput("is not UTF-8 text", file=path, expected=EXPECTED) from error
