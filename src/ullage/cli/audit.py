"""`ullage audit MODEL`: judge a model and its deployment before launch.

Holds flags, the table on a terminal and the exit code; the rules are `ullage.audit`'s, the other
outputs `audit_outputs.py`'s.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from ullage.anatomy import Model, load
from ullage.audit import audit, choose, prepare
from ullage.cli.audit_outputs import ci_text, document
from ullage.cli.deep import add_deep_arguments, deep_scan
from ullage.cli.deployment_file import add_deployment_file_arguments, chosen_launch, model_path
from ullage.cli.flags import (
    add_deployment_arguments,
    add_model_argument,
    deployment_from,
    gpus_from,
    located,
    sizes_given,
)
from ullage.findings.baseline import Accepted, accept, read_baseline, write_baseline
from ullage.findings.finding import Finding, Severity, worst

OUTPUTS = ("table", "json", "sarif", "junit", "github")
FAIL_ON = (*(severity.name for severity in sorted(Severity, reverse=True)), "never")
STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan", "dim": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage audit`."""
    add_model_argument(parser, optional=True)
    parser.add_argument("--output", choices=OUTPUTS, default="table")
    parser.add_argument(
        "--fail-on",
        choices=FAIL_ON,
        default="error",
        help="exit 1 when a finding this grave fired (default: error)",
    )
    parser.add_argument("--select", metavar="ID,…", default="", help="only these rules")
    parser.add_argument("--ignore", metavar="ID,…", default="", help="not these rules")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="list the clear rules with their evidence"
    )
    parser.add_argument(
        "--baseline", metavar="FILE", help="accept the findings that it lists: shown, not counted"
    )
    parser.add_argument(
        "--write-baseline", metavar="FILE", help="write what fires now as such a file"
    )
    add_deployment_file_arguments(parser)
    add_deep_arguments(parser)
    add_deployment_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Audit, print, and return 1 when something at or above --fail-on fired, else 0."""
    rules = choose(_ids(args.select), _ids(args.ignore))
    deployment, gpus = deployment_from(args), gpus_from(args)
    entries = () if args.baseline is None else read_baseline(args.baseline)
    chosen = chosen_launch(args, deployment)
    name = model_path(args, chosen)
    path, headers_only = located(name)
    model = load(path)
    deep = deep_scan(model, args, headers_only=headers_only)
    subject, choice = prepare(
        model,
        deployment if chosen is None else chosen.deployment,
        gpus,
        choose_sizes=chosen is None and not sizes_given(args),
        deep=deep,
        launch=None if chosen is None else chosen.launch,
    )
    findings, stale = accept(audit(subject, rules), entries)
    if args.write_baseline is not None:
        findings = _write_baseline(args.write_baseline, findings)
    compared = args.baseline is not None or args.write_baseline is not None
    if args.output == "json":
        made = document(name, subject, findings, choice, chosen, stale)
        json.dump(made, sys.stdout, allow_nan=False)
        print()
    elif args.output == "table":
        _print_table(subject.model, findings, choice, stale, verbose=args.verbose)
    else:
        text = ci_text(args.output, name, subject, findings, chosen, compared=compared)
        sys.stdout.write(text)
        for line in _stale_notes(stale):
            print(line, file=sys.stderr)
    gravest = worst(findings)
    if args.fail_on == "never" or gravest is None:
        return 0
    return int(gravest >= Severity[args.fail_on])


def _write_baseline(path: str, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Write what fired, say so, and return the findings with all of it accepted."""
    number = write_baseline(path, findings)
    print(f"{path}: {number} accepted finding{'s' if number != 1 else ''}", file=sys.stderr)
    return tuple(replace(f, accepted=True) if f.state == "fired" else f for f in findings)


def _stale_notes(stale: Sequence[Accepted]) -> list[str]:
    return [f"Baseline entry that fires no more: {e.rule} {e.title}".rstrip() for e in stale]


def _ids(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.replace(" ", ",").split(",") if part)


def _print_table(
    model: Model,
    findings: Sequence[Finding],
    choice: str,
    stale: Sequence[Accepted],
    *,
    verbose: bool,
) -> None:
    import shutil

    from ullage.findings.table import lines  # a JSON document starts faster without it

    on_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if on_terminal else 100
    notes = [
        (f"Not understood: {unknown.field}: {unknown.found}", "dim")
        for unknown in model.anatomy.spec.unknowns
    ]
    if model.anatomy.unread:
        notes.append((f"Keys that nothing read: {', '.join(model.anatomy.unread)}", "dim"))
    if choice:
        notes.append((f"Chosen: {choice}", "dim"))
    notes += [(line, "dim") for line in _stale_notes(stale)]
    if notes:
        notes.append(("", "plain"))
    rows = [*notes, *lines(findings, width=min(width, 120), verbose=verbose)]
    if not on_terminal:
        sys.stdout.write("".join(f"{text}\n" for text, _ in rows))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for text, role in rows:
        console.print(Text(text, style=STYLES.get(role, "")), soft_wrap=True)
