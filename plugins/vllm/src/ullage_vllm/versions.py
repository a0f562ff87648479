"""Whether the plugin is asked for, and which vLLM it knows. Imports nothing of vLLM.

What it finds inside a version that it knows is checked again where it is used (`engine`).
"""

from __future__ import annotations

import os
import re

SWITCH = "ULLAGE_VLLM"
"""Nothing is added to vLLM unless this variable is 1."""
PROBE_SWITCH = "ULLAGE_VLLM_PROBE"
"""Attention is looked at only where this is 1, or the number of decode steps per one looked at."""
PROBE_EVERY = 16
KNOWN = ((0, 30), (0, 31), (0, 32), (0, 33))
"""vLLM's minor versions whose insides were read."""


def asked_for() -> bool:
    return os.environ.get(SWITCH) == "1"


def probe_every() -> int:
    """One in so many decode steps is looked at; 0: the probe is off. Raises ValueError."""
    told = os.environ.get(PROBE_SWITCH, "").strip()
    if told in ("", "0"):
        return 0
    if not (told.isascii() and told.isdecimal()):
        raise ValueError(f"{PROBE_SWITCH}: found {told[:40]!r}, expected 1 or a number of steps")
    return PROBE_EVERY if told == "1" else int(told)


def minor(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version, also of `0.33.0rc1` and `0.32.1.dev3+cpu`; else None."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\D|$)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def objection(version: str) -> str:
    """Why the plugin steps aside for this version of vLLM; empty where it does not."""
    if minor(version) in KNOWN:
        return ""
    first, last = (".".join(map(str, known)) for known in (KNOWN[0], KNOWN[-1]))
    return f"vLLM {version} is not one that it knows ({first} to {last})"
