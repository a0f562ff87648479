"""The probe of one worker process of vLLM: which steps it looks at, and what it keeps of them.

Holds the choice of steps and rows and what becomes of them; hooks are `steps`, vLLM's layers
`layers`, the arithmetic `entropy`, who asks `worker`. While no step is looked at nothing of vLLM's
is replaced.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ullage_vllm import entropy
from ullage_vllm.entropy import Place
from ullage_vllm.layers import MASKS, Layer, Unreadable, fetches, layers_of
from ullage_vllm.memory import Memory, Row
from ullage_vllm.steps import Caught, Rows, Step, Want, replaced

log = logging.getLogger("vllm.ullage")

REQUESTS_A_ROW, MOST_ROWS = 8, 4
"""Decode rows of one sampled step: one, and one more for so many requests, as a step of more costs
more. Over steps every request gets its turn."""
MAX_WATCHES = 4
NONE_LEFT = "no layer is left that can be read"
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""How far attention may be from vLLM's own, of the largest value that it weighs: half-precision
kernels round the weights. A cache that is read wrongly is off by the whole."""


@dataclass
class Watch:
    """A prompt that an operator asked for. `left`: positions that are still to be read; `mistake`:
    what they asked for and there is not, `failure`: why it was not read."""

    positions: tuple[int, ...] | None
    num_rows: int
    weights: dict[str, int] | None
    memory: Memory | None = None
    left: tuple[int, ...] = ()
    found_weights: list[float] | None = None
    tokens: int = 0
    failure: str = ""
    mistake: str = ""


@dataclass
class Counts:
    """Since the start. `seconds`: of reading, the forward itself left out."""

    steps: int = 0
    sampled: int = 0
    missed: int = 0
    rows: int = 0
    without_graph: int = 0
    seconds: float = 0.0


