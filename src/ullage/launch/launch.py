"""The start of one server as data: its flags as given, its environment, what its host allows.

Holds values only. Reading them is `documents.py`'s, what an engine makes of them `settings.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineName = Literal["vllm", "sglang"]
Kind = Literal["command", "dockerfile", "compose", "kubernetes", "helm", "ray"]
SharedMemory = Literal["unknown", "default", "limited", "unlimited"]
Trouble = Literal["", "unknown", "ambiguous", "no value", "takes no value"]


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command and its line. `open` names what keeps the text unknown (`$TP`), or "".

    `splits`: the unknown part stands unquoted and alone, so that it may be any number of words.
    """

    text: str
    line: int
    open: str = ""
    splits: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """A flag as given: `name` is the engine's own spelling ("" when it has no such flag)."""

    name: str
    spelling: str
    values: tuple[str, ...]
    line: int
    open: str = ""
    trouble: Trouble = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe's patience: it acts after `failures` tries, `period_s` apart, from `delay_s` on."""

    delay_s: float
    period_s: float
    failures: int
    line: int

    @property
    def patience_s(self) -> float:
        """Seconds from the container's start until the last failure counts."""
        return self.delay_s + self.period_s * self.failures


@dataclass(frozen=True, slots=True)
class Host:
    """What surrounds the command. Each None is unknown, unless a flag beside it says otherwise.

    `gpus` None with `gpus_said` True: the file speaks of GPUs and the number is not known.
    `shm_bytes` None with `shm` "unlimited": a memory volume without a limit, or the host's own.
    `grace_s` is what the orchestrator allows between SIGTERM and SIGKILL, `pre_stop_s` of it is
    spent before SIGTERM. Probes are absent (None) only where `probes_known`. `pods` share the
    ranks, None an unknown number of them.
    """

    gpus: int | None = None
    gpus_said: bool = False
    gpu_ids: tuple[str, ...] | None = None
    shm: SharedMemory = "unknown"
    shm_bytes: int | None = None
    grace_s: float | None = None
    pre_stop_s: float | None = 0.0
    probes_known: bool = False
    liveness: Probe | None = None
    startup: Probe | None = None
    exposed: bool | None = None
    pods: int | None = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """One server's start.

    `version` is the image's, None where no tag says it. `model` is the model as named, None where
    it is not, `model_open` names what hides it. `strays` are words that belong to no flag.
    `environment` holds literal values, None where one comes from elsewhere. `absent_unknown` names
    what may hold more flags (a config file, `"$@"`): with it, a flag that is not seen may be given.
    `headless`: part of another server, without a port of its own. `background`: a script goes on
    beside it. `neighbours` are the other servers of the file.
    """

    name: str
    file: str
    line: int
    kind: Kind
    engine: EngineName
    flags: tuple[Given, ...]
    version: str | None = None
    model: str | None = None
    model_open: str = ""
    strays: tuple[Word, ...] = ()
    environment: tuple[tuple[str, str | None], ...] = ()
    absent_unknown: tuple[str, ...] = ()
    headless: bool = False
    background: bool = False
    host: Host = Host()
    neighbours: tuple[Launch, ...] = ()

    def given(self, name: str) -> Given | None:
        """The last time that the flag is given (argparse keeps the last), or None."""
        for flag in reversed(self.flags):
            if flag.name == name:
                return flag
        return None

    def variable(self, name: str) -> str | None:
        """A literal environment variable, None when it is absent or not known."""
        return dict(self.environment).get(name)

    def names_variable(self, name: str) -> bool:
        """Whether the environment sets the variable, to a known value or not."""
        return name in dict(self.environment)
