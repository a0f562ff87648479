"""Helm values: vLLM's production stack, vLLM's own chart, llm-d's, others that hold a command.

Holds how those charts turn values into a command (production-stack: deployment-vllm-multi.yaml;
vLLM: examples/online_serving/chart-helm). What a chart decides itself stays unknown.
"""

from __future__ import annotations

from dataclasses import replace

from ullage.launch.commands import Start, launch_of
from ullage.launch.launch import Host, Launch, Word
from ullage.launch.manifests import container_launches, pods, probe, variables, with_devices
from ullage.launch.values import parse_quantity
from ullage.launch.yaml_reading import Node, walk

LOOKED_FOR = (
    "servingEngineSpec.modelSpec (vLLM's production stack), modelArtifacts with decode and prefill "
    "(llm-d), image.command (vLLM's own chart), applications[].args.llm_configs (Ray Serve), and "
    "containers, command or args that start a server, anywhere; other charts: `helm template`"
)

STACK_FLAGS = {
    "maxModelLen": "--max-model-len",
    "dtype": "--dtype",
    "tensorParallelSize": "--tensor-parallel-size",
    "maxNumSeqs": "--max-num-seqs",
    "gpuMemoryUtilization": "--gpu-memory-utilization",
    "maxLoras": "--max-loras",
}


def helm_launches(document: Node, file: str) -> list[Launch]:
    """The servers that the values describe; none when no chart known here has such values."""
    models = document.at("servingEngineSpec", "modelSpec")
    if models is not None:
        return [_stack_launch(document, model, file) for model in models.elements()]
    if document.at("modelArtifacts") is not None:
        from ullage.launch.llm_d import llm_d_launches

        return llm_d_launches(document, file)
    if document.at("image", "command") is not None:
        return _chart_launches(document, file)
    found = pods(document, file, "helm")
    if found:
        return found
    for node in walk(document):
        if node.at("command") is not None or node.at("args") is not None:
            name = node.at("name")
            shown = (name.text() if name else None) or "server"
            image = _image(node.at("image"))
            found += container_launches(node, file, "helm", shown, _around(node), image)
    return found


def _stack_launch(document: Node, model: Node, file: str) -> Launch:
    """One model of the production stack: its command as the chart writes it."""
    config = model.at("vllmConfig")
    words = [Word(_text(model.at("modelURL")) or "", _line(model, "modelURL"))]
    words += [Word("--host", model.line), Word("0.0.0.0", model.line)]
    for switch, flag in (
        ("enableLoRA", "--enable-lora"),
        ("enableTool", "--enable-auto-tool-choice"),
    ):
        node = model.at(switch)
        if node is not None and node.truth():
            words.append(Word(flag, node.line))
    for said, flag in (
        ("toolCallParser", "--tool-call-parser"),
        ("chatTemplate", "--chat-template"),
    ):
        given = model.at(said)
        if given is not None:
            words += [Word(flag, given.line), Word(given.text() or "", given.line)]
    if config is not None:
        words += _config_words(config)
    key = document.at("servingEngineSpec", "vllmApiKey")
    environment = variables(model)
    if key is not None:
        environment["VLLM_API_KEY"] = None
    if document.at("servingEngineSpec", "configs") is not None:
        environment["*"] = None
    start = Start("vllm", tuple(words), model.line)
    repository, tag = _text(model.at("repository")), _text(model.at("tag"))
    launch = launch_of(
        start, name=_text(model.at("name")) or "model", file=file, kind="helm",
        image=f"{repository}:{tag}", environment=environment, host=_stack_host(document, model),
    )  # fmt: skip
    unseen = tuple(k for k in ("lmcacheConfig", "raySpec") if model.at(k) is not None)
    return replace(launch, absent_unknown=(*launch.absent_unknown, *unseen))


def _config_words(config: Node) -> list[Word]:
    words: list[Word] = []
    chunked, caching = config.at("enableChunkedPrefill"), config.at("enablePrefixCaching")
    if chunked is not None:
        on = chunked.truth()
        words.append(Word(f"--{'' if on else 'no-'}enable-chunked-prefill", chunked.line))
    # The chart turns prefix caching off wherever the values do not turn it on.
    on = caching is not None and caching.truth() is True
    line = config.line if caching is None else caching.line
    words.append(Word(f"--{'' if on else 'no-'}enable-prefix-caching", line))
    for key, flag in STACK_FLAGS.items():
        node = config.at(key)
        if node is not None:
            text = node.text() or ""
            words += [Word(flag, node.line), Word(text, node.line, text if "{{" in text else "")]
    extra = config.at("extraArgs")
    for element in extra.elements() if extra else ():
        text = element.text() or ""
        words.append(Word(text, element.line, text if "{{" in text else ""))
    return words


def _stack_host(document: Node, model: Node) -> Host:
    """The chart mounts a memory volume at /dev/shm where tensorParallelSize is given."""
    engine = document.at("servingEngineSpec") or document
    number, shm = model.at("requestGPU"), parse_quantity(_text(model.at("shmSize")) or "")
    devices = None if number is None else number.number()
    parallel = model.at("vllmConfig", "tensorParallelSize") is not None
    return Host(
        gpus=None if devices is None else int(devices),
        gpus_said=number is not None,
        shm="limited" if parallel and shm else "unknown" if parallel else "default",
        shm_bytes=shm if parallel else None,
        liveness=probe(engine.at("livenessProbe")),
        startup=probe(engine.at("startupProbe")),
        probes_known=engine.at("livenessProbe") is not None
        and engine.at("startupProbe") is not None,
    )


def _chart_launches(document: Node, file: str) -> list[Launch]:
    """vLLM's own chart: image.command is the whole command."""
    image = document.at("image")
    container = Node({**document.members(), **(image.members() if image else {})}, 1, "map")
    host = _around(document)
    enabled, size = document.at("shm", "enabled"), _text(document.at("shm", "size"))
    if enabled is not None and enabled.truth() is True:
        limit = parse_quantity(size or "")
        host = replace(host, shm="limited" if limit else "unlimited", shm_bytes=limit)
    elif enabled is not None:
        host = replace(host, shm="default")
    line = document.line if image is None else image.line
    moved = Node(container.members(), line, "map")
    return container_launches(moved, file, "helm", "server", host, _image(image))


def _around(node: Node) -> Host:
    """What values beside a command say; the chart's own defaults are not known."""
    told = node.at("livenessProbe") is not None and node.at("startupProbe") is not None
    grace = node.at("terminationGracePeriodSeconds")
    host = Host(
        grace_s=None if grace is None else grace.number(),
        liveness=probe(node.at("livenessProbe")),
        startup=probe(node.at("startupProbe")),
        probes_known=told,
    )
    return with_devices(host, node.at("resources"))


def _image(node: Node | None) -> str | None:
    if node is None:
        return None
    repository, tag = _text(node.at("repository")), _text(node.at("tag"))
    return node.text() or (f"{repository}:{tag}" if repository and tag else repository)


def _text(node: Node | None) -> str | None:
    return None if node is None else node.text()


def _line(node: Node, key: str) -> int:
    found = node.at(key)
    return node.line if found is None else found.line
