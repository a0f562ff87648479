"""The engine's own thread: requests go in from the HTTP loop, tokens come back to it.

Holds the hand-over between the two and nothing of HTTP. The engine is touched by its thread only;
every answer reaches the asyncio loop in one call per step, however many requests ran.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from ullage.engine.engine import Engine, Output
from ullage.engine.lora import LoraAdapter
from ullage.engine.paging.blocks import OutOfBlocks
from ullage.engine.reports import CancelReport
from ullage.engine.request import Request, SamplingParams
from ullage.engine.sampler import TokenLogprobs
from ullage.errors import BadInput, UllageError
from ullage.serving.metrics import EngineMetrics
from ullage.serving.refusals import Cancelled, Draining, EngineFailed, NotFinite, QueueFull
from ullage.serving.tickets import Ticket, raise_if_cut
from ullage.serving.trace import NoTrace, Trace
from ullage.serving.warmup import warm_up

log = logging.getLogger("ullage.serving")
T = TypeVar("T")
PROMPT_LOGPROBS_WAIT_S = 60.0


class EngineLoop:
    """Runs an engine in a thread from `start()` to `stop()`.

    Beside those that may run `max_num_queued_reqs` may wait, as long as the prompts of all that
    have no token yet stay below `max_num_queued_tokens` (None: any).
    """

    def __init__(
        self,
        engine: Engine,
        metrics: EngineMetrics,
        max_num_queued_reqs: int,
        max_num_queued_tokens: int | None = None,
        trace: Trace | NoTrace | None = None,
    ) -> None:
        self.engine = engine
        self._metrics = metrics
        self._trace = trace or NoTrace()
        self._max_in_flight = engine.options.max_num_seqs + max_num_queued_reqs
        self._max_queued_tokens = (
            math.inf if max_num_queued_tokens is None else max_num_queued_tokens
        )
        self._commands: deque[Callable[[], None]] = deque()
        self._calls: set[Future[object]] = set()
        self._wake = threading.Condition()
        # By request id; only the engine's thread touches it.
        self._live: dict[str, tuple[Ticket, int]] = {}
        self._thread = threading.Thread(target=self._run, name="ullage-engine", daemon=True)
        self._http: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        # Submitted and not closed; only the asyncio loop touches them.
        self._open: set[Ticket] = set()
        self.num_in_flight = 0
        self.num_queued_tokens = 0
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

    def submit(
        self,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        prefix: str,
        lora: LoraAdapter | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_salt: str = "",
    ) -> Ticket:
        """Hand prompts to the engine. Raises Refused, EngineFailed or RequestRefused.

        All of a ticket's choices are taken or none.
        """
        if self.failure is not None:
            raise EngineFailed("the engine has failed and serves nothing any more")
        if self.draining:
            raise Draining("the server is shutting down and takes no new requests", 5)
        for prompt_ids in prompts:
            self.engine.require_fits(prompt_ids, params)
        ticket = Ticket(
            f"{prefix}-{uuid.uuid4().hex}",
            tuple(prompts),
            params,
            lora,
            priority,
            deadline_s,
            cache_salt,
        )
        self._require_room(ticket)
        self._open.add(ticket)
        self.num_in_flight += ticket.num_choices
        self.num_queued_tokens += ticket.num_prompt_tokens
        self._send(lambda: self._admit(ticket))
        return ticket

    def require_possible(self, num_prompts: int, n: int) -> None:
        """Raise BadInput for more answers in one request than may run and wait here together."""
        if num_prompts * n > self._max_in_flight:
            several = num_prompts > 1
            raise BadInput(
                f"{num_prompts * n} choices in one request"
                + (f" ({num_prompts} prompts, n {n})" if several else ""),
                field="prompt" if several else "n",
                expected=f"at most {self._max_in_flight}, as many as may run and wait here",
            )

    def _require_room(self, ticket: Ticket) -> None:
        """Raise QueueFull, or BadInput for a ticket that would never be let in."""
        self.require_possible(len(ticket.prompts), ticket.params.n)
        if self.num_in_flight + ticket.num_choices > self._max_in_flight:
            full, reason = f"{self.num_in_flight} requests are in flight", "max_num_queued_reqs"
        elif self.num_queued_tokens >= self._max_queued_tokens:
            full, reason = f"{self.num_queued_tokens} prompt tokens wait", "max_num_queued_tokens"
        else:
            return
        self._metrics.rejected(reason)
        raise QueueFull(f"{full}, no more may wait", self.engine.retry_after_s() or 1)

    async def outputs(self, ticket: Ticket) -> AsyncIterator[tuple[int, Output]]:
        """Every output of `ticket` with its choice, until all have finished.

        Raises EngineFailed, NotFinite, DeadlinePassed or Cancelled when one ends without an answer.
        """
        num_open = ticket.num_choices
        while num_open:
            found = await ticket.outputs.get()
            if isinstance(found, UllageError):
                raise found
            choice, output = found
            self._leave_queue(ticket)
            if output.finished:
                num_open -= 1
                raise_if_cut(output.request)
            yield choice, output

    def close(self, ticket: Ticket) -> None:
        """Whoever submitted must call this; a request that still runs is cancelled."""
        if not ticket.closed:
            ticket.closed = True
            self._open.discard(ticket)
            self.num_in_flight -= ticket.num_choices
            self._leave_queue(ticket)
            self._send(lambda: self._cancel(ticket))

    def _leave_queue(self, ticket: Ticket) -> None:
        """Its prompts wait no longer, once it has a token or is gone."""
        if ticket.prefilling:
            ticket.prefilling = False
            self.num_queued_tokens -= ticket.num_prompt_tokens

    async def call(self, function: Callable[[Engine], T]) -> T:
        """What `function` says of the engine, between two steps. Raises EngineFailed."""
        future: Future[T] = Future()

        def run() -> None:
            with self._wake:
                self._calls.discard(future)
            if not future.set_running_or_notify_cancel():
                return  # whoever asked is gone
            try:
                future.set_result(function(self.engine))
            except Exception as error:
                future.set_exception(error)

        with self._wake:
            if self._stopping or self.failure is not None:
                raise EngineFailed("the engine does not run")
            self._calls.add(future)  # type: ignore[arg-type]
            self._commands.append(run)
            self._wake.notify()
        return await asyncio.wrap_future(future)

    async def cancel_oldest(self, percent: float, dry_run: bool) -> CancelReport:
        """Have the engine end its oldest running requests; their clients get a 503."""

        def cancel(engine: Engine) -> CancelReport:
            report = engine.cancel_oldest(percent, dry_run=dry_run)
            if not dry_run:
                found = [self._live[request_id] for request_id in report.request_ids]
                ended = [ticket.requests[choice] for ticket, choice in found]
                self._deliver([Output(request, None, "", finished=True) for request in ended])
                for _ in ended:
                    self._metrics.cancelled("operator")
            return report

        return await self.call(cancel)

    async def prompt_logprobs(self, ticket: Ticket, count: int) -> list[list[TokenLogprobs]]:
        """Of each of the ticket's prompts, from its second token on. Raises NotFinite, QueueFull.

        Each is computed between two steps, once the pool has room for it beside those who run.
        """
        until_s = time.monotonic() + PROMPT_LOGPROBS_WAIT_S
        found: list[list[TokenLogprobs]] = []
        while len(found) < len(ticket.prompts):
            prompt_ids = ticket.prompts[len(found)]
            ask = partial(
                Engine.prompt_logprobs, prompt_ids=prompt_ids, count=count, lora=ticket.lora
            )
            logprobs = await self.call_with_room(ask, until_s, "the prompt's logprobs")
            if any(math.isnan(one.logprob) for one in logprobs):
                raise NotFinite("the model's logits were not finite within the prompt")
            found.append(logprobs)
        return found

    async def call_with_room(self, function: Callable[[Engine], T], until_s: float, what: str) -> T:
        """As `call`, again until the pool has room beside those who run. Raises QueueFull."""
        while True:
            try:
                return await self.call(function)
            except OutOfBlocks as full:
                if time.monotonic() > until_s:
                    raise QueueFull(f"no room to compute {what}", 5) from full
                await asyncio.sleep(0.05)

    async def drain(self, timeout_s: float | None = None) -> int:
        """Take nothing new; return when what was taken is finished.

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
            ticket.outputs.put_nowait(Cancelled("the server shut down before this was finished", 5))
        while self._open and self.failure is None:
            await asyncio.sleep(0.02)
        return len(cut)

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
            self._metrics.begin()
            self._metrics.observe_state(self.engine)
            self.ready = True
            while self._take_commands():
                if self.engine.has_work:
                    report = self.engine.step()
                    self._metrics.observe_step(report, self.engine)
                    started_s = time.monotonic()
                    self._deliver(report.outputs)
                    self._trace.step(report, self.engine, started_s, time.monotonic())
            for ticket, choice in list(self._live.values()):
                self._abort(ticket.requests[choice], "shutdown")
            self._end_all()
        except BaseException as error:
            # Whatever it was, waiting clients must hear of it rather than hang.
            log.exception("the engine failed")
            self.failure = error
            self.ready = False
            self._end_all()
        finally:
            self._trace.close()

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
        several = len(ticket.prompts) > 1
        try:
            for index, prompt_ids in enumerate(ticket.prompts):
                ticket.requests += self.engine.add_request(
                    f"{ticket.id}-p{index}" if several else ticket.id,
                    prompt_ids,
                    ticket.params,
                    ticket.lora,
                    priority=ticket.priority,
                    deadline_s=ticket.deadline_s,
                    cache_salt=ticket.cache_salt,
                )
        except BadInput as refusal:
            for request in ticket.requests:
                self.engine.abort(request)
            self._call_http(partial(ticket.outputs.put_nowait, refusal))
            return
        for choice, request in enumerate(ticket.requests):
            self._live[request.id] = (ticket, choice)

    def _cancel(self, ticket: Ticket) -> None:
        for request in ticket.requests:
            if request.id in self._live:
                self._abort(request, "shutdown" if self.draining else "client")

    def _abort(self, request: Request, by: str) -> None:
        self.engine.abort(request)
        self._metrics.cancelled(by)
        self._ended(request)

    def _ended(self, request: Request) -> None:
        """Account for a request that has ended and is delivered to nobody any more."""
        ticket, choice = self._live.pop(request.id)
        self._metrics.observe_finished(request)
        self._trace.ended(request)
        first = choice - request.index
        choices = ticket.requests[first : first + ticket.params.n]
        if not any(one.id in self._live for one in choices):
            self._metrics.observe_choices(choices)

    def _deliver(self, outputs: Iterable[Output]) -> None:
        pairs: list[tuple[Ticket, int, Output]] = []
        for output in outputs:
            pairs.append((*self._live[output.request.id], output))
            if output.finished:
                self._ended(output.request)
        if pairs:
            self._call_http(partial(_hand_over, pairs))

    def _end_all(self) -> None:
        """Tell everybody who still waits that no more will come, those in the inbox too.

        Told on the asyncio loop, where `submit` runs: whoever comes later sees `failure` or
        `draining` and is refused, so nobody is forgotten.
        """
        self._live.clear()
        with self._wake:
            self._stopping = True
            calls = list(self._calls)
            self._calls.clear()
        for future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineFailed("the engine does not run any more"))
        self._call_http(self._end_open)

    def _end_open(self) -> None:
        for ticket in self._open:
            ticket.outputs.put_nowait(EngineFailed("the engine ended before this request did"))

    def _call_http(self, function: Callable[[], None]) -> None:
        assert self._http is not None
        # A loop that is closed has no client left to answer.
        if not self._http.is_closed():
            self._http.call_soon_threadsafe(function)


def _hand_over(answers: Sequence[tuple[Ticket, int, Output]]) -> None:
    for ticket, choice, output in answers:
        ticket.outputs.put_nowait((choice, output))
