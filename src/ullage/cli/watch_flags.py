"""The flags of `ullage watch`: what each is, which contradict each other, which rules they leave.

Holds no reading of them; those of `watch rules` and `watch dashboard` are `watch_code.py`'s.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ullage.cli import watch_code, watch_gpus
from ullage.errors import BadUsage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ullage.watch.sight import Sight

FAIL_ON = ("error", "warning", "info", "never")
LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.2, 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage watch`."""
    parser.add_argument(
        "urls",
        metavar="URL",
        nargs="*",
        help="engines' servers, as http://HOST:PORT; or the word rules or dashboard, to write "
        "alerts or a dashboard as code",
    )
    _add_where(parser.add_argument_group("what is watched"))
    _add_how(parser.add_argument_group("how"))
    _add_shown(parser.add_argument_group("what comes of it"))
    watch_code.add_arguments(parser)


def _add_where(where: argparse._ArgumentGroup) -> None:
    where.add_argument("--prometheus", metavar="URL", help="read replicas from that Prometheus")
    where.add_argument(
        "--prometheus-selector",
        metavar="MATCHERS",
        help='only those that match, for example {job="vllm"}',
    )
    where.add_argument(
        "--prometheus-header",
        action="append",
        metavar="'NAME: VALUE'",
        help="sent to it with every question, for example 'X-Scope-OrgID: team'",
    )
    where.add_argument(
        "--k8s",
        metavar="NAMESPACE/SELECTOR",
        help="find pods by their labels, for example llm/app=vllm, and join their state",
    )
    where.add_argument("--k8s-context", metavar="NAME", help="that context of the kubeconfig")
    where.add_argument(
        "--k8s-port",
        metavar="PORT",
        help="where engines answer in their pods: a number, or a container port's name (default: "
        "found by trying)",
    )
    watch_gpus.add_argument(where)
    where.add_argument("--model", metavar="MODEL", help="to tell KV bytes where no engine does")
    where.add_argument("--api-key", help="sent as a bearer token to what is asked")


def _add_how(how: argparse._ArgumentGroup) -> None:
    how.add_argument(
        "--interval", type=_interval, default=5.0, metavar="SECONDS", help="default: 5"
    )
    how.add_argument("--once", action="store_true", help="two scrapes, one interval apart")
    how.add_argument("--select", metavar="ID,…", default="", help="only these rules")
    how.add_argument("--ignore", metavar="ID,…", default="", help="not these rules")
    how.add_argument(
        "--fail-on",
        choices=FAIL_ON,
        default="never",
        help="exit 1 when a finding this grave fired in the last round (default: never: to have "
        "watched is no failure, whatever was seen)",
    )


def _add_shown(shown: argparse._ArgumentGroup) -> None:
    shown.add_argument("--output", choices=("table", "json"), default="table")
    shown.add_argument(
        "-v", "--verbose", action="store_true", help="with evidence, and the rules that are clear"
    )
    shown.add_argument("--exporter", metavar="[HOST]:PORT", help="Prometheus metrics at /metrics")
    shown.add_argument("--web", metavar="[HOST]:PORT", help="a live page")
    shown.add_argument(
        "--listen-api-key",
        metavar="KEY",
        help="demanded by --exporter and --web; needed where they leave loopback",
    )
    shown.add_argument("--act", metavar="POLICY.toml", help="act by this policy; see docs/watch.md")
    shown.add_argument("--yes", action="store_true", help="with --act: do it, not only say it")


def require_meant(args: argparse.Namespace) -> None:
    """Raise BadUsage for flags that contradict each other or would do nothing."""
    ways = [bool(args.urls), args.prometheus is not None, args.k8s is not None]
    if sum(ways) != 1:
        raise BadUsage(
            "nothing to watch" if not any(ways) else "more than one way to find replicas",
            expected="URLs, or --prometheus URL, or --k8s NAMESPACE/SELECTOR",
        )
    for flag, value in (("--k8s-context", args.k8s_context), ("--k8s-port", args.k8s_port)):
        if value is not None and args.k8s is None:
            raise BadUsage("there is no cluster", field=flag, expected="--k8s with it")
    if args.prometheus_selector is not None and args.prometheus is None:
        raise BadUsage("it selects from nothing", field="--prometheus-selector",
                       expected="--prometheus with it")  # fmt: skip
    if args.prometheus_header and args.prometheus is None:
        raise BadUsage("nobody to send it to", field="--prometheus-header",
                       expected="--prometheus with it")  # fmt: skip
    if args.yes and args.act is None:
        raise BadUsage("there is nothing to do", field="--yes", expected="--act with it")
    if args.act is not None and args.prometheus is not None:
        raise BadUsage("what Prometheus knows is late, and its names are no addresses",
                       field="--act", expected="URLs")  # fmt: skip
    if args.act is not None and args.k8s is not None:
        raise BadUsage("it acts on addresses, and pods are called by their names",
                       field="--act", expected="URLs")  # fmt: skip
    for name in ("api_key", "listen_api_key"):
        value = getattr(args, name)
        if value is not None and not value.strip():
            raise BadUsage(repr(value), field=f"--{name.replace('_', '-')}", expected="some text")
    if args.once:
        for flag, value in (
            ("--exporter", args.exporter),
            ("--web", args.web),
            ("--act", args.act),
        ):
            if value is not None:
                raise BadUsage("--once is over before it is of use", field=flag,
                               expected="one of the two")  # fmt: skip
    if args.listen_api_key is not None and args.exporter is None and args.web is None:
        raise BadUsage("nothing listens", field="--listen-api-key",
                       expected="--exporter or --web with it")  # fmt: skip


def chosen(args: argparse.Namespace) -> Callable[[Sight], Sight]:
    """What --select and --ignore leave of a Sight. Raises BadUsage for ids that no rule has."""
    from dataclasses import replace

    from ullage.watch.rules.table import RULES

    known = [rule.id for rule in RULES]
    selected = _ids(args.select, known, "--select") or frozenset(known)
    kept = selected - _ids(args.ignore, known, "--ignore")
    if not kept:
        raise BadUsage("it leaves no rule", field="--ignore", expected="fewer than --select names")
    if kept == frozenset(known):
        return lambda sight: sight

    def left(sight: Sight) -> Sight:
        judged = tuple(one for one in sight.judged if one.finding.id in kept)
        incidents = tuple(one for one in sight.incidents if one.finding.id in kept)
        return replace(sight, judged=judged, incidents=incidents)

    return left


def _ids(text: str, known: Collection[str], flag: str) -> frozenset[str]:
    ids = frozenset(part.upper() for part in text.replace(" ", ",").split(",") if part)
    for rule_id in sorted(ids):
        if rule_id not in known:
            raise BadUsage(
                repr(rule_id[:40]), field=flag, expected=f"rules of watch: {', '.join(known)}"
            )
    return ids


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not LEAST_INTERVAL_S <= value <= MOST_INTERVAL_S:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r}; expected {LEAST_INTERVAL_S:g} to {MOST_INTERVAL_S:g} seconds"
        )
    return value
