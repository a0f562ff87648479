"""Rows' readings against float64 over written-out scores: every mask, rule and layout of keys.

The oracle is written here from the definitions and shares no code with the probes. Both ways to
count are held to it: the compiled loops and torch's tiles.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.engine.rule import AttentionRule
from ullage.probes.attention import entropy as module
from ullage.probes.attention.entropy import RowReadings, Sight, attention_rows, head_readings
from ullage.probes.attention.sums import Asked, CompiledCount, Count, TiledCount, count_for

NATS = 1e-4
COUNTS = {"compiled": CompiledCount, "tiled": TiledCount}


@pytest.fixture(params=COUNTS)
def count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way to count in turn."""
    monkeypatch.setattr(module, "count_for", COUNTS[request.param])
    return str(request.param)


# --- the oracle ----------------------------------------------------------------------------------


def visible(t: int, s: int, rule: AttentionRule, sight: Sight) -> bool:
    if s < sight.padding or (sight.causal and s > t):
        return False
    if rule.window is not None and abs(t - s) >= rule.window:
        return False
    if sight.chunk is not None:
        skip = sight.padding
        if (t - skip) // sight.chunk != (s - skip) // sight.chunk:
            return False
    return sight.keep is None or bool(sight.keep[s])


@dataclass
class Expected:
    """[rows, heads, keys] of float64 scores, −inf where hidden, and what follows from them."""

    scores: torch.Tensor
    rows: list[int]
    sight: Sight
    sinks: torch.Tensor | None = None

    @staticmethod
    def entropy(p: torch.Tensor) -> torch.Tensor:
        return -torch.special.xlogy(p, p).sum(-1)

    def check(self, found: RowReadings, nats: float = NATS, mass: float = 1e-5) -> None:
        p = self.scores.softmax(-1)
        distance = torch.arange(p.shape[-1]) - torch.tensor(self.rows)[:, None]
        near = (distance.abs() <= 16)[:, None]
        band_scores = self.scores.masked_fill(~near, -math.inf)
        assert found.visible.tolist() == (self.scores[:, 0] > -math.inf).sum(-1).tolist()
        same(found.entropy_nats, self.entropy(p), nats)
        same(found.max_score, self.scores.amax(-1), 1e-5 * max(1.0, float(found.max_score.max())))
        same(found.first_mass, p[..., self.sight.padding], mass)
        same(found.band_mass, (p * near).sum(-1), mass)
        same(found.band_entropy_nats, self.entropy(band_scores.softmax(-1)), nats)
        if self.sinks is None:
            assert found.entropy_with_sink_nats is found.learned_sink_mass is None
            return
        more = self.sinks.double()[None, :, None].expand(len(self.rows), -1, 1)
        with_sink = torch.cat([self.scores, more], -1).softmax(-1)
        same(found.entropy_with_sink_nats, self.entropy(with_sink), nats)
        same(found.learned_sink_mass, with_sink[..., -1], mass)


def same(found: torch.Tensor | None, expected: torch.Tensor, atol: float) -> None:
    assert found is not None
    torch.testing.assert_close(found.double(), expected, atol=atol, rtol=0, equal_nan=True)


def expected(
    q: torch.Tensor,
    k: torch.Tensor,
    rows: list[int],
    rule: AttentionRule,
    sight: Sight,
    sinks: torch.Tensor | None = None,
) -> Expected:
    k_of_heads = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("rhd,shd->rhs", q.double(), k_of_heads) * rule.scale
    if rule.soft_cap is not None:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    if rule.slopes:
        distance = torch.arange(len(k)) - torch.tensor(rows)[:, None]
        scores = scores + torch.tensor(rule.slopes).double()[:, None] * distance[:, None]
    seen = torch.tensor([[visible(t, s, rule, sight) for s in range(len(k))] for t in rows])
    return Expected(scores.masked_fill(~seen[:, None], -math.inf), rows, sight, sinks)


# --- every rule and mask -------------------------------------------------------------------------

