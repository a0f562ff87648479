"""The embedded engine as a peer. Settings: model, threads, options (EngineOptions' fields)."""

from __future__ import annotations

import time
from typing import Any

from protocol import Json, TraceClock, serve

import ullage
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.request import SamplingParams


class UllagePeer:
    """Drives Engine.step() in this thread."""

    def __init__(self, settings: Json) -> None:
        # Not at the top: ullage.engine must come first, it says how OpenMP waits.
        import torch

        torch.set_num_threads(settings["threads"])
        self._torch = torch.__version__
        self._options: dict[str, Any] = settings["options"]
        self._engine = Engine.load(settings["model"], EngineOptions(**self._options))
        self._count = 0
        self._room = self._engine.max_model_len

    def describe(self) -> Json:
        engine = self._engine
        return {
            "engine": f"ullage {ullage.__version__}, torch {self._torch}",
            "settings": self._options,
            "weights_bytes": engine.weights_bytes,
            "kv_bytes_per_token": engine.kv.bytes_per_block / engine.options.block_size,
        }

    def prefill(self, prompt_ids: list[int]) -> float:
        self._add(prompt_ids, 1)
        started = time.perf_counter()
        while self._engine.has_work:
            self._engine.step()
        return time.perf_counter() - started

    def add(self, prompts: list[list[int]]) -> None:
        names = {self._add(prompt, self._room - len(prompt)) for prompt in prompts}
        while names:
            for output in self._engine.step().outputs:
                names.discard(output.request.id)

    def decode(self, steps: int) -> list[float]:
        num_running = len(self._engine.scheduler.running)
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            report = self._engine.step()
            seconds.append(time.perf_counter() - started)
            assert len(report.outputs) == num_running, "a sequence got no token"
        return seconds

    def clear(self) -> None:
        for request in (*self._engine.scheduler.running, *self._engine.scheduler.waiting):
            self._engine.abort(request)

    def trace(self, rows: list[tuple[list[int], int]], concurrency: int) -> Json:
        limit = self._engine.options.max_num_seqs
        assert limit == concurrency, f"max_num_seqs is {limit}, not {concurrency}"
        clock = TraceClock(len(rows))
        index = {self._add(prompt, count): row for row, (prompt, count) in enumerate(rows)}
        while self._engine.has_work:
            for output in self._engine.step().outputs:
                clock.token(index[output.request.id])
        return clock.result(rows)

    def score(self, windows: list[list[int]], chunk: int) -> list[Json]:
        limit = self._engine.options.max_num_batched_tokens
        assert limit == chunk, f"max_num_batched_tokens is {limit}, not {chunk}"
        found = []
        for window in windows:
            logits_TV = self._engine.prompt_logits(tuple(window))[:-1]
            logprobs_TV = logits_TV.double().log_softmax(dim=-1)
            logprobs = [
                row[token].item() for row, token in zip(logprobs_TV, window[1:], strict=True)
            ]
            found.append({"logprobs": logprobs, "top": logits_TV.argmax(dim=-1).tolist()})
            self._engine.reset_prefix_cache()
        return found

    def _add(self, prompt_ids: list[int], max_tokens: int) -> str:
        self._count += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._engine.add_request(str(self._count), tuple(prompt_ids), params)
        return str(self._count)


if __name__ == "__main__":
    serve(UllagePeer)
