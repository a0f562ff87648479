"""One round of generations over the shapes to come, before the server calls itself ready.

Covers prefills and decodes of the fullest step and its halvings, each way of sampling and
every adapter that is loaded: what is compiled, allocated or paged in on first use is so by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

from ullage.engine.engine import Engine
from ullage.engine.lora import LoraAdapter
from ullage.engine.request import SamplingParams

SHORT_PROMPT = 2
# Each exercises another path of the sampler.
WAYS: tuple[SamplingParams, ...] = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=1),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.0, presence_penalty=0.1, repetition_penalty=1.1),
)


def warm_up(engine: Engine) -> None:
    """Run the round to its end; nothing of it stays in the prefix cache."""
    prefills = [
        (num_prompt, _ending(WAYS[0], min(1, engine.max_model_len - num_prompt)), None)
        for num_prompt in _prefill_lengths(engine)
    ]
    for index, (num_prompt, params, lora) in enumerate((*prefills, *_batch(engine))):
        # Different first tokens, lest the prefix cache spare the work.
        prompt = (index % engine.spec.vocab_size, *(0,) * (num_prompt - 1))
        engine.add_request(f"warm-up-{index}", prompt, params, lora)
        if index < len(prefills):
            _finish(engine)
    _finish(engine)
    engine.reset_prefix_cache()


def _prefill_lengths(engine: Engine) -> Iterator[int]:
    """A full chunk and its halvings, each to run alone."""
    longest = max(1, engine.max_model_len - min(4, engine.max_model_len - 1))
    yield from _halvings(min(engine.options.max_num_batched_tokens, longest))


def _batch(engine: Engine) -> Iterator[tuple[int, SamplingParams, LoraAdapter | None]]:
    """Prompt length, parameters, adapter of a full batch that thins out."""
    size = _batch_size(engine)
    adapters = cycle([None, *engine.loras.values()])
    ways = cycle(WAYS)
    sizes = list(_halvings(size))
    for place in range(size):
        # After each step half of the batch ends.
        num_new = 1 + sum(place < alive for alive in sizes)
        num_new = min(num_new, engine.max_model_len - SHORT_PROMPT)
        if num_new > 0:
            yield SHORT_PROMPT, _ending(next(ways), num_new), next(adapters)


def _halvings(size: int) -> Iterator[int]:
    """size, half of it rounded up, … 1."""
    while size > 1:
        yield size
        size = -(-size // 2)
    yield size


def _batch_size(engine: Engine) -> int:
    """As many short requests as may run at once and as the pool holds."""
    groups = len(engine.kv.layout.groups)
    return max(1, min(engine.options.max_num_seqs, engine.pool.num_blocks // (2 * groups)))


def _ending(way: SamplingParams, num_new: int) -> SamplingParams:
    return replace(way, max_tokens=num_new, ignore_eos=True)


def _finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
