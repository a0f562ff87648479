"""Every tensor of a checkpoint as its headers tell it: `CheckpointIndex`.

Holds the data, and how a checkpoint file is opened (regular files only, errors as one sentence).
Reading headers is `files/` and `gguf/header.py`; comparing with a spec is `compare.py`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ullage.errors import MalformedCheckpoint

# What one checkpoint may hold. The largest published ones have some 200,000 tensors; more than this
# would only cost time and memory, so it is refused with a sentence instead.
MAX_TENSORS = 500_000


class TensorEntry(NamedTuple):
    """One stored tensor. `start` and `end` are absolute byte offsets in `file`.

    `dtype` is the header's word: BF16, F8_E4M3, U8, … for safetensors; Q4_1, F32, … for GGUF.
    GGUF shapes are turned to row-major [out, in] order. A named tuple, since a checkpoint may have
    100,000 and it is made in less than half the time of a frozen dataclass.
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
    """All tensors of one checkpoint, in file order; `metadata` is the header's own key-values.

    `format` is "safetensors" or "gguf". `files` were read, in the order of `tensors`;
    `missing_files` are named by the index file or the split count but are not there.
    `absent_tensors` are (name, file) pairs that an index file promises: the file is missing, or its
    header lacks them. `unlisted_tensors` are stored, but an index file does not name them there.
    `duplicate_tensors` are (name, file) pairs stored a second time (the first one is in `tensors`).
    `unused_files` hold weights too, but belong to another checkpoint of the same directory.
    `declared_bytes` is the index file's own total, None where it gives none.
    """

    format: str
    tensors: tuple[TensorEntry, ...]
    files: tuple[str, ...]
    metadata: tuple[tuple[str, str], ...] = ()
    missing_files: tuple[str, ...] = ()
    absent_tensors: tuple[tuple[str, str], ...] = ()
    unlisted_tensors: tuple[tuple[str, str], ...] = ()
    duplicate_tensors: tuple[tuple[str, str], ...] = ()
    unused_files: tuple[str, ...] = ()
    declared_bytes: int | None = None

    @property
    def has_headers(self) -> bool:
        """Whether any header was read. An index file without a single shard proves no bytes."""
        return bool(self.files)

    @property
    def is_complete(self) -> bool:
        """Whether every file and every tensor that is promised was found."""
        return self.has_headers and not self.missing_files and not self.absent_tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data in the files that were read, headers and padding not counted."""
        return sum(t.end - t.start for t in self.tensors)

    @property
    def num_elements(self) -> int:
        """Stored elements in the files that were read (packed formats count packed elements)."""
        return sum(t.num_elements for t in self.tensors)


@contextmanager
def open_regular(file: Path) -> Iterator[tuple[BinaryIO, int]]:
    """`file` opened for reading, with its size in bytes. Pipes and devices are refused unopened.

    Raises MalformedCheckpoint, also for an OSError while the file is read.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise MalformedCheckpoint("not a regular file", file=file)
        with file.open("rb") as stream:
            yield stream, os.fstat(stream.fileno()).st_size
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise MalformedCheckpoint(f"cannot be read ({reason})", file=file) from error
    except ValueError as error:  # a NUL in the path
        raise MalformedCheckpoint(f"cannot be read ({error})", file=str(file)) from error
