"""A batch as the paged kernels see it: blocks of neighbouring rows, tables, parts of contexts.

Pure translation to arrays; what is done with them is `kernels.attention_batch`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ullage.engine.batch import Span
from ullage.engine.kernels.attention_batch import MOST_BLOCK_ROWS
from ullage.engine.paging.layout import FREED

# Pieces of work that each thread should find, so that the last to finish is soon done.
_PIECES_PER_THREAD = 4
# Fewer positions than these are not worth a part of their own.
_LEAST_PART = 128


def row_blocks(spans: tuple[Span, ...]) -> npt.NDArray[np.int64]:
    """Rows in blocks of neighbours: first row, how many, its position, its sequence."""
    blocks = []
    for sequence, span in enumerate(spans):
        for skip in range(0, span.count, MOST_BLOCK_ROWS):
            count = min(MOST_BLOCK_ROWS, span.count - skip)
            blocks.append((span.first + skip, count, span.start + skip, sequence))
    # The longest first, so that none is left to one thread at the end.
    blocks.sort(key=lambda block: -block[1] * (block[2] + block[1]))
    return np.array(blocks, np.int64).reshape(-1, 4)


def block_tables(spans: tuple[Span, ...], num_groups: int) -> npt.NDArray[np.int32]:
    """int32 [groups, sequences, blocks]; FREED where a table ends before the longest."""
    widest = max((len(table) for span in spans for table in span.tables), default=0)
    tables = np.full((num_groups, len(spans), widest), FREED, np.int32)
    for sequence, span in enumerate(spans):
        for group, table in enumerate(span.tables):
            tables[group, sequence, : len(table)] = table
    return tables


def num_parts(pieces: int, seen: int, threads: int) -> int:
    """Into how many parts to cut contexts of up to `seen` positions so that all have work."""
    if threads == 1 or pieces >= _PIECES_PER_THREAD * threads:
        return 1
    wanted = -(-_PIECES_PER_THREAD * threads // pieces)
    return max(1, min(wanted, seen // _LEAST_PART))
