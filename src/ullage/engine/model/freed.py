"""Giving freed memory back to the system: `give_back_freed`.

Holds one call to the C library. Loading needs it: the float32 matrices that int8 ones are made of
are freed into the allocator's heap, where they would stay beside the weights for good.
"""

from __future__ import annotations

import ctypes


def give_back_freed() -> None:
    """Hand free pages of the heap to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
