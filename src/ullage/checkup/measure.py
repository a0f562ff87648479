"""The experiments on a serving engine, in order: warm-up, prefill, growth, batch, trace.

Holds what is measured and how; each returns plain data. What it means is `comparison.py` and
`document.py`. Works against any OpenAI-compatible server; what a server does not tell stays None.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from ullage.checkup.metrics import Sample, Sampler, Series
from ullage.traffic.load import (
    PlannedRequest,
    RequestResult,
    Target,
    accepted_extras,
    run_load,
    tokenize,
)
from ullage.traffic.prompts import PromptSource, make_prompt, passage, random_ids
from ullage.traffic.summary import decode_rate, output_tokens
from ullage.traffic.trace import Rates, Workload, recorded_rows, scale_to_machine

Progress = Callable[[str], None]

SEED = 20231116
PREFILL_LENGTHS = (64, 128, 256, 512)
GROWTH_PROMPT, GROWTH_OUTPUT = 24, 160
BATCH_SIZE, BATCH_PROMPT, BATCH_OUTPUT = 8, 32, 24
# One experiment may not eat the others' time on a slow machine.
GROWTH_BUDGET_S = 14.0
GROWTH_LEAST_S = 3.0
PREFILL_BUDGET_S = 12.0
FASTEST_S, FAST_S, SLOW_S = 0.005, 0.03, 0.25


class RunFailed(Exception):
    """The engine answered nothing usable; `str()` is the reason.

    Not an UllageError: the checkup still has its audit and its size to report.
    """


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A lone prompt and the time to its first token."""

    prompt_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class GrowthPoint:
    """KV in use while one sequence grows: its tokens (prompt and generated) and what was used."""

    tokens: int
    used_ratio: float | None
    used_bytes: float | None


@dataclass(frozen=True, slots=True)
class Growth:
    """One sequence alone: the growth of its KV and its speed in tokens per second."""

    points: tuple[GrowthPoint, ...]
    tokens_per_s: float
    mean_context: float


