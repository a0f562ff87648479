"""`ullage lab NAME [MODEL]`: measure one serving mechanism, or all of them on one page.

Holds flags, progress on stderr, the output and the exit code: 0 done, 2 bad input, 3 a server that
could not be reached.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.cli.checkup import Progress, server_url
from ullage.errors import BadUsage
from ullage.lab.registry import EXPERIMENTS

if TYPE_CHECKING:
    from ullage.lab.document import Document
    from ullage.lab.result import NotRun, Result

ALL = "all"
NAMES = ("lab.json", "lab.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage lab`."""
    parser.add_argument(
        "name",
        metavar="NAME",
        choices=(*EXPERIMENTS, ALL),
        help=f"{', '.join(EXPERIMENTS)}; or {ALL} on one page",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a directory, safetensors or GGUF file (default: a small one with random weights)",
    )
    parser.add_argument("--output", choices=("table", "json", "html"), default="table")
    parser.add_argument(
        "--save", metavar="DIR", help=f"write lab.json and lab.html there ({ALL}: default lab)"
    )
    parser.add_argument(
        "--url", help="measure the OpenAI-compatible server there, not the embedded engine"
    )
    parser.add_argument("--api-key", help="for --url, when it asks for one")
    parser.add_argument(
        "--serve-command",
        metavar="TEMPLATE",
        help="a command that starts a server on {port}, with the flag that the experiment varies: "
        "{block_size} or {max_num_batched_tokens}; it is restarted for each value",
    )
    parser.add_argument(
        "--trace",
        metavar="CSV",
        type=Path,
        help="request lengths (ContextTokens, GeneratedTokens) for block-size and batching",
    )
    parser.add_argument("--quick", action="store_true", help="the least that still measures")


def run(args: argparse.Namespace) -> int:
    """Run one experiment or all. Raises BadInput for a model or flags that are wrong."""
    try:
        import ullage.engine  # noqa: F401 - before torch, see there
        from ullage.checkup.save import check_place, write_files
        from ullage.lab.document import as_json
        from ullage.lab.html.page import render
        from ullage.lab.run import Asked, run_lab
        from ullage.lab.text import as_text
    except ModuleNotFoundError as error:
        if (error.name or "ullage").startswith("ullage"):
            raise  # our own mistake, not a missing extra
        raise BadUsage(
            f"the Python package {error.name} is not installed",
            expected="pip install 'ullage[engine]'",
        ) from error
    asked = Asked(
        model=args.model,
        quick=args.quick,
        url=None if args.url is None else server_url(args.url, "--url"),
        api_key=args.api_key,
        serve_command=args.serve_command,
        trace=args.trace,
    )
    save = args.save or ("lab" if args.name == ALL else None)
    if save is not None:
        check_place(Path(save), NAMES)
    progress = Progress()
    try:
        names = tuple(EXPERIMENTS) if args.name == ALL else (args.name,)
        document = run_lab(names, asked, progress)
    finally:
        progress.end()
    exact = json.dumps(as_json(document), indent=1, ensure_ascii=True, allow_nan=False)
    written: tuple[Path, ...] = ()
    if save is not None:
        texts = dict(zip(NAMES, (exact + "\n", render(document)), strict=True))
        written = write_files(Path(save), texts)
    match args.output:
        case "json":
            print(exact)
        case "html":
            print(render(document), end="")
        case _:
            _print_table(document, as_text, written)
    return 0


def _print_table(
    document: Document, as_text: Callable[[Result | NotRun], str], written: tuple[Path, ...]
) -> None:
    print("\n\n".join(as_text(outcome) for outcome in document.outcomes))
    facts = ", ".join(f"{name} {value}" for name, value in document.machine.items())
    print(f"\nmeasured {facts}; {document.subject}; {document.wall_s:.0f} s")
    for path in written:
        print(f"wrote {path}")
