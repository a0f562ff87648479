"""A small soak of `ullage serve`: every request gets an answer, no block stays, SIGTERM cuts none.

The client and what it demands are benchmarks/soak, which does the same with 5,000 requests.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "soak"))

from soak_client import Target, judge
from soak_load import Disturbances
from soak_plan import Ask, Limits, Row, make_asks
from soak_run import Subject, leaks, memory_grows, soak

from tests.engine.adapters import write_adapter
from ullage.traffic.trace import recorded_rows

FLAGS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-num-queued-reqs", "8")
LIMITS = Limits(32, 32, 40, 8, 512)
NUM_REQUESTS = 300
END = b'{"choices":[{"index":0,"finish_reason":"length"}]}'


def rows() -> list[Row]:
    return [Row(row.prompt_tokens, row.output_tokens) for row in recorded_rows()]


def test_a_small_soak(model_dir: Path, tmp_path: Path) -> None:
    adapters = {
        name: str(write_adapter(model_dir, tmp_path / name, seed=seed))
        for seed, name in enumerate(("first", "swapped"))
    }
    flags = (*FLAGS, "--kv-cache-memory-bytes", str(1 << 19))
    subject = Subject("tiny", str(model_dir), flags, LIMITS, 8, adapters, 1)
    disturbances = Disturbances(
        cancel_every_s=1.0, swap_every_s=0.5, adapter=("swapped", adapters["swapped"])
    )
    # So few requests must come nearly at once to fill the queue, whatever the machine's speed.
    found = soak(subject, rows(), NUM_REQUESTS, disturbances, overload=50.0)
    assert found.problems == ()
    assert found.exit_code == 0
    # It was a soak: all of this happened.
    kinds = sum((result.kinds for result in found.phases), Counter[str]())
    for kind in ("complete", "refused", "left", "rejected"):
        assert kinds[kind], kind
    assert kinds["complete"] > NUM_REQUESTS / 3
    assert found.disturbed.cancels and found.disturbed.swaps
    assert found.drained["complete"]


class TestTheJudge:
    """The soak can fail: each kind of wrong answer is told from a right one."""

    ASK = Ask(0, "/v1/completions", {}, num_choices=1, max_tokens=2)
    STREAM = Ask(0, "/v1/completions", {"stream": True}, num_choices=1, max_tokens=2)
    WHOLE = b'{"choices":[{"index":0,"finish_reason":"length"}],"usage":{"completion_tokens":2}}'

    @pytest.mark.parametrize(
        ("status", "headers", "body", "kind"),
        [
            (200, {}, WHOLE, "complete"),
            (200, {}, WHOLE.replace(b"2}", b"1}"), "fault"),
            (200, {}, WHOLE.replace(b"length", b"abort"), "fault"),
            (200, {}, WHOLE.replace(b'"index":0', b'"index":1'), "fault"),
            (200, {}, b"{}", "fault"),
            (200, {}, b"", "fault"),
            (429, {"retry-after": "1"}, b'{"error":{"type":"QueueFull"}}', "refused"),
            (429, {}, b'{"error":{"type":"QueueFull"}}', "fault"),
            (503, {"retry-after": "5"}, b'{"error":{"type":"Cancelled"}}', "cancelled"),
            (408, {}, b'{"error":{"type":"DeadlinePassed"}}', "fault"),
            (400, {}, b'{"error":{"type":"BadRequest"}}', "fault"),
            (500, {}, b'{"error":{"type":"EngineFailed"}}', "fault"),
        ],
    )
    def test_whole_answers(
        self, status: int, headers: dict[str, str], body: bytes, kind: str
    ) -> None:
        assert judge(self.ASK, status, headers, body).kind == kind

    @pytest.mark.parametrize(
        ("events", "kind"),
        [
            (
                [b'{"choices":[{"index":0,"finish_reason":"length"}]}', b"USAGE", b"[DONE]"],
                "complete",
            ),
            ([END, b"USAGE"], "fault"),
            ([b'{"choices":[{"index":0,"finish_reason":null}]}', b"USAGE", b"[DONE]"], "fault"),
            ([END, b"[DONE]"], "fault"),
            ([b'{"error":{"type":"EngineFailed","code":500}}', b"[DONE]"], "fault"),
            ([b'{"error":{"type":"Cancelled","code":503}}', b"[DONE]"], "cancelled"),
        ],
    )
    def test_streams(self, events: list[bytes], kind: str) -> None:
        usage = b'{"choices":[],"usage":{"completion_tokens":2}}'
        lines = [b"data: " + (usage if event == b"USAGE" else event) for event in events]
        assert judge(self.STREAM, 200, {}, b"\n\n".join([*lines, b""])).kind == kind

    def test_leaks(self) -> None:
        rest = {"used_blocks": 0, "free_blocks": 9, "num_blocks": 9, "running": 0, "waiting": 0}
        assert leaks({**rest, "holders": []}) == []
        assert leaks({**rest, "used_blocks": 1, "free_blocks": 8, "holders": []})
        assert leaks({**rest, "running": 1, "holders": []})

    def test_memory(self) -> None:
        assert memory_grows(0.0, 0, 2000) == []
        assert memory_grows(5000.0, 1 << 20, 2000)
        assert memory_grows(0.0, 1 << 30, 10)


def test_asks_are_repeatable_and_of_every_kind() -> None:
    first, again = (list(make_asks(rows(), 500, LIMITS, ["a"])) for _ in range(2))
    assert first == again
    features = {feature for ask in first for feature in ask.features}
    assert features >= {"stream", "chat", "choices", "prompts", "adapter", "deadline", "logprobs"}
    assert {ask.leaves for ask in first} == {None, "half_body", "at_once", "early", "mid_stream"}
    assert Target("127.0.0.1", 1, "k").headers == {"authorization": "Bearer k"}
