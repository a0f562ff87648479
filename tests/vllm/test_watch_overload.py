"""`ullage watch` over a real vLLM 0.32 in an overload: the storm, its cause, acting by a policy.

The whole course, with a drain, is benchmarks/watch/overload.py.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plugin_server import (
    BLOCK_SIZE,
    BYTES_PER_BLOCK,
    ON,
    TIGHT,
    Server,
    Servers,
    eventually,
    prompt_of,
)
from watched import watching

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CANCELLED = 'ullage_requests_cancelled_total{by="operator"}'
NUM_BLOCKS = 64
OUTPUT_TOKENS = 900
PROMPT_TOKENS = 30


class Load:
    """Twelve clients, each with a request of half the pool at a time, answered in one piece: to
    read streams would take a client longer than a fast server takes to write them."""

    def __init__(self, server: Server) -> None:
        self._server, self._stop = server, threading.Event()
        self.reasons: list[str] = []
        self._clients = [threading.Thread(target=self._ask, args=(n,)) for n in range(12)]
        for client in self._clients:
            client.start()

    def _ask(self, number: int) -> None:
        while not self._stop.is_set():
            answer = self._server.ask(prompt_of(number, PROMPT_TOKENS), OUTPUT_TOKENS)
            self.reasons.append(answer.raise_for_status().json()["choices"][0]["finish_reason"])
            number = (number + 12) % 140

    def stop(self) -> None:
        self._stop.set()
        for client in self._clients:
            client.join(120)


@pytest.fixture(scope="module")
def server(launched: Servers) -> Iterator[Server]:
    yield launched.start(TIGHT, ON)
    launched.stop()


@pytest.fixture(scope="module")
def load(server: Server) -> Iterator[Load]:
    made = Load(server)
    yield made
    made.stop()


def test_a_preemption_storm_is_told_with_its_true_cause(load: Load, server: Server) -> None:
    """The pool holds two requests of that length, and more run: they are admitted by their
    prompts, and grow."""
    num = 0
    with watching(server.url, "--interval", "1", "--select", "W003") as watch:

        def storm() -> dict[str, Any] | None:
            nonlocal num
            (finding,) = watch.await_round(num)["findings"]
            num += 1
            return finding if "run at once" in (finding["cause"] or "") else None

        finding = eventually(storm, limit_s=180)
    facts = {fact["name"]: fact["value"] for fact in finding["evidence"]}
    assert facts["mean length"] == PROMPT_TOKENS + OUTPUT_TOKENS
    fit = NUM_BLOCKS * BLOCK_SIZE / (PROMPT_TOKENS + OUTPUT_TOKENS)
    assert facts["requests that fit"] == pytest.approx(fit, abs=0.05)
    assert facts["running mean"] > fit
    assert facts["preemptions gained"] >= 10
    assert "--max-num-seqs" in finding["remedy"]


def policy(folder: Path) -> tuple[Path, Path]:
    """(a policy that ends two in five once the pool is half held, its log)."""
    log, file = folder / "acted.jsonl", folder / "POLICY.toml"
    file.write_text(
        f'log = "{log}"\n[limits]\nper_replica_per_hour = 1\n'
        '[[action]]\nname = "shed"\nwhen = "kv_used_ratio > 0.5"\nfor_s = 0\n'
        'do = "cancel_oldest"\npercent = 40\n'
    )
    return file, log


def acted(load: Load, server: Server, folder: Path, *flags: str, until: str) -> list[dict]:
    """The log of a `--act` over the overload, once it tells of such an outcome."""
    file, log = policy(folder)
    with watching(server.url, "--interval", "1", "--act", str(file), *flags) as watch:

        def told() -> bool:
            assert watch.process.poll() is None
            return log.exists() and f'"{until}"' in log.read_text()

        eventually(told, limit_s=180)
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_acting_is_only_told_without_yes(load: Load, server: Server, tmp_path: Path) -> None:
    before = server.metrics()[CANCELLED]
    log = acted(load, server, tmp_path, until="would")
    (would,) = [entry for entry in log if entry["outcome"] == "would"]
    assert would["dry_run"] is True
    assert would["num_requests"] >= 1
    assert would["promised_bytes"] > 0
    assert not {"begun", "done"} & {entry["outcome"] for entry in log}
    assert server.metrics()[CANCELLED] == before
    assert not [one for one in load.reasons if one == "abort"]


def test_with_yes_the_oldest_are_ended_and_free_what_was_promised(
    load: Load, server: Server, tmp_path: Path
) -> None:
    before = server.metrics()[CANCELLED]
    log = acted(load, server, tmp_path, "--yes", until="seen")
    (done,) = [entry for entry in log if entry["outcome"] == "done"]
    assert done["dry_run"] is False
    assert done["freed_bytes"] == done["promised_bytes"] > 0
    assert done["freed_bytes"] % BYTES_PER_BLOCK == 0
    assert server.metrics()[CANCELLED] - before == done["num_requests"] >= 1
    eventually(lambda: load.reasons.count("abort") == done["num_requests"])
    (seen,) = [entry for entry in log if entry["outcome"] == "seen"]
    assert seen["promised_bytes"] == done["promised_bytes"]
    assert {"kv_used_ratio", "kv_used_bytes"} <= seen["before"].keys()
