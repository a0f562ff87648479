"""Request lengths as they occur: a slice of a real trace that ships with ullage, or a CSV file.

Holds reading and scaling of lengths only; every factor is said with the results.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ullage.errors import BadUsage
from ullage.traffic.trace import TRACE_NAME, recorded_rows

# Column names of public traces → what they mean.
PROMPT_COLUMNS = ("ContextTokens", "input_tokens", "input_length")
OUTPUT_COLUMNS = ("GeneratedTokens", "output_tokens", "output_length")
MOST_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """(prompt, output) tokens per request, and in words where they come from and how scaled."""

    rows: tuple[tuple[int, int], ...]
    words: str


def recorded_lengths(trace: Path | None) -> Lengths:
    """All rows as recorded. Raises BadUsage for a file that is no trace."""
    if trace is None:
        rows = tuple((row.prompt_tokens, row.output_tokens) for row in recorded_rows())
        return Lengths(rows, TRACE_NAME)
    try:
        with trace.open(encoding="utf-8", newline="") as stream:
            table = csv.DictReader(stream)
            names = table.fieldnames or ()
            prompt = next((name for name in PROMPT_COLUMNS if name in names), None)
            output = next((name for name in OUTPUT_COLUMNS if name in names), None)
            if prompt is None or output is None:
                raise BadUsage(
                    f"columns {', '.join(map(str, names))[:120] or 'none'}",
                    file=trace,
                    field="--trace",
                    expected=f"{PROMPT_COLUMNS[0]} and {OUTPUT_COLUMNS[0]}",
                )
            rows = tuple(
                (int(row[prompt]), int(row[output]))
                for row, _ in zip(table, range(MOST_ROWS))  # noqa: B905
            )
    except (OSError, UnicodeDecodeError, csv.Error, TypeError, ValueError) as error:
        raise BadUsage(
            f"not a table of lengths ({error})"[:200], file=trace, field="--trace"
        ) from error
    rows = tuple(row for row in rows if row[0] > 0 and row[1] > 0)
    if not rows:
        raise BadUsage("no rows with lengths", file=trace, field="--trace")
    return Lengths(rows, f"{trace.name}, {len(rows):,} rows")


def scaled(
    lengths: Lengths, count: int, *, mean_prompt: float, mean_output: float, most: int
) -> Lengths:
    """The first `count` rows with their means brought to these, shapes kept, none above `most`.

    Prompts have at least 4 tokens and answers 2, as in the checkup's trace.
    """
    chosen: Sequence[tuple[int, int]] = [lengths.rows[i % len(lengths.rows)] for i in range(count)]
    by_prompt = mean_prompt * count / sum(prompt for prompt, _ in chosen)
    by_output = mean_output * count / sum(output for _, output in chosen)
    rows = tuple(
        (
            max(4, min(round(prompt * by_prompt), most // 2)),
            max(2, min(round(output * by_output), most // 2)),
        )
        for prompt, output in chosen
    )
    words = (
        f"lengths of the first {count} requests of {lengths.words}; prompts × {by_prompt:.3g}, "
        f"answers × {by_output:.3g}"
    )
    return Lengths(rows, words)
