"""transformers as a peer. Settings: model, threads, mode, max_seqs, page_size.

Mode "continuous" is its continuous batching, stepped by hand as its background thread does; mode
"generate" is what generate() does for prompts of one length: a static batch with a cache.
"""

from __future__ import annotations

import queue
import time
from typing import Any

import torch
import transformers
from protocol import Json, TraceClock, serve
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.generation import ContinuousBatchingConfig


class _Transformers:
    def __init__(self, settings: Json) -> None:
        torch.set_num_threads(settings["threads"])
        torch.set_grad_enabled(False)
        self._settings = settings
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    def describe(self) -> Json:
        return {
            "engine": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "settings": {k: v for k, v in self._settings.items() if k != "model"},
            "dtype": str(self._model.dtype),
            "kv": "float32",
            "attention": self._model.config._attn_implementation,
        }

    def score(self, windows: list[list[int]], chunk: int) -> list[Json]:
        """One pass over each window: float32 keys and values are the same in a cache."""
        del chunk
        found = []
        for window in windows:
            logits_TV = self._model(torch.tensor([window])).logits[0, :-1]
            actual_T1 = torch.tensor(window[1:])[:, None]
            logprobs_T = logits_TV.double().log_softmax(dim=-1).gather(1, actual_T1)[:, 0]
            found.append(
                {"logprobs": logprobs_T.tolist(), "top": logits_TV.argmax(dim=-1).tolist()}
            )
        return found


class GeneratePeer(_Transformers):
    """A static batch: all sequences have one length, as the benchmark's prompts do."""

    def __init__(self, settings: Json) -> None:
        super().__init__(settings)
        self._prompts: list[list[int]] = []
        self._cache: Any = None
        self._last_B1: torch.Tensor | None = None

    def prefill(self, prompt_ids: list[int]) -> float:
        started = time.perf_counter()
        self._forward(torch.tensor([prompt_ids]), DynamicCache(config=self._model.config))
        return time.perf_counter() - started

    def add(self, prompts: list[list[int]]) -> None:
        """A static batch cannot grow: all of it is run again, eight prompts at a time."""
        self._prompts += prompts
        caches, tokens = [], []
        for start in range(0, len(self._prompts), 8):
            cache = DynamicCache(config=self._model.config)
            tokens.append(self._forward(torch.tensor(self._prompts[start : start + 8]), cache))
            caches.append(cache)
        whole = DynamicCache(config=self._model.config)
        for layer in range(self._model.config.num_hidden_layers):
            whole.update(
                torch.cat([cache.layers[layer].keys for cache in caches]),
                torch.cat([cache.layers[layer].values for cache in caches]),
                layer,
            )
        self._cache, self._last_B1 = whole, torch.cat(tokens)

    def decode(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            assert self._last_B1 is not None
            self._last_B1 = self._forward(self._last_B1, self._cache)
            seconds.append(time.perf_counter() - started)
        return seconds

    def clear(self) -> None:
        self._prompts, self._cache, self._last_B1 = [], None, None

    def trace(self, rows: list[tuple[list[int], int]], concurrency: int) -> Json:
        raise NotImplementedError("a static batch does not serve a trace")

    def _forward(self, ids_BT: torch.Tensor, cache: Any) -> torch.Tensor:
        out = self._model(ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(dim=-1, keepdim=True)


class ContinuousPeer(_Transformers):
    """ContinuousBatchingManager without its thread: prepare, compute, update, one step a call."""

    def __init__(self, settings: Json) -> None:
        super().__init__(settings)
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=16)
        config = ContinuousBatchingConfig(
            page_size=settings["page_size"],
            num_blocks=settings["num_blocks"],
            max_batch_tokens=settings["max_batch_tokens"],
            max_requests_per_batch=settings["max_seqs"],
            use_async_batching=False,
        )
        self._manager: Any = self._model.init_continuous_batching(generation, config)
        self._manager.warmup()
        self._manager.current_batch = 0
        self._count = 0
        self._kept: set[str] = set()

    def prefill(self, prompt_ids: list[int]) -> float:
        self._add(prompt_ids, 1)
        started = time.perf_counter()
        self._until_idle()
        return time.perf_counter() - started

    def add(self, prompts: list[list[int]]) -> None:
        names = {self._add(prompt, 1000 - len(prompt)) for prompt in prompts}
        self._kept |= names
        while names:
            names -= set(self._step())

    def decode(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            produced = self._step()
            seconds.append(time.perf_counter() - started)
            assert set(produced) == self._kept, "a sequence got no token"
        return seconds

    def clear(self) -> None:
        for name in self._kept:
            self._manager.cancel_request(name)
        self._kept = set()
        self._until_idle()

    def trace(self, rows: list[tuple[list[int], int]], concurrency: int) -> Json:
        assert self._settings["max_seqs"] == concurrency
        clock = TraceClock(len(rows))
        index = {self._add(prompt, count): row for row, (prompt, count) in enumerate(rows)}
        while sum(clock.tokens) < sum(count for _, count in rows):
            for name in self._step():
                clock.token(index[name])
        return clock.result(rows)

    def _add(self, prompt_ids: list[int], max_tokens: int) -> str:
        self._count += 1
        name = str(self._count)
        self._manager.add_request(
            prompt_ids, name, max_new_tokens=max_tokens, streaming=True, eos_token_id=-1
        )
        return name

    def _step(self) -> list[str]:
        """One step; the requests that got a token."""
        processor = self._manager.batch_processor
        if processor.prepare_next_batch():
            self._manager._generation_step()
            self._manager.current_batch += 1
            processor.update_batch()
        names = []
        while True:
            try:
                output = self._manager.output_router.output_queue.get_nowait()
            except queue.Empty:
                return names
            if output.error is not None:
                raise RuntimeError(output.error)
            names.append(output.request_id)

    def _until_idle(self) -> None:
        processor = self._manager.batch_processor
        self._step()
        while processor.has_pending_requests():
            self._step()


MODES = {"continuous": ContinuousPeer, "generate": GeneratePeer}

if __name__ == "__main__":
    serve(lambda settings: MODES[settings["mode"]](settings))