HOLES = torch.arange(600) % 5 != 4
SLOPES = tuple(2.0**-n for n in range(1, 7))
CASES: dict[str, tuple[AttentionRule, Sight]] = {
    "causal": (AttentionRule(0.3), Sight()),
    "a window": (AttentionRule(0.3, window=150), Sight()),
    "a window narrower than the band": (AttentionRule(0.3, window=9), Sight()),
    "a window of one key": (AttentionRule(0.3, window=1), Sight()),
    "chunks": (AttentionRule(0.3), Sight(chunk=200)),
    "left padding": (AttentionRule(0.3), Sight(padding=37)),
    "left padding and chunks": (AttentionRule(0.3), Sight(padding=37, chunk=200)),
    "left padding and a window": (AttentionRule(0.3, window=150), Sight(padding=37)),
    "both ways": (AttentionRule(0.3), Sight(causal=False)),
    "both ways within a window": (AttentionRule(0.3, window=33), Sight(causal=False)),
    "both ways within chunks": (AttentionRule(0.3), Sight(causal=False, chunk=200)),
    "hidden keys": (AttentionRule(0.3), Sight(keep=HOLES)),
    "right padding, both ways": (
        AttentionRule(0.3),
        Sight(causal=False, keep=torch.arange(600) < 411),
    ),
    "a soft cap": (AttentionRule(1.5, soft_cap=8.0), Sight()),
    "slopes": (AttentionRule(0.3, slopes=SLOPES), Sight()),
    "all at once": (
        AttentionRule(1.5, window=150, soft_cap=8.0, slopes=SLOPES),
        Sight(padding=37, chunk=200, keep=HOLES),
    ),
}


