"""What the checkup sends: a slice of a real request trace, scaled to the machine and saying how.

Holds the trace rows, the scaling and its account. Sending is `load.py`; the rows' licence lies
beside them in `data/`.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files

TRACE_NAME = "azure-2023-conv, rows 1–128 (Azure Public Dataset, CC-BY 4.0)"
TRACE_FILE = "azure-2023-conv-128.csv"
# Shorter prompts or answers than these measure HTTP, not the model.
MIN_PROMPT_TOKENS = 4
MIN_OUTPUT_TOKENS = 2


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request as it was recorded; `arrival_s` counts from the first row."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Rates:
    """What the engine did when it was calibrated: tokens per second, each alone."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """Exactly what was done to the trace. Factors are new / recorded; 1.0 means untouched.

    `length_factor` multiplies prompts and answers alike. `num_clipped` rows were then cut to
    `max_model_len`, `num_raised` rows lifted to the least lengths. `speed_up` divides arrival
    times: 0.5 plays the trace at half its recorded speed. `reason` says which limit decided.
    """

    num_rows: int
    num_recorded: int
    length_factor: float
    speed_up: float
    num_clipped: int
    num_raised: int
    recorded_span_s: float
    planned_span_s: float
    recorded_prompt_tokens: int
    planned_prompt_tokens: int
    recorded_output_tokens: int
    planned_output_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests to send, by arrival, and the account of how they differ from the record."""

    rows: tuple[TraceRow, ...]
    scaling: Scaling


def recorded_rows() -> tuple[TraceRow, ...]:
    """The slice that ships with the package, as recorded."""
    text = (files("ullage.traffic") / "data" / TRACE_FILE).read_text(encoding="utf-8")
    table = list(csv.DictReader(text.splitlines()))
    times = [_timestamp(row["TIMESTAMP"]) for row in table]
    return tuple(
        TraceRow(
            (time - times[0]).total_seconds(),
            int(row["ContextTokens"]),
            int(row["GeneratedTokens"]),
        )
        for time, row in zip(times, table, strict=True)
    )


def scale_to_machine(
    rows: tuple[TraceRow, ...],
    *,
    num_requests: int,
    duration_s: float,
    max_model_len: int,
    rates: Rates,
    target_load: float = 0.7,
) -> Workload:
    """Cut the first `num_requests` rows to what the engine can do in `duration_s`.

    Lengths shrink by one factor, so that the work (prompt tokens at the calibrated prefill rate
    plus output tokens at the calibrated decode rate) takes `target_load` of `duration_s`; they
    never grow. Arrivals keep their recorded pattern, stretched or squeezed to fill `duration_s`.
    A row that is still longer than `max_model_len` is clipped, prompt first.
    """
    assert rows and num_requests > 0 and duration_s > 0, "an empty workload measures nothing"
    chosen = rows[:num_requests]
    prompt = sum(row.prompt_tokens for row in chosen)
    output = sum(row.output_tokens for row in chosen)
    work_s = prompt / rates.prefill_tokens_per_s + output / rates.decode_tokens_per_s
    factor = min(1.0, target_load * duration_s / work_s)
    span_s = chosen[-1].arrival_s
    # The last arrivals need time to finish, so arrivals fill nine tenths of the time.
    speed_up = span_s / (0.9 * duration_s) if span_s > 0 else 1.0
    cut = [_scaled(row, factor, speed_up, max_model_len) for row in chosen]
    planned = tuple(row for row, _, _ in cut)
    scaling = Scaling(
        num_rows=len(chosen),
        num_recorded=len(rows),
        length_factor=factor,
        speed_up=speed_up,
        num_clipped=sum(clipped for _, clipped, _ in cut),
        num_raised=sum(raised for _, _, raised in cut),
        recorded_span_s=span_s,
        planned_span_s=planned[-1].arrival_s,
        recorded_prompt_tokens=prompt,
        planned_prompt_tokens=sum(row.prompt_tokens for row in planned),
        recorded_output_tokens=output,
        planned_output_tokens=sum(row.output_tokens for row in planned),
        reason=(
            f"at the calibrated {rates.prefill_tokens_per_s:.0f} prompt tokens/s and "
            f"{rates.decode_tokens_per_s:.0f} output tokens/s the recorded lengths are "
            f"{work_s:.0f} s of work; {target_load:.0%} of {duration_s:.0f} s was wanted"
        ),
    )
    return Workload(planned, scaling)


def _scaled(
    row: TraceRow, factor: float, speed_up: float, max_model_len: int
) -> tuple[TraceRow, bool, bool]:
    """The row cut to size, whether it was clipped to max_model_len, whether lifted to the least."""
    prompt, output = round(row.prompt_tokens * factor), round(row.output_tokens * factor)
    raised = prompt < MIN_PROMPT_TOKENS or output < MIN_OUTPUT_TOKENS
    prompt, output = max(prompt, MIN_PROMPT_TOKENS), max(output, MIN_OUTPUT_TOKENS)
    clipped = prompt + output > max_model_len
    if clipped:
        output = max(1, min(output, max_model_len // 2))
        prompt = max(1, min(prompt, max_model_len - output))
    return TraceRow(row.arrival_s / speed_up, prompt, output), clipped, raised


def _timestamp(text: str) -> datetime:
    """`2023-11-16 18:15:46.6805900`: seven decimals, of which datetime keeps six."""
    return datetime.fromisoformat(text[:26])
