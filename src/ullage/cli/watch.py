"""`ullage watch URL…`: what live engines say, what is wrong with them, and what to do.

Holds flags, signals and the exit code: 0 fine, 1 a finding at or above --fail-on in the last round,
2 bad input, 3 not one endpoint answered. `watch rules` and `watch dashboard` are `watch_code.py`'s.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING

from ullage.cli import watch_code, watch_gpus
from ullage.errors import BadUsage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection
    from contextlib import AsyncExitStack

    from ullage.watch.act.actor import Actor
    from ullage.watch.session import Shown
    from ullage.watch.sight import Sight
    from ullage.watch.watcher import Source

FAIL_ON = ("error", "warning", "info", "never")
LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.2, 3600.0
NUM_ROUNDS_OF_ONCE = 2
WRITTEN = ("rules", "dashboard")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ullage watch`."""
    parser.add_argument(
        "urls",
        metavar="URL",
        nargs="*",
        help="engines' servers, as http://HOST:PORT; or the word rules or dashboard, to write "
        "alerts or a dashboard as code",
    )
    where = parser.add_argument_group("what is watched")
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
    how = parser.add_argument_group("how")
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
    shown = parser.add_argument_group("what comes of it")
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
    watch_code.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Watch until there is an answer (--once) or somebody stops it."""
    if args.urls[:1] and args.urls[0] in WRITTEN:
        return watch_code.run(args)
    for url in args.urls:
        if meant := get_close_matches(url, WRITTEN, 1, 0.8):
            raise BadUsage(
                repr(url), expected=f"the word {meant[0]} and no URL, or http://{url} for a host"
            )
    watch_code.require_none(args)
    _require_meant(args)
    import asyncio

    return asyncio.run(_watch(args))


def _require_meant(args: argparse.Namespace) -> None:
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


async def _watch(args: argparse.Namespace) -> int:
    import asyncio
    from contextlib import AsyncExitStack

    from ullage.watch.session import follow
    from ullage.watch.watcher import Watcher

    chosen = _chosen(args)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        for number in _stopping_signals():
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        source = _source(args, stack)
        shown = await _shown(args, stack, chosen)
        watcher = Watcher(source, args.interval)
        num_rounds = NUM_ROUNDS_OF_ONCE if args.once else None
        last = await follow(watcher, shown, stop, num_rounds=num_rounds)
    if last is None:
        return 0
    if args.once or _on_screen(args):
        # The live screen is gone by now; its last round stays in the terminal's history.
        _write(args, chosen(last))
    return _exit_code(chosen(last), args.fail_on)


def _stopping_signals() -> list[int]:
    """What ends a watch in good order: also a terminal that goes away, unless nohup was asked."""
    import signal

    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def _write(args: argparse.Namespace, sight: Sight, *, apart: bool = False) -> None:
    from ullage.watch.screen import write_json, write_table

    if args.output == "json":
        write_json(sight, sys.stdout)
    else:
        write_table(sight, sys.stdout, verbose=args.verbose)
        if apart:
            print(flush=True)


def _exit_code(sight: Sight, fail_on: str) -> int:
    """3 where not one replica answered, else 1 where a finding as grave as that fired."""
    from ullage.findings.finding import Severity, worst
    from ullage.watch.cells import clean

    if not any(view.now is not None and not view.error for view in sight.views):
        reasons = sorted({f"{view.url}: {view.error}" for view in sight.views})
        more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        why = reasons[0] if reasons else sight.error or "no replica was found"
        print(f"ullage watch: no answer: {clean(why)}{more}", file=sys.stderr)
        return 3
    gravest = worst(judged.finding for judged in sight.judged)
    if fail_on == "never" or gravest is None:
        return 0
    return int(gravest >= Severity[fail_on])


def _source(args: argparse.Namespace, stack: AsyncExitStack) -> Source:
    """What is asked, by the flags. Raises BadInput for what cannot be asked, or sized."""
    if args.k8s is not None:
        source = _kubernetes(args, stack)
    else:
        source = _prometheus(args, stack) if args.prometheus is not None else _direct(args, stack)
    source = watch_gpus.with_gpus(source, args, stack)
    if args.model is None:
        return source
    from ullage.anatomy import load
    from ullage.cli.flags import located
    from ullage.watch.modelled import ModelledSource

    path, _ = located(args.model)
    return ModelledSource(source, load(path).anatomy)


def _direct(args: argparse.Namespace, stack: AsyncExitStack) -> Source:
    from ullage.telemetry.scrape import DirectSource, twice_named

    again = twice_named(args.urls)
    for url, before in again.items():
        print(f"ullage watch: {url} is {before}: watched once", file=sys.stderr)
    urls = [url for url in args.urls if url not in again]
    source = DirectSource(urls, interval_s=args.interval, api_key=args.api_key)
    stack.push_async_callback(source.close)
    return source


def _kubernetes(args: argparse.Namespace, stack: AsyncExitStack) -> Source:
    import os

    from ullage.telemetry.pods import port_of, selection_of

    selection = selection_of(args.k8s)
    port = "" if args.k8s_port is None else port_of(args.k8s_port)
    with _installed():
        from ullage.telemetry.kubernetes import Cluster, config_of
    from ullage.watch.pods import PodSource

    cluster = Cluster(config_of(os.environ, args.k8s_context or ""))
    stack.push_async_callback(cluster.close)
    source = PodSource(
        cluster, selection, interval_s=args.interval, api_key=args.api_key, port=port
    )
    stack.push_async_callback(source.close)
    return source


def _prometheus(args: argparse.Namespace, stack: AsyncExitStack) -> Source:
    import os

    with _installed():
        from ullage.telemetry.prometheus_api import access_from
        from ullage.telemetry.promql import PrometheusSource

    say = _aside(args, stack)
    source = PrometheusSource(
        args.prometheus,
        selector=args.prometheus_selector or "",
        access=access_from(os.environ, args.prometheus_header or (), args.api_key or ""),
        on_warning=lambda text: say(f"ullage watch: Prometheus warns: {text}"),
    )
    stack.push_async_callback(source.close)
    return source


async def _shown(
    args: argparse.Namespace, stack: AsyncExitStack, chosen: Callable[[Sight], Sight]
) -> list[Shown]:
    """Everybody who is given each round, in order. Who acts sees it whole, whatever is shown."""
    actor = None if args.act is None else _actor(args, stack)
    found: list[Shown] = []
    if args.exporter is not None:
        found.append(await _exporter(args, stack))
    if args.web is not None:
        found.append(await _web(args, stack))
    if not args.once:
        found.append(_screen(args, stack, actor))
    return [*([] if actor is None else [actor.take]), *(_each(chosen, show) for show in found)]


def _actor(args: argparse.Namespace, stack: AsyncExitStack) -> Actor:
    """Who follows the policy. Raises BadInput for one that is wrong or cannot be logged."""
    import time

    with _installed():
        from ullage.watch.act.actor import Actor
        from ullage.watch.act.journal import Journal
        from ullage.watch.act.perform import Performer
        from ullage.watch.act.policy import read_policy

    policy = read_policy(args.act)
    journal = stack.enter_context(Journal(policy.log))
    performer = Performer(api_key=args.api_key, dry_run=not args.yes)
    stack.push_async_callback(performer.close)
    mode = "acting" if args.yes else "a dry run: nothing is done without --yes"
    print(f"{args.act}: {mode}; logged in {policy.log}", file=sys.stderr, flush=True)

    def say(sentence: str) -> None:
        # On the live screen the last of these stand beneath the replicas.
        if not (_on_screen(args) and sys.stderr.isatty()):
            print(sentence, file=sys.stderr, flush=True)

    return Actor(policy, performer, journal, say, now_s=time.time())


def _each(chosen: Callable[[Sight], Sight], show: Shown) -> Shown:
    def shown(sight: Sight) -> Awaitable[None] | None:
        return show(chosen(sight))

    return shown


async def _exporter(args: argparse.Namespace, stack: AsyncExitStack) -> Shown:
    with _installed():
        from ullage.watch.exporter import Exporter, create_app
        from ullage.watch.web.gate import Gate
        from ullage.watch.web.server import address_of, serving

    exporter = Exporter()
    host, port = address_of(args.exporter, field="--exporter")
    app = Gate(create_app(exporter), args.listen_api_key)
    url = await stack.enter_async_context(
        serving(app, host=host, port=port, api_key=args.listen_api_key, field="--exporter")
    )
    print(f"metrics on {url}/metrics", file=sys.stderr, flush=True)
    return exporter.take


async def _web(args: argparse.Namespace, stack: AsyncExitStack) -> Shown:
    with _installed():
        from ullage.watch.web.app import create_app
        from ullage.watch.web.feed import Feed
        from ullage.watch.web.server import address_of, serving

    feed = Feed()
    host, port = address_of(args.web, field="--web")
    app = create_app(feed, api_key=args.listen_api_key)
    url = await stack.enter_async_context(
        serving(
            app,
            host=host,
            port=port,
            api_key=args.listen_api_key,
            field="--web",
            before_stop=feed.close,
        )
    )
    print(f"page on {url}", file=sys.stderr, flush=True)
    return feed.take


def _screen(args: argparse.Namespace, stack: AsyncExitStack, actor: Actor | None) -> Shown:
    """The live screen where a terminal looks on, else each round as text or as a JSON line."""
    import asyncio
    import signal

    if not _on_screen(args):
        return lambda sight: _write(args, sight, apart=True)
    from ullage.watch.screen import Screen

    screen = stack.enter_context(Screen(verbose=args.verbose))
    asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, screen.redraw)
    return lambda sight: screen.show(sight, () if actor is None else actor.said)


def _aside(args: argparse.Namespace, stack: AsyncExitStack) -> Callable[[str], None]:
    """Prints to standard error; where the live screen is there, when that is gone: a line that is
    printed into it scrolls it away."""
    held: list[str] = []
    stack.callback(lambda: [print(line, file=sys.stderr) for line in held])

    def say(line: str) -> None:
        if _on_screen(args) and sys.stderr.isatty():
            held.append(line)
        else:
            print(line, file=sys.stderr, flush=True)

    return say


def _on_screen(args: argparse.Namespace) -> bool:
    """Whether each round is drawn over the one before."""
    import os

    dumb = os.environ.get("TERM") == "dumb"
    return args.output == "table" and not args.once and sys.stdout.isatty() and not dumb


@contextmanager
def _installed() -> Iterator[None]:
    """Turn a package that is not there into a sentence. Raises what is our own mistake."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "ullage").startswith("ullage"):
            raise
        raise BadUsage(
            f"the Python package {error.name} is not installed",
            expected="pip install 'ullage[watch]'",
        ) from error


def _chosen(args: argparse.Namespace) -> Callable[[Sight], Sight]:
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

    def chosen(sight: Sight) -> Sight:
        judged = tuple(one for one in sight.judged if one.finding.id in kept)
        incidents = tuple(one for one in sight.incidents if one.finding.id in kept)
        return replace(sight, judged=judged, incidents=incidents)

    return chosen


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
