"""`--deep`: the reading of every tensor, with a bar on a terminal, for the verbs that offer it.

Holds the flags, the check that numpy is there and the bar; the reading is `ullage.deep`'s.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ullage.cli.flags import positive_integer
from ullage.errors import BadUsage

if TYPE_CHECKING:
    from ullage.anatomy import Model
    from ullage.deep.readings import DeepScan

BAR_WIDTH = 30


def add_deep_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags --deep and --deep-jobs."""
    parser.add_argument(
        "--deep",
        action="store_true",
        help="read every tensor too: NaN, Inf, zeros, copies, ranges, scales, checksums",
    )
    parser.add_argument(
        "--deep-jobs",
        type=positive_integer,
        metavar="N",
        help="threads that read (default: one per core, at most 4)",
    )


def deep_scan(
    model: Model, args: argparse.Namespace, *, headers_only: bool = False
) -> DeepScan | None:
    """What `--deep` reads of `model`; None without the flag.

    `headers_only`: behind its headers the model's files are empty.

    Raises BadUsage when there is nothing to read, or numpy is not installed.
    """
    if not args.deep:
        if args.deep_jobs is not None:
            raise BadUsage("given without --deep", file="--deep-jobs")
        return None
    if headers_only:
        raise BadUsage(
            "of a hub's model only the headers are fetched, so there are no tensors to read",
            file="--deep",
            expected="a downloaded model",
        )
    index = model.checkpoint
    if index is None or not index.has_headers:
        raise BadUsage(
            "there are no tensors to read",
            file="--deep",
            expected="safetensors or GGUF files, locally",
        )
    try:
        import numpy  # noqa: F401
    except ImportError:
        raise BadUsage(
            "needs numpy, which is not installed",
            file="--deep",
            expected="pip install ullage[deep]",
        ) from None
    from ullage.deep.scan import scan_checkpoint

    if not sys.stderr.isatty():
        return scan_checkpoint(index, jobs=args.deep_jobs)
    try:
        return scan_checkpoint(index, jobs=args.deep_jobs, progress=_draw)
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _draw(done: int, total: int) -> None:
    share = done / total if total else 1.0
    filled = round(BAR_WIDTH * share)
    print(
        f"\rreading tensors [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {share:4.0%} "
        f"of {total / 1e9:.2f} GB",
        end="",
        file=sys.stderr,
        flush=True,
    )
