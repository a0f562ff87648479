"""KServe: an InferenceService's `predictor.model` and the runtime of the file that starts it.

Holds how the two become one command: the runtime's container, with the model's arguments behind.
Without its runtime a service hides flags, and its model is where `storageUri` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ullage.launch.commands import Start, launch_of
from ullage.launch.launch import EngineName, Launch
from ullage.launch.manifests import container_launches, pod_host, variables, words_of
from ullage.launch.yaml_reading import Node

RUNTIMES = ("ServingRuntime", "ClusterServingRuntime")
SERVICES = ("InferenceService", "LLMInferenceService")
FORMATS: Mapping[str, EngineName] = {"vllm": "vllm", "sglang": "sglang"}
"""Model formats whose runtimes are the engine's own server; `huggingface` is KServe's."""

MOUNT = "/mnt/models"
"""Where KServe puts the model (pkg/constants: DefaultModelLocalMountPath)."""


def kserve_launches(documents: Sequence[Node], file: str) -> tuple[list[Launch], list[Node]]:
    """The servers of services that name a model, and the documents that are done with."""
    runtimes = {_name(d): d for d in documents if _kind(d) in RUNTIMES}
    found: list[Launch] = []
    done: list[Node] = []
    for document in documents:
        if _kind(document) not in SERVICES:
            continue
        if _kind(document) == "LLMInferenceService":
            found.append(_llm_service(document, file))
            done.append(document)
            continue
        model = document.at("spec", "predictor", "model")
        if model is None:
            continue
        runtime_name = _text(model.at("runtime"))
        runtime = runtimes.get(runtime_name or "")
        made = (
            _alone(document, model, runtime_name, file)
            if runtime is None
            else _with_runtime(document, model, runtime, file)
        )
        found += made
        done += [document, *((runtime,) if runtime is not None else ())]
    return found, done


def _with_runtime(service: Node, model: Node, runtime: Node, file: str) -> list[Launch]:
    """The runtime's container as the service completes it."""
    spec, predictor = runtime.at("spec"), service.at("spec", "predictor")
    containers = runtime.list_at("spec", "containers")
    named = [c for c in containers if _text(c.at("name")) == "kserve-container"]
    if spec is None or predictor is None or not containers:
        return []
    container = (named or list(containers))[0]
    pod = dict(spec.members())
    pod["volumes"] = _joined(spec, predictor, "volumes")
    pod.update({k: v for k, v in predictor.members().items() if k not in ("model", "volumes")})
    whole = dict(container.members())
    for key in ("args", "env", "volumeMounts"):
        whole[key] = _joined(container, model, key)
    whole.update(
        {k: v for k, v in model.members().items() if k not in ("args", "env", "volumeMounts")}
    )
    made = Node(whole, container.line, "map")
    host = pod_host(Node(pod, spec.line, "map"), made)
    if predictor.at("workerSpec") is not None:
        host = replace(host, pods=None)
    launches = container_launches(made, file, "kubernetes", _name(service), host)
    return [_stored(launch, model) for launch in launches]


def _joined(first: Node, second: Node, key: str) -> Node:
    parts = (*first.list_at(key), *second.list_at(key))
    node = second.at(key) or first.at(key)
    return Node(parts, first.line if node is None else node.line, "seq")


def _alone(service: Node, model: Node, runtime: str | None, file: str) -> list[Launch]:
    """What the service says by itself, where the format is an engine's own."""
    engine = FORMATS.get((_text(model.at("modelFormat", "name")) or "").lower())
    predictor = service.at("spec", "predictor")
    if engine is None or predictor is None:
        return []
    environment = variables(model)
    start = Start(engine, words_of(model.at("args"), environment), model.line, takes_model=False)
    host = pod_host(predictor, model)
    host = replace(host, shm="unknown" if host.shm == "default" else host.shm, probes_known=False)
    if predictor.at("workerSpec") is not None:
        host = replace(host, pods=None)
    launch = launch_of(
        start, name=_name(service), file=file, kind="kubernetes",
        image=_text(model.at("image")), environment=environment, host=host,
    )  # fmt: skip
    hidden = f"the ServingRuntime {runtime or 'that KServe chooses'}"
    launch = replace(launch, absent_unknown=(*launch.absent_unknown, hidden))
    return [_stored(replace(launch, model=launch.model or MOUNT), model)]


def _stored(launch: Launch, model: Node) -> Launch:
    """The launch with the model that KServe mounts: `storageUri` says which it is."""
    if launch.model != MOUNT:
        return launch
    uri = _text(model.at("storageUri")) or ""
    if uri.startswith("hf://"):
        return replace(launch, model=uri.removeprefix("hf://"))
    return replace(launch, model_open=uri or "storage")


def _llm_service(service: Node, file: str) -> Launch:
    """An LLMInferenceService: KServe's own configuration adds the command around what it says."""
    template = service.at("spec", "template") or service
    mains = [c for c in template.list_at("containers") if _text(c.at("name")) == "main"]
    main = mains[0] if mains else template
    environment = variables(main)
    start = Start("vllm", words_of(main.at("args"), environment), main.line, takes_model=False)
    if extra := environment.get("VLLM_ADDITIONAL_ARGS"):
        from ullage.launch.shell import plain_words

        start = replace(start, words=(*start.words, *plain_words(extra, main.line)))
    host = pod_host(template, main)
    host = replace(host, shm="unknown" if host.shm == "default" else host.shm, probes_known=False)
    launch = launch_of(
        start, name=_name(service), file=file, kind="kubernetes",
        image=_text(main.at("image")), environment=environment, host=host,
    )  # fmt: skip
    uri = _text(service.at("spec", "model", "uri")) or ""
    hf = uri.startswith("hf://")
    return replace(
        launch,
        model=uri.removeprefix("hf://") if hf else MOUNT,
        model_open="" if hf else uri or "spec.model.uri",
        absent_unknown=(*launch.absent_unknown, "the LLMInferenceServiceConfig"),
    )


def _kind(document: Node) -> str:
    return _text(document.at("kind")) or ""


def _name(document: Node) -> str:
    return _text(document.at("metadata", "name")) or "server"


def _text(node: Node | None) -> str | None:
    return None if node is None else node.text()
