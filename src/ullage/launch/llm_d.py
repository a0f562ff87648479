"""llm-d's model service chart: the decode and prefill servers that its values describe.

Holds how the chart writes their commands (llm-d-modelservice: templates/_helpers.tpl,
vllmServeModelCommand and its neighbours).
"""

from __future__ import annotations

from dataclasses import replace

from ullage.launch.commands import Start, container_starts, launch_of
from ullage.launch.launch import Launch, Word
from ullage.launch.manifests import pod_host, variables, words_of
from ullage.launch.yaml_reading import Node

ROLES = ("decode", "prefill")


def llm_d_launches(document: Node, file: str) -> list[Launch]:
    """The servers of both roles that are created; none where the values are not this chart's."""
    artifacts = document.at("modelArtifacts")
    if artifacts is None:
        return []
    found: list[Launch] = []
    for role in ROLES:
        part = document.at(role)
        create = None if part is None else part.at("create")
        if part is None or (create is not None and create.truth() is False):
            continue
        for container in part.list_at("containers"):
            found += _servers(document, artifacts, role, part, container, file)
    return found


def _servers(
    document: Node, artifacts: Node, role: str, part: Node, container: Node, file: str
) -> list[Launch]:
    environment = variables(container)
    args = words_of(container.at("args"), environment)
    way = _text(container.at("modelCommand")) or "custom"
    image = _text(container.at("image"))
    sizes = _sizes(part.at("parallelism"))
    if way == "custom":
        starts = container_starts(
            image, words_of(container.at("command"), environment), args, container.line
        )
    else:
        line = container.line
        words = (*_written(artifacts, sizes, line), *args)
        starts = [Start("vllm", words, line)]
    workers = sizes.get("workers")
    host = pod_host(part, _with_extra(container))
    if not host.gpus_said and way != "custom":
        tensor, local = sizes.get("tensor"), sizes.get("local")
        number = None if tensor is None or local is None else tensor * local
        host = replace(host, gpus=number, gpus_said=True)
    multinode = document.at("multinode")
    spread = multinode is not None and multinode.truth() is True
    host = replace(host, pods=(workers or None) if spread else 1)
    return [
        launch_of(
            start, name=role, file=file, kind="helm", image=image, environment=environment,
            host=host,
        )
        for start in starts
    ]  # fmt: skip


def _written(artifacts: Node, sizes: dict[str, int | None], line: int) -> list[Word]:
    """The words that the chart puts before the container's own."""
    uri = _text(artifacts.at("uri")) or ""
    scheme, _, rest = uri.partition("://")
    model = Word(rest, line)
    if scheme == "pvc+hf":
        model = Word("/".join(rest.split("/")[-2:]), line)
    elif scheme != "hf" or not rest or "{{" in rest:
        model = Word("", line, uri or "modelArtifacts.uri")
    words = [model]
    for flag, key in (
        ("--tensor-parallel-size", "tensor"),
        ("--data-parallel-size", "data"),
        ("--data-parallel-size-local", "local"),
    ):
        size = sizes.get(key)
        if size is None:
            words += [Word(flag, line), Word("", line, f"parallelism.{key}")]
        elif size > 1:
            words += [Word(flag, line), Word(str(size), line)]
    name = _text(artifacts.at("name"))
    if name is not None:
        words += [Word("--served-model-name", line), Word(name, line)]
    return words


def _sizes(node: Node | None) -> dict[str, int | None]:
    """The chart's four sizes, each 1 unless said or made of the others; None where unreadable."""
    said: dict[str, int | None] = {}
    for key in ("tensor", "data", "dataLocal", "workers"):
        found = None if node is None else node.at(key)
        if found is not None:
            number = found.number()
            said[key] = None if number is None or number < 1 else int(number)
    if None in said.values():
        return {"tensor": said.get("tensor", 1), "data": None, "local": None, "workers": None}
    known = {key: value or 1 for key, value in said.items()}
    data, local, workers = known.get("data"), known.get("dataLocal"), known.get("workers")
    return {
        "tensor": known.get("tensor", 1),
        "data": data or (local or 1) * (workers or 1),
        "local": local or (data or 1) // (workers or 1),
        "workers": workers or (data or 1) // (local or data or 1),
    }


def _with_extra(container: Node) -> Node:
    """The container with what `extraConfig` adds to it."""
    extra = container.at("extraConfig")
    if extra is None or not extra.members():
        return container
    return Node({**extra.members(), **container.members()}, container.line, "map")


def _text(node: Node | None) -> str | None:
    return None if node is None else node.text()
