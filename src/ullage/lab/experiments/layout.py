"""Q, K and V from one matrix or from three, and what permuting them into copies costs.

Holds the experiment on one projection; results of all variants are compared before any is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ullage.lab.result import Axis, Column, Lines, Result, Series, Table
from ullage.lab.setting import Setting
from ullage.lab.shape import AttentionShape, attention_shape
from ullage.lab.timing import race
from ullage.lab.units import times

ROWS, QUICK_ROWS = (1, 8, 32, 128, 512), (1, 32)
# Together larger than a last-level cache, so that each step reads its weights from memory as a
# whole model does.
WEIGHT_BYTES = 64 << 20
SEPARATE, VIEWED, COPIED = "three matrices", "fused, viewed", "fused, permuted copies"

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run(setting: Setting) -> Result:
    shape = attention_shape(setting.model)
    num_weights = _num_weights(shape, setting.quick)
    weights = [_weight(shape, seed) for seed in range(num_weights)]
    measured = []
    for num_rows in QUICK_ROWS if setting.quick else ROWS:
        setting.progress(f"layout: {num_rows} rows")
        x_TE = torch.randn(num_rows, shape.hidden_size, generator=_draw(99))
        arrange = {name: _variant(name, shape) for name in (SEPARATE, VIEWED, COPIED)}
        _require_equal(arrange, x_TE, weights[0])
        timings = race(
            {name: _over_layers(work, x_TE, weights) for name, work in arrange.items()},
            budget_s=0.3 if setting.quick else 2.5,
        )
        measured.append((num_rows, {n: best_s / num_weights for n, best_s in timings.items()}))
    return Result(
        name="layout",
        learnt=_learnt(measured),
        how=(
            f"One layer's Q, K and V ({shape.words}), float32, for so many rows (tokens) at once; "
            f"{num_weights} layers' weights in turn, so that they come from memory.",
            "The fastest of rounds in which the variants take turns. All three give the same "
            "numbers (compared within 1e-5 before timing).",
        ),
        tables=(_table(measured),),
        plots=(_plot(measured),),
        data={"rows": [{"rows": rows, "seconds": taken} for rows, taken in measured]},
    )


def _draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _num_weights(shape: AttentionShape, quick: bool) -> int:
    one = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * shape.hidden_size * 4
    return 2 if quick else max(2, min(64, WEIGHT_BYTES // one))


def _weight(shape: AttentionShape, seed: int) -> torch.Tensor:
    rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return torch.randn(rows, shape.hidden_size, generator=_draw(seed)) / math.sqrt(
        shape.hidden_size
    )


def _variant(name: str, shape: AttentionShape) -> Callable[[torch.Tensor, torch.Tensor], QKV]:
    """x, fused weight → Q, K, V as [tokens, heads, dim], as this variant makes them."""
    sizes = [n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
    heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]

    def separate(x_TE: torch.Tensor, weight_OE: torch.Tensor) -> QKV:
        parts = [F.linear(x_TE, w_OE) for w_OE in torch.split(weight_OE, sizes)]
        q_TO, k_TO, v_TO = parts
        view = (x_TE.shape[0], -1, shape.head_dim)
        return q_TO.view(view), k_TO.view(view), v_TO.view(view)

    def viewed(x_TE: torch.Tensor, weight_OE: torch.Tensor) -> QKV:
        heads_TND = F.linear(x_TE, weight_OE).view(x_TE.shape[0], -1, shape.head_dim)
        q_THD, k_TKD, v_TKD = torch.split(heads_TND, heads, dim=1)
        return q_THD, k_TKD, v_TKD

    def copied(x_TE: torch.Tensor, weight_OE: torch.Tensor) -> QKV:
        # What much code does: heads first, each of Q, K and V as a tensor of its own.
        q_THD, k_TKD, v_TKD = (
            part.permute(1, 0, 2).contiguous().transpose(0, 1) for part in viewed(x_TE, weight_OE)
        )
        return q_THD, k_TKD, v_TKD

    return {SEPARATE: separate, VIEWED: viewed, COPIED: copied}[name]


def _over_layers(
    work: Callable[[torch.Tensor, torch.Tensor], QKV],
    x_TE: torch.Tensor,
    weights: list[torch.Tensor],
) -> Callable[[], None]:
    @torch.inference_mode()
    def all_layers() -> None:
        for weight_OE in weights:
            work(x_TE, weight_OE)

    return all_layers


def _require_equal(
    variants: dict[str, Callable[[torch.Tensor, torch.Tensor], QKV]],
    x_TE: torch.Tensor,
    weight_OE: torch.Tensor,
) -> None:
    expected = variants[VIEWED](x_TE, weight_OE)
    for name, work in variants.items():
        for ours, theirs in zip(work(x_TE, weight_OE), expected, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5), f"{name} computes something else"


Measured = list[tuple[int, dict[str, float]]]


def _table(measured: Measured) -> Table:
    return Table(
        "Time of one layer's Q, K and V",
        (
            Column("rows", source=""),
            *(Column(name, "s") for name in (SEPARATE, VIEWED, COPIED)),
            Column("three / fused", "times", "quotient"),
            Column("copied / viewed", "times", "quotient"),
        ),
        tuple(
            (
                rows,
                *(taken[name] for name in (SEPARATE, VIEWED, COPIED)),
                taken[SEPARATE] / taken[VIEWED],
                taken[COPIED] / taken[VIEWED],
            )
            for rows, taken in measured
        ),
    )


def _plot(measured: Measured) -> Lines:
    return Lines(
        "Time per row",
        Axis("rows at once", log=True),
        Axis("time per row", "s", log=True),
        tuple(
            Series(name, tuple((float(rows), taken[name] / rows) for rows, taken in measured))
            for name in (SEPARATE, VIEWED, COPIED)
        ),
    )


def _learnt(measured: Measured) -> str:
    few, few_taken = measured[0]
    many, many_taken = measured[-1]
    return (
        f"Three matrices take {_compared(few_taken[SEPARATE], few_taken[VIEWED])} one fused matrix "
        f"at {_rows(few)} and {_compared(many_taken[SEPARATE], many_taken[VIEWED])} it at "
        f"{_rows(many)}; permuting Q, K and V into copies takes "
        f"{_compared(few_taken[COPIED], few_taken[VIEWED])} views at {_rows(few)} and "
        f"{_compared(many_taken[COPIED], many_taken[VIEWED])} them at {_rows(many)}."
    )


def _rows(count: int) -> str:
    return f"{count} row" + ("" if count == 1 else "s")


def _compared(ours: float, theirs: float) -> str:
    """`1.4 times as long as`; differences within 3% are none on a machine with other work."""
    ratio = ours / theirs
    return "as long as" if abs(ratio - 1) < 0.03 else f"{times(ratio)} as long as"
