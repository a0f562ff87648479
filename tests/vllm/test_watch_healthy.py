"""`ullage watch` over a real vLLM 0.32 that is well: five minutes of mixed traffic, and silence.

Half an hour of the same is benchmarks/watch/healthy.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from healthy import FLAGS, failures, save_healthy_model, silent
from mixed_traffic import Traffic
from plugin_server import KEY, ON, Servers
from watched import watching

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

HEALTHY_S = 300.0


def test_five_minutes_of_healthy_mixed_traffic_fire_nothing(
    launched: Servers, tmp_path: Path
) -> None:
    usual, launched.model = launched.model, save_healthy_model(tmp_path / "model")
    try:
        server = launched.start(FLAGS, ON)
        traffic = Traffic(server.url, KEY, HEALTHY_S, seed=1)
        with watching(server.url, "--interval", "2") as watch:
            watch.await_round(0)
            traffic.run()
        assert watch.said == ""
        assert failures(watch.rounds, traffic) == []
        assert len(watch.rounds) > 100
        # What needs a past of ten minutes has none yet; everything else had its say.
        assert all("own past" in why for why in silent(watch.rounds).values())
    finally:
        launched.stop()
        launched.model = usual
