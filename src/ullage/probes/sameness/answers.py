"""Fixed prompts, and how probable a model finds them: on the embedded engine and over HTTP.

Holds the asking. How far two models' answers are apart is `distances`, what follows `sameness`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ullage.errors import BadUsage, Unreachable
from ullage.probes.sameness.marks import AnswerMark

if TYPE_CHECKING:
    from ullage.engine.engine import Engine
    from ullage.engine.lora import LoraAdapter

# Prose, facts, code, numbers, a list, a dialogue, other scripts: faults seldom touch one alone.
# Changing one makes saved fingerprints incomparable (a prompt without its like is left out).
PROMPTS = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is Tokyo.",
    "Once upon a time there was a little girl who lived with her grandmother near a dark wood.",
    "def total(values):\n    result = 0\n    for value in values:\n        result += value\n",
    "Q: What is 17 + 25?\nA: 17 + 25 = 42.\nQ: What is 12 * 12?\nA: 12 * 12 = 144.\n",
    "SELECT name, COUNT(*) FROM users WHERE year > 2020 GROUP BY name ORDER BY 2 DESC;",
    "La réunion de demain aura lieu à dix heures dans la grande salle du deuxième étage.",
    "水在标准大气压下的沸点是一百摄氏度，冰点是零摄氏度。",
    "The committee postponed the vote because two of its members had not read the report.",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20",
    '{"id": 7, "name": "Ada", "tags": ["first", "second"], "active": true, "score": 0.75}',
    "In physics, energy is neither created nor destroyed: it changes from one form to another.",
    "User: My parcel has not arrived.\nAgent: I am sorry. May I have your order number?",
)
LEAST_LOGPROB = -50.0
"""Below it a probability says nothing but that the token was impossible."""
_TIMEOUT_S = 120


def embedded_answers(engine: Engine, lora: LoraAdapter | None = None) -> tuple[AnswerMark, ...]:
    """Every prompt's log-probabilities. Raises BadUsage when one is not a number."""
    assert engine.tokenizer is not None
    found = []
    for prompt in PROMPTS:
        ids = tuple(engine.tokenizer.encode(prompt))[: engine.max_model_len]
        if len(ids) < 2:
            continue
        logprobs = [one.logprob for one in engine.prompt_logprobs(ids, 1, lora)]
        if not all(map(math.isfinite, logprobs)):
            raise BadUsage("the answers are NaN or Inf", field=prompt[:30])
        shown = tuple(round(max(value, LEAST_LOGPROB), 6) for value in logprobs)
        found.append(AnswerMark(prompt, len(ids), ids, shown))
    return tuple(found)


def served_answers(
    url: str, model: str | None, api_key: str | None
) -> tuple[str, tuple[AnswerMark, ...]]:
    """The name that is served there, and what it makes of every prompt (echo with logprobs).

    Raises Unreachable, and BadUsage for a server that does not tell a prompt's logprobs.
    """
    import httpx2

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx2.Client(base_url=url, timeout=_TIMEOUT_S, headers=headers) as client:
            name = model or _served_name(client, url)
            return name, tuple(_served(client, url, name, prompt) for prompt in PROMPTS)
    except httpx2.HTTPError as error:
        raise Unreachable(f"{url}: {error or type(error).__name__}") from error


def metrics_info(url: str, api_key: str | None) -> dict[str, str]:
    """The labels of ullage_engine_info in a server's /metrics; nothing where it has none."""
    import re

    import httpx2

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        text = httpx2.get(f"{url}/metrics", timeout=_TIMEOUT_S, headers=headers).text
    except httpx2.HTTPError:
        return {}
    line = next((one for one in text.splitlines() if one.startswith("ullage_engine_info{")), "")
    return dict(re.findall(r'(\w+)="([^"]*)"', line))


def _served_name(client: Any, url: str) -> str:
    models = _json(client.get("/v1/models"), url).get("data")
    names = [
        str(one["id"])
        for one in models or ()
        if isinstance(one, Mapping) and "id" in one and not one.get("parent")
    ]
    if len(names) != 1:
        told = ", ".join(names[:8]) or "none"
        raise BadUsage(
            f"serves {told}", file=url, expected="URL#NAME, which of its models is meant"
        )
    return names[0]


def _served(client: Any, url: str, model: str, prompt: str) -> AnswerMark:
    body = {
        "model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True,
        "logprobs": 1,
    }  # fmt: skip
    answer = _json(client.post("/v1/completions", json=body), url)
    try:
        count = int(answer["usage"]["prompt_tokens"])
        values = list(answer["choices"][0]["logprobs"]["token_logprobs"])[1:count]
        logprobs = tuple(round(max(float(value), LEAST_LOGPROB), 6) for value in values)
    except (KeyError, IndexError, TypeError, ValueError):
        raise BadUsage(
            "answers without the prompt's logprobs", file=url,
            expected="a server that takes echo with logprobs on /v1/completions",
        ) from None  # fmt: skip
    if len(logprobs) != count - 1 or not all(map(math.isfinite, logprobs)):
        raise BadUsage(f"{len(logprobs)} logprobs of {count} tokens", file=url, field=prompt[:30])
    return AnswerMark(prompt, count, None, logprobs)


def _json(response: Any, url: str) -> dict[str, Any]:
    if response.status_code != 200:
        raise BadUsage(f"answered {response.status_code}: {response.text[:200]}", file=url)
    try:
        body = response.json()
    except ValueError:
        raise BadUsage("the answer is not JSON", file=url) from None
    return body if isinstance(body, dict) else {}
