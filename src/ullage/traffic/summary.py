"""What a load amounted to: throughput, quantiles of TTFT and inter-token time, failures by reason.

Holds arithmetic on `RequestResult`s only. All times in seconds, all rates per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ullage.traffic.load import RequestResult


@dataclass(frozen=True, slots=True)
class Distribution:
    """Quantiles of one measured quantity and the values themselves, sorted."""

    values: tuple[float, ...]

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    def quantile(self, share: float) -> float:
        """The smallest value that at least `share` of all are at or below (nearest rank)."""
        assert self.values and 0 < share <= 1, "quantiles need values"
        rank = -(-len(self.values) * share // 1)
        return self.values[min(len(self.values), max(1, int(rank))) - 1]


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """One load in numbers. A distribution is None when nothing was there to measure.

    `wall_s` is from the first send to the last end. `output_tokens` are the server's own count
    where it gave one, else the text events seen (`counted_by_events` says for how many requests).
    `max_lag_s` is how late the client itself sent at worst.
    """

    num_planned: int
    num_succeeded: int
    errors: tuple[tuple[str, int], ...]
    wall_s: float
    prompt_tokens: int
    output_tokens: int
    counted_by_events: int
    num_short: int
    ttft: Distribution | None
    inter_token: Distribution | None
    end_to_end: Distribution | None
    max_lag_s: float

    @property
    def num_failed(self) -> int:
        return self.num_planned - self.num_succeeded

    @property
    def output_tokens_per_s(self) -> float | None:
        return self.output_tokens / self.wall_s if self.wall_s > 0 else None

    @property
    def requests_per_s(self) -> float | None:
        return self.num_succeeded / self.wall_s if self.wall_s > 0 else None


def summarise(results: Sequence[RequestResult]) -> LoadSummary:
    """Sum up a load. Tokens of failed requests count (they were produced), their times do not."""
    good = [r for r in results if r.error is None]
    reasons: dict[str, int] = {}
    for result in results:
        if result.error is not None:
            reasons[result.error] = reasons.get(result.error, 0) + 1
    first = min((r.sent_s for r in results), default=0.0)
    return LoadSummary(
        num_planned=len(results),
        num_succeeded=len(good),
        errors=tuple(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
        wall_s=max((r.end_s for r in results), default=first) - first,
        prompt_tokens=sum(_prompt_tokens(r) for r in results),
        output_tokens=sum(output_tokens(r) for r in results),
        counted_by_events=sum(r.output_tokens is None for r in results),
        num_short=sum(output_tokens(r) < r.planned_output_tokens for r in good),
        ttft=_distribution([t for r in good if (t := r.ttft_s) is not None]),
        inter_token=_distribution([gap for r in good for gap in r.inter_token_s]),
        end_to_end=_distribution([r.end_s - r.sent_s for r in good]),
        max_lag_s=max((r.lag_s for r in results), default=0.0),
    )


def output_tokens(result: RequestResult) -> int:
    """The server's count of generated tokens, or the text events seen where it gave none."""
    if result.output_tokens is not None:
        return result.output_tokens
    return len(result.event_times_s)


def _prompt_tokens(result: RequestResult) -> int:
    """Prompt tokens that the server is known to have read: those of requests that got a token."""
    if result.prompt_tokens is not None:
        return result.prompt_tokens
    return result.planned_prompt_tokens if result.event_times_s else 0


def decode_rate(results: Sequence[RequestResult]) -> float | None:
    """Tokens per second of a batch while all of it decodes: between the last start and first end.

    None when the requests never all ran together or some failed.
    """
    if not results or any(r.error is not None or len(r.event_times_s) < 3 for r in results):
        return None
    times = [[r.sent_s + t for t in r.event_times_s] for r in results]
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    count = sum(sum(begin < moment <= end for moment in t) for t in times)
    return count / (end - begin) if end > begin and count >= len(results) else None


def _distribution(values: list[float]) -> Distribution | None:
    return Distribution(tuple(sorted(values))) if values else None
