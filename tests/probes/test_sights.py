"""Masks of others: views show exactly what the mask does, in one piece where that is possible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.engine.rule import AttentionRule
from ullage.probes.attention.entropy import seen_interval
from ullage.probes.attention.sights import View, view_without_mask, views_of_mask


def shown(view: View, num_keys: int) -> torch.Tensor:
    """bool [rows, keys]: what attention over the view sees."""
    low_R, high_R = seen_interval(view.positions, AttentionRule(1.0, view.window), view.sight)
    keys_S = torch.arange(num_keys)
    seen_RS = (keys_S >= low_R[:, None]) & (keys_S < high_R[:, None])
    return seen_RS if view.sight.keep is None else seen_RS & view.sight.keep


def rebuilt(views: list[View], like_TS: torch.Tensor) -> torch.Tensor:
    found_TS = torch.zeros_like(like_TS)
    for view in views:
        found_TS[view.rows] = shown(view, like_TS.shape[1])
    return found_TS


def distances(num_queries: int, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of queries [T, 1], the last at the last key, and keys [1, S]."""
    return torch.arange(num_keys - num_queries, num_keys)[:, None], torch.arange(num_keys)[None]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_mask_is_shown_exactly(data: st.DataObject) -> None:
    num_keys = data.draw(st.integers(1, 12))
    num_queries = data.draw(st.integers(1, num_keys))
    bits = data.draw(
        st.lists(st.booleans(), min_size=num_keys * num_queries, max_size=num_keys * num_queries)
    )
    mask_TS = torch.tensor(bits).view(num_queries, num_keys)
    views = list(views_of_mask(mask_TS, torch.arange(num_queries)))
    assert torch.equal(rebuilt(views, mask_TS), mask_TS)


@settings(max_examples=200, deadline=None)
@given(
    num_keys=st.integers(1, 40),
    cut=st.integers(0, 39),
    padding=st.integers(0, 10),
    window=st.one_of(st.none(), st.integers(1, 20)),
    chunk=st.one_of(st.none(), st.integers(1, 20)),
    causal=st.booleans(),
)
def test_what_rules_show_is_one_view(
    num_keys: int, cut: int, padding: int, window: int | None, chunk: int | None, causal: bool
) -> None:
    """Causal or not, windows, chunks and padding, of queries that follow cached keys."""
    if window is not None:
        chunk = None
    num_queries = max(num_keys - cut, 1)
    padding = min(padding, num_keys - 1)
    t, s = distances(num_queries, num_keys)
    mask_TS = (s >= padding).expand(num_queries, -1).clone()
    if causal:
        mask_TS &= s <= t
    if window is not None:
        mask_TS &= (s - t).abs() < window
    if chunk is not None:
        mask_TS &= (s - padding) // chunk == (t - padding) // chunk
    tokens_R = torch.arange(num_queries)[t[:, 0] >= padding]
    views = list(views_of_mask(mask_TS, tokens_R, padding))
    assert len(views) == 1
    assert torch.equal(views[0].positions, t[tokens_R, 0])
    assert torch.equal(shown(views[0], num_keys), mask_TS[tokens_R])


@pytest.mark.parametrize(("padding", "window"), [(0, None), (3, None), (0, 4), (3, 4)])
@pytest.mark.parametrize("is_told", [True, False])
def test_the_first_token_is_the_first_that_is_none_of_the_padding(
    padding: int, window: int | None, is_told: bool
) -> None:
    """Of sampled rows too: a window hides the first token from them, padding is none."""
    t, s = distances(20, 20)
    mask_TS = (s <= t) & (s >= padding) & (s > t - (window or 20))
    (view,) = views_of_mask(mask_TS, torch.tensor([12, 19]), padding if is_told else None)
    assert view.sight.padding == padding
    assert view.window == window


def test_a_first_token_that_a_cache_has_dropped_is_seen_by_nobody() -> None:
    """The last eight keys of 50: the first token is 42 before them."""
    mask_1S = torch.ones(1, 8, dtype=torch.bool)
    (view,) = views_of_mask(mask_1S, torch.tensor([0]), -42)
    assert shown(view, 8).all()
    assert view.positions.tolist() == [7] and view.sight.padding == -42
    view = view_without_mask(torch.tensor([0]), 1, 8, causal=True, first=-42)
    assert shown(view, 8).all() and view.sight.padding == -42


def test_room_behind_the_last_token_moves_no_row() -> None:
    """A cache of fixed size: 30 places, of which four queries fill up to the tenth."""
    t = torch.arange(6, 10)[:, None]
    (view,) = views_of_mask(torch.arange(30)[None] <= t, torch.arange(4))
    assert view.positions.tolist() == [6, 7, 8, 9]
    assert view.sight.causal and view.sight.keep is None


def test_packed_sequences_and_prefixes_are_read_row_by_row() -> None:
    """Two sequences in one, and a prefix that sees all of itself."""
    t, s = distances(10, 10)
    packed_TS = (s <= t) & ((s < 4) == (t < 4))
    prefix_TS = (s <= t) | (s < 5)
    for mask_TS in (packed_TS, prefix_TS):
        views = list(views_of_mask(mask_TS, torch.arange(10)))
        assert torch.equal(rebuilt(views, mask_TS), mask_TS)
        rows = torch.cat([view.rows for view in views])
        positions = torch.cat([view.positions for view in views])
        assert torch.equal(rows, positions) and sorted(rows.tolist()) == list(range(10))


def test_without_a_mask_one_query_sees_all_and_several_see_up_to_themselves() -> None:
    one = view_without_mask(torch.tensor([0]), 1, 7, causal=True)
    assert shown(one, 7).all() and one.positions.tolist() == [6]
    t, s = distances(5, 5)
    several = view_without_mask(torch.arange(5), 5, 5, causal=True)
    assert torch.equal(shown(several, 5), s <= t)
    both_ways = view_without_mask(torch.arange(5), 5, 5, causal=False)
    assert shown(both_ways, 5).all()