def drawn(rows: int, keys: int, heads: int, kv_heads: int, dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + keys + heads + dim)
    q = torch.randn(rows, heads, dim, generator=generator)
    return [q, torch.randn(keys, kv_heads, dim, generator=generator)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
def test_every_rule_and_mask(case: str, with_sinks: bool, count: str) -> None:
    rule, sight = CASES[case]
    # All edges of tiles and masks lie among these rows; before the padding none is a token.
    rows = [37, 38, 53, 127, 128, 200, 236, 237, 255, 256, 257, 300, 511, 512, 599]
    q, k = drawn(len(rows), 600, 6, 2, 12)
    sinks = torch.linspace(-3.0, 9.0, 6) if with_sinks else None
    found = attention_rows(q, k, torch.tensor(rows), rule, sight=sight, sinks_H=sinks)
    expected(q, k, rows, rule, sight, sinks).check(found)


SHAPES = {  # query heads, kv heads, dim, value dim
    "one head": (1, 1, 8, 8),
    "a kv head each": (5, 5, 16, 16),
    "groups": (6, 2, 64, 64),
    "one kv head for all": (7, 1, 10, 10),
    "latent keys (MLA)": (16, 1, 96 + 24, 96),
    "more heads than a piece of work": (130, 1, 6, 4),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_grouping_of_heads_and_all_rows(shape: str, count: str) -> None:
    heads, kv_heads, dim, _ = SHAPES[shape]
    rule, sight, rows = AttentionRule(dim**-0.5), Sight(), list(range(150))
    q, k = drawn(150, 150, heads, kv_heads, dim)
    found = attention_rows(q, k, torch.arange(150), rule)
    expected(q, k, rows, rule, sight).check(found)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
def test_attention_itself_comes_from_the_same_pass(
    shape: str, with_sinks: bool, count: str
) -> None:
    heads, kv_heads, dim, width = SHAPES[shape]
    rule, rows = AttentionRule(dim**-0.5, window=180), list(range(100, 300, 7))
    q, k = drawn(len(rows), 300, heads, kv_heads, dim)
    v = torch.randn(300, kv_heads, width, generator=torch.Generator().manual_seed(1))
    sinks = torch.linspace(-3.0, 3.0, heads) if with_sinks else None
    found = attention_rows(q, k, torch.tensor(rows), rule, values_SKD=v, sinks_H=sinks)
    wanted = expected(q, k, rows, rule, Sight(), sinks)
    wanted.check(found)
    share = (
        1 if found.learned_sink_mass is None else 1 - found.learned_sink_mass.double()[..., None]
    )
    v_of_heads = v.double().repeat_interleave(heads // kv_heads, dim=1)
    output = torch.einsum("rhs,shd->rhd", wanted.scores.softmax(-1), v_of_heads) * share
    same(found.output_RHD, output, 1e-5)


# --- how keys come -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_pieces_in_any_order_say_what_one_tensor_says(case: str, count: str) -> None:
    rule, sight = CASES[case]
    rows = [40, 200, 431, 599]
    q, k = drawn(len(rows), 600, 6, 2, 12)
    cuts = [0, 1, 16, 130, 131, 400, 600]
    pieces = [(a, k[a:b]) for a, b in pairwise(cuts)]
    for order in (pieces, pieces[::-1], pieces[3:] + pieces[:3]):
        found = attention_rows(q, iter(order), torch.tensor(rows), rule, sight=sight)
        expected(q, k, rows, rule, sight).check(found)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
def test_attention_itself_comes_from_pieces_too(with_sinks: bool, count: str) -> None:
    rule, rows = AttentionRule(2.0, window=450), torch.tensor([40, 200, 431, 599])
    q, k = drawn(4, 600, 6, 2, 12)
    v = torch.randn(600, 2, 20, generator=torch.Generator().manual_seed(1))
    sinks = torch.linspace(-3.0, 3.0, 6) if with_sinks else None
    cuts = [0, 1, 16, 130, 131, 400, 600]
    pieces = [(a, k[a:b], v[a:b]) for a, b in pairwise(cuts)]
    wanted = attention_rows(q, k, rows, rule, values_SKD=v, sinks_H=sinks)
    for order in (pieces, pieces[::-1]):
        found = attention_rows(q, order, rows, rule, sinks_H=sinks)
        assert found.output_RHD is not None and wanted.output_RHD is not None
        torch.testing.assert_close(found.output_RHD, wanted.output_RHD)
        expected(q, k, rows.tolist(), rule, Sight(), sinks).check(found)


def test_pieces_that_no_row_sees_may_be_left_out(count: str) -> None:
    rule, rows = AttentionRule(0.3, window=50), [500, 599]
    q, k = drawn(2, 600, 6, 2, 12)
    found = attention_rows(q, [(400, k[400:])], torch.tensor(rows), rule)
    expected(q, k, rows, rule, Sight()).check(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_read_as_what_they_hold(dtype: torch.dtype, count: str) -> None:
    if dtype is torch.float64 and count == "compiled":
        pytest.skip("float64 is left to torch")
    rule, rows = AttentionRule(0.3), list(range(0, 200, 3))
    q, k = (x.to(dtype) for x in drawn(len(rows), 200, 6, 2, 12))
    found = attention_rows(q, k, torch.tensor(rows), rule)
    expected(q, k, rows, rule, Sight()).check(found)


def test_float64_and_other_devices_are_left_to_torch() -> None:
    rows = torch.arange(2)

    def chosen(q: torch.Tensor) -> Count:
        return count_for(Asked(q, rows, rows, rows, 0, None, AttentionRule(1.0)))

    assert isinstance(chosen(torch.zeros(2, 1, 4)), CompiledCount)
    assert isinstance(chosen(torch.zeros(2, 1, 4, dtype=torch.float64)), TiledCount)
    assert isinstance(chosen(torch.zeros(2, 1, 4, device="meta")), TiledCount)


def test_tensors_need_not_lie_in_order(count: str) -> None:
    """As transformers hands them in: heads before tokens, or dimensions apart."""
    rule, rows = AttentionRule(0.3), list(range(150))
    q, k = drawn(150, 150, 6, 2, 12)
    v = torch.randn(150, 2, 12, generator=torch.Generator().manual_seed(1))
    wanted = attention_rows(q, k, torch.arange(150), rule, values_SKD=v)

    def heads_first(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    def apart(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x], -1)[..., 0]

    for lay in (heads_first, apart):
        found = attention_rows(lay(q), lay(k), torch.arange(150), rule, values_SKD=lay(v))
        expected(q, k, rows, rule, Sight()).check(found)
        assert found.output_RHD is not None and wanted.output_RHD is not None
        torch.testing.assert_close(found.output_RHD, wanted.output_RHD)


# --- adversarial scores --------------------------------------------------------------------------

SCORES = st.one_of(
    st.floats(-1e4, 1e4, width=32),
    st.floats(-1, 1, width=32),
    st.sampled_from([0.0, -0.0, 1e4, -1e4, 88.0, -87.5, 104.0, 1e-30, 9999.999]),
)


def of_scores(scores: torch.Tensor, rule: AttentionRule, sight: Sight, rows: list[int]) -> None:
    """Queries that are unit vectors and keys that hold the scores: every product is exact."""
    q = torch.eye(len(rows))[:, None]
    k = scores.T.contiguous()[:, None]
    found = attention_rows(q, k, torch.tensor(rows), rule, sight=sight)
    expected(q, k, rows, rule, sight).check(found)
    # What can only be rounding never shows.
    assert (found.entropy_nats >= 0).all() and (found.band_mass <= 1).all()
    assert (found.entropy_nats.double() <= found.visible.double().log()[:, None] + NATS).all()


@settings(max_examples=150, deadline=None)
@given(data=st.data(), way=st.sampled_from(sorted(COUNTS)))
def test_scores_of_any_height(data: st.DataObject, way: str) -> None:
    keys = data.draw(st.sampled_from([1, 2, 17, 33, 128, 129, 300]))
    # Most keys repeat a few drawn scores, so that ties and long stretches are common.
    few = data.draw(st.lists(SCORES, min_size=1, max_size=12))
    seed = data.draw(st.integers(0, 2**32 - 1))
    picks = np.random.default_rng(seed).integers(0, len(few), (4, keys))
    scores = torch.tensor(few, dtype=torch.float32)[torch.from_numpy(picks)]
    rows = sorted({0, keys // 2, keys - 1})
    sight = data.draw(st.sampled_from([Sight(), Sight(causal=False), Sight(padding=keys // 2)]))
    rows = [t for t in rows if t >= sight.padding]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "count_for", COUNTS[way])
        of_scores(scores[: len(rows)], AttentionRule(1.0), sight, rows)


def ramps(keys: int) -> Iterator[tuple[str, torch.Tensor]]:
    at = torch.arange(keys).float()
    yield "rising, so that every tile has a new highest", at * (1e4 / keys)
    yield "falling", -at * (1e4 / keys)
    yield "rising slowly", at / 64
    yield "equal at the top of the range", torch.full((keys,), 1e4)
    yield "equal at the bottom", torch.full((keys,), -1e4)
    yield "one far above", torch.where(at == keys // 3, 1e4, -1e4)
    yield "the last far above", torch.where(at == keys - 1, 1e4, -1e4)
    yield "two alike far above", torch.where((at == 5) | (at == keys - 2), 9e3, 0.0)
    yield "a nat apart, high up", 1e4 - (at % 8)
    yield "just where weights vanish in float32", torch.where(at == 0, 0.0, -87.4)


@pytest.mark.parametrize("ramp", [name for name, _ in ramps(1)])
@pytest.mark.parametrize("keys", [1, 16, 129, 3000])
def test_scores_that_break_careless_sums(ramp: str, keys: int, count: str) -> None:
    scores = dict(ramps(keys))[ramp]
    for sight in (Sight(), Sight(causal=False)):
        of_scores(scores[None], AttentionRule(1.0), sight, [keys - 1])


def test_the_usual_formula_would_not_do() -> None:
    """Log-sum-exp minus mean score, in float32: high scores use up its digits."""
    scores = 1e4 - (torch.arange(3000) % 8).float()
    usual = scores.logsumexp(-1) - (scores.softmax(-1) * scores).sum()
    exact = Expected.entropy(scores.double().softmax(-1))
    assert abs(float(usual) - float(exact)) > NATS


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 70, 140])
def test_what_is_not_finite_is_counted_and_not_averaged(bad: float, place: int, count: str) -> None:
    """In a key that rows before it do not see: those keep their readings."""
    q, k = drawn(200, 200, 4, 2, 8)
    q, k = q.abs(), k.abs()
    clean = attention_rows(q, k, torch.arange(200), AttentionRule(0.3))
    k[place, 0] = bad
    found = attention_rows(q, k, torch.arange(200), AttentionRule(0.3))
    assert found.entropy_nats[place:, :2].isnan().all()
    torch.testing.assert_close(found.entropy_nats[:place], clean.entropy_nats[:place])
    torch.testing.assert_close(found.entropy_nats[:, 2:], clean.entropy_nats[:, 2:])
    hit, well = head_readings([found])[1], head_readings([found])[3]
    assert (hit.rows, hit.not_finite, well.not_finite) == (200, 200 - place, 0)
    if place == 0:
        assert hit.entropy_nats is hit.max_score is hit.band_mass is None
    else:
        assert hit.entropy_nats is not None and hit.entropy_nats.mean > 0


def test_what_is_hidden_may_hold_anything(count: str) -> None:
    """Blocks of a paged cache hold what their last owner left."""
    rule, sight = AttentionRule(0.3, window=60), Sight(padding=10)
    rows = [100, 120]
    q, k = drawn(2, 200, 4, 2, 8)
    wanted = expected(q, k, rows, rule, sight)
    k[:10] = math.nan
    k[121:] = math.inf
    wanted.check(attention_rows(q, k, torch.tensor(rows), rule, sight=sight))


def test_a_row_that_sees_nothing_has_no_reading(count: str) -> None:
    q, k = drawn(2, 50, 4, 2, 8)
    found = attention_rows(q, k, torch.tensor([3, 40]), AttentionRule(0.3), sight=Sight(padding=20))
    assert found.visible.tolist() == [0, 21]
    for name in ("entropy_nats", "max_score", "first_mass", "band_mass", "band_entropy_nats"):
        column = getattr(found, name)
        assert column[0].isnan().all() and column[1].isfinite().all(), name


def test_a_row_of_one_key_has_no_entropy_and_no_normalised_one(count: str) -> None:
    q, k = drawn(1, 50, 4, 2, 8)
    [head, *_] = head_readings([attention_rows(q, k, torch.tensor([0]), AttentionRule(0.3))])
    assert head.entropy_nats is not None and head.entropy_nats.mean == 0
    assert (head.entropy_normalized, head.effective_context) == (None, 1.0)
    assert (head.sink_mass, head.band_mass, head.band_entropy_nats) == (1.0, 1.0, 0.0)


# --- statistics ----------------------------------------------------------------------------------


def test_heads_are_summed_up_over_all_chunks_of_a_prompt(count: str) -> None:
    q, k = drawn(120, 120, 4, 2, 8)
    rule, rows = AttentionRule(0.9), torch.arange(120)
    parts = [attention_rows(q[a:b], k, rows[a:b], rule) for a, b in ((0, 50), (50, 51), (51, 120))]
    scores = expected(q, k, rows.tolist(), rule, Sight()).scores
    p = scores.softmax(-1)
    heads = head_readings(parts)
    assert [head.head for head in heads] == [0, 1, 2, 3]
    assert head_readings([]) == ()
    for head in heads:
        values = Expected.entropy(p[:, head.head]).numpy()
        assert head.entropy_nats is not None
        spread = (head.entropy_nats.mean, head.entropy_nats.p5, head.entropy_nats.p95)
        assert spread == pytest.approx(
            (values.mean(), *np.quantile(values, [0.05, 0.95])), abs=NATS
        )
        normalised = (values[1:] / np.log(np.arange(2, 121))).mean()
        assert head.entropy_normalized == pytest.approx(normalised, abs=NATS)
        assert head.effective_context == pytest.approx(np.exp(values).mean(), rel=NATS)
        assert head.sink_mass == pytest.approx(float(p[:, head.head, 0].mean()), abs=1e-6)
        assert head.max_score == pytest.approx(float(scores[:, head.head].max()), abs=1e-5)


def test_what_does_not_go_together_is_refused(count: str) -> None:
    q, k = drawn(2, 50, 4, 3, 8)
    with pytest.raises(ValueError, match="do not go with"):
        attention_rows(q, k, torch.arange(2), AttentionRule(1.0))
    q, k = drawn(2, 50, 4, 2, 8)
    with pytest.raises(ValueError, match="do not go with"):
        attention_rows(q[..., :4], k, torch.arange(2), AttentionRule(1.0))
    with pytest.raises(ValueError, match="positions 20 to 49"):
        keep = torch.ones(20, dtype=torch.bool)
        attention_rows(q, k, torch.arange(2), AttentionRule(1.0), sight=Sight(keep=keep))
    with pytest.raises(ValueError, match="beside the keys"):
        attention_rows(q, [(0, k)], torch.arange(2), AttentionRule(1.0), values_SKD=k)
    mixed = [(0, k[:20], k[:20]), (20, k[20:])]
    with pytest.raises(ValueError, match="with values and without"):
        attention_rows(q, mixed, torch.tensor([30, 49]), AttentionRule(1.0))


# --- memory --------------------------------------------------------------------------------------

PEAK = """
import resource, sys, torch
from ullage.engine.rule import AttentionRule
from ullage.probes.attention import entropy
from ullage.probes.attention import sums
way, tokens, heads, kv_heads = sys.argv[1], *map(int, sys.argv[2:])
entropy.count_for = getattr(sums, way)
q, k = torch.randn(tokens, heads, 64), torch.randn(tokens, kv_heads, 64)
def read(n):
    found = entropy.attention_rows(q[:n], k[:n], torch.arange(n), AttentionRule(0.125))
    return entropy.head_readings([found])
read(600)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read(tokens)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def peak_mb(way: str, tokens: int, heads: int, kv_heads: int) -> float:
    """What reading every row of a layer adds to the most memory a process ever had, in MB."""
    command = [sys.executable, "-c", PEAK, way, *map(str, (tokens, heads, kv_heads))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    return float(done.stdout)


@pytest.mark.parametrize("way", ["CompiledCount", "TiledCount"])
def test_no_matrix_of_scores_is_held(way: str) -> None:
    """8,192 rows of 3 heads would have 768 MB of scores."""
    assert resource.getpagesize() == 4096, "ru_maxrss is in KiB"
    assert peak_mb(way, 8192, 3, 1) <= 32


@pytest.mark.slow
def test_a_prompt_of_32768_tokens_needs_less_than_64_mb() -> None:
    """A layer of SmolLM2-135M; its scores alone are 36 GB."""
    assert peak_mb("CompiledCount", 32768, 9, 3) <= 64
