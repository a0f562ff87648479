"""What a tensor's name says: whether it is a quantisation scale.

Apart from `readings.py` so that rules which only ask this start without its data classes.
"""

from __future__ import annotations

import re

_SCALE = re.compile(r"(?:^|[._])scales?(?:_inv|_2)?$")


def is_scale(name: str) -> bool:
    """Whether a name is that of a quantisation scale: weight_scale, scales, weight_scale_inv …"""
    return _SCALE.search(name) is not None
