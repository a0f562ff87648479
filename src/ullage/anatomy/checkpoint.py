"""Every tensor of a checkpoint as its headers tell it: `CheckpointIndex`.

Holds data only; reading headers is `safetensors.py` and `gguf.py`, comparing with a spec `compare.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor. `start` and `end` are absolute byte offsets in `file`.

    `dtype` is the header's word: BF16, F8_E4M3, U8, … for safetensors; Q4_1, F32, … for GGUF.
    GGUF shapes are turned to row-major [out, in] order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @property
    def num_elements(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """All tensors of one checkpoint, in file order; `metadata` is the header's own key-values."""

    format: str
    tensors: tuple[TensorEntry, ...]
    files: tuple[str, ...]
    metadata: tuple[tuple[str, str], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data, headers and padding not counted."""
        return sum(t.num_bytes for t in self.tensors)
