"""The engines whose adapters are judged: name → module, versions, defaults.

Holds a table. Each module has `judge(adapter, tree, options) -> EngineAnswer`; it is imported when
it is asked for, so that the check of one engine does not pay for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

from ullage.adapters.base import BaseTree
from ullage.adapters.verdict import EngineAnswer, ServeOptions
from ullage.anatomy.adapters.adapter import Adapter
from ullage.errors import BadUsage

Judge = Callable[[Adapter, BaseTree, ServeOptions], EngineAnswer]


@dataclass(frozen=True, slots=True)
class Engine:
    """`module` holds the engine's judge; `versions` are known, the default one last.

    `oldest`: versions from this one on are judged too, by what is known to have changed since.
    """

    name: str
    module: str
    versions: tuple[str, ...]
    oldest: str | None = None

    def judge(self) -> Judge:
        found: Judge = import_module(f"ullage.adapters.engines.{self.module}").judge
        return found


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("vllm", "vllm", ("0.33", "0.32"), oldest="0.5"),
        Engine("sglang", "sglang", ("0.5.23",)),
        Engine("tensorrt-llm", "tensorrt_llm", ("1.2",)),
        Engine("peft", "peft", ("0.21",)),
        Engine("ullage", "ullage", ("0.1",)),
    )
}


def resolve(options: ServeOptions) -> tuple[Engine, ServeOptions]:
    """The engine and the options with its version filled in and cut to what is known of it.

    `0.32.1` is judged as `0.32`. Raises BadUsage for an engine or a version that is not known.
    """
    engine = ENGINES.get(options.engine)
    if engine is None:
        raise BadUsage(
            repr(options.engine), file="--engine", expected=f"one of {', '.join(ENGINES)}"
        )
    if options.version is None:
        return engine, replace(options, version=engine.versions[-1])
    given = options.version.removeprefix("v")
    for version in engine.versions:
        if given == version or given.startswith(version + "."):
            return engine, replace(options, version=version)
    number = release(given)
    newest = max(release(version) or (0, 0) for version in engine.versions)
    if engine.oldest is not None and number and (release(engine.oldest) or ()) <= number < newest:
        return engine, replace(options, version=given)
    known = ", ".join(sorted(engine.versions))
    if engine.oldest is not None:
        known += f", or an older one from {engine.oldest} on"
    raise BadUsage(
        options.version, file="--engine-version",
        expected=f"a version of {engine.name} that is known: {known}",
    )  # fmt: skip


def release(version: str) -> tuple[int, int] | None:
    """(0, 32) of `0.32.1`; None for what is no version."""
    parts = version.split(".")[:2]
    if len(parts) < 2 or not all(p.isascii() and p.isdecimal() and len(p) < 6 for p in parts):
        return None
    return int(parts[0]), int(parts[1])
