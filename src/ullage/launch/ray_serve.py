"""Ray Serve's LLM applications: each `llm_configs` entry is one engine without a port of its own.

Reads a Serve configuration, and a RayService that holds one as text. `engine_kwargs` are the
engine's arguments under their Python names (ray 2.5x: ray/llm/_internal/serve, LLMConfig).
"""

from __future__ import annotations

from dataclasses import replace

from ullage.launch.commands import Start, launch_of
from ullage.launch.flags import known_flags
from ullage.launch.launch import EngineName, Launch, Word
from ullage.launch.yaml_reading import Node, as_json, read_yaml, shifted

SGLANG_SIGN = "build_sglang_openai_app"


def ray_launches(document: Node, file: str) -> list[Launch]:
    """The engines of a Serve configuration or a RayService; none where it holds neither."""
    text = document.at("spec", "serveConfigV2")
    if text is not None and (held := text.text()) is not None:
        inner = read_yaml(held, file)
        return [made for node in inner for made in _engines(shifted(node, text.line - 1), file)]
    return _engines(document, file)


def _engines(document: Node, file: str) -> list[Launch]:
    found: list[Launch] = []
    for application in document.list_at("applications"):
        path = application.at("import_path")
        engine: EngineName = "vllm"
        if path is not None and SGLANG_SIGN in (path.text() or ""):
            engine = "sglang"
        configs = application.list_at("args", "llm_configs")
        found += [_engine(config, engine, file) for config in configs if config.members()]
    return found


def _engine(config: Node, engine: EngineName, file: str) -> Launch:
    name = config.at("model_loading_config", "model_id")
    source = config.at("model_loading_config", "model_source") or name
    words: list[Word] = []
    if engine == "vllm":
        shown = None if source is None else source.text()
        hidden = "" if shown else "model_source"
        words.append(Word(shown or "", config.line if source is None else source.line, hidden))
    if name is not None and (text := name.text()) is not None:
        words += [Word("--served-model-name", name.line), Word(text, name.line)]
    kwargs = config.at("engine_kwargs")
    for key, value in kwargs.members().items() if kwargs else ():
        words += _words(engine, key, value)
    variables = config.at("runtime_env", "env_vars")
    members = variables.members().items() if variables else ()
    launch = launch_of(
        Start(engine, tuple(words), config.line),
        name=(name.text() if name else None) or "engine",
        file=file,
        kind="ray",
        environment={key: value.text() for key, value in members},
    )
    return replace(launch, headless=True)


def _words(engine: EngineName, key: str, value: Node) -> list[Word]:
    """One keyword argument as the flag that sets the same."""
    flag = f"--{key.replace('_', '-')}"
    if value.kind == "null":
        return []
    if value.members():
        return [Word(flag, value.line), Word(as_json(value), value.line)]
    truth = value.truth()
    if truth is None:
        texts = [element.text() or "" for element in value.elements()] or [value.text() or ""]
        return [Word(flag, value.line), *(Word(text, value.line) for text in texts)]
    if truth:
        return [Word(flag, value.line)]
    negative = f"--no-{flag[2:]}"
    return [Word(negative, value.line)] if negative in known_flags(engine) else []
