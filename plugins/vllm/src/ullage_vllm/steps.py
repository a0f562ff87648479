"""One step of vLLM's model that is looked at: which rows, what is caught of them as it runs.

Holds the hooks of a step and their removal; what becomes of what was caught is `worker`'s. Nothing
here raises into vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ullage_vllm.layers import Layer


@dataclass(frozen=True)
class Want:
    """Of one request of the step: places of query rows among its own, whether it is decoding.

    `watch` is the id by which an operator asked for it; None: it was drawn.
    """

    request_id: str
    places: tuple[int, ...]
    watch: str | None = None


@dataclass(frozen=True)
class Rows:
    """Where the rows of a want are: the request's number in the batch, its first query row."""

    want: Want
    number: int
    first: int
    count: int


@dataclass
class Caught:
    """What one layer was given: queries of the chosen rows, and where their keys are."""

    q_RHD: torch.Tensor
    cache: torch.Tensor
    metadata: Any
    output_RHD: torch.Tensor | None = None


@dataclass
class Step:
    """`checked`: layers whose output is caught too. `failure`: the first thing that went wrong."""

    runner: Any
    scheduler_output: Any
    wants: Sequence[Want]
    checked: frozenset[str]
    rows: list[Rows] = field(default_factory=list)
    caught: dict[str, Caught] = field(default_factory=dict)
    failure: str = ""
    without_graph: int = 0
    batch: Any = None
    _index: torch.Tensor | None = None

    @contextmanager
    def hooked(self, layers: Sequence[Layer]) -> Iterator[None]:
        """Catch until the end of the block; every hook is gone afterwards, whatever happens."""
        with ExitStack() as stack:
            for layer in layers:
                hook = _attention_hook if layer.method == "forward" else _latent_hook
                original = getattr(layer.owner, layer.method)
                stack.enter_context(
                    replaced(layer.owner, layer.method, hook(self, layer, original))
                )
            self._without_full_graphs(stack)
            yield

    def catch(self, layer: Layer, query: torch.Tensor, cache: Any, metadata: Any) -> None:
        try:
            if metadata is None or self.failure:
                return
            index = self._rows(query.device)
            if layer.name in self.caught:
                self.failure = f"{layer.name} ran twice in one step"
                return
            self.caught[layer.name] = Caught(query.index_select(0, index), cache, metadata)
        except Exception as error:
            self.failure = f"{layer.name}: {error!r}"

    def catch_output(self, layer: Layer, output: torch.Tensor) -> None:
        caught = self.caught.get(layer.name)
        if caught is None or layer.name not in self.checked or self._index is None:
            return
        try:
            found = output.view(output.shape[0], layer.heads, -1)
            caught.output_RHD = found.index_select(0, self._index).float()
        except Exception as error:
            self.failure = f"{layer.name}: {error!r}"

    def _rows(self, device: torch.device) -> torch.Tensor:
        """Indices of the query rows of all wants; requests are in the order of this step's batch,
        which is known only once the model runs."""
        if self._index is None:
            ids, counts = self._batch()
            firsts = dict(zip(ids, _starts(counts), strict=True))
            chosen = []
            for want in self.wants:
                number = ids.index(want.request_id)
                rows = Rows(want, number, firsts[want.request_id], counts[number])
                self.rows.append(rows)
                chosen += [rows.first + place for place in want.places]
            self._index = torch.tensor(chosen, device=device)
        return self._index

    def _batch(self) -> tuple[list[str], list[int]]:
        if self.batch is not None:  # the second model runner
            ids = list(self.batch.req_ids)
            counts = [int(one) for one in self.batch.num_scheduled_tokens[: len(ids)]]
            return ids, counts
        ids = list(self.runner.input_batch.req_ids)
        return ids, [self.scheduler_output.num_scheduled_tokens[one] for one in ids]

    def _without_full_graphs(self, stack: ExitStack) -> None:
        """A full graph replays without calling Python. Read, not run: the tests have no GPU."""
        dispatcher = getattr(self.runner, "cudagraph_dispatcher", None)
        if dispatcher is not None:
            stack.enter_context(
                replaced(dispatcher, "dispatch", _first_runner(self, dispatcher.dispatch))
            )
            return
        prepare = self.runner.prepare_inputs

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.batch = prepare(*args, **kwargs)
            return self.batch

        stack.enter_context(replaced(self.runner, "prepare_inputs", noted))
        manager = getattr(self.runner, "cudagraph_manager", None)
        if manager is not None:
            stack.enter_context(
                replaced(manager, "dispatch", _second_runner(self, manager.dispatch))
            )


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of this one instance, as it was afterwards."""
    own = vars(owner)
    before, had = own.get(name), name in own
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _starts(counts: Sequence[int]) -> list[int]:
    found, at = [], 0
    for count in counts:
        found.append(at)
        at += count
    return found


def _attention_hook(step: Step, layer: Layer, original: Any) -> Any:
    def forward(
        own: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any,
        output: Any, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        step.catch(layer, query, kv_cache, attn_metadata)
        found = original(own, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        step.catch_output(layer, output)
        return found

    return forward


def _latent_hook(step: Step, layer: Layer, original: Any) -> Any:
    def forward_mqa(q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, own: Any) -> Any:
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        step.catch(layer, query[:, : layer.heads], kv_c_and_k_pe_cache, attn_metadata)
        found = original(q, kv_c_and_k_pe_cache, attn_metadata, own)
        step.catch_output(layer, found[0])
        return found

    return forward_mqa


def _first_runner(step: Step, original: Any) -> Any:
    """CudagraphDispatcher.dispatch, FULL taken away; where ranks agreed on a mode, that holds."""

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if found[0].name != "FULL" or kwargs.get("valid_modes"):
            return found
        step.without_graph += 1
        barred = set(kwargs.pop("invalid_modes", None) or ()) | {found[0]}
        return original(*args, invalid_modes=barred, **kwargs)

    return dispatch


def _second_runner(step: Step, original: Any) -> Any:
    """CudaGraphManager.dispatch: what it answers where it has no graph, instead of a full one."""

    def dispatch(num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        found = original(num_reqs, num_tokens, *args, **kwargs)
        # Ranks that split a batch in two have agreed on its graph already.
        if found.cg_mode.name != "FULL" or found.num_ubatches > 1:
            return found
        step.without_graph += 1
        return type(found)(
            cg_mode=type(found.cg_mode).NONE,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            num_active_loras=found.num_active_loras,
            num_ubatches=found.num_ubatches,
        )

    return dispatch