@dataclass(frozen=True, slots=True)
class Batch:
    """`num_sequences` decoding together: tokens per second of all of them; None: never together."""

    num_sequences: int
    tokens_per_s: float | None
    mean_context: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """Everything that one engine was seen to do."""

    target: Target
    prompts: PromptSource
    prefill: tuple[PrefillPoint, ...]
    growth: Growth
    batch: Batch
    workload: Workload
    results: tuple[RequestResult, ...]
    series: Series


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure. `max_model_len` is what the engine was started with, or what it says;
    `block_size` is its own word, None where it does not tell."""

    num_requests: int
    duration_s: float
    max_model_len: int
    vocab_size: int
    max_num_seqs: int | None = None
    block_size: int | None = None


async def measure(target: Target, plan: Plan, progress: Progress) -> Measurements:
    """All experiments, one after the other.

    Raises:
        RunFailed: when the first requests already fail, so that nothing can be measured.
    """
    progress("warming up")
    target, prompts = await warm_up(target, plan.max_model_len, plan.vocab_size)
    progress("measuring prefill")
    prefill = await _measure_prefill(target, prompts, plan)
    progress("growing one sequence")
    growth = await _measure_growth(target, prompts, plan)
    progress("decoding a batch")
    batch = await _measure_batch(target, prompts, plan)
    rates = Rates(
        prefill_tokens_per_s=statistics.median(p.prompt_tokens / p.ttft_s for p in prefill),
        decode_tokens_per_s=batch.tokens_per_s or growth.tokens_per_s,
    )
    workload = scale_to_machine(
        recorded_rows(),
        num_requests=plan.num_requests,
        duration_s=plan.duration_s,
        max_model_len=plan.max_model_len,
        rates=rates,
    )
    results, series = await _serve_trace(target, prompts, workload, plan, progress)
    return Measurements(target, prompts, prefill, growth, batch, workload, results, series)


async def warm_up(
    target: Target, max_model_len: int, vocab_size: int
) -> tuple[Target, PromptSource]:
    """A completed generation at the sizes to come, and how this server takes prompts.

    `vocab_size` 0 stands for a server whose vocabulary is not known. Raises RunFailed.
    """
    ids = await tokenize(target, passage())
    if ids is None and vocab_size > 0:
        ids = random_ids(vocab_size, seed=SEED)
    source = PromptSource(ids=ids or (), words=tuple(passage().split()))
    probe = _planned(source, 0.0, min(16, max_model_len // 2), 4, seed=1)
    target, result = await accepted_extras(target, probe)
    if result.error is not None and source.ids:
        # A server that takes no token ids may still take text; count what a word makes of tokens.
        source = PromptSource(words=source.words)
        probe = _planned(source, 0.0, 16, 4, seed=1)
        target, result = await accepted_extras(target, probe)
        if result.error is None and result.prompt_tokens:
            source = PromptSource(words=source.words, tokens_per_word=result.prompt_tokens / 16)
    if result.error is not None:
        raise RunFailed(f"the warm-up request failed: {result.error}")
    longest = _fitting(max(PREFILL_LENGTHS) // 2, max_model_len)
    await _alone(target, _planned(source, 0.0, longest, 4, seed=2), "the warm-up")
    return target, source


async def _measure_prefill(
    target: Target, prompts: PromptSource, plan: Plan
) -> tuple[PrefillPoint, ...]:
    """Time to the first token of lone prompts, from short to long, within a time budget."""
    points: list[PrefillPoint] = []
    spent = 0.0
    for length in sorted({_fitting(n, plan.max_model_len) for n in PREFILL_LENGTHS}):
        expected = 2 * points[-1].ttft_s if points else 0.0
        if points and spent + expected > PREFILL_BUDGET_S:
            break
        request = _planned(prompts, 0.0, length, 2, seed=100 + length)
        result = await _alone(target, request, f"a prompt of {length} tokens")
        assert result.ttft_s is not None, "an answer without an error has a first token"
        points.append(PrefillPoint(result.prompt_tokens or length, result.ttft_s))
        spent += result.ttft_s
    return tuple(points)


async def _measure_growth(target: Target, prompts: PromptSource, plan: Plan) -> Growth:
    """Generate with one sequence while looking at the KV cache as often as is polite.

    One after the other for GROWTH_LEAST_S: what a model's whole length is over in is too short to
    be looked at often enough, and a short answer that came haltingly tells a pace at which the
    next one is.
    """
    prompt = max(1, min(GROWTH_PROMPT, plan.max_model_len // 4))
    request = _planned(prompts, 0.0, prompt, min(8, plan.max_model_len - prompt), seed=3)
    rate = _lone_rate(await _alone(target, request, "a short answer"))
    grown: list[RequestResult] = []
    points: list[GrowthPoint] = []
    start = time.perf_counter()
    while not grown or time.perf_counter() - start < GROWTH_LEAST_S:
        output = _growth_output(rate, plan.block_size)
        output = max(1, min(output, plan.max_model_len - prompt))
        request = _planned(prompts, 0.0, prompt, output, seed=4 + len(grown))
        async with Sampler(target, interval_s=_growth_interval_s(output, rate)) as sampler:
            result = await _alone(target, request, "the growing sequence")
        grown.append(result)
        points += _growth_points(sampler.series, result.prompt_tokens or prompt, result)
        rate = _lone_rate(result)
    longest = max(map(output_tokens, grown))
    whole = [r for r in grown if output_tokens(r) == longest and _lone_rate(r) is not None]
    if not whole:
        raise RunFailed(
            "the growing sequence gave one token only, so nothing can be said of decoding"
        )
    seconds = sum(r.event_times_s[-1] - r.event_times_s[0] for r in whole)
    return Growth(
        points=tuple(sorted(points, key=lambda point: point.tokens)),
        tokens_per_s=len(whole) * (longest - 1) / seconds,
        mean_context=(whole[0].prompt_tokens or prompt) + longest / 2,
    )


def _growth_interval_s(output: int, rate: float | None) -> float:
    """Eight looks at the growth at least, but no more than the server can well answer."""
    return FAST_S if rate is None else max(FASTEST_S, min(FAST_S, output / rate / 8))


def _growth_output(rate: float | None, block_size: int | None) -> int:
    """How many tokens to grow by: long enough to be sampled, short enough for the budget.

    Two rises must be seen for a slope; four blocks make sure of them.
    """
    wanted = max(GROWTH_OUTPUT, 4 * (block_size or 0))
    if rate is None:
        return wanted
    return max(8, min(max(wanted, int(GROWTH_LEAST_S * rate)), int(GROWTH_BUDGET_S * rate)))


def _lone_rate(result: RequestResult) -> float | None:
    """Tokens per second after the first, over the whole answer; None for a single token.

    The whole and not a median gap: a busy client takes in several events at once.
    """
    span_s = result.event_times_s[-1] - result.event_times_s[0]
    tokens = output_tokens(result) - 1
    return tokens / span_s if tokens > 0 and span_s > 0 else None


def _growth_points(
    series: Series, prompt_tokens: int, result: RequestResult
) -> tuple[GrowthPoint, ...]:
    """Samples taken while the sequence was decoding, by its tokens at that instant.

    Both numbers come from the same page of metrics: tokens from the counter of generated tokens.
    Without that counter there are no points, since client and engine clocks tell of other moments.
    """
    first = next(
        (s.generation_tokens for s in series.samples if s.generation_tokens is not None), None
    )
    if first is None:
        return ()
    points: list[GrowthPoint] = []
    total = len(result.event_times_s) if result.output_tokens is None else result.output_tokens
    for sample in series.samples:
        if sample.generation_tokens is None or sample.num_running == 0:
            continue
        generated = int(sample.generation_tokens - first)
        if 0 < generated < total:
            points.append(_growth_point(sample, prompt_tokens + generated))
    return tuple(points)


def _growth_point(sample: Sample, tokens: int) -> GrowthPoint:
    return GrowthPoint(tokens, sample.kv_usage_ratio, sample.kv_used_bytes)


async def _measure_batch(target: Target, prompts: PromptSource, plan: Plan) -> Batch:
    """Several sequences at once, to see what batching gives."""
    size = min(BATCH_SIZE, plan.max_num_seqs or BATCH_SIZE)
    prompt = max(1, min(BATCH_PROMPT, plan.max_model_len // 4))
    output = min(BATCH_OUTPUT, plan.max_model_len - prompt)
    requests = [_planned(prompts, 0.0, prompt, output, seed=200 + i) for i in range(size)]
    results = await run_load(target, requests, limit_s=60.0)
    return Batch(size, decode_rate(results), prompt + output / 2)


async def _serve_trace(
    target: Target, prompts: PromptSource, workload: Workload, plan: Plan, progress: Progress
) -> tuple[tuple[RequestResult, ...], Series]:
    """Play the scaled trace while sampling metrics; report each request as it ends."""
    requests = [
        _planned(prompts, row.arrival_s, row.prompt_tokens, row.output_tokens, seed=1000 + i)
        for i, row in enumerate(workload.rows)
    ]
    done = failed = 0

    def finished(result: RequestResult) -> None:
        nonlocal done, failed
        done += 1
        failed += result.error is not None
        state = f", {failed} failed" if failed else ""
        progress(f"serving the trace: {done} of {len(requests)} requests{state}")

    progress(f"serving the trace: 0 of {len(requests)} requests")
    async with Sampler(target, interval_s=SLOW_S) as sampler:
        results = await run_load(
            target, requests, limit_s=2.0 * plan.duration_s + 15.0, on_finish=finished
        )
    return results, sampler.series


async def _alone(target: Target, request: PlannedRequest, what: str) -> RequestResult:
    """One request with nothing beside it. Raises RunFailed if it fails."""
    (result,) = await run_load(target, [request], limit_s=120.0, request_timeout_s=120.0)
    if result.error is not None:
        raise RunFailed(f"{what} failed: {result.error}")
    return result


def _planned(
    source: PromptSource, arrival_s: float, prompt_tokens: int, output_tokens: int, *, seed: int
) -> PlannedRequest:
    prompt = make_prompt(source, prompt_tokens, seed=SEED + seed)
    return PlannedRequest(arrival_s, prompt, prompt_tokens, output_tokens)


def _fitting(prompt_tokens: int, max_model_len: int) -> int:
    """The prompt length, or what leaves a few tokens of room below max_model_len."""
    return max(1, min(prompt_tokens, max_model_len - 4))
