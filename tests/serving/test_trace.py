"""The trace is a Chrome trace: valid JSON, lanes that do not overlap, spans that add up."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from ullage.engine.options import EngineOptions
from ullage.errors import BadUsage
from ullage.serving.app import start_server
from ullage.serving.trace import LANES, Trace

Event = dict[str, Any]
NUM_REQUESTS, NUM_NEW = 3, 8


@pytest.fixture(scope="module")
def path(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three requests at once, one of them long enough for two prefill chunks."""
    path = tmp_path_factory.mktemp("trace") / "steps.json"
    options = EngineOptions(
        kv_cache_memory_bytes=1 << 22, max_num_seqs=4, max_num_batched_tokens=64
    )
    server = start_server(model_dir, options, trace=path)

    def ask(prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": NUM_NEW, "ignore_eos": True}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()

    threads = [threading.Thread(target=ask, args=(p,)) for p in ("a", "b" * 100, "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.stop()
    return path


@pytest.fixture(scope="module")
def events(path: Path) -> list[Event]:
    found: list[Event] = json.loads(path.read_text())
    return found


def test_every_event_has_what_its_phase_needs(events: list[Event]) -> None:
    needs = {
        "M": {"name", "pid", "args"},
        "X": {"name", "pid", "tid", "ts", "dur"},
        "C": {"name", "pid", "ts", "args"},
        "b": {"name", "pid", "tid", "ts", "cat", "id"},
        "e": {"name", "pid", "tid", "ts", "cat", "id"},
    }
    assert {event["ph"] for event in events} == set(needs)
    for event in events:
        assert needs[event["ph"]] <= event.keys()
        assert event.get("dur", 0) >= 0
        assert all(isinstance(event.get(name, 0.0), int | float) for name in ("ts", "dur"))


def test_lanes_are_named_and_never_overlap(events: list[Event]) -> None:
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == set(LANES)
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["name"] == LANES[event["tid"]]
            lanes[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(lanes) == set(range(len(LANES)))
    for spans in lanes.values():
        assert spans == sorted(spans)
        # Times are rounded to a tenth of a microsecond.
        assert all(end <= start + 0.2 for (_, end), (start, _) in pairwise(spans))


def test_steps_add_up_to_the_work(events: list[Event]) -> None:
    steps = [event["args"] for event in events if event["name"] == "forward"]
    prompts = 1 + 100 + 1
    assert sum(step["tokens"] for step in steps) == prompts + NUM_REQUESTS * (NUM_NEW - 1)
    outputs = sum(event["args"]["outputs"] for event in events if event["name"] == "deliver")
    assert outputs == NUM_REQUESTS * NUM_NEW


def test_each_request_is_queued_then_prefilled_then_decodes(events: list[Event]) -> None:
    spans: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event["ph"] in "be":
            spans[event["id"]][event["name"]].append(event["ts"])
    assert len(spans) == NUM_REQUESTS
    for request in spans.values():
        whole, queued, prefill, decode = (
            request[name] for name in ("request", "queued", "prefill", "decode")
        )
        assert whole[0] == queued[0] <= queued[1] == prefill[0] <= prefill[1] == decode[0]
        assert decode[0] <= decode[1] == whole[1]
    details = [e["args"] for e in events if e["ph"] == "b" and e["name"] == "request"]
    assert sorted(detail["prompt_tokens"] for detail in details) == [1, 1, 100]
    assert all(detail["output_tokens"] == NUM_NEW for detail in details)
    assert all(detail["finish_reason"] == "length" for detail in details)


def test_counters_of_kv_end_at_nothing_used(events: list[Event]) -> None:
    used = [event["args"]["used"] for event in events if event["name"] == "KV blocks"]
    assert max(used) > 0
    assert used[-1] == 0


def test_a_file_without_its_end_can_still_be_read(path: Path, events: list[Event]) -> None:
    """What a killed server leaves: viewers of the array form add the missing bracket."""
    text = path.read_text()
    assert text.endswith("\n]\n")
    cut = text[: text.rindex(",\n{")]
    assert json.loads(cut + "]") == events[:-1]


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="--trace: cannot write it"):
        Trace(tmp_path / "nowhere" / "trace.json")


def test_a_full_disk_ends_the_trace_and_not_the_server(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    trace = Trace("/dev/full")
    trace.close()
    trace.close()
    assert "ends here: No space left on device" in caplog.text
