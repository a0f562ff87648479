"""`ullage watch rules` and `ullage watch dashboard`: alerts and dashboards as code.

Holds flags and the writing of one file, whole or not at all. What is written is `watch.code`'s.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING

from ullage.errors import BadUsage
from ullage.findings.written import write_whole

if TYPE_CHECKING:
    from ullage.telemetry.dialects.source import Dialect
    from ullage.watch.code.expressions import Scope

ENGINES = ("vllm", "sglang", "trtllm", "triton", "tgi", "lmdeploy", "llamacpp", "ullage")
"""Dialects by name; a test holds them to `telemetry.dialects.table`."""
EXPORTER = "exporter"
GPUS = "dcgm"
PODS = "kube-state-metrics"
LABEL = re.compile("[A-Za-z_][A-Za-z0-9_]*")
LEAST_SCRAPE_S, MOST_SCRAPE_S = 0.1, 3600.0
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
BY = "cluster,namespace,job,pod,instance"
FLAGS = ("engine", "selector", "by", "scrape_interval", "out")
"""What these flags are called among the parsed; they mean nothing to `ullage watch URL`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage watch rules` and `ullage watch dashboard`."""
    code = parser.add_argument_group("for the words rules and dashboard")
    code.add_argument(
        "--engine",
        choices=(*ENGINES, EXPORTER, GPUS, PODS),
        help=f"whose metrics (default: vllm); {EXPORTER}: what `ullage watch --exporter` exports; "
        f"{GPUS}: GPUs, by NVIDIA's DCGM exporter; {PODS}: pods, rules only",
    )
    code.add_argument(
        "--selector", metavar="MATCHERS", help='only series that match, for example job="vllm"'
    )
    code.add_argument(
        "--by", type=_labels, metavar="LABELS", help=f"what tells replicas apart (default: {BY})"
    )
    code.add_argument(
        "--scrape-interval",
        type=_scrape_interval,
        metavar="DURATION",
        help="how often Prometheus scrapes the engines; rules count in scrapes (default: 15s)",
    )
    code.add_argument("--out", metavar="FILE", help="default: standard output")


def run(args: argparse.Namespace) -> int:
    """Write rules or a dashboard, by the one word in `args.urls`."""
    word = args.urls[0]
    if len(args.urls) != 1:
        raise BadUsage(repr(" ".join(args.urls)[:80]), expected=f"nothing after {word}")
    if word == "dashboard" and args.scrape_interval is not None:
        raise BadUsage("Grafana knows it by itself", field="--scrape-interval",
                       expected="it with rules")  # fmt: skip
    text = _rules(args) if word == "rules" else _dashboard(args)
    if args.out is None:
        sys.stdout.write(text)
    else:
        write_whole(args.out, text, field="--out")
        print(f"wrote {args.out}", file=sys.stderr)
    return 0


def require_none(args: argparse.Namespace) -> None:
    """Raise BadUsage where a flag of these words was given without them."""
    for flag in FLAGS:
        if getattr(args, flag) is not None:
            raise BadUsage(
                "there is nothing to write", field=f"--{flag.replace('_', '-')}",
                expected="it after `ullage watch rules` or `ullage watch dashboard`",
            )  # fmt: skip


def _rules(args: argparse.Namespace) -> str:
    from ullage.watch.code.records import Spans
    from ullage.watch.code.ruleset import rule_file, ruleset_of

    scope = _scope(args)
    spans = Spans() if args.scrape_interval is None else Spans(args.scrape_interval)
    if args.engine == EXPORTER:
        from ullage.watch.code.exporter_code import exporter_rule_file

        return exporter_rule_file(scope.matchers, spans)
    if args.engine == GPUS:
        from ullage.watch.code.gpus import gpu_rule_file

        return gpu_rule_file(scope.matchers, spans)
    if args.engine == PODS:
        from ullage.watch.code.pods import pod_rule_file

        if not scope.matchers:
            raise BadUsage("it tells of every pod of the cluster", field="--selector",
                           expected="which serve models, for example "
                           'namespace="llm",pod=~"vllm-.*"')  # fmt: skip
        return pod_rule_file(scope.matchers, spans)
    return rule_file(ruleset_of(_dialect(args), scope, spans))


def _dashboard(args: argparse.Namespace) -> str:
    from ullage.watch.code.dashboard import dashboard_json
    from ullage.watch.code.panels import board_of

    scope = _scope(args)
    if args.engine == PODS:
        raise BadUsage("there is no dashboard of pods", field="--engine", expected="another")
    if args.engine == EXPORTER:
        from ullage.watch.code.exporter_code import exporter_board

        return dashboard_json(exporter_board(scope.matchers))
    if args.engine == GPUS:
        from ullage.watch.code.gpu_board import gpu_board

        return dashboard_json(gpu_board(scope.matchers))
    return dashboard_json(board_of(_dialect(args), scope))


def _dialect(args: argparse.Namespace) -> Dialect:
    from ullage.telemetry.dialects.table import DIALECTS

    return next(d for d in DIALECTS if d.engine == (args.engine or ENGINES[0]))


def _scope(args: argparse.Namespace) -> Scope:
    from ullage.telemetry.promql_text import selector_of
    from ullage.watch.code.expressions import Scope

    apart = {
        EXPORTER: "replicas are told apart by url",
        GPUS: "GPUs are told apart by host and UUID",
        PODS: "pods are told apart by namespace and name",
    }
    if args.engine in apart and args.by is not None:
        raise BadUsage(apart[args.engine], field="--by",
                       expected=f"another --engine than {args.engine}")  # fmt: skip
    return Scope(selector_of(args.selector or "", "--selector"), args.by or _labels(BY))


def _labels(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(LABEL.fullmatch(name) for name in names):
        raise argparse.ArgumentTypeError(f"{text[:80]!r}; expected label names with commas")
    if "instance" not in names and "pod" not in names:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}; expected instance or pod among them")
    return names


def _scrape_interval(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|)", text.strip())
    value = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not LEAST_SCRAPE_S <= value <= MOST_SCRAPE_S:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r}; expected a duration such as 15s, from 100ms to 1h"
        )
    return value
