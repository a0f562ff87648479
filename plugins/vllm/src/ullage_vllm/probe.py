"""The probe as an API process sees it: what workers answer made one document, prompts run for it.

Holds what the routes /ullage/entropy and /ullage/attention answer. Series are `probe_series`;
what is read of a model, and when, is `worker`'s.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from ullage_vllm.engines import Engines, NoAnswer
from ullage_vllm.routes import Refusal

ROWS = 64
MOST_ROWS = 256
MOST_EVERY = 1_000_000
MOST_WEIGHTS = 8192
"""Keys of a row whose weights are told; the weights of a longer one are refused."""
PROMPT_S = 300.0
MISTAKES = frozenset({"ValueError", "VLLMClientError"})
"""What vLLM raises for a prompt that it cannot take."""
COUNTERS = ("steps", "sampled", "missed", "rows", "without_graph", "seconds")


class Probing:
    """The workers behind `client`, vLLM's AsyncLLM. Prompts are looked at one by one."""

    def __init__(self, client: Any, engines: Engines, source: str) -> None:
        self._client, self._engines, self._source = client, engines, source
        self._one = asyncio.Lock()

    async def ask(self, action: str, **arguments: Any) -> list[list[dict[str, Any]]]:
        """Of each engine core what its workers answer. Raises Refusal where one cannot."""
        answers = await self._engines.ask("ullage_probe", action, arguments)
        for worker in (worker for workers in answers for worker in workers):
            if "error" in worker:
                raise Refusal(501, f"the probe cannot do that: {worker['error']}")
        return answers

    async def entropy(self, query: dict[str, str]) -> dict[str, Any]:
        """What the last rows of the sampled decode steps come to."""
        for name in query:
            raise Refusal(400, f"{name[:80]!r} is not a parameter of this route", name[:80])
        answers = await self.ask("report")
        return {"source": self._source, **state(answers), "layers": layers(answers)}

    async def sample(self, query: dict[str, str]) -> dict[str, Any]:
        """Look at one in `every` decode steps from now on; at none with 0."""
        for name in query:
            if name != "every":
                raise Refusal(400, f"{name[:80]!r} is not a parameter of this route", name[:80])
        told = query.get("every", "")
        if not (told.isascii() and told.isdecimal()) or int(told) > MOST_EVERY:
            found = told[:80] or "nothing"
            raise Refusal(400, f"every: found {found}, expected 0 to {MOST_EVERY} steps", "every")
        return state(await self.ask("sample", every=int(told)))

    async def attention(self, body: bytes) -> dict[str, Any]:
        """Run a prompt, nothing of it taken from the prefix cache, and read rows of it."""
        asked = asked_of(body)
        key = f"ullage-attention-{uuid.uuid4().hex}"
        async with self._one:
            try:
                await self.ask("watch", key=key, rows=asked["rows"], weights=asked["weights"])
                await asyncio.wait_for(self._run(asked["prompt"], key), PROMPT_S)
            except (TimeoutError, asyncio.TimeoutError):
                raise NoAnswer(f"the prompt has not run for {PROMPT_S:g} s") from None
            finally:
                answers = await asyncio.shield(self.ask("take", key=key))
        return self._told(answers, asked)

    async def _run(self, prompt: Any, key: str) -> None:
        from vllm import SamplingParams

        parameters = SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, skip_reading_prefix_cache=True
        )
        given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        try:
            async for _ in self._client.generate(given, parameters, key):
                pass
        except Exception as error:
            if MISTAKES & {base.__name__ for base in type(error).__mro__}:
                raise Refusal(400, f"prompt: {error}", "prompt") from None
            raise NoAnswer(f"the prompt did not run: {error!r}") from error

    def _told(self, answers: list[list[dict[str, Any]]], asked: dict[str, Any]) -> dict[str, Any]:
        told = [[one for one in workers if one["layers"] is not None] for workers in answers]
        ran = [workers for workers in told if workers]
        if len(ran) != 1:
            raise Refusal(500, "no engine told that it ran the prompt")
        (workers,) = ran
        if workers[0]["mistake"]:
            raise Refusal(400, f"weights: {workers[0]['mistake']}", "weights")
        failures = [one["failure"] for one in workers if one.get("failure")]
        if failures:
            raise Refusal(500, f"the prompt was not read: {failures[0]}")
        document = {
            "source": self._source,
            "tokens": workers[0]["tokens"],
            "rows": min(one["rows_read"] for one in workers),
            "not_read": sorted({name for one in workers for name in one["not_read"]}),
            "layers": layers([workers]),
        }
        if asked["weights"] is not None:
            found = [one["weights"] for one in workers if one["weights"] is not None]
            if len(found) != 1:
                raise Refusal(400, "weights: this model has no such layer and head", "weights")
            if len(found[0]) > MOST_WEIGHTS:
                raise Refusal(400, f"weights: the row sees {len(found[0])} keys, more than "
                              f"{MOST_WEIGHTS}", "weights")  # fmt: skip
            first = asked["weights"]["row"] + 1 - len(found[0])
            document["weights"] = {**asked["weights"], "first_key": first, "values": found[0]}
        return document


