"""Runs experiments one after another and gathers what they found.

Holds the order, the synthetic model's life and what becomes of an experiment that cannot run here.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from ullage import __version__
from ullage.errors import BadUsage, UllageError
from ullage.lab.document import Document, machine
from ullage.lab.neighbours import elsewhere_ratio, read_clock
from ullage.lab.registry import EXPERIMENTS
from ullage.lab.result import NotRun, Result
from ullage.lab.setting import Setting
from ullage.lab.synthetic import write_synthetic


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asked for; `model` None stands for a small one with random weights."""

    model: str | None
    quick: bool = False
    url: str | None = None
    api_key: str | None = None
    serve_command: str | None = None
    trace: Path | None = None


def run_lab(names: Sequence[str], asked: Asked, progress: Callable[[str], None]) -> Document:
    """Run the named experiments. With one name its errors are raised; with more, each that cannot
    run is in the document with the reason."""
    begin = time.perf_counter()
    facts = machine()
    outcomes: list[Result | NotRun] = []
    with tempfile.TemporaryDirectory(prefix="ullage-lab-") as scratch:
        model = (
            write_synthetic(Path(scratch), quick=asked.quick)
            if asked.model is None
            else Path(asked.model)
        )
        setting = Setting(
            model=model,
            synthetic=asked.model is None,
            progress=progress,
            quick=asked.quick,
            url=asked.url,
            api_key=asked.api_key,
            serve_command=asked.serve_command,
            trace=asked.trace,
        )
        for name in names:
            progress(f"{name}: begins")
            try:
                outcomes.append(_run(name, setting))
            except UllageError as error:
                if len(names) == 1:
                    raise
                outcomes.append(NotRun(name, str(error)))
    return Document(
        subject=_subject(setting),
        machine=facts,
        outcomes=tuple(outcomes),
        ullage=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        wall_s=time.perf_counter() - begin,
    )


def _subject(setting: Setting) -> str:
    if setting.url is not None:
        return f"the server at {setting.url}"
    return "the server of --serve-command" if setting.serve_command else setting.model_name


def _run(name: str, setting: Setting) -> Result:
    about = EXPERIMENTS[name]
    if about.needs_weights and setting.synthetic:
        raise BadUsage(
            f"{name} measures answers, which random weights do not have",
            field="MODEL",
            expected="a model with its weights",
        )
    if setting.url is not None and not about.over_http:
        over_http = ", ".join(other for other, e in EXPERIMENTS.items() if e.over_http)
        raise BadUsage(
            f"{name} looks inside the engine, which no server shows",
            field="--url",
            expected=f"one of {over_http} with it",
        )
    if setting.serve_command is not None and setting.url is None and not about.varies:
        raise BadUsage(
            f"{name} starts no server of its own",
            field="--serve-command",
            expected="--url with it, for a server that runs",
        )
    module = import_module(f"ullage.lab.experiments.{about.module}")
    begin, before = time.perf_counter(), read_clock()
    result: Result = module.run(setting)
    wall_s, after = time.perf_counter() - begin, read_clock()
    return replace(
        result,
        wall_s=wall_s,
        processor_s=None if before is None or after is None else after.own_s - before.own_s,
        elsewhere_ratio=elsewhere_ratio(before, after, os.cpu_count() or 1),
    )
