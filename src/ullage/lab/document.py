"""All that one call of the lab found, and what it was found on: as data and as JSON.

Holds the document and its JSON form (schema ullage.lab/1). The page is `html/`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ullage.lab.registry import EXPERIMENTS
from ullage.lab.result import NotRun, Result
from ullage.pages.words import seconds

SCHEMA = "ullage.lab/1"
DISTURBED = 0.1
"""The share of the cores' time in other hands above which times are said to be disturbed."""


@dataclass(frozen=True, slots=True)
class Document:
    """`machine`: name → what it was run on; `wall_s` all experiments together."""

    subject: str
    machine: Mapping[str, str]
    outcomes: tuple[Result | NotRun, ...]
    ullage: str
    created: str
    wall_s: float


def machine() -> dict[str, str]:
    """What the figures were measured on: processor, cores, memory, versions."""
    import torch

    from ullage.checkup.machine import cpu_name, total_bytes, usable_cores

    memory = total_bytes()
    facts = {
        "on": cpu_name(),
        "cores": str(usable_cores()),
        "memory": "not known" if memory is None else f"{memory / 1e9:.1f} GB",
        "PyTorch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "Python": platform.python_version(),
    }
    if hasattr(os, "getloadavg"):
        facts["load average at start"] = f"{os.getloadavg()[0]:.1f}"
    return facts


def as_json(document: Document) -> dict[str, Any]:
    """Plain data: every table with its columns' sources, every plot's points, unrounded."""
    return {
        "schema": SCHEMA,
        "ullage": document.ullage,
        "created": document.created,
        "wall_s": document.wall_s,
        "subject": document.subject,
        "machine": dict(document.machine),
        "results": [_result(o) for o in document.outcomes if isinstance(o, Result)],
        "not_run": [asdict(o) for o in document.outcomes if isinstance(o, NotRun)],
    }


def disturbance(result: Result) -> str:
    """One sentence: how long it took, and how busy the machine was with other things."""
    said = f"Took {seconds(result.wall_s, 2)}"
    if result.processor_s is not None:
        said += f" and {seconds(result.processor_s, 2)} of processor time"
    if result.elsewhere_ratio is None:
        return said + "; what other processes took meanwhile is not known."
    said += f"; other processes took {result.elsewhere_ratio:.0%} of the cores meanwhile"
    if result.elsewhere_ratio > DISTURBED:
        return said + ", so that times are disturbed."
    return said + "."


def _result(result: Result) -> dict[str, Any]:
    about = EXPERIMENTS[result.name]
    return {
        "name": result.name,
        "title": about.title,
        "question": about.question,
        "learnt": result.learnt,
        "how": list(result.how),
        "tables": [asdict(table) for table in result.tables],
        "plots": [{"kind": type(plot).__name__.lower(), **asdict(plot)} for plot in result.plots],
        "data": dict(result.data),
        "wall_s": result.wall_s,
        "processor_s": result.processor_s,
        "elsewhere_ratio": result.elsewhere_ratio,
    }
