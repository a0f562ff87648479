"""Completions and chats: from a body to tickets of the engine, and from tokens to an answer.

Holds the two generating routes, whole and streamed. What bodies mean is `protocol`, what answers
look like `answers`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from ullage.engine.engine import Output, RequestRefused
from ullage.engine.sampler import TokenLogprobs
from ullage.engine.text.tokenizer import Tokenizer
from ullage.errors import UllageError
from ullage.serving import answers
from ullage.serving.fields import BadRequest
from ullage.serving.http import read_body, unless_disconnected
from ullage.serving.loop import EngineLoop
from ullage.serving.models import Models
from ullage.serving.protocol import Ask, Kind, parse_ask, parse_body
from ullage.serving.tickets import Ticket


@dataclass(frozen=True, slots=True)
class Completions:
    """The handlers, over one engine's loop."""

    loop: EngineLoop
    tokenizer: Tokenizer
    models: Models
    body_timeout_s: float

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, "completion")

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, "chat")

    async def _answer(self, request: Request, kind: Kind) -> Response:
        ask = parse_ask(parse_body(await read_body(request, self.body_timeout_s)), kind)
        deadline_s = None
        if ask.deadline_seconds is not None:
            deadline_s = time.monotonic() + ask.deadline_seconds
        lora = self.models.adapter(ask.model)
        self._require_known(ask)
        # Before the prompts are tokenized: they may be a thousand.
        self.loop.require_possible(max(1, len(ask.prompts)), ask.params.n)
        prompts = await run_in_threadpool(self._prompts, ask)
        params = replace(ask.params, max_tokens=max(1, self._max_tokens(ask, prompts)))
        ticket = self.loop.submit(
            prompts,
            params,
            "chatcmpl" if kind == "chat" else "cmpl",
            lora,
            priority=ask.priority,
            deadline_s=deadline_s,
            cache_salt=ask.cache_salt,
        )
        name = self.models.name if lora is None else lora.name
        envelope = answers.Envelope(kind, ticket.id, name, int(time.time()))
        taken_over = False
        try:
            choices = await unless_disconnected(request, self._choices(ask, ticket))
            if ask.stream:
                events = self._events(ask, ticket, envelope, choices)
                stream = _EventStream(self.loop, ticket, events)
                taken_over = True
                return stream
            await unless_disconnected(request, self._collect(ask, ticket, choices))
        finally:
            if not taken_over:
                self.loop.close(ticket)
        usage = self._usage(ticket, choices)
        with_logprobs = ask.params.logprobs is not None
        token_text = self.tokenizer.token_text
        return JSONResponse(answers.whole(envelope, choices, usage, token_text, with_logprobs))

    async def _collect(self, ask: Ask, ticket: Ticket, choices: list[answers.Choice]) -> None:
        async for index, output in self._outputs(ask, ticket):
            choices[index].take(output)

    async def _outputs(self, ask: Ask, ticket: Ticket) -> AsyncIterator[tuple[int, Output]]:
        """The ticket's outputs; where only the echo is wanted (max_tokens 0) they say nothing.

        One token is generated all the same, as in vLLM: the engine's requests end with a token.
        """
        async for index, output in self.loop.outputs(ticket):
            if ask.max_tokens == 0:
                output = replace(output, token_id=None, text="", logprobs=None)
            yield index, output

    async def _events(
        self, ask: Ask, ticket: Ticket, envelope: answers.Envelope, choices: list[answers.Choice]
    ) -> AsyncIterator[bytes]:
        """The server-sent events of one answer. Headers are gone: a failure is an event too."""
        token_text = self.tokenizer.token_text
        for body in answers.first_chunks(envelope, choices, token_text):
            yield answers.event(body)
        try:
            async for index, output in self._outputs(ask, ticket):
                choice = choices[index]
                body = answers.chunk(envelope, choice, output, token_text)
                choice.take(output)
                if ask.continuous_usage:
                    body["usage"] = self._usage(ticket, choices)
                yield answers.event(body)
        except UllageError as failure:
            status = getattr(failure, "status", 500)
            yield answers.event(answers.error(str(failure), type(failure).__name__, status))
        else:
            if ask.include_usage:
                yield answers.event(answers.usage_chunk(envelope, self._usage(ticket, choices)))
        yield b"data: [DONE]\n\n"

    async def _choices(self, ask: Ask, ticket: Ticket) -> list[answers.Choice]:
        """The choices before their first token: an echoed prompt, with its logprobs if wanted."""
        count = ask.params.logprobs
        logprobs: list[list[TokenLogprobs]] = []
        if ask.echo and count is not None:
            logprobs = await self.loop.prompt_logprobs(ticket, count)
        choices: list[answers.Choice] = []
        for at, ids in enumerate(ticket.prompts):
            prefix = ""
            of_prompt: tuple[TokenLogprobs | int, ...] = ()
            if ask.echo:
                prompt = ask.prompts[at]
                prefix = prompt if isinstance(prompt, str) else self.tokenizer.decode(ids)
                of_prompt = () if count is None else (ids[0], *logprobs[at])
            choices += [
                answers.Choice(len(choices) + index, prefix, of_prompt)
                for index in range(ask.params.n)
            ]
        return choices

    def _usage(self, ticket: Ticket, choices: Iterable[answers.Choice]) -> answers.Json:
        num_generated = sum(choice.num_tokens for choice in choices)
        return answers.usage(ticket.prompts, ticket.requests, num_generated)

    def _prompts(self, ask: Ask) -> tuple[tuple[int, ...], ...]:
        if ask.kind == "chat":
            # The template writes the special tokens itself.
            text = self.tokenizer.apply_chat_template(ask.messages)
            return (self.ids(text, False),)
        return tuple(
            prompt if isinstance(prompt, tuple) else self.ids(prompt, ask.add_special)
            for prompt in ask.prompts
        )

    def ids(self, text: str, add_special: bool) -> tuple[int, ...]:
        """Token ids. Raises RequestRefused for a text that is too long by far, at little cost."""
        limit = self.loop.engine.max_model_len
        if self.tokenizer.far_more(text, limit) is not None:
            raise RequestRefused(
                f"more than {limit} tokens in {len(text)} characters",
                field="prompt",
                expected=f"at most {limit} together with max_tokens (max_model_len)",
            )
        return tuple(self.tokenizer.encode(text, add_special))

    def _max_tokens(self, ask: Ask, prompts: Iterable[tuple[int, ...]]) -> int:
        if ask.max_tokens is not None:
            return ask.max_tokens
        return max(1, self.loop.engine.max_model_len - max(map(len, prompts)))

    def _require_known(self, ask: Ask) -> None:
        """Raise BadRequest for what this engine's model or scheduler does not know."""
        engine = self.loop.engine
        for token, _ in ask.params.logit_bias:
            if token >= engine.spec.vocab_size:
                raise BadRequest(
                    f"token {token}",
                    field="logit_bias",
                    expected=f"ids below {engine.spec.vocab_size}",
                )
        if ask.priority and engine.options.scheduling_policy != "priority":
            raise BadRequest(
                str(ask.priority),
                field="priority",
                expected="0 without --scheduling-policy priority",
            )


class _EventStream(StreamingResponse):
    """A stream that lets go of its request however it ends, begun or not."""

    def __init__(self, loop: EngineLoop, ticket: Ticket, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        self._loop = loop
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            await send(message)
            # Tokens that wait in a row would be written on and on to a client that has gone, before
            # the event loop is heard: of the fifth such write asyncio complains on stderr.
            await asyncio.sleep(0)

        try:
            await super().__call__(scope, receive, sent)
        finally:
            self._loop.close(self._ticket)
