"""`ullage probe attention MODEL`: how each head attends to one prompt.

Holds flags; measuring is `ullage.probes`.
"""

from __future__ import annotations

import argparse

from ullage.errors import BadUsage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage probe attention`."""
    parser.add_argument("model", metavar="MODEL", help="a directory, safetensors or GGUF file")


def run(args: argparse.Namespace) -> int:
    raise BadUsage("not there yet", file=args.model)
