"""Pages and groups: what they reserve is enough, what they share is all there, by brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.anatomy.spec import Attention, LatentAttention
from ullage.costs.kv_formats import attention_token_bytes, latent_token_bytes
from ullage.errors import BadUsage
from ullage.planning.vllm_groups import Slot, Ungroupable, bytes_per_block, group_slots
from ullage.planning.vllm_pages import Page


def page(kind="full", block_size=16, state_bytes=64, bound=0, **more) -> Page:
    return Page(kind, block_size, state_bytes, (kind, state_bytes), bound=bound, **more)


def blocks_touched(first: int, tokens: int, block_size: int) -> int:
    return (first + tokens - 1) // block_size - first // block_size + 1


@given(st.integers(1, 500), st.integers(1, 300), st.integers(1, 2000), st.integers(1, 64))
def test_a_window_reserves_for_every_position_it_can_be_at(window, in_flight, length, block):
    reserved = page("window", block, bound=window).blocks_per_request(
        length, in_flight, aligned=False
    )
    held = min(window - 1 + in_flight, length)
    worst = max(blocks_touched(first, held, block) for first in range(block))
    assert worst <= reserved <= worst + 1


@given(st.integers(1, 5000), st.integers(1, 256))
def test_full_attention_reserves_every_token_and_less_than_one_block_more(length, block):
    reserved = page("full", block).blocks_per_request(length, 10**6, aligned=False)
    assert length <= reserved * block < length + block


def test_a_state_takes_one_block_and_more_when_prefixes_are_cached():
    state, mamba2 = page("state"), page("state", extra_states=1)
    assert state.blocks_per_request(10**6, 1, aligned=False) == 1
    assert state.blocks_per_request(10**6, 1, aligned=True) == 2
    assert mamba2.blocks_per_request(10**6, 1, aligned=False) == 1
    assert mamba2.blocks_per_request(10**6, 1, aligned=True) == 3


PAGES = st.builds(
    page,
    kind=st.sampled_from(["full", "window", "state"]),
    block_size=st.sampled_from([16, 32]),
    state_bytes=st.sampled_from([64, 96, 128]),
    bound=st.sampled_from([128, 512]),
).map(lambda p: replace(p, bound=p.bound if p.kind == "window" else 0))
SLOTS = st.lists(st.builds(Slot, rank=st.just(0), page=PAGES), max_size=24)


@given(SLOTS, st.booleans())
def test_groups_hold_every_layer_once_and_blocks_hold_every_group(slots, block_outermost):
    try:
        groups = group_slots(slots, hybrid_manager=True, block_outermost=block_outermost)
    except Ungroupable:
        assert block_outermost  # plain attention and states can always be padded otherwise
        return
    assert sum(len(group.slots) for group in groups) == len(slots)
    if not groups:
        assert not slots
        return
    block = bytes_per_block(groups, block_outermost=block_outermost)
    for group in groups:
        assert sum(slot.page.page_bytes for slot in group.slots) <= block
        assert len({slot.page.kind for slot in group.slots}) == 1
    # Nothing a layer stores got lost: its page still holds its tokens (or its state).
    stored = sorted(slot.page.state_bytes for slot in slots)
    assert sorted(s.page.state_bytes for group in groups for s in group.slots) == stored
    for group in groups:
        assert all(s.page.page_bytes >= s.page.natural_bytes for s in group.slots)


@given(st.integers(1, 40), st.integers(1, 40))
def test_groups_are_as_large_as_the_rarest_kind_unless_the_kinds_are_near(full, window):
    slots = [Slot(0, page("full"))] * full + [Slot(0, page("window", bound=128))] * window
    groups = group_slots(slots, hybrid_manager=True, block_outermost=False)
    low, high = sorted((full, window))
    size = high if high < low * 1.5 else low
    assert max(len(group.slots) for group in groups) == size
    assert len(groups) == -(-full // size) + -(-window // size)


def test_without_the_hybrid_manager_all_layers_share_one_group():
    slots = [Slot(0, page("full")), *[Slot(0, page("chunk", bound=128))] * 3]
    (group,) = group_slots(slots, hybrid_manager=False, block_outermost=False)
    assert len(group.slots) == 4
    assert group.blocks_per_request(1600, 1, aligned=False) == 100


def test_a_smaller_page_grows_by_tokens_or_is_padded():
    divides = [Slot(0, page("full", state_bytes=128)), Slot(0, page("window", bound=9))]
    full, window = group_slots(divides, hybrid_manager=True, block_outermost=False)
    assert (full.block_size, window.block_size) == (16, 32)
    odd = [Slot(0, page("full", state_bytes=96)), Slot(0, page("window", bound=9))]
    full, window = group_slots(odd, hybrid_manager=True, block_outermost=False)
    assert window.block_size == 16
    assert window.slots[0].page.page_bytes == full.slots[0].page.page_bytes == 16 * 96


def test_a_latent_page_cannot_be_padded():
    odd = [Slot(0, page("state", state_bytes=1536)), Slot(0, page("mla", state_bytes=64))]
    with pytest.raises(Ungroupable, match="latent"):
        group_slots(odd, hybrid_manager=True, block_outermost=False)


def test_windows_beside_latents_of_an_odd_size_are_kept_in_full():
    odd = [Slot(0, page("mla", state_bytes=64)), Slot(0, page("window", bound=9, state_bytes=96))]
    (group,) = group_slots(odd, hybrid_manager=True, block_outermost=False)
    assert len(group.slots) == 2
    assert group.blocks_per_request(1600, 1, aligned=False) == 100


@pytest.mark.parametrize(
    ("kv_cache_dtype", "token_bytes"),
    [
        ("auto", 8 * 256 * 2),
        ("fp8", 8 * 256),
        ("int8_per_token_head", 8 * (256 + 8)),
        ("int4_per_token_head", 8 * (128 + 8)),
        ("nvfp4", 8 * 2 * (64 + 8)),
    ],
)
def test_token_bytes_by_format(kv_cache_dtype, token_bytes):
    assert attention_token_bytes(8, 128, 128, kv_cache_dtype, "bfloat16") == token_bytes


def test_latents_by_format():
    mixer = LatentAttention(128, 512, 128, 64, 128)
    assert latent_token_bytes(mixer, "auto", "bfloat16") == 1152
    assert latent_token_bytes(mixer, "fp8", "bfloat16") == 576
    assert latent_token_bytes(mixer, "fp8_ds_mla", "bfloat16") == 656
    with pytest.raises(BadUsage, match="nvfp4"):
        latent_token_bytes(mixer, "nvfp4", "bfloat16")


def test_an_unknown_format_is_refused_by_name():
    with pytest.raises(BadUsage, match="turboquant_k8v4"):
        attention_token_bytes(8, 128, 128, "turboquant_k8v4", "bfloat16")


def test_attention_has_separate_key_and_value_sizes():
    assert Attention(4, 2, 192, 128).v_head_dim == 128
    assert attention_token_bytes(2, 192, 128, "auto", "float16") == 2 * 320 * 2
