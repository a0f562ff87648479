"""The engine's own thread: requests go in from the HTTP loop, tokens come back to it.

Holds the hand-over between the two and nothing of HTTP. The engine is touched by its thread only;
every answer reaches the asyncio loop in one call per step, however many requests ran.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ullage.engine.engine import Engine, Output
from ullage.engine.lora import LoraAdapter
from ullage.engine.request import FinishReason, Request, SamplingParams
from ullage.errors import UllageError
from ullage.serving.metrics import EngineMetrics

log = logging.getLogger("ullage.serving")


class Refused(UllageError):
    """A request that is not taken now; `status` is HTTP's, `retry_after_s` when to come back."""

    status = 429
    retry_after_s = 1


class QueueFull(Refused):
    """As many requests wait as may."""


class Draining(Refused):
    """The server is going away: what runs is finished, nothing new is taken."""

    status = 503
    retry_after_s = 5


class EngineFailed(UllageError):
    """The engine's thread died; nothing can be served any more."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One submitted request as the HTTP side holds it. `request` is set once the engine has it."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    lora: LoraAdapter | None = None
    outputs: asyncio.Queue[Output | None] = field(default_factory=asyncio.Queue)
    request: Request | None = None
    closed: bool = False

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.request is None else self.request.finish_reason


class EngineLoop:
    """Runs an engine in a thread from `start()` to `stop()`."""

    def __init__(self, engine: Engine, metrics: EngineMetrics, max_num_queued_reqs: int) -> None:
        self.engine = engine
        self._metrics = metrics
        self._max_in_flight = engine.options.max_num_seqs + max_num_queued_reqs
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._tickets: dict[str, Ticket] = {}
        self._thread = threading.Thread(target=self._run, name="ullage-engine", daemon=True)
        self._http: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        # Submitted and not closed; only the asyncio loop touches it.
        self._open: set[Ticket] = set()
        self.draining = False
        self.ready = False
        self.failure: BaseException | None = None

    # --- called from the asyncio loop ---

    def start(self) -> None:
        """Start the thread; its answers go to the running asyncio loop. First it warms up."""
        self._http = asyncio.get_running_loop()
        self._thread.start()

    @property
    def num_in_flight(self) -> int:
        """Requests submitted and not yet closed."""
        return len(self._open)

    def submit(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        prefix: str,
        lora: LoraAdapter | None = None,
    ) -> Ticket:
        """Hand a request to the engine. Raises Refused, EngineFailed or RequestRefused."""
        if self.failure is not None:
            raise EngineFailed("the engine has failed and serves nothing any more")
        if self.draining:
            raise Draining("the server is shutting down and takes no new requests")
        self.engine.require_fits(prompt_ids, params)
        if self.num_in_flight >= self._max_in_flight:
            self._metrics.rejected()
            raise QueueFull(f"{self.num_in_flight} requests are in flight, no more may wait")
        ticket = Ticket(f"{prefix}-{uuid.uuid4().hex}", prompt_ids, params, lora)
        self._open.add(ticket)
        self._send(lambda: self._admit(ticket))
        return ticket

    async def outputs(self, ticket: Ticket) -> AsyncIterator[Output]:
        """Every output of `ticket`, the finished one last. Raises EngineFailed."""
        while True:
            output = await ticket.outputs.get()
            if output is None:
                raise EngineFailed("the engine ended before this request did")
            yield output
            if output.finished:
                return

    def close(self, ticket: Ticket) -> None:
        """Whoever submitted must call this; a request that still runs is cancelled."""
        if not ticket.closed:
            ticket.closed = True
            self._open.discard(ticket)
            self._send(lambda: self._cancel(ticket))

    async def drain(self) -> None:
        """Take nothing new; return when what was taken is finished."""
        self.draining = True
        while self._open and self.failure is None:
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        """End the thread after its step; requests still running are aborted. Safe to repeat."""
        self.draining = True
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    # --- the engine's thread ---

    def _send(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            warm_up(self.engine)
            self._metrics.observe_state(self.engine)
            self.ready = True
            while self._take_commands():
                if self.engine.has_work:
                    report = self.engine.step()
                    self._metrics.observe_step(report, self.engine)
                    self._deliver(report.outputs)
            for ticket in self._tickets.values():
                if ticket.request is not None:
                    self.engine.abort(ticket.request)
                    self._metrics.observe_finished(ticket.request)
            self._end_all()
        except BaseException as error:
            # Whatever it was, waiting clients must hear of it rather than hang.
            log.exception("the engine failed")
            self.failure = error
            self.ready = False
            self._end_all()

    def _take_commands(self) -> bool:
        """Run what the HTTP side sent, waiting for it when idle. False when it is time to stop."""
        with self._wake:
            while not (self._commands or self._stopping or self.engine.has_work):
                self._wake.wait()
            commands = list(self._commands)
            self._commands.clear()
            stopping = self._stopping
        for command in commands:
            command()
        if commands:
            self._metrics.observe_state(self.engine)
        return not stopping

    def _admit(self, ticket: Ticket) -> None:
        if ticket.closed:
            return
        (ticket.request,) = self.engine.add_request(
            ticket.id, ticket.prompt_ids, ticket.params, ticket.lora
        )
        self._tickets[ticket.id] = ticket

    def _cancel(self, ticket: Ticket) -> None:
        if self._tickets.pop(ticket.id, None) is not None and ticket.request is not None:
            self.engine.abort(ticket.request)
            self._metrics.observe_finished(ticket.request)

    def _deliver(self, outputs: tuple[Output, ...]) -> None:
        pairs: list[tuple[Ticket, Output]] = []
        for output in outputs:
            pairs.append((self._tickets[output.request.id], output))
            if output.finished:
                del self._tickets[output.request.id]
        if pairs:
            self._call_http(partial(_hand_over, pairs))

    def _end_all(self) -> None:
        """Tell everybody who still waits that no more will come, those in the inbox too.

        Told on the asyncio loop, where `submit` runs: whoever comes later sees `failure` or
        `draining` and is refused, so nobody is forgotten.
        """
        self._tickets.clear()
        self._call_http(self._end_open)

    def _end_open(self) -> None:
        for ticket in self._open:
            ticket.outputs.put_nowait(None)

    def _call_http(self, function: Callable[[], None]) -> None:
        assert self._http is not None
        # A loop that is closed has no client left to answer.
        if not self._http.is_closed():
            self._http.call_soon_threadsafe(function)


def _hand_over(answers: Sequence[tuple[Ticket, Output]]) -> None:
    for ticket, output in answers:
        ticket.outputs.put_nowait(output)


def warm_up(engine: Engine) -> None:
    """One generation over the shapes to come: a full prefill chunk, then a few decodes."""
    num_new = min(4, engine.max_model_len - 1)
    num_prompt = min(engine.options.max_num_batched_tokens, engine.max_model_len - num_new)
    params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
    engine.add_request("warm-up", (0,) * max(num_prompt, 1), params)
    while engine.has_work:
        engine.step()
