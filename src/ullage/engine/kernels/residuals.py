"""What `probes.relations` computes of one row, in one call: sums of inputs against sums of outputs.

Holds the loops; what the numbers mean, the order of cells and the same in numpy are there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ullage.engine.kernels.compiling import compiled
from ullage.engine.kernels.elementwise import exp
from ullage.engine.kernels.llvm import GROUP
from ullage.engine.kernels.step import (
    TAP_GATE,
    TAP_HIDDEN,
    TAP_MIDDLE,
    TAP_MIXED,
    TAP_MLP_NORMED,
    TAP_NORMED,
    TAP_QKV,
    TAP_TURNED,
    TAP_UP,
    TAP_X,
)

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Rows of what is written, float64 [6, cells].
RESIDUAL, SIZE, FLOOR, MADE, SAID, ADAPTED = range(6)

SMALLEST_NORMAL = np.float32(2.0**-126)
# Where the cells of each part begin, int64 [PARTS].
(
    EMBEDDING, MIXER_NORM, Q, K, V, HEAD_NORM, ROPE, ATTENTION, OUT, MLP_NORM, GATE, UP, ACTIVATION,
    DOWN, FINAL_NORM, LM_HEAD,
) = range(16)  # fmt: skip
PARTS = 16
CANCELLED = 0.1


def _dot(a: Floats, b: Floats) -> np.float32:
    total = np.float32(0)
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


def _difference(a: Floats, b: Floats, signs: Floats) -> np.float32:
    """Σ signs·(a − b)."""
    total = np.float32(0)
    for i in range(a.shape[0]):
        total += (a[i] - b[i]) * signs[i]
    return total


def _square(a: Floats) -> np.float32:
    total = np.float32(0)
    for i in range(a.shape[0]):
        total += a[i] * a[i]
    return total


def _apart(a: Floats, b: Floats) -> np.float32:
    """Σ (a − b)²."""
    total = np.float32(0)
    for i in range(a.shape[0]):
        total += (a[i] - b[i]) * (a[i] - b[i])
    return total


def _gate_apart(gate_F: Floats, up_F: Floats, hidden_F: Floats, sums_2: Floats) -> None:
    """Σ (hidden − silu(gate)·up)², and Σ of what it should be, squared."""
    off, size = np.float32(0), np.float32(0)
    for i in range(gate_F.shape[0]):
        wanted = gate_F[i] / (np.float32(1) + exp(-gate_F[i])) * up_F[i]
        off += (hidden_F[i] - wanted) * (hidden_F[i] - wanted)
        size += wanted * wanted
    sums_2[0], sums_2[1] = off, size


dot, difference = compiled(_dot, fast=True), compiled(_difference, fast=True)
square, apart = compiled(_square, fast=True), compiled(_apart, fast=True)
gate_apart = compiled(_gate_apart, fast=True)


def _largest_squares(x_I: Floats, largest_G: Floats) -> None:
    """The square of the largest input of each group."""
    size = x_I.shape[0]
    for group in range(largest_G.shape[0]):
        most = np.float32(0)
        for i in range(group * GROUP, min(size, (group + 1) * GROUP)):
            most = max(most, abs(x_I[i]))
        largest_G[group] = most * most


largest_squares = compiled(_largest_squares, fast=True)


def _take(x_I: Floats, rounds: bool, taken_I: Floats) -> None:
    """What a product takes for its input: of int8 weights what `elementwise.quantize` makes of it.

    A group that is not finite, or too small for it, is NaN or 0 there too.
    """
    size = x_I.shape[0]
    if not rounds:
        taken_I[:] = x_I
        return
    for first in range(0, size, GROUP):
        last = min(size, first + GROUP)
        largest = np.float32(0)
        for i in range(first, last):
            if not abs(x_I[i]) <= largest:
                largest = abs(x_I[i])
        if not largest < np.inf:
            taken_I[first:last] = np.nan
        elif largest < SMALLEST_NORMAL:
            taken_I[first:last] = 0
        else:
            factor, worth = np.float32(127) / largest, largest / np.float32(127)
            for i in range(first, last):
                taken_I[i] = np.rint(x_I[i] * factor) * worth


take = compiled(_take)


def _put(
    out_6N: Doubles, at: int, made: float, said: float, size: float, floor: float, off: float
) -> None:
    out_6N[RESIDUAL, at], out_6N[SIZE, at], out_6N[FLOOR, at] = off, size, floor
    out_6N[MADE, at], out_6N[SAID, at], out_6N[ADAPTED, at] = made, said, 0.0


put = compiled(_put)


def _put_norm(
    out_6N: Doubles, channels_N: Ints, at: int, x_E: Floats, out_E: Floats, weight_E: Floats,
    bias_E: Floats, eps: float, centred: bool,
) -> None:  # fmt: skip
    """The channel that is furthest from what it should be; see `relation_sums.norm_part`."""
    count = x_E.shape[0]
    mean = 0.0
    if centred:
        for i in range(count):
            mean += x_E[i]
        mean /= count
    squares = 0.0
    for i in range(count):
        squares += (x_E[i] - mean) * (x_E[i] - mean)
    factor = 1 / np.sqrt(squares / count + eps)
    total = 0.0
    for i in range(count):
        wanted = (x_E[i] - mean) * factor * weight_E[i] + bias_E[i]
        total += wanted * wanted
    least = 1e-3 * np.sqrt(total / count) + 1e-30
    worst, at_channel, made, said = -1.0, 0, 0.0, 0.0
    for i in range(count):
        scaled = (x_E[i] - mean) * factor * weight_E[i]
        wanted = scaled + bias_E[i]
        off = abs(out_E[i] - wanted) / (abs(scaled) + abs(bias_E[i]) + least)
        # A comparison with NaN is false: it is the largest of all.
        if not off <= worst:
            worst, at_channel, made, said = off, i, np.float64(out_E[i]), wanted
            if off != off:
                break
    put(out_6N, at, made, said, 1.0, 0.0, worst)
    channels_N[at] = at_channel


put_norm = compiled(_put_norm, fast=True)


def _put_product(
    out_6N: Doubles, at: int, made: float, sums_I: Floats, bias: float, squares_G: Floats,
    x_I: Floats, largest_G: Floats, floor: float,
) -> None:  # fmt: skip
    said = np.float64(dot(sums_I, x_I)) + bias
    size = np.sqrt(np.float64(dot(squares_G, largest_G))) + 1e-30
    put(out_6N, at, made, said, size, floor, abs(made - said))


put_product = compiled(_put_product)


def _put_turn(
    out_6N: Doubles, norm_at: int, rope_at: int, before_O: Floats, after_O: Floats, heads: int,
    count: int, dim: int, q_norm_D: Floats, k_norm_D: Floats, eps: float, cos_P: Doubles,
    sin_P: Doubles, factor: float, interleaved: bool, wanted_D: Doubles,
) -> None:  # fmt: skip
    """Queries and keys after norms and rotation, against those computed anew in float64."""
    pairs, normed = cos_P.shape[0], q_norm_D.shape[0] > 0
    off, lengths, norm_off = 0.0, 0.0, 0.0
    for head in range(count):
        first = head * dim
        scale = 1.0
        if normed:
            squares = 0.0
            for d in range(dim):
                squares += np.float64(before_O[first + d]) * before_O[first + d]
            scale = 1 / np.sqrt(squares / dim + eps)
        should, found = 0.0, 0.0
        for d in range(dim):
            value = before_O[first + d] * scale
            if normed:
                value *= q_norm_D[d] if head < heads else k_norm_D[d]
            wanted_D[d] = value
            stretched = value * factor if d < 2 * pairs else value
            should += stretched * stretched
            found += np.float64(after_O[first + d]) * after_O[first + d]
        norm_off += (np.sqrt(should) - np.sqrt(found)) ** 2
        lengths += found
        for pair in range(pairs):
            i = 2 * pair if interleaved else pair
            j = i + 1 if interleaved else i + pairs
            a, b = wanted_D[i], wanted_D[j]
            wanted_D[i] = a * cos_P[pair] - b * sin_P[pair]
            wanted_D[j] = b * cos_P[pair] + a * sin_P[pair]
        for d in range(dim):
            off += (after_O[first + d] - wanted_D[d]) ** 2
    lengths, off, norm_off = np.sqrt(lengths), np.sqrt(off), np.sqrt(norm_off)
    put(out_6N, rope_at, off, 0.0, lengths, 0.0, off)
    put(out_6N, norm_at, norm_off, 0.0, lengths if normed else np.nan, 0.0, norm_off)


put_turn = compiled(_put_turn, fast=True)


def _residuals(
    kept_LW: Floats, taps: Ints, starts: Ints, heads: int, kv_heads: int, dim: int, inner: int,
    eps: float, centred: bool, silu: bool, rounds: bool, rounding: float, signs_hidden: Floats,
    signs_inner: Floats, signs_heads: Floats, signs_vocab: Floats, heads_LHI: Floats,
    heads_bias_LH: Floats, heads_squares: Floats, o_LI: Floats, o_bias_L: Floats,
    o_squares: Floats, gate_LI: Floats, gate_bias_L: Floats, gate_squares: Floats, up_LI: Floats,
    up_bias_L: Floats, up_squares: Floats, down_LI: Floats, down_bias_L: Floats,
    down_squares: Floats, mixer_norm_LE: Floats, mixer_norm_bias_LE: Floats, mlp_norm_LE: Floats,
    mlp_norm_bias_LE: Floats, final_norm_E: Floats, final_norm_bias_E: Floats,
    q_norm_LD: Floats, k_norm_LD: Floats, head_E: Floats, head_bias: float, head_squares: Floats,
    logit_scale: float, logits_V: Floats, embedded: float, turning_L: Ints, cos_NP: Doubles,
    sin_NP: Doubles, factors_N: Doubles, interleaved_N: Ints, attended_LHD: Floats,
    out_6N: Doubles, channels_N: Ints,
) -> None:  # fmt: skip
    """All cells but `activation`, which is here where it is SiLU with a gate."""
    layers, hidden, mixed = kept_LW.shape[0] - 1, signs_hidden.shape[0], heads * dim
    qkv = mixed + 2 * kv_heads * dim
    groups, mixed_groups = heads_squares.shape[2], o_squares.shape[1]
    largest_G = np.empty(groups, np.float32)
    mixed_G = np.empty(mixed_groups, np.float32)
    inner_G = np.empty(down_squares.shape[1], np.float32)
    # Inputs as products take them: rounded where weights are int8, else as they are.
    taken_E, taken_O = np.empty(hidden, np.float32), np.empty(mixed, np.float32)
    taken_F = np.empty(inner, np.float32)
    wanted_D, sums_2 = np.empty(dim), np.empty(2, np.float32)
    channels_N[:] = -1
    first_E = kept_LW[0, taps[TAP_X] : taps[TAP_X] + hidden]
    size = np.sqrt(np.float64(square(first_E)))
    made = np.float64(dot(first_E, signs_hidden))
    put(out_6N, starts[EMBEDDING], made, embedded, size, rounding * size, abs(made - embedded))
    for layer in range(layers):
        row = kept_LW[layer]
        x_E = row[taps[TAP_X] : taps[TAP_X] + hidden]
        normed_E = row[taps[TAP_NORMED] : taps[TAP_NORMED] + hidden]
        qkv_O = row[taps[TAP_QKV] : taps[TAP_QKV] + qkv]
        turned_O = row[taps[TAP_TURNED] : taps[TAP_TURNED] + qkv]
        mixed_O = row[taps[TAP_MIXED] : taps[TAP_MIXED] + mixed]
        middle_E = row[taps[TAP_MIDDLE] : taps[TAP_MIDDLE] + hidden]
        mlp_normed_E = row[taps[TAP_MLP_NORMED] : taps[TAP_MLP_NORMED] + hidden]
        up_F = row[taps[TAP_UP] : taps[TAP_UP] + inner]
        hidden_F = row[taps[TAP_HIDDEN] : taps[TAP_HIDDEN] + inner]
        next_E = kept_LW[layer + 1, taps[TAP_X] : taps[TAP_X] + hidden]
        put_norm(
            out_6N, channels_N, starts[MIXER_NORM] + layer, x_E, normed_E, mixer_norm_LE[layer],
            mixer_norm_bias_LE[layer], eps, centred,
        )  # fmt: skip
        largest_squares(normed_E, largest_G)
        take(normed_E, rounds, taken_E)
        for head in range(heads + 2 * kv_heads):
            if head < heads:
                at = starts[Q] + layer * heads + head
            elif head < heads + kv_heads:
                at = starts[K] + layer * kv_heads + head - heads
            else:
                at = starts[V] + layer * kv_heads + head - heads - kv_heads
            own = qkv_O[head * dim : (head + 1) * dim]
            made = np.float64(dot(own, signs_heads[head * dim : (head + 1) * dim]))
            put_product(
                out_6N, at, made, heads_LHI[layer, head], heads_bias_LH[layer, head],
                heads_squares[layer, head], taken_E, largest_G, 0.0,
            )  # fmt: skip
        number = turning_L[layer]
        pairs = cos_NP.shape[1] if number >= 0 else 0
        number = max(number, 0)
        put_turn(
            out_6N, starts[HEAD_NORM] + layer, starts[ROPE] + layer, qkv_O, turned_O, heads,
            heads + kv_heads, dim, q_norm_LD[layer], k_norm_LD[layer], eps, cos_NP[number, :pairs],
            sin_NP[number, :pairs], factors_N[number], interleaved_N[number] == 1, wanted_D,
        )  # fmt: skip
        least = 0.0
        for head in range(heads):
            least += np.float64(square(attended_LHD[layer, head])) * CANCELLED * CANCELLED / heads
        for head in range(heads):
            should = attended_LHD[layer, head]
            off = np.sqrt(np.float64(apart(mixed_O[head * dim : (head + 1) * dim], should)))
            length = np.sqrt(np.float64(square(should)) + least) + 1e-30
            put(out_6N, starts[ATTENTION] + layer * heads + head, off, 0.0, length, 0.0, off)
        stream = rounding * np.sqrt(np.float64(square(middle_E)))
        largest_squares(mixed_O, mixed_G)
        take(mixed_O, rounds, taken_O)
        made = np.float64(difference(middle_E, x_E, signs_hidden))
        put_product(
            out_6N, starts[OUT] + layer, made, o_LI[layer], o_bias_L[layer], o_squares[layer],
            taken_O, mixed_G, stream,
        )  # fmt: skip
        put_norm(
            out_6N, channels_N, starts[MLP_NORM] + layer, middle_E, mlp_normed_E,
            mlp_norm_LE[layer], mlp_norm_bias_LE[layer], eps, centred,
        )  # fmt: skip
        largest_squares(mlp_normed_E, largest_G)
        take(mlp_normed_E, rounds, taken_E)
        made = np.float64(dot(up_F, signs_inner))
        put_product(
            out_6N, starts[UP] + layer, made, up_LI[layer], up_bias_L[layer], up_squares[layer],
            taken_E, largest_G, 0.0,
        )  # fmt: skip
        put(out_6N, starts[GATE] + layer, 0.0, 0.0, np.nan, 0.0, 0.0)
        if silu:
            gate_F = row[taps[TAP_GATE] : taps[TAP_GATE] + inner]
            made = np.float64(dot(gate_F, signs_inner))
            put_product(
                out_6N, starts[GATE] + layer, made, gate_LI[layer], gate_bias_L[layer],
                gate_squares[layer], taken_E, largest_G, 0.0,
            )  # fmt: skip
            gate_apart(gate_F, up_F, hidden_F, sums_2)
            off, length = np.sqrt(np.float64(sums_2[0])), np.sqrt(np.float64(sums_2[1])) + 1e-30
            put(out_6N, starts[ACTIVATION] + layer, off, 0.0, length, 0.0, off)
        stream += rounding * np.sqrt(np.float64(square(next_E)))
        largest_squares(hidden_F, inner_G)
        take(hidden_F, rounds, taken_F)
        made = np.float64(difference(next_E, middle_E, signs_hidden))
        put_product(
            out_6N, starts[DOWN] + layer, made, down_LI[layer], down_bias_L[layer],
            down_squares[layer], taken_F, inner_G, stream,
        )  # fmt: skip
    x_E = kept_LW[layers, taps[TAP_X] : taps[TAP_X] + hidden]
    normed_E = kept_LW[layers, taps[TAP_NORMED] : taps[TAP_NORMED] + hidden]
    put_norm(
        out_6N, channels_N, starts[FINAL_NORM], x_E, normed_E, final_norm_E, final_norm_bias_E, eps,
        centred,
    )  # fmt: skip
    largest_squares(normed_E, largest_G)
    take(normed_E, rounds, taken_E)
    said = (np.float64(dot(head_E, taken_E)) + head_bias) * logit_scale
    size = (np.sqrt(np.float64(dot(head_squares, largest_G))) + 1e-30) * abs(logit_scale)
    made = np.float64(dot(logits_V, signs_vocab))
    put(out_6N, starts[LM_HEAD], made, said, size, 0.0, abs(made - said))


residuals = compiled(_residuals)
