"""The engine: add_request → schedule → run → postprocess, one step at a time, in one thread.

Holds the loop body and the request table. HTTP, threads and metrics are `serving`; whoever drives
`step()` reads its `StepReport`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from pathlib import Path

import torch

from ullage.engine.attention import AttentionPath, choose_path
from ullage.engine.batch import Batch, build_batch
from ullage.engine.compiled import DTYPES, CompiledDecoder, eager_because, fastest
from ullage.engine.kv import KVCache
from ullage.engine.linear import LINEARS
from ullage.engine.lora import LoraAdapter, LoraRefused, read_lora
from ullage.engine.model.decoder import Decoder
from ullage.engine.model.weights import Weights
from ullage.engine.options import EngineOptions, kv_blocks, scheduler_limits
from ullage.engine.paging.blocks import BlockPool
from ullage.engine.paging.layout import kv_layout
from ullage.engine.paging.prefix import salt_of
from ullage.engine.paging.tables import Tables
from ullage.engine.possible import require_possible
from ullage.engine.reports import (
    CancelReport,
    KVReport,
    PoolHistory,
    blocks_held_only_by,
    kv_report,
    oldest,
)
from ullage.engine.request import FinishReason, Request, SamplingParams, State
from ullage.engine.sampler import Choice, TokenLogprobs, choose, token_logprobs
from ullage.engine.scheduling.admission import Pace, RequestRefused, require_fits
from ullage.engine.scheduling.scheduler import Plan, Scheduler, Work
from ullage.engine.steps import Output, StepReport, advance
from ullage.engine.taps import Reader, Taps
from ullage.engine.text.loading import load_tokenizer
from ullage.engine.text.tokenizer import TextStream, Tokenizer

__all__ = ["Engine", "Output", "RequestRefused", "StepReport"]


@dataclass(slots=True)
class _Live:
    """What the engine keeps beside a request while it lives."""

    stream: TextStream | None
    random: random.Random


class Engine:
    """A model, a KV cache, a scheduler. Not thread-safe: one thread calls all its methods."""

    def __init__(
        self,
        decoder: Decoder | CompiledDecoder,
        tokenizer: Tokenizer | None,
        options: EngineOptions,
        max_model_len: int,
    ) -> None:
        """`tokenizer` None serves token ids only: no text, no stop strings, no end-of-sequence."""
        self.spec = decoder.spec
        self.tokenizer = tokenizer
        self.options = options
        self.max_model_len = max_model_len
        num_blocks = kv_blocks(decoder.kv_shapes, decoder.windows, options, max_model_len)
        layout = kv_layout(decoder.windows, decoder.kv_shapes)
        self.kv = KVCache(
            decoder.kv_shapes, layout, num_blocks, options.block_size, options.kv_format
        )
        self.pool = BlockPool(num_blocks, options.block_size)
        self.tables = Tables(
            self.pool,
            layout.groups,
            options.max_num_batched_tokens,
            caching=options.enable_prefix_caching,
        )
        self.scheduler = Scheduler(self.tables, scheduler_limits(options))
        self._decoder = decoder
        self.attention, self._attention = choose_path(options.attention, self.kv)
        self.loras: dict[str, LoraAdapter] = {}
        # Who looks at the logits of every step, a row for each request; None: nobody is called.
        self.on_logits: Callable[[Sequence[Request], torch.Tensor], None] | None = None
        self._live: dict[str, _Live] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._pace = Pace()
        self._history = PoolHistory()
        self._waiting_since_s: float | None = None
        self._freed_before = 0
        self._checks = os.environ.get("ULLAGE_CHECK") == "1"
        self.reader: Reader | None = None

    @classmethod
    def load(cls, model: str | Path, options: EngineOptions | None = None) -> Engine:
        """Read `model` (directory, safetensors or GGUF file) and get ready to serve it.

        Raises UnsupportedModel for a spec that it would not run exactly, MalformedCheckpoint for
        files that lie, BadUsage for options that do not go together.
        """
        from ullage.anatomy import load

        options = options or EngineOptions()
        found = load(model)
        spec = found.anatomy.spec
        max_model_len = require_possible(spec, options)  # before the weights are read
        tokenizer = load_tokenizer(found)
        linear, dtype = LINEARS[options.quantization], DTYPES[options.dtype]
        decoder = Decoder(spec, Weights(found), linear, max_model_len, dtype)
        return cls(fastest(decoder, options), tokenizer, options, max_model_len)

    @property
    def eager_because(self) -> str | None:
        """Why every step runs in torch; None where decodes and short prompts run compiled."""
        if isinstance(self._decoder, CompiledDecoder):
            return None
        return eager_because(self._decoder, self.options)

    @property
    def weights_bytes(self) -> int | None:
        """Bytes of the weights in memory; None where they are packed and cannot be counted."""
        return self._decoder.weights_bytes

    @property
    def decoder(self) -> Decoder:
        """The model's weights and wiring, whatever runs its steps."""
        run = self._decoder
        return run.plain if isinstance(run, CompiledDecoder) else run

    @property
    def compiled(self) -> bool:
        """Whether steps that the compiled decoder knows run in it."""
        return not isinstance(self._decoder, Decoder)

    @property
    def _eos_ids(self) -> frozenset[int]:
        return frozenset() if self.tokenizer is None else self.tokenizer.eos_ids

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def load_lora(self, name: str, path: str | Path, *, allow_partial: bool = False) -> LoraAdapter:
        """Read an adapter and offer it under `name`; may be called while another thread steps.

        Raises LoraRefused when it would not do all that it was trained for, or when there is no
        room for it; the adapters that are loaded stay as they are.
        """
        if not self.options.enable_lora:
            raise LoraRefused("adapters are off", expected="--enable-lora")
        if name in self.loras:
            raise LoraRefused(
                f"The lora adapter {name!r} has already been loaded.", field="lora_name"
            )
        if len(self.loras) >= self.options.max_loras:
            raise LoraRefused(
                f"{len(self.loras)} adapters are loaded",
                expected=f"at most {self.options.max_loras} (--max-loras); unload one first",
            )
        adapter = read_lora(
            name, path, self.spec, self.options.max_lora_rank, allow_partial=allow_partial
        )
        self.loras[name] = adapter
        return adapter

    def unload_lora(self, name: str) -> None:
        """Stop offering an adapter. Requests that run with it finish with it. Raises KeyError."""
        del self.loras[name]

    def add_request(
        self,
        request_id: str,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        lora: LoraAdapter | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_salt: str = "",
    ) -> tuple[Request, ...]:
        """Queue one request per answer wanted (params.n); RequestRefused when it can never run.

        Their ids are `request_id` for one, else `request_id-0`, `request_id-1`, …; the prompt is
        computed once for all of them. `deadline_s` is a time of `time.monotonic()`. Prefixes are
        shared only between requests of one `cache_salt`.
        """
        self.require_fits(prompt_ids, params)
        names = [request_id]
        if params.n > 1:
            names = [f"{request_id}-{index}" for index in range(params.n)]
        for name in names:
            if name in self._live:
                raise RequestRefused(f"a request {name!r} is already running")
        now_s = time.monotonic()
        salt = salt_of(None if lora is None else lora.serial, cache_salt)
        requests = tuple(
            Request(
                name,
                prompt_ids,
                params,
                now_s,
                lora,
                index=index,
                priority=priority,
                deadline_s=deadline_s,
                salt=salt,
            )
            for index, name in enumerate(names)
        )
        for request in requests:
            stream = None
            if self.tokenizer is not None:
                stream = self.tokenizer.stream(
                    params.stop, params.min_tokens, params.include_stop_str_in_output
                )
            # Seeded requests repeat; the others draw their seed from the system.
            seed = None if params.seed is None else params.seed + request.index
            self._live[request.id] = _Live(stream, random.Random(seed))  # noqa: S311
        self.scheduler.add(*requests)
        if deadline_s is not None:
            self._forget_met_deadlines()
            for request in requests:
                heappush(self._deadlines, (deadline_s, request.arrival, request))
        return requests

    def require_fits(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> None:
        """Raise RequestRefused unless prompt and answer fit the model's length and vocabulary."""
        require_fits(prompt_ids, params, self.max_model_len, self.spec.vocab_size)

    def abort(self, request: Request) -> None:
        """End `request` now; its blocks are free when this returns. Finished ones are left."""
        if request.state is not State.FINISHED:
            self._finish(request, FinishReason.ABORT, time.monotonic())

    def step(self) -> StepReport:
        """Run one batch. Returns an empty report when nobody waits or runs."""
        started_s = time.monotonic()
        expired = self._expire(started_s)
        plan = self.scheduler.schedule()
        scheduled_s = forwarded_s = time.monotonic()
        outputs: list[Output] = list(expired)
        chosen: list[tuple[Request, Choice]] = []
        num_recomputed = 0
        if plan.work:
            batch = build_batch(plan, self.pool.block_size)
            if plan.copies:
                self.kv.copy(*map(list, zip(*plan.copies, strict=True)))
            logits_BV = self._forward(batch)
            forwarded_s = time.monotonic()
            num_recomputed = sum(advance(work, started_s) for work in plan.work)
            outputs += self._prove(batch, logits_BV)
            chosen = self._choose(batch, logits_BV)
        ended_s = time.monotonic()
        outputs += [self._postprocess(request, choice, ended_s) for request, choice in chosen]
        if self._checks:
            self.scheduler.check()
        self._history.record(ended_s, self.pool.num_used)
        since_s = started_s if self._waiting_since_s is None else self._waiting_since_s
        self._waiting_since_s = ended_s if plan.waits else None
        freed, self._freed_before = self.pool.num_freed - self._freed_before, self.pool.num_freed
        return StepReport(
            plan,
            tuple(outputs),
            started_s,
            scheduled_s,
            forwarded_s,
            ended_s,
            num_recomputed,
            {cause: number * (ended_s - since_s) for cause, number in plan.waits.items()},
            freed,
        )

    def _forward(self, batch: Batch) -> torch.Tensor:
        rows = () if self.reader is None else self.reader.rows(batch)
        if self.reader is None or not rows:
            return self._decoder.forward(batch, self.kv, self._attention)
        taps = Taps(self.decoder, rows)
        logits_BV = self._decoder.forward(batch, self.kv, self._attention, taps)
        self.reader.take(batch, taps, logits_BV)
        return logits_BV

    def _prove(self, batch: Batch, logits_BV: torch.Tensor) -> list[Output]:
        """Let others find what prompts have computed so far; end those whose numbers are bad."""
        if not batch.proved:
            return []
        good = torch.isfinite(logits_BV[len(batch.sampled) :].sum(dim=1)).tolist()
        outputs: list[Output] = []
        for request, is_good in zip(batch.proved, good, strict=True):
            if is_good:
                self.tables.publish(request)
                continue
            outputs += [self._fail(one) for one in (*request.followers, request)]
        return outputs

    def _choose(self, batch: Batch, logits_BV: torch.Tensor) -> list[tuple[Request, Choice]]:
        """The next token of everybody whose newest one was computed, and of their followers."""
        rows: list[int] = []
        sampled: list[Request] = []
        for row, request in enumerate(batch.sampled):
            followers = self.scheduler.fork(request)
            for follower in followers:
                follower.first_scheduled_s = request.first_scheduled_s
                follower.num_cached_tokens = request.num_cached_tokens
            sampled += (request, *followers)
            rows += [row] * (1 + len(followers))
        if not sampled:
            return []
        wanted = logits_BV[: len(rows)] if len(rows) == len(batch.sampled) else logits_BV[rows]
        streams = [self._live[request.id].random for request in sampled]
        if self.on_logits is not None:
            self.on_logits(sampled, wanted)
        choices = choose(wanted, sampled, streams, self._eos_ids)
        return list(zip(sampled, choices, strict=True))

    def prompt_logits(
        self, prompt_ids: tuple[int, ...], lora: LoraAdapter | None = None
    ) -> torch.Tensor:
        """Float32 logits [tokens, vocab] at every position of a prompt, computed afresh in chunks.

        For measuring, while nobody is served. Raises RequestRefused for a prompt that never fits.
        """
        assert not self.has_work, "prompt_logits runs beside no requests"
        return torch.cat(list(self._prompt_chunks(prompt_ids, lora)))

    def prompt_logprobs(
        self, prompt_ids: tuple[int, ...], count: int, lora: LoraAdapter | None = None
    ) -> list[TokenLogprobs]:
        """Of every token of a prompt but the first, and of the `count` likeliest in its place.

        Computed afresh between two steps, in blocks of its own that are free again afterwards.
        Raises OutOfBlocks while those who run leave too few, RequestRefused as above.
        """
        found: list[TokenLogprobs] = []
        for logits_TV in self._prompt_chunks(prompt_ids, lora):
            # The last row says what would follow the prompt.
            wanted = prompt_ids[len(found) + 1 : len(found) + 1 + len(logits_TV)]
            found += [
                token_logprobs(logits_V, token_id, count)
                for logits_V, token_id in zip(logits_TV, wanted, strict=False)
            ]
        return found

    def read_prompt(self, prompt_ids: tuple[int, ...], path: AttentionPath) -> None:
        """Run a prompt through an attention path that reads along, in blocks as `prompt_logprobs`.

        Raises what that raises.
        """
        for _ in self._prompt_chunks(prompt_ids, None, path):
            pass

    @property
    def attention_path(self) -> AttentionPath:
        """What computes attention here, for a path that reads along to pass on to."""
        return self._attention

    def _prompt_chunks(
        self,
        prompt_ids: tuple[int, ...],
        lora: LoraAdapter | None,
        path: AttentionPath | None = None,
    ) -> Iterator[torch.Tensor]:
        """The prompt's logits, chunk by chunk; its blocks are given back at the end.

        With a `path` those of each chunk's last row only.
        """
        self.require_fits(prompt_ids, SamplingParams(max_tokens=0))
        request = Request("prompt_logits", prompt_ids, SamplingParams(), lora=lora)
        try:
            while request.num_uncomputed > 0:
                count = min(request.num_uncomputed, self.options.max_num_batched_tokens)
                self.tables.slide(request)
                self.tables.extend(request, count)
                tables = tuple(map(tuple, request.tables))
                work = Work(request, request.num_computed, count, tables, samples=True)
                batch = build_batch(Plan((work,)), self.pool.block_size)
                if path is None:
                    batch = replace(
                        batch, sampled_rows=torch.arange(count), sampled_lora=batch.lora
                    )
                yield self._decoder.forward(batch, self.kv, path or self._attention)
                request.num_computed += count
        finally:
            self.tables.release(request)

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far shall be found again; who runs is not disturbed."""
        self.pool.forget_all()

    def retry_after_s(self) -> float | None:
        """How long who waits now will keep the engine busy at its present pace; None: not known."""
        return self._pace.wait_s(len(self.scheduler.waiting) + 1, time.monotonic())

    def kv_report(self) -> KVReport:
        """The pool and who holds it, now."""
        return kv_report(self.scheduler, self.kv.bytes_per_block, self._history, time.monotonic())

    def cancel_oldest(self, percent: float, *, dry_run: bool = False) -> CancelReport:
        """End `percent` of the running requests, the oldest first, rounded up; 0 < percent ≤ 100.

        `dry_run` only says what would be freed. Whoever serves them must tell their clients.
        """
        chosen = oldest(self.scheduler.running, percent)
        promised = self.kv.bytes_per_block * blocks_held_only_by(chosen, self.pool)
        before = self.pool.num_free
        if not dry_run:
            for request in chosen:
                self.abort(request)
        freed = self.kv.bytes_per_block * (self.pool.num_free - before)
        return CancelReport(tuple(r.id for r in chosen), promised, freed, dry_run)

    def tokens_held(self) -> int:
        """Tokens whose KV lies in the pool, over all running requests."""
        return sum(request.num_computed for request in self.scheduler.running)

    def _forget_met_deadlines(self) -> None:
        """Most deadlines are met: without this their requests would be kept until then."""
        if len(self._deadlines) > 2 * len(self._live) + 64:
            late = [one for one in self._deadlines if one[2].state is not State.FINISHED]
            heapify(late)
            self._deadlines = late

    def _expire(self, now_s: float) -> list[Output]:
        """End those whose deadline has passed."""
        outputs = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, _, request = heappop(self._deadlines)
            if request.state is not State.FINISHED:
                request.expired = True
                self._finish(request, FinishReason.ABORT, now_s)
                outputs.append(Output(request, None, "", finished=True))
        return outputs

    def _postprocess(self, request: Request, choice: Choice, now_s: float) -> Output:
        """Take the token in, decide whether the request ends, and say what text is new."""
        if choice.token_id is None:
            return self._fail(request)
        self.tables.publish(request)
        request.output_ids.append(choice.token_id)
        since_s = None if request.last_token_s is None else now_s - request.last_token_s
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.last_token_s = now_s
        stream = self._live[request.id].stream
        reason = self._token_ends(request, choice.token_id)
        text = ""
        if stream is not None and reason is not FinishReason.STOP:
            text = stream.push(choice.token_id)
            if stream.stopped:
                reason = FinishReason.STOP
        if reason is not None:
            if stream is not None:
                text += stream.close()
            self._finish(request, reason, now_s)
        finished = reason is not None
        return Output(request, choice.token_id, text, finished, since_s, choice.logprobs)

    def _fail(self, request: Request) -> Output:
        """End a request whose numbers are not finite: nobody may find or inherit them."""
        alone = self.tables.discard(request)
        if alone:
            self.kv.clear(alone)
        self._finish(request, FinishReason.ERROR, time.monotonic())
        return Output(request, None, "", finished=True)

    def _token_ends(self, request: Request, token_id: int) -> FinishReason | None:
        params = request.params
        is_eos = token_id in self._eos_ids and not params.ignore_eos
        if token_id in params.stop_token_ids or is_eos:
            return FinishReason.STOP
        if len(request.output_ids) >= params.max_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(self, request: Request, reason: FinishReason, now_s: float) -> None:
        self.scheduler.finish(request)
        self._live.pop(request.id)
        self._pace.ended(now_s)
        request.finish_reason = reason
        request.finished_s = now_s
