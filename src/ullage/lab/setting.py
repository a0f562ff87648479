"""What an experiment is given: the model, how thorough to be, and the server if it is another's.

Holds data only; `run.py` makes it from the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Setting:
    """`model` is a path; `synthetic` when its weights are random (see `synthetic.py`).

    `quick` runs the least that still measures. `url` is a server to measure instead of the
    embedded engine, `serve_command` a template that starts one with {port} and the flag that the
    experiment varies. `trace` is a CSV of lengths. `progress` takes one line at a time.
    """

    model: Path
    synthetic: bool
    progress: Callable[[str], None]
    quick: bool = False
    url: str | None = None
    api_key: str | None = None
    serve_command: str | None = None
    trace: Path | None = None

    @property
    def model_name(self) -> str:
        return "a model with random weights" if self.synthetic else self.model.name