def asked_of(body: bytes) -> dict[str, Any]:
    """prompt, rows, weights of a body. Raises Refusal where it is not clear what is meant."""
    try:
        found = json.loads(body)
    except ValueError:
        raise Refusal(400, "the body is not JSON") from None
    if not isinstance(found, dict):
        raise Refusal(400, 'the body: found no object, expected {"prompt": …}')
    for name in found:
        if name not in ("prompt", "rows", "weights"):
            raise Refusal(400, f"{name[:80]!r} is not a parameter of this route", name[:80])
    prompt, rows, weights = found.get("prompt"), found.get("rows", ROWS), found.get("weights")
    if not prompt or not (isinstance(prompt, str) or _all_whole(prompt)):
        raise Refusal(400, "prompt: expected a text or a list of token ids, not empty", "prompt")
    if not _all_whole([rows]) or not 1 <= rows <= MOST_ROWS:
        raise Refusal(400, f"rows: found {rows!r:.40}, expected 1 to {MOST_ROWS}", "rows")
    if weights is not None:
        names = {"layer", "head", "row"}
        if (
            not isinstance(weights, dict)
            or set(weights) != names
            or not _all_whole(list(weights.values()))
        ):
            raise Refusal(400, "weights: expected layer, head and row, whole numbers", "weights")
    return {"prompt": prompt, "rows": rows, "weights": weights}


def _all_whole(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in values
    )


# --- many answers made one ---


def state(answers: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Counters of all engines. Workers of one engine look at the same steps: the most of them."""
    told: dict[str, Any] = {
        name: sum(max(one[name] for one in workers) for workers in answers) for name in COUNTERS
    }
    everyone = [one for workers in answers for one in workers]
    told["every"] = everyone[0]["every"]
    told["last_miss"] = next((one["last_miss"] for one in everyone if one["last_miss"]), None)
    told["not_read"] = sorted({name for one in everyone for name in one["not_read"]})
    return told


def layers(answers: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Layers in order, each with the heads of all ranks; with several engines each says whose."""
    found = []
    for number, workers in enumerate(answers):
        heads: dict[int, list[dict[str, Any]]] = {}
        for layer in (layer for one in workers for layer in one["layers"] or ()):
            heads.setdefault(layer["layer"], []).extend(layer["heads"])
        whose = {"engine": number} if len(answers) > 1 else {}
        found += [
            {**whose, "layer": layer, "heads": sorted(listed, key=lambda head: int(head["head"]))}
            for layer, listed in sorted(heads.items())
        ]
    return found


def pooled(grids: Iterable[Sequence[float]], share: float) -> float:
    """A quantile of all ranks' entropies, each of which told its own at even distances."""
    values = sorted(value for grid in grids for value in grid)
    at = share * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])
