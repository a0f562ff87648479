"""What was learnt is computed: where the numbers say the opposite, so does the sentence."""

from __future__ import annotations

import pytest
import torch

from ullage.lab.experiments import (
    attention,
    batching,
    block_size,
    chunked_prefill,
    encoder_decoder,
    gqa,
    kv_quant,
    layout,
    prefix,
    weight_quant,
)
from ullage.lab.scoring import Score, score
from ullage.lab.shape import AttentionShape
from ullage.traffic.summary import Distribution


def learnt_prefix(ttfts, hits):
    points = [
        prefix.Point(share, round(100 * share), hit, ttft)
        for share, hit, ttft in zip((0.0, 0.5, 0.9), hits, ttfts, strict=True)
    ]
    return prefix._learnt(points, 100)


def test_prefix_in_proportion():
    said = learnt_prefix((1.0, 0.52, 0.13), (0, 50, 90))
    assert "90% of 100 tokens saved" in said and "87% sooner" in said
    assert "is cut in proportion to the tokens saved" in said


def test_prefix_hits_that_save_no_time():
    said = learnt_prefix((1.0, 1.0, 0.95), (0, 50, 90))
    assert "5% sooner" in said and "not in proportion" in said


def test_prefix_of_a_server_without_a_cache():
    said = learnt_prefix((1.0, 1.0, 1.0), (0, 0, 0))
    assert said.startswith("This server saved no tokens")


def test_prefix_without_counts_takes_what_was_the_same():
    assert "90% of 100 tokens saved" in learnt_prefix((1.0, 0.5, 0.1), (None, None, None))


def chunk(size, worst, ttft):
    return chunked_prefill.Outcome(size, 0.01, (worst,), worst, ttft)


def test_chunks_that_help_and_cost():
    said = chunked_prefill._learnt(
        [chunk(64, 0.1, 2.0), chunk(2048, 1.0, 1.0)], chunked_prefill.FULL
    )
    assert "cutting shortens the wait" in said and "waits 2.0 times as long" in said


def test_chunks_that_do_not_help_and_cost_nothing():
    said = chunked_prefill._learnt(
        [chunk(64, 1.2, 1.0), chunk(2048, 1.0, 1.0)], chunked_prefill.FULL
    )
    assert "does not shorten" in said and "waits no longer" in said


def shape():
    return AttentionShape(2, 64, 4, 2, 16)


def test_gqa_faster_slower_and_inexact():
    def said(seconds, modelled=100):
        rows = [
            gqa.Row(n, modelled * n, 100 * n, s) for n, s in zip((1, 2, 4), seconds, strict=True)
        ]
        return gqa._learnt(shape(), rows)

    assert "is 2.0 times as fast" in said((0.5, 1.0, 2.0))
    assert "is 2.0 times slower" in said((0.5, 2.0, 1.0))
    assert "exactly as the formula says" in said((1, 1, 1))
    assert "within 10.0% of the formula" in said((1, 1, 1), modelled=100 / 1.1)


def test_layout_says_no_difference_where_there_is_none():
    taken = dict.fromkeys((layout.SEPARATE, layout.VIEWED, layout.COPIED), 1.0)
    said = layout._learnt([(1, taken), (32, taken | {layout.COPIED: 2.0})])
    assert "Three matrices take as long as one fused matrix at 1 row" in said
    assert "2.0 times as long as them at 32 rows" in said


def outcome(name, tokens_per_s, end):
    spread = Distribution((end,))
    load = batching.Load(name, 4)
    return batching.Outcome(load, round(100 * tokens_per_s), 100.0, spread, spread, spread)


def test_batching_gain_is_the_quotient():
    said = batching._learnt(outcome("one", 10, 8.0), outcome("s", 20, 4.0), outcome("c", 45, 2.0))
    assert "4.5 times the throughput of one at a time" in said
    assert "2.2 times that of static" in said or "2.3 times that of static" in said


def test_block_size_without_the_servers_word_is_predicted():
    outcomes = [block_size.Outcome(1, 1.0, None, 10.0), block_size.Outcome(128, 0.5, None, 20.0)]
    said = block_size._learnt(outcomes)
    assert "50% with blocks of 128" in said and "this server does not say" in said
    assert "the fastest size was 128, 2.0 times" in said


