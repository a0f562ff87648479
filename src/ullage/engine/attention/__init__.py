"""Attention over paged KV: the protocol, the paths, and the table that one is chosen from.

`protocol` says what a path is; `reference` is the plain formula, `gathered` copies blocks together
and calls SDPA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ullage.engine.attention.gathered import GatheredAttention
from ullage.engine.attention.protocol import AttentionPath, AttentionStep
from ullage.engine.attention.reference import ReferenceAttention
from ullage.engine.kv import KVCache

ATTENTION_PATHS: Mapping[str, Callable[[KVCache], AttentionPath]] = {
    "gathered": GatheredAttention,
    "reference": ReferenceAttention,
}

__all__ = [
    "ATTENTION_PATHS",
    "AttentionPath",
    "AttentionStep",
    "GatheredAttention",
    "ReferenceAttention",
]
