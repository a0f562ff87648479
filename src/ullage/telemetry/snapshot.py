"""Snapshot: what a live engine says at one instant, in one vocabulary whatever the engine.

Holds the vocabulary and the values. Which metric of which engine a field is read from is the
dialects' (`dialects/`); what happened between two snapshots is `watch`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ullage.telemetry.histogram import Histogram

Gauge = Literal[
    "kv_used_ratio",  # 0 to 1, of what requests hold now
    "kv_used_bytes",
    "kv_total_bytes",
    "kv_used_tokens",
    "kv_total_tokens",
    "kv_cached_tokens",  # prefixes that may be found again, in blocks that are free to take
    "page_utilization_ratio",  # tokens held over tokens that the held pages could hold
    "running",
    "waiting",
    "oldest_request_age_s",
]
Counter = Literal[
    "preemptions",
    "recomputed_tokens",
    "prompt_tokens",
    "generation_tokens",
    "prefix_queries_tokens",
    "prefix_hits_tokens",
    "rejected_requests",
    "process_cpu_s",
]
# A field with one number per value of a label.
Labelled = Literal[
    "waiting_by_reason",  # gauge: capacity, deferred
    "finished_by_reason",  # counter: stop, length, abort, error, …
    "sleep_state",  # gauge: awake, weights_offloaded, discard_all
]
Histograms = Literal[
    "ttft_s",
    "itl_s",
    "e2e_s",
    "queue_s",
    "prefill_s",
    "decode_s",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_tokens",
    "request_preemptions",
]
Probed = Literal["probe_findings"]  # what the server's own probe says of its model
Devices = Literal["gpus"]  # the accelerators under an endpoint, in a place of their own
Name = Gauge | Counter | Labelled | Histograms | Probed | Devices

GAUGES: tuple[Gauge, ...] = get_args(Gauge)
COUNTERS: tuple[Counter, ...] = get_args(Counter)
LABELLED: tuple[Labelled, ...] = get_args(Labelled)
LABELLED_COUNTERS: frozenset[Labelled] = frozenset({"finished_by_reason"})
HISTOGRAMS: tuple[Histograms, ...] = get_args(Histograms)
PROBED: tuple[Probed, ...] = get_args(Probed)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who answered. "" or None: it does not say.

    `engine` is a dialect's name (vllm, sglang, trtllm, triton, tgi, lmdeploy, llamacpp, ullage) or
    "" when no dialect knows the page. `versions` came from the server (`/version` or a label).
    `settings` are what it tells of its flags, by the engine's own names (the labels of
    vllm:cache_config_info, `/get_server_info`, …). `started_s` is Unix time. `num_engines` counts
    the data-parallel engines behind the page. `unsaid` is why nothing else is known, where the
    server refused to say it.
    """

    engine: str = ""
    version: str = ""
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    num_engines: int = 1
    adapters: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    started_s: float | None = None
    unsaid: str = ""

    @property
    def why_unsaid(self) -> str:
        """Why a fact of this server that is not known is not."""
        return self.unsaid or "the server does not say it"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator, from DCGM exporter or NVML. None: it does not say. Ratios are 0 to 1.

    `index` tells it from the others of its host; of a MIG instance it is `GPU/INSTANCE`, with
    `mig_profile` as the driver names it. `throttled_because` are the driver's reasons for holding
    the clocks down now, idleness aside. `xid_errors` is the code of the last Xid error, 0 for none,
    which DCGM goes on telling for ever, whatever was mended since; `xid_s` (Unix) is when it was
    seen to come, None of one that was there from the first look on.
    """

    index: str
    name: str = ""
    used_bytes: float | None = None
    total_bytes: float | None = None
    busy_ratio: float | None = None
    sm_clock_hz: float | None = None
    max_sm_clock_hz: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    throttled_because: tuple[str, ...] | None = None
    xid_errors: float | None = None
    uuid: str = ""
    mig_profile: str = ""
    xid_s: float | None = None

    @property
    def key(self) -> str:
        """What tells it from every other device: the index may be another after a reboot."""
        instance = self.index.partition("/")[2]
        return f"{self.uuid}/{instance}" if self.uuid else self.index


@dataclass(frozen=True, slots=True)
class ProbeFinding:
    """What a server's own probe says by one rule (P001 …) of its model.

    `kind` and `layer` are where a rule fires, as the server writes them (`many`: several layers),
    "" of one that does not.
    """

    id: str
    kind: str
    layer: str
    state: Literal["fired", "clear", "not_evaluable"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at one endpoint. Mappings hold only what is known; the rest is in `absent`.

    `time_s` is Unix time of the answer. `counters` are cumulative since the server's start.
    `sources` says for every field that is known which metric it was read from, or by what
    arithmetic from which (`kv_cache_usage_perc × kv_cache_size_tokens`); `absent` says for every
    other field of the vocabulary why it is not. `approximate` names fields whose derivation is
    not exact (usage × capacity counts whole pages, not tokens). `dropped` says in words what of
    the page could not be read, "" when all was. The page of an engine tells of no GPU: `gpus` are
    joined by `watch.gpus`, with who told of them in `sources` and why there are none in `absent`,
    both under `gpus`; neither where nobody was asked. `probe_findings` None: the server does not
    judge its model.
    """

    time_s: float
    identity: Identity
    gauges: Mapping[Gauge, float]
    counters: Mapping[Counter, float]
    labelled: Mapping[Labelled, Mapping[str, float]]
    histograms: Mapping[Histograms, Histogram]
    sources: Mapping[Name, str]
    absent: Mapping[Name, str]
    gpus: tuple[Gpu, ...] = ()
    probe_findings: tuple[ProbeFinding, ...] | None = None
    approximate: frozenset[Name] = frozenset()
    dropped: str = ""

    def why_absent(self, name: Name) -> str:
        """The reason in words, for a field that is not known."""
        return self.absent.get(name, "the endpoint does not say")
