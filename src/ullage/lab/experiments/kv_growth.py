"""KV bytes against length and batch, and which blocks each request held over its life.

Holds the experiment on the engine in this process, step by step.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from ullage.costs.kv import kv_bytes
from ullage.engine.engine import Engine
from ullage.engine.options import EngineOptions
from ullage.engine.paging.blocks import BlockPool
from ullage.engine.request import Request, SamplingParams
from ullage.lab.lengths import Lengths, recorded_lengths, scaled
from ullage.lab.raster import stretches
from ullage.lab.result import CACHED, Axis, Column, Lines, Raster, Result, Series, Table
from ullage.lab.setting import Setting
from ullage.pages.words import byte_size, percent
from ullage.traffic.embedded import private_bytes

BATCHES, QUICK_BATCHES = (1, 4, 8), (1, 2)
LENGTH, QUICK_LENGTH = 500, 60
CHUNK, QUICK_CHUNK = 128, 32
BLOCK_SIZE = 16
KV_DTYPE = "float32"
LIFE_SEQS, LIFE_EVERY = 6, 4


@dataclass(frozen=True, slots=True)
class Sample:
    """After one step: tokens whose KV is held, bytes as predicted for them, bytes of the blocks in
    use, and how much more private memory the process has (None: the system does not tell)."""

    tokens: int
    predicted_bytes: int
    used_bytes: int
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Growth:
    """`batch` requests growing to at least `length` tokens each, together, step by step."""

    batch: int
    length: int
    token_bytes: float
    block_bytes: int
    samples: tuple[Sample, ...]

    @property
    def last(self) -> Sample:
        return self.samples[-1]

    @property
    def worst_error(self) -> float:
        """The largest |held / predicted − 1| of any step."""
        pairs = [(s.used_bytes, s.predicted_bytes) for s in self.samples if s.predicted_bytes]
        return max(abs(used / predicted - 1) for used, predicted in pairs)


@dataclass(frozen=True, slots=True)
class Life:
    """The small pool over its steps: its picture, and what happened in it."""

    raster: Raster
    lengths: Lengths
    num_blocks: int
    peak_blocks: int
    preemptions: int
    owners_per_block: float
    utilisation: float


def run(setting: Setting) -> Result:
    length = QUICK_LENGTH if setting.quick else LENGTH
    growths = []
    for batch in QUICK_BATCHES if setting.quick else BATCHES:
        setting.progress(f"kv-growth: {batch} requests of {length} tokens")
        growths.append(_grow(setting, batch, length))
    setting.progress("kv-growth: the life of the blocks")
    life = _live(setting, growths[0].block_bytes)
    return Result(
        name="kv-growth",
        learnt=_learnt(growths, life),
        how=(
            f"The engine in this process, {setting.model_name}, KV in {KV_DTYPE}, blocks of "
            f"{BLOCK_SIZE} tokens. After every step the pool's blocks in use and the process's "
            "private memory (RssAnon) were read.",
            f"The picture: {life.lengths.words}, at most {LIFE_SEQS} at once in a pool of "
            f"{life.num_blocks} blocks, a new request every {LIFE_EVERY} steps. Cached: nobody's, "
            "kept for a prompt that begins alike.",
        ),
        tables=(_table(growths),),
        plots=(_plot(growths), life.raster),
        data={
            "block_bytes": growths[0].block_bytes,
            "growths": [
                {
                    "batch": g.batch,
                    "length": g.length,
                    "samples": [
                        [s.tokens, s.predicted_bytes, s.used_bytes, s.memory_bytes]
                        for s in g.samples
                    ],
                }
                for g in growths
            ],
            "life": {
                "num_blocks": life.num_blocks,
                "peak_blocks": life.peak_blocks,
                "preemptions": life.preemptions,
                "owners_per_block": life.owners_per_block,
                "utilisation": life.utilisation,
            },
        },
    )


def _grow(setting: Setting, batch: int, length: int) -> Growth:
    """A fresh engine, so that no page of its pool was touched before."""
    chunk = QUICK_CHUNK if setting.quick else CHUNK
    engine = Engine.load(
        setting.model,
        EngineOptions(
            max_num_seqs=batch,
            max_num_batched_tokens=max(chunk, batch),
            max_model_len=2 * length,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=False,  # so that blocks that are given back are used next
        ),
    )
    # Steps of every kind first: what the model itself needs is there before KV is counted.
    touched = _blocks_touched(engine, batch, chunk)
    before = private_bytes_here()
    requests = [
        # Answers long enough that nobody ends before the last prompt is in.
        engine.add_request(str(i), _prompt(engine, length, seed=i), _greedy(length))[0]
        for i in range(batch)
    ]
    samples = [Sample(0, 0, 0, None if before is None else 0)]
    while any(request.num_computed < length for request in requests):
        engine.step()
        memory = private_bytes_here()
        rise = None if memory is None or before is None else max(0, memory - before)
        samples.append(
            Sample(
                engine.tokens_held(),
                sum(_priced(engine, request.num_computed) for request in requests),
                engine.pool.num_used * engine.kv.bytes_per_block,
                None if rise is None else rise + touched * engine.kv.bytes_per_block,
            )
        )
    for request in requests:
        engine.abort(request)
    token_bytes = _priced(engine, length) / (-(-length // BLOCK_SIZE) * BLOCK_SIZE)
    return Growth(batch, length, token_bytes, engine.kv.bytes_per_block, tuple(samples))


def _priced(engine: Engine, tokens: int) -> int:
    """What `costs` says of one request of so many tokens, rounded up to whole blocks."""
    room = -(-tokens // BLOCK_SIZE) * BLOCK_SIZE
    return kv_bytes(engine.spec, room, kv_cache_dtype=KV_DTYPE, dtype=KV_DTYPE)


def _blocks_touched(engine: Engine, batch: int, tokens: int) -> int:
    """Run `batch` prompts of `tokens` in all and a few steps more; how many blocks were written.

    They are the ones that the next requests get first.
    """
    each = max(2, min(tokens, engine.max_model_len - 4) // batch)
    for index in range(batch):
        engine.add_request(f"warm-{index}", _prompt(engine, each, seed=900 + index), _greedy(3))
    touched = 0
    while engine.has_work:
        engine.step()
        touched = max(touched, engine.pool.num_used)
    return touched


def private_bytes_here() -> int | None:
    return private_bytes(os.getpid())


def _prompt(engine: Engine, length: int, *, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    return tuple(draw.randrange(8, engine.spec.vocab_size) for _ in range(length))


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


# --- the life of blocks --------------------------------------------------------------------------


def _live(setting: Setting, block_bytes: int) -> Life:
    num_requests, num_blocks = (6, 24) if setting.quick else (12, 48)
    most = num_blocks * BLOCK_SIZE // 2
    lengths = scaled(
        recorded_lengths(setting.trace),
        num_requests,
        mean_prompt=most / 4,
        mean_output=most / 16,
        most=most - 8,
    )
    engine = Engine.load(
        setting.model,
        EngineOptions(
            max_num_seqs=LIFE_SEQS,
            max_num_batched_tokens=8 * BLOCK_SIZE,
            max_model_len=most,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=num_blocks * block_bytes,
        ),
    )
    requests: list[Request] = []
    frames: list[dict[int, int]] = []
    held_tokens = held_room = peak = 0
    for step in count():
        if step % LIFE_EVERY == 0 and len(requests) < num_requests:
            prompt, output = lengths.rows[len(requests)]
            ids = _prompt(engine, prompt, seed=100 + len(requests))
            requests += engine.add_request(f"r{len(requests)}", ids, _greedy(output))
        engine.step()
        frames.append(_cached(engine.pool, owner=num_requests) | dict(_holders(requests)))
        held_tokens += engine.tokens_held()
        held_room += engine.pool.num_used * BLOCK_SIZE
        peak = max(peak, engine.pool.num_used)
        if len(requests) == num_requests and not engine.has_work:
            break
    found = stretches(frames)
    held = [stretch for stretch in found if stretch.owner < num_requests]
    raster = Raster(
        "Which blocks each request held over its life",
        Axis("steps of the engine"),
        Axis("blocks of the pool"),
        engine.pool.num_blocks,
        (
            *(f"{i + 1}: {prompt}+{output}" for i, (prompt, output) in enumerate(lengths.rows)),
            CACHED,
        ),
        found,
    )
    return Life(
        raster,
        lengths,
        engine.pool.num_blocks,
        peak,
        sum(request.num_preemptions for request in requests),
        len(held) / len({stretch.row for stretch in held}),
        held_tokens / held_room,
    )


def _cached(pool: BlockPool, *, owner: int) -> dict[int, int]:
    """Blocks that nobody holds and whose content the prefix cache can still find."""
    return {
        block: owner
        for block in range(pool.num_blocks)
        if pool.is_published(block) and pool.references(block) == 0
    }


def _holders(requests: list[Request]) -> Iterator[tuple[int, int]]:
    """(block, owner) of every block in the tables of the requests that run."""
    for owner, request in enumerate(requests):
        for table in request.tables:
            for block in table:
                if block >= 0:  # FREED where a window layer gave it back
                    yield block, owner


# --- what it amounts to --------------------------------------------------------------------------


def _table(growths: list[Growth]) -> Table:
    return Table(
        "Bytes when all prompts are in",
        (
            Column("requests", source=""),
            Column("tokens held"),
            Column("their own bytes", "bytes", "modelled: tokens × bytes per token"),
            Column("in whole blocks", "bytes", f"modelled, {BLOCK_SIZE} tokens a block"),
            Column("held in the pool", "bytes", "measured: blocks in use"),
            Column("worst error", "change", "held / predicted, over all steps"),
            Column("process memory", "bytes", "measured: rise of RssAnon"),
        ),
        tuple(
            (
                g.batch,
                g.last.tokens,
                round(g.last.tokens * g.token_bytes),
                g.last.predicted_bytes,
                g.last.used_bytes,
                g.worst_error,
                g.last.memory_bytes,
            )
            for g in growths
        ),
        note="" if growths[0].last.memory_bytes is not None else "No /proc: memory not known.",
    )


def _plot(growths: list[Growth]) -> Lines:
    largest = growths[-1]
    series = [
        Series(
            f"{g.batch} request{'s' if g.batch > 1 else ''}, pool",
            tuple((float(s.tokens), float(s.used_bytes)) for s in g.samples),
        )
        for g in growths
    ]
    if largest.last.memory_bytes is not None:
        points = tuple((float(s.tokens), float(s.memory_bytes or 0)) for s in largest.samples)
        series.append(Series(f"{largest.batch} requests, process", points))
    end = float(largest.last.tokens)
    needed = ((0.0, 0.0), (end, end * largest.token_bytes))
    series.append(Series("what tokens need", needed, "modelled"))
    return Lines(
        "KV bytes against tokens held",
        Axis("tokens held by all requests"),
        Axis("bytes", "bytes"),
        tuple(series),
    )


def _learnt(growths: list[Growth], life: Life) -> str:
    worst = max(g.worst_error for g in growths)
    exact = "to the byte at every step" if worst == 0 else f"within {worst:.1%} at every step"
    preempted = (
        f"{life.preemptions} times one was preempted and gave all of its blocks back"
        if life.preemptions
        else "nobody was preempted"
    )
    return (
        f"Each token takes {byte_size(growths[0].token_bytes)} however many requests hold them; "
        f"the formula, rounded up to whole blocks, met the pool {exact}. In the small pool each "
        f"block served {life.owners_per_block:.1f} requests one after the other, at most "
        f"{percent(life.peak_blocks / life.num_blocks)} of the blocks were held at once, "
        f"{percent(life.utilisation)} of the held room had tokens in it, and {preempted}."
    )
