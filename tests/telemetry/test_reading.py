"""From a page to a snapshot: absence apart from 0, nothing bent, renames, several engines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from ullage.telemetry import reading
from ullage.telemetry.dialects.source import Arithmetic, Dialect, Label, Metric, Source
from ullage.telemetry.dialects.table import DIALECTS
from ullage.telemetry.histogram import Histogram as Counted
from ullage.telemetry.reading import VOCABULARY, Told, snapshot_of
from ullage.telemetry.snapshot import HISTOGRAMS, LABELLED, PROBED, Name, ProbeFinding, Snapshot

NAMED = {dialect.engine: dialect for dialect in DIALECTS}


def read(text: str, told: Told | None = None) -> Snapshot:
    return snapshot_of(text.encode(), time_s=5.0, told=told or Told())


def known(snapshot: Snapshot) -> set[Name]:
    return {
        *snapshot.gauges,
        *snapshot.counters,
        *snapshot.labelled,
        *snapshot.histograms,
        *(() if snapshot.probe_findings is None else PROBED),
    }


def assert_whole(snapshot: Snapshot) -> None:
    """Every field of the vocabulary is known with a source, or absent with a reason."""
    assert known(snapshot) == set(snapshot.sources)
    assert set(snapshot.sources) | set(snapshot.absent) == set(VOCABULARY)
    assert not set(snapshot.sources) & set(snapshot.absent)
    assert all(snapshot.sources.values()) and all(snapshot.absent.values())
    assert snapshot.approximate <= set(snapshot.sources)


# --- the tables ---


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.engine)
def test_a_dialect_has_a_source_or_a_reason_for_every_field(dialect: Dialect) -> None:
    assert set(dialect.fields) | set(dialect.absent) == set(VOCABULARY)
    assert not set(dialect.fields) & set(dialect.absent)
    assert set(dialect.hints) <= set(dialect.fields)
    for name, sources in dialect.fields.items():
        assert sources, name
        for source in sources:
            assert isinstance(source, Metric) or name not in {*LABELLED, *HISTOGRAMS, *PROBED}
            assert name not in LABELLED or (isinstance(source, Metric) and source.by)


def metrics_of(source: Source) -> Sequence[Metric | Label]:
    if isinstance(source, Arithmetic):
        return [*metrics_of(source.left), *metrics_of(source.right)]
    return [source]


def lines_of(source: Source, name: Name) -> list[str]:
    """Lines that this source is read from, each series with the number 1."""
    lines = []
    for part in metrics_of(source):
        if isinstance(part, Label):
            lines.append(f'{part.metric}{{{part.label}="7"}} 1')
            continue
        labels = [f'{label}="{text}"' for label, text in part.where if text]
        if part.by:
            labels.append(f'{part.by}="one"')
        if name in HISTOGRAMS:
            for bound in ("1", "+Inf"):
                inside = ",".join([*labels, f'le="{bound}"'])
                lines.append(f"{part.name}_bucket{{{inside}}} 1")
            lines.append(f"{part.name}_sum{{{','.join(labels)}}} 1")
        else:
            lines.append(f"{part.name}{{{','.join(labels)}}} 1")
    return list(dict.fromkeys(lines))


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.engine)
def test_every_source_of_a_dialect_is_read_when_it_alone_is_on_the_page(dialect: Dialect) -> None:
    for name, sources in dialect.fields.items():
        for source in sources:
            # What tells whose page it is.
            page = [f"{dialect.marks[0]}x 1", *lines_of(source, name)]
            snapshot = read("\n".join(page) + "\n")
            assert snapshot.identity.engine == dialect.engine
            assert snapshot.sources[name] == str(source)
            assert (name in snapshot.approximate) == (not source.exact)
            assert_whole(snapshot)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.engine)
def test_of_a_page_with_nothing_but_the_mark_all_is_absent_by_name(dialect: Dialect) -> None:
    snapshot = read(f"{dialect.marks[0]}x 1\n")
    assert_whole(snapshot)
    assert not known(snapshot)
    for name, sources in dialect.fields.items():
        assert any(
            (part.metric if isinstance(part, Label) else part.name) in snapshot.absent[name]
            for source in sources
            for part in metrics_of(source)
        )


# --- whose page ---


def test_a_page_is_nobodys_when_no_engine_or_two_speak() -> None:
    for text, why in (
        ("", "no metrics"),
        ("<html>\n", "no metrics"),
        ("go_gc_cycles 1\n", "no metric on the page is of an engine"),
        ("vllm:num_requests_running 1\nsglang:token_usage 0.5\n", "vLLM and SGLang"),
    ):
        snapshot = read(text)
        assert snapshot.identity.engine == ""
        assert_whole(snapshot)
        assert not known(snapshot)
        assert all(why in reason for reason in snapshot.absent.values())


def test_what_the_server_said_decides_between_two_that_speak() -> None:
    text = "vllm:num_requests_running 1\nsglang:token_usage 0.5\n"
    assert read(text, Told(engine="sglang")).identity.engine == "sglang"
    assert read(text, Told(engine="vllm")).gauges == {"running": 1.0}
    assert read(text, Told(engine="tgi")).identity.engine == ""
    # What it said never makes a page into another engine's.
    assert read("vllm:num_requests_running 1\n", Told(engine="sglang")).identity.engine == "vllm"


def test_the_embedded_engine_speaks_vllms_names_and_is_told_apart() -> None:
    assert read("vllm:num_requests_running 1\nullage_engine_info 1\n").identity.engine == "ullage"
    # vLLM with the plugin is vLLM.
    assert read("vllm:num_requests_running 1\nullage_kv_cache_used_bytes 5\n").identity.engine == (
        "vllm"
    )


def test_who_answers_is_what_it_told_then_what_its_labels_say() -> None:
    text = (
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="None",engine="0",x="y"} 1\n'
        'vllm:num_requests_running{engine="0",model_name="m"} 0\n'
        'vllm:lora_requests_info{running_lora_adapters="b,a",waiting_lora_adapters=""} 7\n'
        "process_start_time_seconds 1.5e9\n"
    )
    told = read(text).identity
    assert told.models == ("m",)
    assert (told.block_size, told.num_blocks) == (16, None)
    assert told.adapters == ("a", "b")
    assert told.started_s == 1.5e9
    assert told.settings == {"block_size": "16", "num_gpu_blocks": "None", "x": "y"}
    assert told.version == ""
    more = Told(version="1", models=("n",), adapters=("c",), max_model_len=9, settings={"z": "1"})
    identity = read(text, more).identity
    assert (identity.version, identity.models, identity.adapters) == ("1", ("n",), ("c",))
    assert identity.max_model_len == 9
    assert identity.settings == {**told.settings, "z": "1"}


def lora(running: str, waiting: str, when: float) -> str:
    labels = f'max_lora="4",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"vllm:lora_requests_info{{{labels}}} {when}\n"


def test_adapters_that_come_and_go_leave_the_pages_shape_alone() -> None:
    before, after = "vllm:num_requests_running 3\n", "vllm:num_requests_waiting 4\n"
    reading._PLANS.clear()
    blocks = ["", lora("a", "", 1.0), lora("a", "", 1.0) + lora("b,c", "d", 2.0)]
    for block, names in zip(blocks, [(), ("a",), ("a", "b", "c", "d")], strict=True):
        snapshot = read(before + block + after)
        assert snapshot.gauges == {"running": 3.0, "waiting": 4.0}
        assert snapshot.identity.adapters == names
    assert len(reading._PLANS) == 1
    # Last on the page, first on it, apart, and cut off.
    assert read(before + lora("z", "", 1.0)).identity.adapters == ("z",)
    assert read(lora("z", "", 1.0) + before).identity.adapters == ("z",)
    apart = read(lora("y", "", 1.0) + before + lora("z", "", 1.0) + after)
    assert apart.identity.adapters == ("y", "z")
    assert apart.gauges == {"running": 3.0, "waiting": 4.0}
    assert "unfinished" in read(before + after + lora("z", "", 1.0)[:-9]).dropped
    assert read(before + block, Told(adapters=("told",))).identity.adapters == ("told",)


def test_texts_of_labels_are_short_and_harmless() -> None:
    evil = "\x1b[31m" + "x" * 5000
    snapshot = read(
        f'vllm:cache_config_info{{block_size="16",flag="{evil}"}} 1\n'
        f'vllm:num_requests_running{{model_name="{evil}"}} 1\n'
        f'vllm:request_success_total{{finished_reason="{evil}"}} 2\n'
        + lora(evil, "", 1.0)
    )  # fmt: skip
    who = snapshot.identity
    texts = [*who.models, *who.adapters, *who.settings.values()]
    texts += snapshot.labelled["finished_by_reason"]
    assert len(texts) == 5
    assert all(text.isprintable() and len(text) <= 200 for text in texts)


def test_a_label_with_too_many_values_is_no_field() -> None:
    lines = [f'vllm:request_success_total{{finished_reason="{i}"}} 1' for i in range(2000)]
    snapshot = read("\n".join(lines) + "\n")
    assert "2,000 values of finished_reason" in snapshot.absent["finished_by_reason"]
    names = [f'vllm:num_requests_running{{model_name="{i}"}} 1' for i in range(2000)]
    assert len(read("\n".join(names) + "\n").identity.models) == 1000


# --- absence, and numbers that cannot be ---


def test_absent_is_not_zero() -> None:
    snapshot = read("vllm:num_requests_waiting 0\n")
    assert snapshot.gauges == {"waiting": 0.0}
    assert "vllm:num_requests_running" in snapshot.absent["running"]
    assert "plugin" in snapshot.absent["kv_used_bytes"]
    assert_whole(snapshot)


@pytest.mark.parametrize(
    ("lines", "name", "why"),
    [
        (["vllm:kv_cache_usage_perc 1.5"], "kv_used_ratio", "1.5, which is no share"),
        (["vllm:kv_cache_usage_perc 93"], "kv_used_ratio", "no share"),
        (["vllm:kv_cache_usage_perc -0.1"], "kv_used_ratio", "-0.1"),
        (["vllm:kv_cache_usage_perc NaN"], "kv_used_ratio", "NaN"),
        (["vllm:num_requests_running +Inf"], "running", "inf"),
        (["vllm:num_requests_running -1"], "running", "-1"),
        (
            ['vllm:num_requests_running{engine="0"} 5', 'vllm:num_requests_running{engine="1"} -1'],
            "running",
            "-1",
        ),
        (
            ['vllm:num_requests_running{engine="0"} 5', 'vllm:num_requests_running{engine="1"} x'],
            "running",
            "cannot be read",
        ),
        (
            ['vllm:num_requests_running{engine="0"} 5', 'vllm:num_requests_running{engine="1} 6'],
            "running",
            "cannot be read",
        ),
        (["vllm:num_preemptions_total NaN"], "preemptions", "NaN"),
        (
            [
                "vllm:kv_cache_usage_perc 3",
                'vllm:cache_config_info{kv_cache_size_tokens="100"} 1',
            ],
            "kv_used_tokens",
            "more than the whole",
        ),
        (
            ['vllm:cache_config_info{kv_cache_size_tokens="None"} 1'],
            "kv_total_tokens",
            "'None'",
        ),
        (
            ["ullage_kv_cache_used_bytes 11", "ullage_kv_cache_total_bytes 10"],
            "kv_used_bytes",
            "more than the whole",
        ),
        (["ullage_kv_page_utilization_ratio NaN"], "page_utilization_ratio", "no request holds"),
        (["ullage_oldest_request_age_seconds NaN"], "oldest_request_age_s", "there is no request"),
        (["vllm:num_requests_waiting_by_reason 3"], "waiting_by_reason", "no label reason"),
        (
            ['vllm:request_success_total{finished_reason="stop"} NaN'],
            "finished_by_reason",
            "NaN",
        ),
    ],
)
def test_a_number_that_cannot_be_is_absent_with_the_reason(
    lines: list[str], name: Name, why: str
) -> None:
    text = "\n".join(["vllm:x 1", *lines]) + "\n"
    for snapshot in (read(text), read(text)):
        assert name not in known(snapshot)
        assert why in snapshot.absent[name]
        assert_whole(snapshot)


def test_a_value_that_is_spoiled_once_is_read_again_when_it_is_well() -> None:
    good = "vllm:num_requests_running 5\nvllm:num_requests_waiting 6\n"
    for bad in ("x", "1_0", "NaN", "-3"):
        text = good.replace("running 5", f"running {bad}")
        assert read(good).gauges == {"running": 5.0, "waiting": 6.0}
        assert read(text).gauges == {"waiting": 6.0}
        assert read(good).gauges == {"running": 5.0, "waiting": 6.0}


def test_a_rounding_above_one_is_a_full_cache() -> None:
    assert read("vllm:kv_cache_usage_perc 1.0000000001\n").gauges["kv_used_ratio"] >= 1.0


def test_what_a_cut_page_held_last_is_absent_for_it_may_be_a_part() -> None:
    whole = (
        'vllm:num_requests_waiting{engine="0"} 1\nvllm:num_requests_waiting{engine="1"} 2\n'
        'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 4\n'
    )
    assert read(whole).gauges == {"waiting": 3.0, "running": 7.0}
    cut = read(whole[:-10])
    assert cut.gauges == {"waiting": 3.0}
    assert "cannot be read" in cut.absent["running"]
    assert "unfinished last line" in cut.dropped
    assert_whole(cut)


# --- renamed metrics ---


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("kv_used_ratio", "vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),
        (
            "prefix_hits_tokens",
            "vllm:gpu_prefix_cache_hits_total",
            "vllm:prefix_cache_hits_total",
        ),
    ],
)
def test_renamed_metrics_are_followed_both_ways(name: Name, old: str, new: str) -> None:
    for text, source, value in (
        (f"{old} 0.25\n", old, 0.25),
        (f"{new} 0.5\n", new, 0.5),
        (f"{old} 0.25\n{new} 0.5\n", new, 0.5),
    ):
        snapshot = read(text)
        assert snapshot.sources[name] == source
        assert {**snapshot.gauges, **snapshot.counters}[name] == value


# --- several series ---


def test_engines_behind_one_page_are_summed_and_shares_averaged() -> None:
    snapshot = read(
        'vllm:cache_config_info{engine="0",kv_cache_size_tokens="1000",num_gpu_blocks="200"} 1\n'
        'vllm:cache_config_info{engine="1",kv_cache_size_tokens="1000",num_gpu_blocks="200"} 1\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.4\n'
        'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 3\n'
    )
    assert snapshot.gauges["running"] == 5
    assert math.isclose(snapshot.gauges["kv_used_ratio"], 0.3)
    # One engine's tokens, all engines' blocks: vLLM 0.32, v1/engine/core_client.py.
    assert snapshot.gauges["kv_total_tokens"] == 2000
    assert snapshot.identity.num_blocks == 200
    assert snapshot.identity.num_engines == 2
    assert math.isclose(snapshot.gauges["kv_used_tokens"], 600)


def test_blocks_times_block_size_is_never_taken_for_the_capacity() -> None:
    snapshot = read(
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
        "vllm:kv_cache_usage_perc 0.5\n"
    )
    assert "kv_total_tokens" not in snapshot.gauges
    assert "kv_used_tokens" not in snapshot.gauges
    assert "--model" in snapshot.absent["kv_total_tokens"]


def test_sglangs_usage_is_weighted_by_what_each_engine_holds() -> None:
    def rank(dp: int, tp: int, usage: float, total: int) -> str:
        labels = f'{{dp_rank="{dp}",tp_rank="{tp}",pp_rank="0",moe_ep_rank="{tp}",model_name="m"}}'
        return (
            f"sglang:token_usage{labels} {usage}\nsglang:max_total_num_tokens{labels} {total}\n"
            f"sglang:num_running_reqs{labels} 4\nsglang:page_size{labels} 64\n"
        )

    # The same two engines, each said once by every tensor-parallel rank of its own.
    page = rank(0, 0, 0.2, 3000) + rank(0, 1, 0.2, 3000) + rank(1, 10, 0.6, 1000)
    snapshot = read(page + rank(1, 2, 0.6, 1000))
    assert math.isclose(snapshot.gauges["kv_used_ratio"], 0.3)
    assert snapshot.gauges["kv_total_tokens"] == 4000
    assert snapshot.gauges["running"] == 8
    assert snapshot.identity.block_size == 64
    assert snapshot.identity.num_engines == 2


def test_sglangs_priorities_are_parts_of_a_total_and_not_added_to_it() -> None:
    snapshot = read(
        'sglang:num_queue_reqs{priority=""} 5\nsglang:num_queue_reqs{priority="1"} 3\n'
        'sglang:num_queue_reqs{priority="2"} 2\n'
    )
    assert snapshot.gauges == {"waiting": 5.0}


def test_tritons_rows_are_chosen_by_their_labels() -> None:
    def row(kind: str, value: float) -> str:
        block = f'kv_cache_block_type="{kind}",model="tensorrt_llm",version="1"'
        return f"nv_trt_llm_kv_cache_block_metrics{{{block}}} {value}\n"

    snapshot = read(
        row("used", 25) + row("free", 75) + row("max", 100) + row("tokens_per", 64)
        + 'nv_trt_llm_request_metrics{request_type="waiting",model="tensorrt_llm"} 2\n'
        + 'nv_trt_llm_request_metrics{request_type="scheduled",model="tensorrt_llm"} 3\n'
    )  # fmt: skip
    assert snapshot.gauges == {
        "kv_used_ratio": 0.25,
        "kv_used_tokens": 1600.0,
        "kv_total_tokens": 6400.0,
        "waiting": 2.0,
        "running": 3.0,
    }
    assert snapshot.identity.models == ("tensorrt_llm",)


# --- histograms ---


def test_a_histogram_is_what_was_observed() -> None:
    registry = CollectorRegistry()
    ttft = Histogram(
        "vllm:time_to_first_token_seconds", "", ("engine",), buckets=(1, 2), registry=registry
    )
    for engine, value in (("0", 0.5), ("0", 1.5), ("1", 9.0)):
        ttft.labels(engine).observe(value)
    snapshot = snapshot_of(generate_latest(registry), time_s=0.0)
    assert snapshot.histograms == {"ttft_s": Counted((1.0, 2.0, math.inf), (1.0, 2.0, 3.0), 11.0)}


@pytest.mark.parametrize(
    ("buckets", "why"),
    [
        ('_bucket{le="1"} 1', "no bucket for everything"),
        ('_bucket{le="1"} 3\n_bucket{le="+Inf"} 2', "do not add up"),
        ('_bucket{le="1"} -3\n_bucket{le="+Inf"} 2', "do not add up"),
        ('_bucket{le="1"} NaN\n_bucket{le="+Inf"} 2', "do not add up"),
        ('_bucket{le="x"} 1\n_bucket{le="+Inf"} 2', "without a bound"),
        ('_bucket{le="1"} 1\n_bucket{le="1.0"} 1\n_bucket{le="+Inf"} 2', "without a bound"),
        ("_bucket 1", "without a bound"),
        (
            '_bucket{le="1",e="0"} 1\n_bucket{le="+Inf",e="0"} 1\n_bucket{le="2",e="1"} 1\n'
            '_bucket{le="+Inf",e="1"} 1',
            "different buckets",
        ),
        ('_bucket{le="1"} 1\n_bucket{le="+Inf"} x', "cannot be read"),
    ],
)
def test_buckets_that_cannot_be_are_no_histogram(buckets: str, why: str) -> None:
    lines = buckets.replace("_bucket", "vllm:time_to_first_token_seconds_bucket")
    snapshot = read(f"vllm:x 1\n{lines}\n")
    assert why in snapshot.absent["ttft_s"]
    assert_whole(snapshot)


def test_the_count_stands_for_the_last_bucket_and_a_sum_may_be_missing() -> None:
    name = "vllm:time_to_first_token_seconds"
    snapshot = read(f'{name}_bucket{{le="1"}} 1\n{name}_count 3\n')
    assert snapshot.histograms["ttft_s"] == Counted((1.0, math.inf), (1.0, 3.0), None)
    snapshot = read(f'{name}_bucket{{le="+Inf"}} 3\n{name}_sum NaN\n')
    assert snapshot.histograms["ttft_s"] == Counted((math.inf,), (3.0,), None)


# --- plans that are kept ---


def test_kept_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_PLANS", 5)
    reading._PLANS.clear()
    for number in range(20):
        assert read(f'vllm:num_requests_running{{model_name="{number}"}} 3\n').gauges
        assert len(reading._PLANS) <= 5


LINES = [
    'vllm:num_requests_running{engine="0"} %s',
    'vllm:num_requests_running{engine="1"} %s',
    "vllm:kv_cache_usage_perc %s",
    'vllm:request_success_total{finished_reason="stop"} %s',
    'vllm:time_to_first_token_seconds_bucket{le="1"} %s',
    'vllm:time_to_first_token_seconds_bucket{le="+Inf"} %s',
    "# HELP vllm:x %s",
    "ullage_kv_page_utilization_ratio %s",
    "sglang:token_usage %s",
    "%s",
]


def told(snapshot: Snapshot) -> Snapshot:
    """All but the words for rows that nobody reads, which are counted where a plan is made."""
    return replace(snapshot, dropped="", absent=dict.fromkeys(snapshot.absent, ""))


WORDS = st.sampled_from(["0", "1", "0.5", "3", "NaN", "x", "-1", "1 2", "", '1 # {a="b"} 2', "#"])


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(LINES), WORDS), max_size=8),
        min_size=2,
        max_size=5,
    ),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_a_kept_plan_reads_what_a_fresh_one_would(
    pages: list[list[tuple[str, str]]], cut: bool
) -> None:
    texts = ["".join(line % word + "\n" for line, word in page) for page in pages]
    if cut:
        texts = [text[:-2] for text in texts]
    fresh = []
    for text in texts:
        reading._PLANS.clear()
        fresh.append(read(text))
        assert_whole(fresh[-1])
    reading._PLANS.clear()
    for _ in range(2):
        assert [told(read(text)) for text in texts] == [told(snapshot) for snapshot in fresh]


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_a_whole_snapshot(body: bytes) -> None:
    assert_whole(snapshot_of(b"vllm:x 1\n" + body, time_s=0.0))


# --- what a server's own probe says ---

OWN = "ullage_engine_info 1\n"


def probed(*lines: str) -> Snapshot:
    text = "".join(f"ullage_probe_findings{{{line}\n" for line in lines)
    return read(f"{OWN}{text}")


def test_findings_of_the_servers_own_probe_are_read_with_kind_and_layer() -> None:
    snapshot = probed(
        'engine="0",id="P001",kind="q",layer="12"} 1',
        'engine="0",id="P002",kind="",layer=""} 0',
        'engine="0",id="P006",kind="",layer=""} NaN',
        'engine="0",id="P003",kind="rope",layer="many"} 1',
    )
    assert snapshot.sources["probe_findings"] == "ullage_probe_findings"
    assert snapshot.probe_findings == (
        ProbeFinding("P001", "q", "12", "fired"),
        ProbeFinding("P002", "", "", "clear"),
        ProbeFinding("P006", "", "", "not_evaluable"),
        ProbeFinding("P003", "rope", "many", "fired"),
    )


def test_of_two_engines_behind_a_page_the_worse_is_told() -> None:
    snapshot = probed(
        'engine="0",id="P001",kind="",layer=""} 0',
        'engine="1",id="P001",kind="",layer=""} NaN',
        'engine="0",id="P002",kind="norm",layer="1"} NaN',
        'engine="1",id="P002",kind="norm",layer="1"} 1',
    )
    assert snapshot.probe_findings == (
        ProbeFinding("P001", "", "", "not_evaluable"),
        ProbeFinding("P002", "norm", "1", "fired"),
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (None, "--probe-baseline"),
        ('id="P001",kind="",layer=""} 3', "ullage_probe_findings is 3, neither 0 nor 1"),
        ('id="P001",kind="",layer=""} -1', "is -1"),
        ('id="P001",kind="",layer=""} +Inf', "is inf"),
        ('kind="q",layer="1"} 1', "has no id"),
        ('id="P001",kind="q",layer="1"} one', "cannot be read"),
    ],
)
def test_a_server_that_does_not_judge_or_cannot_be_read_says_nothing(
    line: str | None, why: str
) -> None:
    snapshot = probed(*(() if line is None else (line,)))
    assert snapshot.probe_findings is None
    assert why in snapshot.absent["probe_findings"]
    assert_whole(snapshot)


def test_what_the_probe_says_is_told_anew_at_each_scrape() -> None:
    line = 'id="P001",kind="",layer=""} '
    states = [probed(line + value).probe_findings[0].state for value in ("0", "NaN", "1", "0")]
    assert states == ["clear", "not_evaluable", "fired", "clear"]
