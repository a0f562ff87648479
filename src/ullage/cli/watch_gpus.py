"""`ullage watch --gpu-metrics`: who is asked for the GPUs under the replicas, by the flags.

Holds the flag and the choice; the sources are `telemetry.gpu_*`'s, whose a GPU is `watch.gpus`'.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from ullage.errors import BadUsage

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from ullage.telemetry.pods import Selection
    from ullage.watch.gpus import Exporters
    from ullage.watch.watcher import Source

FLAG = "--gpu-metrics"
SELECTION = re.compile(r"[^/:]+/.*[=!(]")
"""NAMESPACE/SELECTOR; no URL without a query has one of these."""


def add_argument(group: argparse._ArgumentGroup) -> None:
    """The flag, in the group of what is watched."""
    group.add_argument(
        FLAG,
        action="append",
        metavar="URL",
        help="a DCGM exporter's page, for the GPUs under the replicas (repeatable); with --k8s "
        "also NAMESPACE/SELECTOR of the exporter's pods. With --prometheus its own series are read "
        "without it, and on this machine NVML where nvidia-ml-py is there",
    )


def with_gpus(source: Source, args: argparse.Namespace, stack: AsyncExitStack) -> Source:
    """`source`, with the GPUs of its replicas where somebody can be asked for them.

    Raises BadInput for what cannot be asked.
    """
    exporters = _named(args, stack)
    told = ""
    if not exporters and args.prometheus is not None:
        from ullage.telemetry.gpu_series import GpuSeries
        from ullage.telemetry.gpus import NO_SERIES
        from ullage.telemetry.promql import PrometheusSource

        assert isinstance(source, PrometheusSource)
        exporters, told = [GpuSeries(source)], NO_SERIES
    local = _is_local(args)
    if not exporters and not local:
        return source
    from ullage.telemetry.nvml import LocalGpus
    from ullage.watch.gpus import GpuSource

    found = GpuSource(
        source,
        exporters=exporters,
        driver=LocalGpus() if local else None,
        interval_s=args.interval,
        **({"none_at_all": told} if told else {}),
    )
    stack.push_async_callback(found.close)
    return found


def _named(args: argparse.Namespace, stack: AsyncExitStack) -> list[Exporters]:
    """The exporters that the flag names."""
    given: list[str] = args.gpu_metrics or []
    selections = [text for text in given if "://" not in text and SELECTION.match(text)]
    urls = [text for text in given if text not in selections]
    if selections and args.k8s is None:
        raise BadUsage(
            f"{selections[0][:80]!r} selects pods of no cluster", field=FLAG,
            expected="the URL of a DCGM exporter, or --k8s with it",
        )  # fmt: skip
    found: list[Exporters] = []
    if urls:
        from ullage.telemetry.gpu_pages import GpuPages

        for url in urls:
            _require_askable(url)
        found.append(GpuPages(urls, interval_s=args.interval))
    return found + [_pods(_selection(text), args, stack) for text in selections]


def _require_askable(url: str) -> None:
    from ullage.telemetry.wire import origin_and_path

    try:
        origin_and_path(url)
    except BadUsage as error:
        raise BadUsage(error.found, field=FLAG, expected="http://HOST:9400 or HOST:9400") from error


def _selection(text: str) -> Selection:
    from ullage.telemetry.pods import selection_of

    try:
        return selection_of(text)
    except BadUsage as error:
        raise BadUsage(error.found, field=FLAG, expected=error.expected) from error


def _pods(selection: Selection, args: argparse.Namespace, stack: AsyncExitStack) -> Exporters:
    import os

    from ullage.telemetry.kubernetes import Cluster, config_of
    from ullage.watch.gpu_pods import GpuPods

    cluster = Cluster(config_of(os.environ, args.k8s_context or ""))
    stack.push_async_callback(cluster.close)
    return GpuPods(cluster, selection, interval_s=args.interval)


def _is_local(args: argparse.Namespace) -> bool:
    """Whether some engine is on this machine, and its driver can be asked."""
    if not args.urls:
        return False
    from ullage.telemetry.nvml import is_installed
    from ullage.telemetry.scrape import Look
    from ullage.watch.gpu_places import LOOPBACK, whereabouts_of

    here = any(whereabouts_of(Look(url, 0.0, None)).hosts == (LOOPBACK,) for url in args.urls)
    return here and is_installed()
