"""`ullage audit MODEL`: judge a model and its deployment before launch.

Holds flags, the two forms of output and the exit code; the rules are `ullage.audit`'s.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ullage.anatomy import Model, load
from ullage.audit import audit, choose, prepare
from ullage.audit.subject import Subject
from ullage.cli.deep import add_deep_arguments, deep_scan
from ullage.cli.flags import (
    add_deployment_arguments,
    add_model_argument,
    deployment_from,
    gpus_from,
    sizes_given,
)
from ullage.deep.readings import deep_document
from ullage.findings.finding import Finding, Severity, worst
from ullage.findings.json import counts_document, finding_document

SCHEMA = "ullage.audit/1"
FAIL_ON = (*(severity.name for severity in sorted(Severity, reverse=True)), "never")
STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan", "dim": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage audit`."""
    add_model_argument(parser)
    parser.add_argument("--output", choices=("table", "json"), default="table")
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
    add_deep_arguments(parser)
    add_deployment_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Audit, print, and return 1 when something at or above --fail-on fired, else 0."""
    rules = choose(_ids(args.select), _ids(args.ignore))
    deployment, gpus = deployment_from(args), gpus_from(args)
    model = load(args.model)
    deep = deep_scan(model, args)
    subject, choice = prepare(
        model, deployment, gpus, choose_sizes=not sizes_given(args), deep=deep
    )
    findings = audit(subject, rules)
    if args.output == "json":
        json.dump(document(args.model, subject, findings, choice), sys.stdout, allow_nan=False)
        print()
    else:
        _print_table(model, findings, choice, verbose=args.verbose)
    gravest = worst(findings)
    if args.fail_on == "never" or gravest is None:
        return 0
    return int(gravest >= Severity[args.fail_on])


def document(
    name: str, subject: Subject, findings: Sequence[Finding], choice: str = ""
) -> dict[str, object]:
    """The JSON document of one audit, schema `ullage.audit/1`.

    `choice` says how parallel sizes were chosen that the user did not give.
    """
    anatomy = subject.model.anatomy
    deployment, parallel = subject.deployment, subject.deployment.parallel
    return {
        "schema": SCHEMA,
        "model": name,
        "deployment": {
            "engine": deployment.engine,
            "engine_version": deployment.engine_version,
            "platform": deployment.platform,
            "gpu": None if subject.gpus is None else subject.gpus.hardware.name,
            "gpus": None if subject.gpus is None else subject.gpus.count,
            "tensor_parallel_size": parallel.tensor,
            "pipeline_parallel_size": parallel.pipeline,
            "data_parallel_size": parallel.data,
            "enable_expert_parallel": parallel.expert,
        },
        "decisions": [choice] if choice else [],
        "findings": [finding_document(finding) for finding in findings],
        "counts": counts_document(findings),
        "unknowns": [
            {"field": unknown.field, "found": unknown.found, "widens": list(unknown.widens)}
            for unknown in anatomy.spec.unknowns
        ],
        "unread": list(anatomy.unread),
        **({} if subject.deep is None else {"deep": deep_document(subject.deep)}),
    }


def _ids(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.replace(" ", ",").split(",") if part)


def _print_table(model: Model, findings: Sequence[Finding], choice: str, *, verbose: bool) -> None:
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
