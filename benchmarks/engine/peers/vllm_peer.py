"""vLLM for CPU as a peer, in one process. Settings: model, threads, options (its LLM arguments).

Its engine is stepped by hand, so that prefill and decode can be told apart.
"""

from __future__ import annotations

import os
import time

# Without these the engine runs in a process of its own, which nobody could step or stop.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import vllm
from protocol import Json, TraceClock, serve
from vllm import LLM, SamplingParams


class VllmPeer:
    """Drives llm_engine.step() in this thread."""

    def __init__(self, settings: Json) -> None:
        self._options = settings["options"]
        self._llm = LLM(
            settings["model"],
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **self._options,
        )
        self._engine = self._llm.llm_engine
        self._count = 0
        self._kept: list[str] = []

    def describe(self) -> Json:
        config = self._engine.vllm_config
        return {
            "engine": f"vllm {vllm.__version__}",
            "settings": self._options,
            "dtype": str(config.model_config.dtype),
            "kv": config.cache_config.cache_dtype,
            "block_size": config.cache_config.block_size,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "environment": {
                name: value
                for name, value in os.environ.items()
                if name.startswith(("VLLM_CPU", "OMP_", "LD_PRELOAD"))
            },
        }

    def prefill(self, prompt_ids: list[int]) -> float:
        self._add(prompt_ids, 1)
        started = time.perf_counter()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - started

    def add(self, prompts: list[list[int]]) -> None:
        room = self._engine.vllm_config.model_config.max_model_len
        names = {self._add(prompt, room - len(prompt)) for prompt in prompts}
        self._kept += names
        while names:
            for output in self._engine.step():
                if output.outputs[0].token_ids:
                    names.discard(output.request_id)

    def decode(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            outputs = self._engine.step()
            seconds.append(time.perf_counter() - started)
            assert len(outputs) == len(self._kept), "a sequence got no token"
        return seconds

    def clear(self) -> None:
        self._engine.abort_request(self._kept)
        self._kept = []
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def trace(self, rows: list[tuple[list[int], int]], concurrency: int) -> Json:
        limit = self._engine.vllm_config.scheduler_config.max_num_seqs
        assert limit == concurrency, f"max_num_seqs is {limit}, not {concurrency}"
        clock = TraceClock(len(rows))
        index = {self._add(prompt, count): row for row, (prompt, count) in enumerate(rows)}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                row = index[output.request_id]
                produced = len(output.outputs[0].token_ids)
                if produced > clock.tokens[row]:
                    clock.token(row, produced - clock.tokens[row])
        return clock.result(rows)

    def score(self, windows: list[list[int]], chunk: int) -> list[Json]:
        """vLLM cuts prompts by its own budget, max_num_batched_tokens; `chunk` is not used."""
        del chunk
        found = []
        for window in windows:
            params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
            (output,) = self._llm.generate([{"prompt_token_ids": window}], params, use_tqdm=False)
            logprobs, top = [], []
            for token, ranked in zip(window[1:], output.prompt_logprobs[1:], strict=True):
                logprobs.append(ranked[token].logprob)
                top.append(next(t for t, entry in ranked.items() if entry.rank == 1))
            found.append({"logprobs": logprobs, "top": top})
        return found

    def _add(self, prompt_ids: list[int], max_tokens: int) -> str:
        self._count += 1
        name = str(self._count)
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt_ids}, params)
        return name


if __name__ == "__main__":
    serve(VllmPeer)
