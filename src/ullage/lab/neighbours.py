"""How much of the machine's time other processes took meanwhile: who else disturbed the figures.

Holds that one measurement. Linux only (/proc/stat); elsewhere it is not known.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds since some fixed moment: the wall's, those that the cores were busy with anything
    (all cores summed), and those of this process and the children that it has waited for."""

    wall_s: float
    busy_s: float
    own_s: float


def read_clock() -> Clock | None:
    """The clocks now; None where the system does not tell (proc(5): user, nice, system, idle,
    iowait, irq, softirq, steal, in ticks)."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
        user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
    except (OSError, ValueError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    busy = (user + nice + system + irq + softirq + steal) / ticks
    own = os.times()
    used = own.user + own.system + own.children_user + own.children_system
    return Clock(time.monotonic(), busy, used)


def elsewhere_ratio(begin: Clock | None, end: Clock | None, num_cores: int) -> float | None:
    """The share of all cores' time that went to others between two clocks, 0 to 1."""
    if begin is None or end is None or end.wall_s <= begin.wall_s:
        return None
    others = (end.busy_s - begin.busy_s) - (end.own_s - begin.own_s)
    return min(1.0, max(0.0, others / (num_cores * (end.wall_s - begin.wall_s))))
