"""`ullage checkup MODEL`: audit, size, run and measure a model; write report.json and report.html.

Holds flags, progress on stderr, the short table on stdout and the exit code. 0: done. 1: a finding
at or above --fail-on fired. 2: bad input. 3: the engine could not be reached or started, so that
the report, written all the same, has no run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ullage.cli.flags import DTYPES, add_model_argument, positive_integer
from ullage.costs.deployment import Deployment
from ullage.errors import BadUsage

FAIL_ON = ("error", "warning", "info", "never")
THIS_MACHINE = "this-machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage checkup`."""
    add_model_argument(parser)
    parser.add_argument(
        "--engine",
        metavar="URL",
        help="measure the OpenAI-compatible server there (default: start the embedded engine)",
    )
    parser.add_argument("--api-key", help="for --engine, when it asks for one")
    parser.add_argument("--save", metavar="DIR", default="checkup", help="default: checkup")
    parser.add_argument(
        "--gpu",
        metavar="NAME[:N]",
        help=f"what the model will run on, or {THIS_MACHINE} when --engine runs here",
    )
    parser.add_argument(
        "--requests", type=positive_integer, default=32, metavar="N", help="default: 32"
    )
    parser.add_argument(
        "--duration",
        type=_seconds,
        default=45.0,
        metavar="SECONDS",
        help="of the trace; default: 45",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="what the server at --engine computes in (auto: the model's own; embedded: float32)",
    )
    parser.add_argument("--max-model-len", type=positive_integer, metavar="TOKENS")
    parser.add_argument("--max-num-seqs", type=positive_integer, metavar="N")
    parser.add_argument(
        "--kv-cache-memory-bytes", "--kv-memory", type=positive_integer, metavar="BYTES"
    )
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument(
        "--fail-on",
        choices=FAIL_ON,
        default="error",
        help="exit 1 when a finding this grave fired (default: error)",
    )


def run(args: argparse.Namespace) -> int:
    """Do the whole checkup. Raises BadInput for a model or flags that are wrong."""
    try:
        from ullage.checkup.document import build_document
        from ullage.checkup.gather import gather
        from ullage.checkup.save import check_place, write_report
    except ModuleNotFoundError as error:
        raise BadUsage(
            f"the Python package {error.name} is not installed",
            expected="pip install 'ullage[engine]'",
        ) from error
    options = _options(args)
    check_place(Path(args.save))
    progress = Progress()
    try:
        evidence = gather(options, progress)
        progress("writing the report")
        document = build_document(evidence)
        paths = write_report(document, Path(args.save))
    finally:
        progress.end()
    if args.output == "json":
        print(json.dumps(document, allow_nan=False))
    else:
        print_summary(document, paths)
    return exit_code(document, args.fail_on)


def exit_code(document: dict[str, Any], fail_on: str) -> int:
    """3 without a run, else 1 when a finding at or above `fail_on` fired, else 0."""
    if document["run"] is None:
        return 3
    if fail_on == "never":
        return 0
    grave = FAIL_ON[: FAIL_ON.index(fail_on) + 1]
    return int(any(document["audit"]["counts"][severity] for severity in grave))


def print_summary(document: dict[str, Any], paths: tuple[Path, Path]) -> None:
    """The verdict and the figures to remember, as text."""
    import textwrap

    from ullage.pages.words import figure_text

    print(textwrap.fill(document["verdict"]["paragraph"], 96))
    print()
    rows = document["highlights"]
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        value = figure_text(row["figure"])
        print(f"  {row['name']:<{width}}  {value:>16}  {row['figure']['source']}")
    print()
    for path in paths:
        print(f"wrote {path}")


class Progress:
    """What is going on, on stderr: one line rewritten on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._phase = ""

    def __call__(self, text: str) -> None:
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            return
        # Counts within a phase would fill a log; its beginning is enough.
        phase = text.partition(":")[0]
        if phase != self._phase:
            self._phase = phase
            print(phase, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _options(args: argparse.Namespace) -> Any:
    from ullage.checkup.gather import Options
    from ullage.costs.hardware import parse_gpus

    here = args.gpu == THIS_MACHINE
    if args.engine is None and (here or args.dtype not in ("auto", "float", "float32")):
        flag, found = ("--gpu", args.gpu) if here else ("--dtype", args.dtype)
        raise BadUsage(
            f"{found} says something of a server",
            field=flag,
            expected="--engine URL with it; the embedded engine runs here, in float32",
        )
    gpus = None if args.gpu is None or here else parse_gpus(args.gpu)
    return Options(
        model=args.model,
        deployment=Deployment(
            dtype=None if args.dtype == "auto" else args.dtype,
            max_model_len=args.max_model_len,
        ),
        gpus=gpus,
        engine_url=None if args.engine is None else server_url(args.engine, "--engine"),
        api_key=args.api_key,
        num_requests=args.requests,
        duration_s=args.duration,
        max_model_len=args.max_model_len,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        max_num_seqs=args.max_num_seqs,
        server_is_here=here,
    )


def server_url(text: str, flag: str) -> str:
    """The server's base: what stands before /v1, http assumed. Raises BadUsage naming `flag`."""
    from urllib.parse import urlsplit

    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port above 65535, a broken IPv6 address
        named = None
    if not named or any(c.isspace() or not c.isprintable() for c in url):
        raise BadUsage(repr(text[:80]), field=flag, expected="an http or https URL")
    return url.rstrip("/").removesuffix("/v1")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1.0 <= value <= 3600.0:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}; expected 1 to 3600 seconds")
    return value
