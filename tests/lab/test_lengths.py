"""Lengths come from a trace, keep its shape, and a file that is no trace is refused by name."""

from __future__ import annotations

import pytest

from ullage.errors import BadUsage
from ullage.lab.lengths import Lengths, recorded_lengths, scaled


def test_the_slice_that_ships_has_a_hundred_and_more_rows():
    lengths = recorded_lengths(None)
    assert len(lengths.rows) == 128
    assert all(prompt > 0 and output > 0 for prompt, output in lengths.rows)


@pytest.mark.parametrize(
    "head", ["ContextTokens,GeneratedTokens", "x,input_tokens,output_tokens"], ids=str
)
def test_traces_of_several_publishers_are_read(tmp_path, head):
    extra = "9," if head.startswith("x") else ""
    path = tmp_path / "trace.csv"
    path.write_text(f"{head}\n{extra}10,3\n{extra}20,5\n{extra}0,4\n")
    assert recorded_lengths(path).rows == ((10, 3), (20, 5))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "columns none"),
        ("a,b\n1,2\n", "columns a, b"),
        ("ContextTokens,GeneratedTokens\nx,2\n", "not a table of lengths"),
        ("ContextTokens,GeneratedTokens\n1\n", "not a table of lengths"),
        ("ContextTokens,GeneratedTokens\n", "no rows with lengths"),
        ("ContextTokens,GeneratedTokens\n-4,2\n", "no rows with lengths"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text, found):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(BadUsage, match=found) as caught:
        recorded_lengths(path)
    assert str(path) in str(caught.value)


def test_bytes_that_are_no_text_and_absent_files_are_refused(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00")
    for place in (path, tmp_path / "absent.csv", tmp_path):
        with pytest.raises(BadUsage, match="--trace"):
            recorded_lengths(place)


def test_scaling_brings_the_means_and_keeps_the_shape():
    lengths = Lengths(((100, 10), (300, 30), (200, 20)), "three")
    half = scaled(lengths, 3, mean_prompt=100, mean_output=10, most=1000)
    assert half.rows == ((50, 5), (150, 15), (100, 10))
    assert "× 0.5" in half.words and "three" in half.words


def test_scaled_rows_fit_and_are_never_empty():
    lengths = Lengths(((1, 1), (10_000, 1000)), "two")
    rows = scaled(lengths, 4, mean_prompt=500, mean_output=500, most=64).rows
    assert len(rows) == 4
    assert all(4 <= prompt <= 32 and 2 <= output <= 32 for prompt, output in rows)
