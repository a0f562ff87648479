"""`ullage size MODEL`: the memory ledger of one rank, what fits in it and what does not.

Holds flags and the two forms of output; figures come from `planning.sizing`.
"""

from __future__ import annotations

import argparse
import json
import sys

from ullage.anatomy import load
from ullage.cli.flags import (
    add_deployment_arguments,
    add_model_argument,
    deployment_from,
    gpus_from,
    located,
    positive_integer,
    sizes_given,
)
from ullage.planning.sizing import size_document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage size`."""
    add_model_argument(parser)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    add_deployment_arguments(parser)
    workload = parser.add_argument_group("workload")
    workload.add_argument(
        "--context",
        type=positive_integer,
        metavar="TOKENS",
        help="tokens of one request, prompt and answer together",
    )
    workload.add_argument(
        "--concurrency", type=positive_integer, metavar="N", help="requests at the same time"
    )


def run(args: argparse.Namespace) -> int:
    """Size and print. Not fitting is an answer: returns 0."""
    gpus = gpus_from(args)
    document = size_document(
        load(located(args.model)[0]),
        deployment_from(args),
        gpus,
        name=args.model,
        choose_sizes=not sizes_given(args),
        context=args.context,
        concurrency=args.concurrency,
    )
    if args.output == "json":
        json.dump(document, sys.stdout, allow_nan=False)
        print()
    else:
        import shutil

        from ullage.cli.size_table import table_lines  # only a reader of tables pays for it

        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print("\n".join(table_lines(document, width)))
    return 0
