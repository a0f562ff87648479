"""From what was held at each step to stretches of a raster.

Holds that one conversion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ullage.lab.result import Stretch


def stretches(frames: Sequence[Mapping[int, int]]) -> tuple[Stretch, ...]:
    """`frames[t]` maps row → owner during step t; one stretch per unbroken hold, by row and start.

    A row absent from a frame belongs to nobody then.
    """
    open_since: dict[int, tuple[int, int]] = {}
    found: list[Stretch] = []
    for step, frame in enumerate((*frames, {})):
        for row, (owner, since) in list(open_since.items()):
            if frame.get(row) != owner:
                found.append(Stretch(row, float(since), float(step), owner))
                del open_since[row]
        for row, owner in frame.items():
            open_since.setdefault(row, (owner, step))
    return tuple(sorted(found, key=lambda stretch: (stretch.row, stretch.start)))
