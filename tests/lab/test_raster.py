"""Stretches say exactly what the frames said, in as few pieces as can be."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ullage.lab.raster import stretches

FRAMES = st.lists(st.dictionaries(st.integers(0, 5), st.integers(0, 3)), max_size=12)


@given(FRAMES)
def test_frames_can_be_rebuilt(frames):
    rebuilt = [{} for _ in frames]
    for stretch in stretches(frames):
        for step in range(int(stretch.start), int(stretch.end)):
            assert stretch.row not in rebuilt[step], "two stretches hold a row at once"
            rebuilt[step][stretch.row] = stretch.owner
    assert rebuilt == frames


@given(FRAMES)
def test_neighbouring_stretches_of_a_row_have_other_owners_or_a_gap(frames):
    found = stretches(frames)
    for a, b in itertools.pairwise(found):
        if a.row == b.row:
            assert a.end < b.start or (a.end == b.start and a.owner != b.owner)
