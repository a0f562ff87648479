"""Entry point: picks the verb, shows errors once, turns them into exit codes.

Only the chosen verb's module is imported, so that `ullage size` never pays for `ullage serve`.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

from ullage import __version__
from ullage.errors import BadUsage, UllageError

VERBS = {
    "audit": "judge a model and its deployment before launch",
    "size": "the memory ledger of one rank: what fits, how many tokens, how many requests",
    "checkup": "audit, size, run and measure a model; write report.json and report.html",
    "serve": "serve a model on the embedded engine, OpenAI-compatible",
    "watch": "live engines: how full their KV cache is, what is wrong with them, and why",
    "probe": "look inside a model that runs: attention, positions, fingerprints",
    "lab": "measure what a serving mechanism buys: one experiment each, or all on one page",
    "adapter": "check, repair and compare LoRA adapters against what an engine serves",
    "explain": "what a rule says, why it matters and how to fix what it found",
}
ONE_ANSWER = ("audit", "size", "explain")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns 0 fine, 1 a finding at or above --fail-on, 2 bad input, 3 unreachable.
    """
    _open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = next((a for a in arguments if not a.startswith("-")), None)
    name = f"ullage {verb}" if verb in VERBS else "ullage"
    parser = _top_parser(verb)
    try:
        args, rest = parser.parse_known_args(arguments)
        if rest:
            # argparse would name the top parser here, whose help does not list the verb's flags.
            raise BadUsage(f"unrecognized arguments: {' '.join(rest)[:80]} (see {name} --help)")
        if args.verb is None:
            parser.print_help(sys.stderr)
            return 2
        with _collector_paused(verb):
            code: int = args.run(args)
        sys.stdout.flush()
        return code
    except UllageError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader (head, less) went away; that is its right.
        _drop_output()
        return 0
    except OSError as error:
        # What no room foresaw, such as a full disk under stdout: still a sentence, and never 1,
        # which would say that a finding fired.
        place = f"{error.filename}: " if error.filename else ""
        print(f"{name}: {place}{error.strerror or error}", file=sys.stderr)
        _drop_output()
        return 2
    except KeyboardInterrupt:
        return 130


@contextmanager
def _collector_paused(verb: str | None) -> Iterator[None]:
    """No search for cycles while a verb that only reads and answers is at work.

    What it builds has next to none, and a checkpoint of 60,000 tensors is searched for a tenth of
    the whole time.
    """
    pauses = verb in ONE_ANSWER and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()


def _open_streams() -> None:
    """Let a closed stdout or stderr, or one that cannot spell `·`, cost the text and nothing else.

    Python sets a stream that the parent closed to None, and raises for characters that the
    terminal's encoding lacks; JSON is ASCII and loses nothing.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _drop_output() -> None:
    """Send what is still buffered nowhere: Python would fail on it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
