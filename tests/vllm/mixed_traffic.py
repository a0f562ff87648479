"""Healthy mixed traffic: chats of several turns and long single questions, by a seed.

Holds who asks what and when, and how it ended. Users wait for their answers before they ask again,
so that however slow the machine is, it is never asked for more than it can do.
"""

from __future__ import annotations

import asyncio
import csv
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx2 as httpx
from plugin_server import MODEL

from ullage.traffic.trace import recorded_rows

TRACES = Path(__file__).parents[3] / "shared" / "traces"
MAX_MODEL_LEN = 4096
NUM_USERS = 10
THINK_S = 2.0
NUM_CALLERS = 2
CALL_EVERY_S = 8.0
"""What each of the callers of long prompts waits on average before the next."""
SYSTEM_PROMPTS = (96, 160, 224, 480)
"""Tokens of the prompts that chats share."""
TURNS = (1, 2, 3, 4, 6)
LEAST_NEW = 16
ENDS = ("stop",) * 17 + ("length",) * 2 + ("leave",)
"""As mixed traffic ends: mostly by itself, one in ten at its limit, the odd one given up."""
STREAMED = (True, True, True, False)
GAP_EVERY_S, GAP_S = 240.0, 15.0
LULL_AFTER_S, LULL_S = 1080.0, 150.0
"""Nobody asks for a while, now and then; and once for longer, which only long runs come to."""
FIRST_ID, LAST_ID, EOS = 4, 159, "2"
UNTIL_ANSWERED_S = 120.0

End = Literal["stop", "length", "leave"]
Row = tuple[int, int]


def chats() -> tuple[str, list[Row]]:
    """(whose lengths, prompt and answer tokens of each)."""
    found = _azure("conv")
    if found:
        return "azure-2023-conv", found
    rows = [(row.prompt_tokens, row.output_tokens) for row in recorded_rows()]
    return "the trace that ships", rows


def calls() -> tuple[str, list[Row]]:
    """As `chats`, of prompts that are long and answers that are short."""
    found = _azure("code")
    if found:
        return "azure-2023-code", found
    name, rows = chats()
    return name, [(prompt, max(5, answer // 8)) for prompt, answer in rows if prompt >= 1000]


def _azure(name: str) -> list[Row]:
    path = TRACES / f"azure-2023-{name}.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(file)]


@dataclass(frozen=True)
class Ask:
    """One request; `answer` tokens come back, of which a client that leaves reads half."""

    prompt: list[int]
    answer: int
    end: End
    streamed: bool

    def body(self) -> dict[str, object]:
        asked: dict[str, object] = {
            "model": MODEL,
            "prompt": self.prompt,
            "temperature": 0.8,
            "stream": self.streamed,
        }
        if self.end == "stop":
            # Its end is impossible before that many tokens, and certain after.
            ends = {"min_tokens": self.answer - 1, "logit_bias": {EOS: 100}}
            return {**asked, **ends, "max_tokens": MAX_MODEL_LEN - len(self.prompt)}
        return {**asked, "ignore_eos": True, "max_tokens": self.answer}


@dataclass
class Traffic:
    """Everybody who asks, for `seconds`. `ended` and `problems` are what came of it."""

    url: str
    key: str
    seconds: float
    seed: int
    ended: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lengths: str = ""

    def run(self) -> None:
        """Until all of it is answered."""
        asyncio.run(self._everybody())

    async def _everybody(self) -> None:
        (chat_name, chat_rows), (call_name, call_rows) = chats(), calls()
        self.lengths = f"{chat_name}, {call_name}"
        self._begin_s = time.monotonic()
        headers = {"Authorization": f"Bearer {self.key}"}
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=UNTIL_ANSWERED_S, trust_env=False
        )
        async with self._http, asyncio.TaskGroup() as group:
            for number in range(NUM_USERS):
                group.create_task(self._user(self._drawn(f"user {number}"), chat_rows))
            for number in range(NUM_CALLERS):
                group.create_task(self._caller(self._drawn(f"caller {number}"), call_rows))

    def _drawn(self, whose: str) -> random.Random:
        return random.Random(f"{self.seed} {whose}")  # noqa: S311

    async def _user(self, rng: random.Random, rows: list[Row]) -> None:
        """Chats of some turns each; every turn's prompt is all that was said before it."""
        while await self._pause(rng, THINK_S):
            kind = rng.randrange(len(SYSTEM_PROMPTS))
            said = _tokens(self._drawn(f"system {kind}"), SYSTEM_PROMPTS[kind])
            for _ in range(rng.choice(TURNS)):
                prompt, answer = rng.choice(rows)
                said = said + _tokens(rng, max(LEAST_NEW, prompt - len(said)))
                if len(said) + answer >= MAX_MODEL_LEN:
                    break
                await self._ask(Ask(said, max(2, answer), rng.choice(ENDS), rng.choice(STREAMED)))
                said = said + _tokens(rng, answer)
                if not await self._pause(rng, THINK_S):
                    return

    async def _caller(self, rng: random.Random, rows: list[Row]) -> None:
        """Single questions, each with a prompt of its own."""
        while await self._pause(rng, CALL_EVERY_S):
            prompt, answer = rng.choice(rows)
            answer = max(2, min(answer, MAX_MODEL_LEN // 8))
            prompt = min(prompt, MAX_MODEL_LEN - answer - 1)
            await self._ask(Ask(_tokens(rng, prompt), answer, rng.choice(ENDS), streamed=False))

    async def _pause(self, rng: random.Random, mean_s: float) -> bool:
        """Think, and wait while nobody asks; whether there is still time for another."""
        await asyncio.sleep(rng.expovariate(1 / mean_s))
        while (gone_s := time.monotonic() - self._begin_s) < self.seconds:
            if not in_gap(gone_s):
                return True
            await asyncio.sleep(0.2 + rng.random())
        return False

    async def _ask(self, ask: Ask) -> None:
        try:
            if ask.streamed:
                self.ended[await self._streamed(ask)] += 1
            else:
                self.ended[await self._whole(ask)] += 1
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self.problems.append(f"a request failed: {type(error).__name__}: {error}"[:200])

    async def _streamed(self, ask: Ask) -> str:
        reason, num = "", 0
        async with self._http.stream("POST", "/v1/completions", json=ask.body()) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                num += 1
                reason = event["choices"][0]["finish_reason"] or reason
                if ask.end == "leave" and num >= ask.answer / 2:
                    return "left"
        self._expect(ask, reason)
        return reason

    async def _whole(self, ask: Ask) -> str:
        answering = self._http.post("/v1/completions", json=ask.body())
        if ask.end == "leave":
            try:
                async with asyncio.timeout(0.5):
                    await answering
            except TimeoutError:
                return "left"
            return "length"
        reason = (await answering).raise_for_status().json()["choices"][0]["finish_reason"]
        self._expect(ask, reason)
        return str(reason)

    def _expect(self, ask: Ask, reason: str) -> None:
        wanted = "length" if ask.end == "leave" else ask.end
        if reason != wanted:
            self.problems.append(f"a request was to end by {wanted} and ended by {reason!r}")


def in_gap(gone_s: float) -> bool:
    """Whether nobody begins anything at that time."""
    if LULL_AFTER_S <= gone_s < LULL_AFTER_S + LULL_S:
        return True
    return gone_s % GAP_EVERY_S >= GAP_EVERY_S - GAP_S


def _tokens(rng: random.Random, num: int) -> list[int]:
    return rng.choices(range(FIRST_ID, LAST_ID + 1), k=num)
