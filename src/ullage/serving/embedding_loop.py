"""The embedder's own thread: texts of all requests together, as many as a batch holds, in turns.

Holds the hand-over between it and the HTTP loop, and nothing of HTTP. A request's texts may spread
over several batches; between batches every request gets its turn, so that a text alone does not
wait for a thousand of somebody else's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ullage.engine.encoder.embedder import Embedder
from ullage.errors import UllageError
from ullage.serving.embedding_metrics import EmbeddingMetrics, Timing
from ullage.serving.refusals import Cancelled, Draining, EngineFailed, NotFinite, QueueFull

log = logging.getLogger("ullage.serving")
Texts = tuple[tuple[int, ...], ...]


@dataclass(eq=False, slots=True)
class Ticket:
    """One HTTP request: its texts, and their embeddings as they come, by index.

    `answer` ends with all of them or with what went wrong; it lives on the asyncio loop.
    """

    id: str
    texts: Texts
    arrival_s: float
    answer: asyncio.Future[list[torch.Tensor]]
    next_text: int = 0
    found: dict[int, torch.Tensor] = field(default_factory=dict)
    closed: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """One text of a batch."""

    ticket: Ticket
    index: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.ticket.texts[self.index]


class EmbeddingLoop:
    """Runs an embedder in a thread from `start()` to `stop()`."""

    def __init__(
        self, embedder: Embedder, metrics: EmbeddingMetrics, max_num_queued_reqs: int
    ) -> None:
        self.embedder = embedder
        self._metrics = metrics
        self._max_in_flight = embedder.options.max_num_seqs + max_num_queued_reqs
        # Requests with texts that no batch has taken yet, in the order of their turns.
        self._queue: deque[Ticket] = deque()
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ullage-embedder", daemon=True)
        self._http: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        # Submitted and not closed; only the asyncio loop touches it.
        self._open: set[Ticket] = set()
        self.drain_asked = asyncio.Event()
        self.cut_asked = False
        self.draining = False
        self.ready = False
        self.failure: BaseException | None = None

    # --- called from the asyncio loop ---

    def start(self) -> None:
        """Start the thread; its answers go to the running asyncio loop. First it warms up."""
        self._http = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, texts: Sequence[tuple[int, ...]]) -> Ticket:
        """Queue one request's texts. Raises Refused, EngineFailed or TextRefused; all or none."""
        if self.failure is not None:
            raise EngineFailed("the embedder has failed and serves nothing any more")
        if self.draining:
            raise Draining("the server is shutting down and takes no new requests", 5)
        for token_ids in texts:
            self.embedder.require_fits(token_ids)
        if len(self._open) >= self._max_in_flight:
            self._metrics.rejected()
            raise QueueFull(f"{len(self._open)} requests are in flight, no more may wait")
        answer: asyncio.Future[list[torch.Tensor]] = asyncio.get_running_loop().create_future()
        ticket = Ticket(f"embd-{uuid.uuid4().hex}", tuple(texts), time.monotonic(), answer)
        self._open.add(ticket)
        with self._wake:
            self._queue.append(ticket)
            self._metrics.waiting(self._num_waiting())
            self._wake.notify()
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Whoever submitted must call this; texts that still wait are dropped at once."""
        if ticket.closed:
            return
        ticket.closed = True
        self._open.discard(ticket)
        with self._wake:
            if ticket in self._queue:
                self._queue.remove(ticket)
                self._metrics.aborted(len(ticket.texts) - ticket.next_text)
            self._metrics.waiting(self._num_waiting())

    async def drain(self, timeout_s: float | None = None) -> int:
        """Take nothing new; return when what was taken is answered.

        After `timeout_s`, or once `cut_asked` is set, the rest is cut: its clients get a 503.
        Returns how many were.
        """
        self.draining = True
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._open and self.failure is None:
            if self.cut_asked or time.monotonic() > until_s:
                break
            await asyncio.sleep(0.02)
        cut = [ticket for ticket in self._open if self.failure is None]
        for ticket in cut:
            _fail(ticket, Cancelled("the server shut down before this was finished", 5))
        while self._open and self.failure is None:
            await asyncio.sleep(0.02)
        return len(cut)

    def stop(self) -> None:
        """End the thread after its batch; whoever still waits is told. Safe to repeat."""
        self.draining = True
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    # --- the embedder's thread ---

    def _run(self) -> None:
        try:
            warm_up(self.embedder)
            self.ready = True
            while batch := self._next_batch():
                started_s = time.monotonic()
                vectors_ND = self.embedder.embed([place.token_ids for place in batch])
                self._observe(batch, started_s)
                self._call_http(partial(_hand_over, batch, vectors_ND))
            self._call_http(self._end_open)
        except BaseException as error:
            # Whatever it was, waiting clients must hear of it rather than hang.
            log.exception("the embedder failed")
            self.failure = error
            self.ready = False
            self._call_http(self._end_open)

    def _next_batch(self) -> list[_Place]:
        """Texts of one batch, waiting for the first. Empty when it is time to stop."""
        max_num_seqs = self.embedder.options.max_num_seqs
        with self._wake:
            while not (self._queue or self._stopping):
                self._metrics.running(0)
                self._wake.wait()
            batch: list[_Place] = []
            if self._stopping:
                return batch
            budget = self.embedder.max_num_batched_tokens
            while self._queue and len(batch) < max_num_seqs:
                ticket = self._queue[0]
                place = _Place(ticket, ticket.next_text)
                budget -= len(place.token_ids)
                if budget < 0:
                    break
                batch.append(place)
                ticket.next_text += 1
                if ticket.next_text == len(ticket.texts):
                    self._queue.popleft()
                else:
                    self._queue.rotate(-1)
            self._metrics.running(len(batch))
            self._metrics.waiting(self._num_waiting())
            return batch

    def _num_waiting(self) -> int:
        return sum(len(ticket.texts) - ticket.next_text for ticket in self._queue)

    def _observe(self, batch: Sequence[_Place], started_s: float) -> None:
        ended_s = time.monotonic()
        self._metrics.observe(
            [
                Timing(len(place.token_ids), place.ticket.arrival_s, started_s, ended_s)
                for place in batch
            ]
        )

    def _end_open(self) -> None:
        for ticket in self._open:
            _fail(ticket, EngineFailed("the embedder ended before this request did"))

    def _call_http(self, function: Callable[[], None]) -> None:
        assert self._http is not None
        # A loop that is closed has no client left to answer.
        if not self._http.is_closed():
            self._http.call_soon_threadsafe(function)


def _hand_over(batch: Sequence[_Place], vectors_ND: torch.Tensor) -> None:
    for place, vector_D in zip(batch, vectors_ND, strict=True):
        ticket = place.ticket
        if not bool(torch.isfinite(vector_D).all()):
            _fail(ticket, NotFinite("the model's numbers are not finite for one of the texts"))
            continue
        ticket.found[place.index] = vector_D
        if len(ticket.found) == len(ticket.texts) and not ticket.answer.done():
            ticket.answer.set_result([ticket.found[index] for index in range(len(ticket.texts))])


def _fail(ticket: Ticket, error: UllageError) -> None:
    if not ticket.answer.done():
        ticket.answer.set_exception(error)


def warm_up(embedder: Embedder) -> None:
    """The shapes to come: the longest text alone, and a full batch of short ones."""
    embedder.embed([(0,) * embedder.max_model_len])
    short = min(8, embedder.max_model_len)
    count = min(embedder.options.max_num_seqs, embedder.max_num_batched_tokens // short)
    embedder.embed([(0,) * short] * max(count, 1))