class Probe:
    """Looks at one in `every` steps that decode; 0: at none but what is watched."""

    def __init__(self, worker: Any, every: int) -> None:
        self.runner, self.every = worker.model_runner, every
        self.layers, self.refused = layers_of(self.runner)
        self.counts, self.watches = Counts(), dict[str, Watch]()
        self.last_miss = ""
        self.memory = Memory(self.layers)
        self._had_layers = bool(self.layers)
        self._unchecked = {layer.name for layer in self.layers}
        self._turn = 0
        self._way: AbstractContextManager[None] | None = None
        self.follow()

    def follow(self) -> None:
        """Stand in vLLM's way only while there is something to look at.

        What is done to a step follows from what was scheduled and asked for alone, never from what
        one rank could read: all ranks of a tensor must run it with the same kind of graph.
        """
        wanted = bool(self.every or self.watches) and self._had_layers
        if wanted and self._way is None:
            inner = self.runner.execute_model
            ours = functools.wraps(inner)(functools.partial(self._execute, inner))
            self._way = replaced(self.runner, "execute_model", ours)
            self._way.__enter__()
        elif not wanted and self._way is not None:
            self._way.__exit__(None, None, None)
            self._way = None

    def _execute(self, inner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        wants = self._wants(scheduler_output)
        if not wants:
            return inner(scheduler_output, *args, **kwargs)
        step = Step(self.runner, scheduler_output, wants, self._to_check(wants))
        with step.hooked(self.layers):
            result = inner(scheduler_output, *args, **kwargs)
        start_s = time.perf_counter()
        self.counts.without_graph += step.without_graph
        try:
            with torch.inference_mode():
                self._take(step)
        except Exception as error:
            self._miss(step, str(error) if isinstance(error, Unreadable) else repr(error))
        self.counts.seconds += time.perf_counter() - start_s
        return result

    # --- which rows ---

    def _wants(self, scheduled: Any) -> list[Want]:
        counts = scheduled.num_scheduled_tokens
        wants = list(self._watched(scheduled)) if self.watches else []
        if not self.every:
            return wants
        drafts = scheduled.scheduled_spec_decode_tokens
        if 1 not in counts.values() and not drafts:
            return wants
        self.counts.steps += 1
        if self.counts.steps % self.every:
            return wants
        taken = {want.request_id for want in wants}
        decoding = [
            one
            for one, count in counts.items()
            if (count == 1 or one in drafts) and one not in taken
        ]
        count = min(1 + len(decoding) // REQUESTS_A_ROW, MOST_ROWS)
        for at in range(count if decoding else 0):
            wants.append(Want(decoding[(self._turn + at) % len(decoding)], (0,)))
        self._turn += count
        return wants

    def _watched(self, scheduled: Any) -> Iterator[Want]:
        computed = {one.req_id: one.num_computed_tokens for one in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduled.scheduled_new_reqs:
            key = self._key(new.req_id)
            if key and self.watches[key].positions is None:
                self._begin(self.watches[key], len(new.prompt_token_ids or ()))
        for request_id, count in scheduled.num_scheduled_tokens.items():
            key = self._key(request_id)
            if key and request_id in computed:
                watch, first = self.watches[key], computed[request_id]
                inside = [at for at in watch.left if first <= at < first + count]
                if inside:
                    # Once, whatever becomes of it: after a preemption they come again.
                    watch.left = tuple(at for at in watch.left if at not in inside)
                    yield Want(request_id, tuple(at - first for at in inside), key)

    def _key(self, request_id: str) -> str | None:
        """vLLM adds a suffix to the ids that it is given."""
        return next((key for key in self.watches if request_id.startswith(key)), None)

    def _begin(self, watch: Watch, tokens: int) -> None:
        watch.tokens = tokens
        count = min(watch.num_rows, tokens)
        chosen = {(at + 1) * tokens // count - 1 for at in range(count)}
        if watch.weights is not None:
            row = watch.weights["row"]
            if row >= tokens:
                watch.mistake = f"row: found {row}, expected below {tokens}, the prompt's tokens"
            else:
                chosen.add(row)
        watch.positions = watch.left = tuple(sorted(chosen))
        watch.memory = Memory(self.layers, capacity=len(chosen))

    def _to_check(self, wants: Sequence[Want]) -> frozenset[str]:
        """Whose output is held against vLLM's: all at first and of prompts, then one in turn."""
        if any(want.watch for want in wants):
            return frozenset(layer.name for layer in self.layers)
        turn = self.layers[self.counts.sampled % len(self.layers)].name if self.layers else ""
        return frozenset({*self._unchecked, turn})

    # --- what was caught ---

    def _take(self, step: Step) -> None:
        if step.failure:
            raise Unreadable(step.failure)
        silent = [layer.name for layer in self.layers if layer.name not in step.caught]
        if not self.layers:
            raise Unreadable(NONE_LEFT)
        if silent:
            raise Unreadable(f"{len(silent)} layers were not called in Python, first {silent[0]}")
        tables: dict[int, _Tables] = {}
        for layer in self.layers:
            metadata = step.caught[layer.name].metadata
            if id(metadata) not in tables:
                tables[id(metadata)] = _Tables(metadata, layer)
        at, drawn = 0, 0
        for rows in step.rows:
            part = slice(at, at := at + len(rows.want.places))
            given = [
                Given(layer, caught, part, tables[id(caught.metadata)], rows)
                for layer in self.layers
                for caught in [step.caught[layer.name]]
            ]
            if rows.want.watch is None:
                drawn += self._read_one(given)
            elif rows.want.watch in self.watches:
                self._read_many(given, self.watches[rows.want.watch])
        if drawn:
            self.counts.sampled += 1
            self.counts.rows += drawn
        elif not self.layers:
            raise Unreadable(NONE_LEFT)

    def _read_one(self, given: Sequence[Given]) -> bool:
        """A decode row: all layers together. Whether any could be read."""
        given = [one for one in given if self._agrees(one)]
        if given:
            position = given[0].positions[0]
            places = [Place(one.q_RHD[0], one.keys, one.layer.rule) for one in given]
            layers = tuple(one.layer for one in given)
            self.memory.add(Row(entropy.one_row(places, position), position, layers))
        return bool(given)

    def _read_many(self, given: Sequence[Given], watch: Watch) -> None:
        """Rows of a prompt: layer by layer, each over all keys once."""
        given = [one for one in given if self._agrees(one)]
        if not given or watch.memory is None:
            return
        columns = []
        for one in given:
            columns.append(one.read().columns_RHC)
            asked = watch.weights
            if asked and asked["layer"] == one.layer.number and asked["row"] in one.positions:
                q_HD = one.q_RHD[one.positions.index(asked["row"])]
                watch.found_weights = entropy.weights(
                    q_HD, asked["row"], one.keys, one.layer.rule, asked["head"]
                )
        layers, positions = tuple(one.layer for one in given), given[0].positions
        for columns_HC, position in zip(torch.cat(columns, 1), positions, strict=True):
            watch.memory.add(Row(columns_HC, position, layers))

    def _agrees(self, given: Given) -> bool:
        """Whether what was read gives what vLLM computed, where that was caught; else refuse it."""
        if given.caught.output_RHD is None:
            return True
        ours, theirs = given.read(values=True).output_RHD, given.caught.output_RHD[given.part]
        assert ours is not None
        last = given.positions[-1]
        largest = given.values(given.layer.rule.low(last), last + 1).abs().max().clamp(min=1e-30)
        off = float((ours - theirs).abs().max() / largest)
        if off > TOLERANCE[self.runner.model_config.dtype]:
            reason = f"vLLM's output is {off:.1%} of a value away from what was read"
            self._refuse(given.layer, reason)
            return False
        self._unchecked.discard(given.layer.name)
        return True

    def _refuse(self, layer: Layer, reason: str) -> None:
        """From now on: it is not attention as its rule says, or its cache lies otherwise."""
        self.layers = [one for one in self.layers if one.name != layer.name]
        self.refused.append(f"{layer.name}: {reason}")
        self.memory.forget(layer)
        for watch in self.watches.values():
            if watch.memory is not None:
                watch.memory.forget(layer)
        _warn(f"does not read {layer.name}: {reason}")

    def _miss(self, step: Step, reason: str) -> None:
        self.last_miss = reason
        if any(want.watch is None for want in step.wants):
            self.counts.missed += 1
        for want in step.wants:
            if want.watch is not None and want.watch in self.watches:
                self.watches[want.watch].failure = reason
        _warn(f"missed a step that it meant to look at: {reason}")

    # --- answers ---

    def state(self) -> dict[str, Any]:
        return {
            "every": self.every,
            **vars(self.counts),
            "last_miss": self.last_miss,
            "not_read": list(self.refused),
        }


class Given:
    """What one layer was given for the rows of one request: queries, positions, keys, values."""

    def __init__(
        self, layer: Layer, caught: Caught, part: slice, table: _Tables, rows: Rows
    ) -> None:
        self.layer, self.caught, self.part = layer, caught, part
        first = table.first_position(rows)
        self.positions = [first + place for place in rows.want.places]
        self.q_RHD = caught.q_RHD[part]
        self.keys, self.values = fetches(layer, caught.cache, table.blocks(rows))

    def read(self, values: bool = False) -> entropy.Rows:
        given = self.values if values else None
        return entropy.read(self.q_RHD, self.positions, self.keys, self.layer.rule, given)


class _Tables:
    """Of one group of layers: where each request's rows and blocks are, taken to the host once."""

    def __init__(self, metadata: Any, layer: Layer) -> None:
        for name in MASKS:
            if getattr(metadata, name, None) is not None:
                raise Unreadable(f"{layer.name}: a mask by {name}")
        if getattr(metadata, "causal", True) is not True:
            raise Unreadable(f"{layer.name}: its attention is not causal")
        self._starts = metadata.query_start_loc.tolist()
        own = metadata.decode if layer.method == "forward_mqa" else metadata
        if own is None:
            raise Unreadable(f"{layer.name}: no decode rows in latent form")
        self._lengths, self._table = own.seq_lens.tolist(), own.block_table

    def first_position(self, rows: Rows) -> int:
        """Of the request's first query row. Raises where the batch is not as it was taken for."""
        number = rows.number
        begin, end = self._starts[number : number + 2]
        if (begin, end - begin) != (rows.first, rows.count) or number >= len(self._lengths):
            raise Unreadable("the batch is in another order than was read")
        return int(self._lengths[number]) - rows.count

    def blocks(self, rows: Rows) -> torch.Tensor:
        found: torch.Tensor = self._table[rows.number]
        return found


_warned: set[str] = set()


def _warn(sentence: str) -> None:
    """Each kind once in a process: a step that is missed again says nothing new."""
    kind = sentence[:40]
    if kind not in _warned:
        _warned.add(kind)
        log.warning("ullage %s", sentence)
