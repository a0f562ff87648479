"""An engine's /metrics over time: KV occupancy, running, waiting, preemptions.

Holds the sampler and the series; the parser and the names are `telemetry`'s. A metric that the
engine does not export is None in every sample and is listed as absent, never 0.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields

import httpx2

from ullage.telemetry.bounded import fetch
from ullage.telemetry.dialects.source import Metric
from ullage.telemetry.dialects.vllm import CACHE_INFO, COMMON
from ullage.telemetry.exposition import Page, page_of
from ullage.telemetry.snapshot import Name
from ullage.traffic.load import Target, client_for


def _newest(name: Name) -> str:
    """What the newest vLLM that is known calls this field of the vocabulary."""
    source = COMMON[name][0]
    assert isinstance(source, Metric), "a plain metric"
    return source.name


# Field of Sample → the metric it is read from.
NAMES: Mapping[str, str] = {
    "kv_usage_ratio": _newest("kv_used_ratio"),
    "kv_used_bytes": _newest("kv_used_bytes"),
    "kv_total_bytes": _newest("kv_total_bytes"),
    "weights_bytes": "ullage_weights_bytes",
    "num_running": _newest("running"),
    "num_waiting": _newest("waiting"),
    "num_preemptions": _newest("preemptions"),
    "prompt_tokens": _newest("prompt_tokens"),
    "generation_tokens": _newest("generation_tokens"),
}
MOST_DIGITS = 18  # more bytes than that no machine has; a label may say anything
# vLLM writes its labels with Python's str().
BOOLEANS: Mapping[str, bool] = {"True": True, "False": False}


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at /metrics, `time_s` after the series began. None: the engine does not say."""

    time_s: float
    kv_usage_ratio: float | None = None
    kv_used_bytes: float | None = None
    kv_total_bytes: float | None = None
    weights_bytes: float | None = None
    num_running: float | None = None
    num_waiting: float | None = None
    num_preemptions: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What the engine says of its KV cache once, in labels. None: absent or not a number.

    `block_size_is_flag`: it was asked for, not chosen. `num_engines` behind the page each say the
    same, with the blocks of all of them summed.
    """

    num_blocks: int | None
    block_size: int | None
    kv_cache_tokens: int | None
    kv_cache_dtype: str | None
    max_concurrency: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_blocks_override: int | None = None
    enable_prefix_caching: bool | None = None
    block_size_is_flag: bool = False
    num_engines: int = 1


@dataclass(frozen=True, slots=True)
class Series:
    """Samples in time order, how many looks failed, and which metrics never appeared."""

    samples: tuple[Sample, ...]
    num_failed: int
    cache: CacheInfo | None

    @property
    def absent(self) -> tuple[str, ...]:
        """Names of metrics that no sample carried; all of them when nothing could be read."""
        return tuple(
            metric
            for field, metric in NAMES.items()
            if all(getattr(sample, field) is None for sample in self.samples)
        )

    def peak(self, field: str) -> float | None:
        values = [v for s in self.samples if (v := getattr(s, field)) is not None]
        return max(values) if values else None

    def rise(self, field: str) -> float | None:
        """How much a counter grew from the first sample that has it to the last."""
        values = [v for s in self.samples if (v := getattr(s, field)) is not None]
        return values[-1] - values[0] if values else None


# --- reading one page ----------------------------------------------------------------------------


def sample_of(page: Page, time_s: float) -> Sample:
    """The fields of a Sample that the page carries; counts over several series are summed.

    The usage ratio of several engines behind one page is their mean, since each is a share.
    """
    values: dict[str, float] = {}
    for field, metric in NAMES.items():
        series = [v for v in page.get(metric).values() if math.isfinite(v)]
        if series:
            total = sum(series)
            values[field] = total / len(series) if field == "kv_usage_ratio" else total
    return Sample(time_s, **values)


def cache_info_of(page: Page) -> CacheInfo | None:
    """What `vllm:cache_config_info` says in its labels, or None when it is not there."""
    series = page.get(CACHE_INFO)
    for labels in series:
        named = dict(labels)
        return CacheInfo(
            num_blocks=_integer(named.get("num_gpu_blocks")),
            block_size=_integer(named.get("block_size")),
            kv_cache_tokens=_integer(named.get("kv_cache_size_tokens")),
            kv_cache_dtype=named.get("cache_dtype"),
            max_concurrency=_decimal(named.get("kv_cache_max_concurrency")),
            kv_cache_memory_bytes=_integer(named.get("kv_cache_memory_bytes")),
            num_blocks_override=_integer(named.get("num_gpu_blocks_override")),
            enable_prefix_caching=BOOLEANS.get(named.get("enable_prefix_caching", "")),
            block_size_is_flag=BOOLEANS.get(named.get("user_specified_block_size", "")) or False,
            num_engines=len(series),
        )
    return None


def _integer(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > MOST_DIGITS:
        return None
    return int(text)


def _decimal(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


async def look_once(target: Target) -> Series:
    """One look at /metrics, as a series of one sample (or none, counted as failed)."""
    async with Sampler(target, interval_s=3600.0) as sampler:
        pass
    return sampler.series


# --- looking over and over ------------------------------------------------------------------------


class Sampler:
    """Reads /metrics every `interval_s` inside an `async with`; afterwards `series` holds all."""

    def __init__(self, target: Target, *, interval_s: float = 0.25) -> None:
        self._target = target
        self._interval_s = interval_s
        self._samples: list[Sample] = []
        self._num_failed = 0
        self._cache: CacheInfo | None = None
        self.start = time.perf_counter()

    @property
    def latest(self) -> Sample | None:
        return self._samples[-1] if self._samples else None

    @property
    def series(self) -> Series:
        return Series(tuple(self._samples), self._num_failed, self._cache)

    async def __aenter__(self) -> Sampler:
        self._client = client_for(self._target, timeout_s=5.0, connections=2)
        self.start = time.perf_counter()
        await self._look()
        self._task = asyncio.create_task(self._keep_looking())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._look()
        await self._client.aclose()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._look()

    async def _look(self) -> None:
        # The moment of the answer's start is the moment that the numbers are of, within its time.
        moment = time.perf_counter() - self.start
        try:
            status, body = await fetch(self._client, "GET", "/metrics", within_s=10.0)
        except httpx2.HTTPError:
            self._num_failed += 1
            return
        if status != 200:
            self._num_failed += 1
            return
        page = page_of(body)
        self._samples.append(sample_of(page, moment))
        self._cache = cache_info_of(page) or self._cache


assert set(NAMES) == {f.name for f in fields(Sample)} - {"time_s"}
