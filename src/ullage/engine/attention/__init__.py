"""Attention over paged KV: the protocol, three paths, and the table that one is chosen from.

`protocol` says what a path is, `table` which there are and when; `reference` is the plain formula,
`gathered` copies blocks together and calls SDPA, `paged` reads them where they lie.
"""

from __future__ import annotations

from ullage.engine.attention.gathered import GatheredAttention
from ullage.engine.attention.protocol import AttentionPath, AttentionStep
from ullage.engine.attention.reference import ReferenceAttention
from ullage.engine.attention.table import ATTENTION_PATHS, AUTO, PATHS, Path, choose_path

__all__ = [
    "ATTENTION_PATHS",
    "AUTO",
    "PATHS",
    "AttentionPath",
    "AttentionStep",
    "GatheredAttention",
    "Path",
    "ReferenceAttention",
    "choose_path",
]