@pytest.mark.parametrize("unseen", [0, 1])
def test_block_size_that_was_over_before_it_was_looked_at_is_predicted_on_both_sides(unseen):
    filled = [0.99, 0.6]
    filled[unseen] = None
    outcomes = [
        block_size.Outcome(1, 1.0, filled[0], 10.0),
        block_size.Outcome(128, 0.5, filled[1], 20.0),
    ]
    said = block_size._learnt(outcomes)
    assert "50% with blocks of 128 and 100% with blocks of 1 (predicted; not seen" in said


def test_block_size_measured():
    outcomes = [block_size.Outcome(1, 1.0, 0.99, 10.0), block_size.Outcome(128, 0.5, 0.6, 5.0)]
    assert "60% with blocks of 128 and 99% with blocks of 1 (measured)" in block_size._learnt(
        outcomes
    )


LOGITS = torch.randn(200, 8, generator=torch.Generator().manual_seed(2))
NEXT = LOGITS.argmax(dim=1)


def quantised(name, bits, token_bytes, logits):
    return kv_quant.Outcome(
        name, bits, token_bytes, 1.0, "steps", score([(logits, NEXT)]), ((1, 2),)
    )


def test_kv_quant_says_what_was_lost():
    outcomes = [
        quantised("float32", 32, 400.0, LOGITS),
        quantised("bfloat16", 16, 200.0, LOGITS),
        quantised("int8_per_token_head", 8, 100.0, LOGITS),
        quantised("int4_per_token_head", 4, 50.0, -LOGITS),
    ]
    said = kv_quant._learnt(outcomes, kv_quant.QUICK)
    assert "8 bits takes 50.0% of bfloat16's bytes" in said
    assert "changes perplexity by 0% and agrees with float32 in 100.0%" in said
    assert "agrees in 0.0%" in said


def test_greedy_answers_are_compared_up_to_the_first_difference():
    assert kv_quant._same((1, 2, 3, 4), (1, 2, 9, 4)) == 2
    assert kv_quant._same((1, 2), (1, 2)) == 2


def test_weight_quant_names_slower_variants_too():
    def variant(name, speed, memory):
        one: Score = score([(LOGITS, NEXT)])
        return weight_quant.Outcome(name, memory, 1.0, (speed, 2 * speed), "steps", one)

    said = weight_quant._learnt([variant("float32", 10.0, 400), variant("int8", 5.0, 100)], (1, 8))
    assert said.startswith("Int8 weights decode 0.50 times at 1 and 0.50 times at 8")
    assert "25% of the bytes" in said


def test_attention_where_paging_saves_or_costs():
    def said(paged):
        prefill = [
            attention.Point(name, length, seconds * length, 1000 * length)
            for length in (64, 256)
            for name, seconds in (("naive", 2.0), ("sdpa", 1.0), ("paged", 1.0))
        ]
        decode = [
            attention.Point(name, 256, seconds)
            for name, seconds in (("naive", 2.0), ("sdpa", 1.0), ("paged", paged))
        ]
        return attention._learnt(prefill, decode, ("naive", "sdpa", "paged"))

    assert "costs 50% against" in said(1.5)
    assert "saves 50% against" in said(0.5)
    assert "costs next to nothing" in said(1.01)
    assert "2.0 times the time of SDPA" in said(1.0)
    assert "1.0th power" in said(1.0)


def test_encoder_decoder_says_so_when_the_two_cannot_be_told_apart():
    points = [
        encoder_decoder.Point(64, 0.01, 0.1, 1000, 0.2),
        encoder_decoder.Point(256, 0.01, 0.4, 4000, 0.8),
    ]
    told = encoder_decoder._learnt(points, encoder_decoder.Moved(0.0, 0.1))
    assert "may be kept" in told and "40 times as fast" in told and "1.0th power" in told
    not_told = encoder_decoder._learnt(points, encoder_decoder.Moved(0.2, 0.1))
    assert "does not tell them apart" in not_told
