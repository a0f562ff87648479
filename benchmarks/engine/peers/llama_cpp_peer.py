"""llama.cpp as a peer, through llama_decode with many sequences, as its server drives it.

Settings: model (GGUF), threads, max_seqs, context (tokens of one sequence), kv_unified,
flash_attention (auto, on, off), ubatch. Greedy: the argmax over its logits.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field

import llama_cpp as lc
import numpy as np
from protocol import Json, TraceClock, serve

BATCH = 2048
FLASH = {
    "auto": lc.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": lc.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": lc.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


@dataclass(slots=True)
class Sequence:
    """One sequence: `pending` tokens are not yet in the cache, `position` of them are."""

    id: int
    pending: list[int]
    position: int = 0
    produced: list[int] = field(default_factory=list)


class LlamaCppPeer:
    """One context. Each step is one llama_decode: a token of every decode, then prompts."""

    def __init__(self, settings: Json) -> None:
        self._settings = settings
        lc.llama_backend_init()
        model_params = lc.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = lc.llama_model_load_from_file(settings["model"].encode(), model_params)
        if not self._model:
            raise ValueError(f"{settings['model']} cannot be loaded")
        params = lc.llama_context_default_params()
        params.n_seq_max = settings["max_seqs"]
        params.n_ctx = settings["max_seqs"] * settings["context"]
        params.n_batch = BATCH
        params.n_ubatch = settings["ubatch"]
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.kv_unified = settings["kv_unified"]
        params.flash_attn_type = FLASH[settings["flash_attention"]]
        params.no_perf = True
        self._context = lc.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError("no context with these settings")
        self._memory = lc.llama_get_memory(self._context)
        vocab = lc.llama_model_get_vocab(self._model)
        self._num_vocab = lc.llama_vocab_n_tokens(vocab)
        self._batch = lc.llama_batch_init(BATCH, 0, 1)
        self._free = list(range(settings["max_seqs"] - 1, -1, -1))
        self._kept: list[Sequence] = []

    def describe(self) -> Json:
        name = ctypes.create_string_buffer(128)
        lc.llama_model_desc(self._model, name, 128)
        return {
            "engine": f"llama-cpp-python {lc.__version__}",
            "settings": {k: v for k, v in self._settings.items() if k != "model"},
            "model": name.value.decode(),
            "kv": "float16",
            "weights_bytes": lc.llama_model_size(self._model),
            "system": lc.llama_print_system_info().decode(),
        }

    def prefill(self, prompt_ids: list[int]) -> float:
        sequence = self._new(prompt_ids)
        started = time.perf_counter()
        while not sequence.produced:
            self._step([sequence])
        seconds = time.perf_counter() - started
        self._end(sequence)
        return seconds

    def add(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            sequence = self._new(prompt)
            while not sequence.produced:
                self._step([sequence])
            self._kept.append(sequence)

    def decode(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            self._step(self._kept)
            seconds.append(time.perf_counter() - started)
        return seconds

    def clear(self) -> None:
        for sequence in self._kept:
            self._end(sequence)
        self._kept = []

    def trace(self, rows: list[tuple[list[int], int]], concurrency: int) -> Json:
        clock = TraceClock(len(rows))
        waiting = list(enumerate(rows))[::-1]
        running: dict[int, Sequence] = {}
        while waiting or running:
            while waiting and len(running) < concurrency:
                row, (prompt, _) = waiting.pop()
                running[row] = self._new(prompt)
            before = {row: len(sequence.produced) for row, sequence in running.items()}
            # Decodes first, so that no prompt keeps them waiting.
            self._step(sorted(running.values(), key=lambda s: len(s.pending)))
            for row, sequence in list(running.items()):
                if len(sequence.produced) > before[row]:
                    clock.token(row)
                if len(sequence.produced) == rows[row][1]:
                    self._end(running.pop(row))
        return clock.result(rows)

    def score(self, windows: list[list[int]], chunk: int) -> list[Json]:
        found = []
        for window in windows:
            sequence = self._new(window)
            rows = []
            for start in range(0, len(window), chunk):
                tokens = window[start : start + chunk]
                self._batch.n_tokens = len(tokens)
                for index, token in enumerate(tokens):
                    self._put(index, token, start + index, sequence.id, wanted=True)
                self._run()
                rows.append(self._logits(len(tokens)).astype(np.float64))
            logits_TV = np.concatenate(rows)[:-1]
            shifted = logits_TV - logits_TV.max(axis=1, keepdims=True)
            normal_T = np.log(np.exp(shifted).sum(axis=1))
            actual = np.array(window[1:])
            logprobs_T = shifted[np.arange(len(actual)), actual] - normal_T
            found.append(
                {"logprobs": logprobs_T.tolist(), "top": logits_TV.argmax(axis=1).tolist()}
            )
            self._end(sequence)
        return found

    # --- one llama_decode ---

    def _new(self, prompt_ids: list[int]) -> Sequence:
        return Sequence(self._free.pop(), list(prompt_ids))

    def _end(self, sequence: Sequence) -> None:
        lc.llama_memory_seq_rm(self._memory, sequence.id, -1, -1)
        self._free.append(sequence.id)

    def _step(self, sequences: list[Sequence]) -> None:
        """Run what is pending, as far as the batch reaches; whoever is through gets a token."""
        used = 0
        ready: list[Sequence] = []
        for sequence in sequences:
            count = min(len(sequence.pending), BATCH - used)
            for index, token in enumerate(sequence.pending[:count]):
                last = index == len(sequence.pending) - 1
                self._put(used + index, token, sequence.position + index, sequence.id, last)
            used += count
            sequence.position += count
            if count == len(sequence.pending):
                ready.append(sequence)
            sequence.pending = sequence.pending[count:]
        self._batch.n_tokens = used
        self._run()
        tokens = self._logits(len(ready)).argmax(axis=1) if ready else []
        for sequence, token in zip(ready, tokens, strict=True):
            sequence.produced.append(int(token))
            sequence.pending = [int(token)]

    def _put(self, index: int, token: int, position: int, sequence: int, wanted: bool) -> None:
        batch = self._batch
        batch.token[index] = token
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = sequence
        batch.logits[index] = wanted

    def _run(self) -> None:
        code = lc.llama_decode(self._context, self._batch)
        if code != 0:
            raise RuntimeError(f"llama_decode gave {code}")

    def _logits(self, count: int) -> np.ndarray:
        """[count, vocab] of the rows whose logits were wanted, in their order."""
        pointer = lc.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(count, self._num_vocab))


if __name__ == "__main__":
    serve(LlamaCppPeer)
