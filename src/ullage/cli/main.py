"""Entry point: picks the verb, shows errors once, turns them into exit codes.

Only the chosen verb's module is imported, so that `ullage size` never pays for `ullage serve`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from ullage import __version__
from ullage.errors import BadUsage, UllageError

VERBS = {
    "audit": "judge a model and its deployment before launch",
    "size": "the memory ledger of one rank: what fits, how many tokens, how many requests",
    "checkup": "audit, size, run and measure a model; write report.json and report.html",
    "serve": "serve a model on the embedded engine, OpenAI-compatible",
    "explain": "what a rule says, why it matters and how to fix what it found",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns 0 fine, 1 a finding at or above --fail-on, 2 bad input, 3 unreachable.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = next((a for a in arguments if not a.startswith("-")), None)
    parser = _top_parser(verb)
    try:
        args = parser.parse_args(arguments)
        if args.verb is None:
            parser.print_help(sys.stderr)
            return 2
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except UllageError as error:
        name = f"ullage {verb}" if verb in VERBS else "ullage"
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader (head, less) went away; that is its right. Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """argparse that raises one sentence, as every other bad input does, and guesses no flag."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise BadUsage(f"{message} (see {self.prog} --help)")


def _top_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser; only the chosen verb's flags are built, the others are listed by name."""
    parser = _Parser(prog="ullage", description="Audit, size, serve and watch Transformers.")
    parser.add_argument("--version", action="version", version=f"ullage {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, summary in VERBS.items():
        if chosen in VERBS and name != chosen:
            continue
        sentence = f"{summary[0].upper()}{summary[1:]}."
        verb_parser = verbs.add_parser(name, help=summary, description=sentence)
        if name == chosen:
            module = import_module(f"ullage.cli.{name}")
            module.add_arguments(verb_parser)
            verb_parser.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
