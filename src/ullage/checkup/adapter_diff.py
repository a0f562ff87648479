"""What an adapter changes in the answers: logits on the embedded engine, greedy answers over HTTP.

Holds the measuring. How much each weight changes is `adapters/changes.py`, showing it is the CLI's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.errors import BadUsage, Unreachable

# Prose, instruction, code, numbers, other scripts: an adapter may leave some of them alone.
PROMPTS = (
    "The capital of France is",
    "Write one sentence about the sea.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Q: What is 17 + 25?\nA:",
    "Once upon a time there was a",
    "SELECT name FROM users WHERE",
    "La reunión de mañana será",
    "Summary: The committee decided to",
)
ANSWER_TOKENS = 16
MAX_PROMPT_TOKENS = 512
_IDENTICAL_LOGIT = 1e-6
_IDENTICAL_LOGPROB = 1e-4


@dataclass(frozen=True, slots=True)
class PromptDivergence:
    """One prompt. On the embedded engine over all positions: KL(base ‖ adapter) in nats, share of
    positions with the same best token, largest difference of a logit. Over HTTP of the answers:
    how many tokens agree from the start, largest difference of a shown logprob of the first."""

    prompt: str
    kl_mean_nats: float | None = None
    kl_max_nats: float | None = None
    top1_agreement_ratio: float | None = None
    max_logit_difference: float | None = None
    agreeing_tokens: int | None = None
    max_logprob_difference: float | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """All prompts. `identical`: nothing differs beyond what the same model differs from itself."""

    source: str
    identical: bool
    prompts: tuple[PromptDivergence, ...]


def embedded(model: str | Path, adapter: str | Path, prompts: Sequence[str]) -> Divergence:
    """Logits of base and adapter at every position of every prompt, float32, one process.

    Raises what Engine.load and Engine.load_lora raise.
    """
    from ullage.engine.engine import Engine  # sets OpenMP's waiting before torch loads
    from ullage.engine.options import EngineOptions

    limit = 2 * MAX_PROMPT_TOKENS
    # Eager: compiled steps take no adapters, and base and adapted must round alike.
    options = EngineOptions(
        enable_lora=True,
        max_lora_rank=1 << 16,
        max_num_batched_tokens=limit,
        enforce_eager=True,
    )
    engine = Engine.load(model, options)
    lora = engine.load_lora("adapter", adapter)
    assert engine.tokenizer is not None
    found = []
    for prompt in prompts:
        ids = tuple(engine.tokenizer.encode(prompt))[: min(MAX_PROMPT_TOKENS, engine.max_model_len)]
        if ids:
            base, adapted = engine.prompt_logits(ids), engine.prompt_logits(ids, lora)
            found.append(_compared(prompt, base, adapted))
    if not found:
        raise BadUsage("no prompt has a token", field="--prompts", expected="text")
    identical = all((d.max_logit_difference or 0.0) <= _IDENTICAL_LOGIT for d in found)
    return Divergence("embedded engine, float32", identical, tuple(found))


def _compared(prompt: str, base_TV: Any, adapted_TV: Any) -> PromptDivergence:
    base, adapted = base_TV.double().log_softmax(-1), adapted_TV.double().log_softmax(-1)
    kl_T = (base.exp() * (base - adapted)).sum(-1).clamp_min(0)
    return PromptDivergence(
        prompt,
        kl_mean_nats=float(kl_T.mean()),
        kl_max_nats=float(kl_T.max()),
        top1_agreement_ratio=float((base.argmax(-1) == adapted.argmax(-1)).double().mean()),
        max_logit_difference=float((base_TV - adapted_TV).abs().max()),
    )


def served(url: str, name: str | None, prompts: Sequence[str], api_key: str | None) -> Divergence:
    """Greedy answers of the base and of the adapter that a server offers as the model `name`.

    The base is asked twice: a server whose own answers vary must not pass for a changed one.
    Raises Unreachable, and BadUsage when it does not offer both.
    """
    import httpx2

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx2.Client(base_url=url, timeout=120, headers=headers) as client:
            base, adapter = _names(client, url, name)
            found, noise = [], 0.0
            for prompt in prompts:
                one, two = _answer(client, base, prompt), _answer(client, base, prompt)
                noise = max(noise, _difference(one, two))
                adapted = _answer(client, adapter, prompt)
                found.append(
                    PromptDivergence(
                        prompt,
                        agreeing_tokens=_agreeing(one["tokens"], adapted["tokens"]),
                        max_logprob_difference=_difference(one, adapted),
                    )
                )
    except httpx2.HTTPError as error:
        raise Unreachable(f"{url}: {error or type(error).__name__}") from error
    identical = all(
        (d.max_logprob_difference or 0.0) <= 2 * noise + _IDENTICAL_LOGPROB for d in found
    )
    return Divergence(f"{url}: {adapter} against {base}", identical, tuple(found))


def _names(client: Any, url: str, name: str | None) -> tuple[str, str]:
    """The base's and the adapter's names there."""
    body = _json(client.get("/v1/models"), url)
    models = [entry for entry in body.get("data") or () if isinstance(entry, Mapping)]
    adapters = [entry for entry in models if entry.get("parent")]
    if name is None and len(adapters) == 1:
        name = str(adapters[0]["id"])
    chosen = [entry for entry in adapters if entry.get("id") == name]
    if not chosen:
        offered = ", ".join(str(entry.get("id")) for entry in adapters) or "none"
        raise BadUsage(
            f"{name!r} is not an adapter of {url}" if name else f"{url} offers several or none",
            field="--lora-name", expected=f"one of its adapters: {offered}",
        )  # fmt: skip
    bases = [str(entry["id"]) for entry in models if not entry.get("parent")]
    parent = str(chosen[0]["parent"])
    return (parent if parent in bases or not bases else bases[0]), str(name)


def _answer(client: Any, model: str, prompt: str) -> dict[str, Any]:
    """The greedy answer's tokens, and the logprobs shown for its first one."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0,
        "logprobs": 5,
    }  # fmt: skip
    answer = _json(client.post("/v1/completions", json=body), model)
    try:
        logprobs = answer["choices"][0]["logprobs"]
        tokens, first = list(logprobs["tokens"]), dict(logprobs["top_logprobs"][0])
    except (KeyError, IndexError, TypeError):
        raise BadUsage("answers without logprobs", field="--engine-url") from None
    return {"tokens": tokens, "first": first}


def _json(response: Any, what: str) -> dict[str, Any]:
    if response.status_code != 200:
        raise BadUsage(f"answered {response.status_code}: {response.text[:200]}", file=what)
    try:
        body = response.json()
    except ValueError:
        raise BadUsage("the answer is not JSON", file=what) from None
    return body if isinstance(body, dict) else {}


def _difference(one: Mapping[str, Any], two: Mapping[str, Any]) -> float:
    """The largest difference of a logprob that both show; of what one alone shows, nothing is known
    but that it changed rank, which counts as its distance to the other's last."""
    first, second = one["first"], two["first"]
    both = [abs(first[token] - second[token]) for token in first if token in second]
    alone = [abs(first[token] - min(second.values())) for token in first if token not in second]
    return max(both + alone, default=float("inf"))


def _agreeing(one: Sequence[str], two: Sequence[str]) -> int:
    count = 0
    for a, b in zip(one, two, strict=False):
        if a != b:
            break
        count += 1
    return count
