"""Names and units of the figures that the page shows, and text from outside made harmless.

Holds tables and `plain`. The page builds its elements from text, never from markup; what is cut
here are control characters, marks that turn the direction of writing, and endless names.
"""

from __future__ import annotations

from collections.abc import Mapping

# Field → (words, unit). Order is the page's.
FIGURES: Mapping[str, tuple[str, str]] = {
    "kv_used_ratio": ("KV cache used", "ratio"),
    "kv_used_bytes": ("KV cache used", "bytes"),
    "kv_free_bytes": ("KV cache free", "bytes"),
    "kv_total_bytes": ("KV cache in all", "bytes"),
    "kv_used_tokens": ("KV cache used", "tokens"),
    "kv_free_tokens": ("KV cache free", "tokens"),
    "kv_total_tokens": ("KV cache in all", "tokens"),
    "kv_cached_tokens": ("prefixes kept for reuse", "tokens"),
    "page_utilization_ratio": ("page utilisation", "ratio"),
    "time_to_full_s": ("time to full, as it goes", "s"),
    "running": ("running", "requests"),
    "waiting": ("waiting", "requests"),
    "oldest_request_age_s": ("age of the oldest request", "s"),
    "preemptions_per_s": ("preemptions", "1/s"),
    "recomputed_tokens_per_s": ("recomputed", "tokens/s"),
    "prompt_tokens_per_s": ("prompts read", "tokens/s"),
    "generation_tokens_per_s": ("written", "tokens/s"),
    "rejected_requests_per_s": ("refused", "1/s"),
    "prefix_hit_ratio": ("prefix cache hits", "ratio"),
    "ttft_s": ("time to first token (TTFT)", "s"),
    "itl_s": ("time between tokens (ITL)", "s"),
    "e2e_s": ("whole request", "s"),
    "queue_s": ("in the queue", "s"),
    "prefill_s": ("prefill", "s"),
    "decode_s": ("decode", "s"),
    "request_prompt_tokens": ("length of prompts", "tokens"),
    "request_generation_tokens": ("length of answers", "tokens"),
    "waiting_by_reason": ("waiting by reason", "requests"),
    "sleep_state": ("sleep state", ""),
    "finished_by_reason": ("finished by reason", "requests"),
    "gpus": ("accelerators", ""),
    "engine": ("engine", ""),
    "version": ("version", ""),
}
MOST_CHARACTERS = 400


def plain(text: object, most: int = MOST_CHARACTERS) -> str:
    """Text from anywhere as one line of printable characters, at most `most` of them."""
    said = str(text)[: most + 1]
    cleaned = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in said)
    return cleaned if len(cleaned) <= most else cleaned[: most - 1] + "…"


def words_of(field: str) -> str:
    """The words for a field; its own name with spaces where the table does not know it."""
    known = FIGURES.get(field)
    return known[0] if known else field.replace("_", " ")
