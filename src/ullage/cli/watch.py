"""`ullage watch URL…`: what live engines say, what is wrong with them, and what to do.

Holds who is asked, who is shown it, signals and the exit code: 0 fine, 1 a finding at or above
--fail-on in the last round, 2 bad input, 3 not one endpoint answered. `watch_flags.py` holds the
flags, `watch_code.py` what `watch rules` and `watch dashboard` write.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING

from ullage.cli import watch_code, watch_flags, watch_gpus
from ullage.cli.watch_flags import add_arguments
from ullage.errors import BadUsage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AsyncExitStack

    from ullage.watch.act.actor import Actor
    from ullage.watch.session import Shown
    from ullage.watch.sight import Sight
    from ullage.watch.watcher import Source

NUM_ROUNDS_OF_ONCE = 2
WRITTEN = ("rules", "dashboard")

__all__ = ["add_arguments", "run"]


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
    watch_flags.require_meant(args)
    import asyncio

    return asyncio.run(_watch(args))


async def _watch(args: argparse.Namespace) -> int:
    import asyncio
    from contextlib import AsyncExitStack

    from ullage.watch.session import follow
    from ullage.watch.watcher import Watcher

    chosen = watch_flags.chosen(args)
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
    places: list[str] = []

    def listens(place: str) -> None:
        places.append(place)
        print(place, file=sys.stderr, flush=True)

    if args.exporter is not None:
        found.append(await _exporter(args, stack, listens))
    if args.web is not None:
        found.append(await _web(args, stack, listens))
    if not args.once:
        found.append(_screen(args, stack, actor, places))
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


async def _exporter(
    args: argparse.Namespace, stack: AsyncExitStack, listens: Callable[[str], None]
) -> Shown:
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
    listens(f"metrics on {url}/metrics")
    return exporter.take


async def _web(
    args: argparse.Namespace, stack: AsyncExitStack, listens: Callable[[str], None]
) -> Shown:
    with _installed():
        from ullage.watch.web.app import create_app
        from ullage.watch.web.attention import Attention
        from ullage.watch.web.feed import Feed
        from ullage.watch.web.server import address_of, serving

    feed = Feed()
    host, port = address_of(args.web, field="--web")
    attention = None
    if args.urls:
        # Engines that are scraped from here; of others only Prometheus or Kubernetes is known.
        attention = Attention(api_key=args.api_key)
        stack.callback(attention.close)
    app = create_app(feed, api_key=args.listen_api_key, attention=attention)
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
    listens(f"page on {url}")
    return feed.take


def _screen(
    args: argparse.Namespace, stack: AsyncExitStack, actor: Actor | None, places: Sequence[str]
) -> Shown:
    """The live screen where a terminal looks on, else each round as text or as a JSON line."""
    import asyncio
    import signal

    if not _on_screen(args):
        return lambda sight: _write(args, sight, apart=True)
    from ullage.watch.screen import Screen

    screen = stack.enter_context(Screen(verbose=args.verbose, standing=places))
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
