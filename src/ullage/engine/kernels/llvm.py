"""What loops need and numba has no words for: memory by address, atomics, vector dot products.

Each is written as LLVM's own generic instructions, so any processor that LLVM knows runs it; on
x86 the integer products become vpmaddwd.
"""

# ruff: noqa: ARG001 (numba types an intrinsic by the names of the arguments it may not need)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# Bytes that come from memory together.
CACHE_LINE = 64
# llvm.prefetch: for reading, into the second cache (the first is full of what is worked on), data.
_TO_READ_SOON = (0, 2, 1)
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()


def _array_pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(data, [index])


# --- atomics on int64 arrays, sequentially consistent ---------------------------------------------


def _atomic_add(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] += value; returns what was there before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _array_pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), codegen


def _atomic_load(typingctx: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _array_pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(array, types.int64), codegen


def _atomic_store(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _array_pointer(context, builder, signature.args[0], args[0], args[1])
        builder.store_atomic(args[2], pointer, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), codegen


def _give_way(typingctx: Any) -> Any:
    """POSIX sched_yield: let whoever else wants this processor have it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(I32, [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


# --- memory by address ----------------------------------------------------------------------------


def _as_pointer(typingctx: Any, address: Any) -> Any:
    """An address as `numba.carray` wants it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), codegen


def _as_float(typingctx: Any, pattern: Any) -> Any:
    """The float32 of a pattern of 32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), codegen


def _as_bits(typingctx: Any, value: Any) -> Any:
    """The pattern of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], I32)

    return types.int32(types.float32), codegen


# --- dot products ---------------------------------------------------------------------------------

LANES = 16


def _int8_products(builder: Any, weights: Any, x: Any) -> Any:
    """<16 x i8> · <16 x i16> → <8 x i32> of sums of neighbours (vpmaddwd)."""
    wide = ir.VectorType(I32, LANES)
    products = builder.mul(builder.sext(weights, wide), builder.sext(x, wide))
    none = ir.Constant(wide, ir.Undefined)

    def every_other(first: int) -> Any:
        mask = ir.Constant(
            ir.VectorType(I32, LANES // 2), [ir.Constant(I32, first + 2 * i) for i in range(8)]
        )
        return builder.shuffle_vector(products, none, mask)

    return builder.add(every_other(0), every_other(1))


def _from_bfloat16(builder: Any, weights: Any) -> Any:
    wide = builder.zext(weights, ir.VectorType(I32, LANES // 2))
    shift = ir.Constant(wide.type, [ir.Constant(I32, 16)] * 8)
    return builder.bitcast(builder.shl(wide, shift), ir.VectorType(F32, 8))


def _sum_lanes(builder: Any, vector: Any) -> Any:
    """The sum of a vector's eight lanes, halves added to halves."""
    none = ir.Constant(vector.type, ir.Undefined)
    for half in (4, 2, 1):
        lanes = [ir.Constant(I32, (i + half) % 8) for i in range(8)]
        mask = ir.Constant(ir.VectorType(I32, 8), lanes)
        vector = builder.fadd(vector, builder.shuffle_vector(vector, none, mask))
    return builder.extract_element(vector, ir.Constant(I32, 0))


class _Kind:
    """How one type of float weight is multiplied by float32."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def widen(self, builder: Any, weights: Any) -> Any:
        return _from_bfloat16(builder, weights) if self.weight is I16 else weights


FLOAT32, BFLOAT16 = _Kind(F32), _Kind(I16)
# Activations of int8 products have one scale for so many neighbours, the last half as many perhaps.
GROUP = 64
_HALF_GROUP = GROUP // 2


class _Rows:
    """Pointers to rows of one matrix, and vectors of them."""

    def __init__(self, builder: Any, base: Any, stride: Any, count: int, element: Any) -> None:
        self._builder, self._element = builder, element
        first = builder.inttoptr(base, element.as_pointer())
        self.starts = [
            builder.gep(first, [builder.mul(stride, ir.Constant(I64, n))]) for n in range(count)
        ]

    def load(self, row: int, at: Any, lanes: int) -> Any:
        vector = ir.VectorType(self._element, lanes).as_pointer()
        pointer = self._builder.bitcast(self._builder.gep(self.starts[row], [at]), vector)
        return self._builder.load(pointer, align=_element_bytes(self._element))

    def load_one(self, row: int, at: Any) -> Any:
        return self._builder.load(self._builder.gep(self.starts[row], [at]))


class _Sums:
    """Vectors of float32 that stay in registers, one for each row of x and row of w."""

    def __init__(self, builder: Any, rows: int, columns: int) -> None:
        self._builder = builder
        self.kind = ir.VectorType(F32, 8)
        zero = ir.Constant(self.kind, [ir.Constant(F32, 0.0)] * 8)
        self._slots = [[self._room(zero) for _ in range(columns)] for _ in range(rows)]

    def _room(self, zero: Any) -> Any:
        slot = cgutils.alloca_once(self._builder, self.kind)
        self._builder.store(zero, slot)
        return slot

    def add_product(self, row: int, column: int, a: Any, b: Any) -> None:
        slot, builder = self._slots[row][column], self._builder
        product = builder.fmul(a, b, flags=("contract",))
        builder.store(builder.fadd(builder.load(slot), product, flags=("contract",)), slot)

    def total(self, row: int, column: int) -> Any:
        return self._builder.load(self._slots[row][column])


def sums_of_four(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """<4 x float>: the sums of the lanes of four <8 x float>, for less than four times one."""

    def chosen(x: Any, y: Any, *lanes: int) -> Any:
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), [ir.Constant(I32, n) for n in lanes])
        return builder.shuffle_vector(x, y, mask)

    def pairs(x: Any, y: Any) -> Any:
        """Neighbours two lanes apart added: x x' y y' in each half."""
        low = chosen(x, y, 0, 8, 1, 9, 4, 12, 5, 13)
        return builder.fadd(low, chosen(x, y, 2, 10, 3, 11, 6, 14, 7, 15))

    ab, cd = pairs(a, b), pairs(c, d)
    low = chosen(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13)
    both = builder.fadd(low, chosen(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15))
    return builder.fadd(chosen(both, both, 0, 1, 2, 3), chosen(both, both, 4, 5, 6, 7))


def _store_totals(
    builder: Any, parts: list[_Sums], rows: int, columns: int, out: Any, out_stride: Any, adds: Any
) -> None:
    """out[r, c] = all lanes of a sum, and what is there if `adds` (an i1)."""
    first = builder.inttoptr(out, F32.as_pointer())

    def total(r: int, c: int) -> Any:
        found = parts[0].total(r, c)
        for part in parts[1:]:
            found = builder.fadd(found, part.total(r, c))
        return found

    def put(r: int, c: int, one: Any) -> None:
        at = builder.add(builder.mul(out_stride, ir.Constant(I64, r)), ir.Constant(I64, c))
        place = builder.gep(first, [at])
        before = builder.select(adds, builder.load(place), ir.Constant(F32, 0.0))
        builder.store(builder.fadd(one, before), place)

    places = [(r, c) for c in range(columns) for r in range(rows)]
    fours = len(places) // 4 * 4
    for n in range(0, fours, 4):
        four = sums_of_four(builder, *(total(r, c) for r, c in places[n : n + 4]))
        for lane, (r, c) in enumerate(places[n : n + 4]):
            put(r, c, builder.extract_element(four, ir.Constant(I32, lane)))
    for r, c in places[fours:]:
        put(r, c, _sum_lanes(builder, total(r, c)))


def asks_of_round(round_bytes: int) -> tuple[int, int, int]:
    """How often a round of so many bytes asks ahead, and (times, by): each ask's part of a step.

    At least once for each line that it reads, so that no step is longer than a line.
    """
    asks = -(-round_bytes // CACHE_LINE)
    return asks, round_bytes, CACHE_LINE * asks


class _Ahead:
    """Memory that is wanted next, asked for a little in every round of a loop, without waiting.

    While a loop computes, memory would else stand still: processors look ahead only within what a
    loop reads by itself, and then seldom over the end of a page.
    """

    def __init__(self, builder: Any, address: Any, step: Any) -> None:
        """From `address` on, `step` bytes for every cache line of weights that a round reads."""
        self._builder, self._step = builder, step
        self._slot = cgutils.alloca_once(builder, I64)
        builder.store(address, self._slot)

    def ask(self, round_bytes: int) -> None:
        """What falls to a round that reads `round_bytes` of weights."""
        builder = self._builder
        asks, times, by = asks_of_round(round_bytes)
        step = builder.mul(self._step, ir.Constant(I64, times))
        step = builder.udiv(step, ir.Constant(I64, by))
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        for _ in range(asks):
            address = builder.load(self._slot)
            place = builder.inttoptr(address, I8.as_pointer())
            builder.call(prefetch, [place, *(ir.Constant(I32, n) for n in _TO_READ_SOON)])
            builder.store(builder.add(address, step), self._slot)


def dot_block(kind: _Kind, rows: int, columns: int, unroll: int = 1) -> Any:
    """An intrinsic (w, x, stride, size, adds, out, out_stride, ahead, step) on addresses.

    out[r, c] = Σ_i w[c, i]·x[r, i] over i < size, and what is there if `adds` is not 0, for `rows`
    rows of x and `columns` rows of w. Strides are in elements, `size` is a multiple of 8 × unroll.
    Every sum stays in a register. Meanwhile memory from `ahead` on is fetched, `step` bytes for
    every 64 of w.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        w, x, stride, size, adds, out, out_stride, ahead, ahead_step = args
        w_rows = _Rows(builder, w, stride, columns, kind.weight)
        x_rows = _Rows(builder, x, stride, rows, F32)
        parts = [_Sums(builder, rows, columns) for _ in range(unroll)]
        wanted = _Ahead(builder, ahead, ahead_step)
        zero, step = ir.Constant(I64, 0), ir.Constant(I64, 8 * unroll)
        with cgutils.for_range_slice(builder, zero, size, step) as (at, _):
            wanted.ask(8 * unroll * columns * _element_bytes(kind.weight))
            for n, part in enumerate(parts):
                here = builder.add(at, ir.Constant(I64, 8 * n))
                ws = [kind.widen(builder, w_rows.load(c, here, 8)) for c in range(columns)]
                for r in range(rows):
                    x_8 = x_rows.load(r, here, 8)
                    for c in range(columns):
                        part.add_product(r, c, ws[c], x_8)
        old_too = builder.icmp_signed("!=", adds, zero)
        _store_totals(builder, parts, rows, columns, out, out_stride, old_too)
        return context.get_dummy_value()

    def typing(
        typingctx: Any, w: Any, x: Any, stride: Any, size: Any, adds: Any, out: Any,
        out_stride: Any, ahead: Any, ahead_step: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.int64] * 9), codegen

    return intrinsic(typing)


def int8_block(rows: int) -> Any:
    """An intrinsic (w, x, x_stride, size, scales, scales_stride, out, out_stride, ahead, step).

    out[r] = Σ_g scales[r, g]·Σ_i w[i]·x[r, i] over the groups g of GROUP neighbours i; w int8, x
    int16 from −127 to 127, scales and out float32. `size` is a multiple of half a group. What is
    whole is exact: a group's sum stays below 2²⁴ in each of eight lanes. `ahead`, `step`: as for
    `dot_block`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        w, x, x_stride, size, scales, scales_stride, out, out_stride, ahead, ahead_step = args
        nothing = ir.Constant(I64, 0)
        w_rows = _Rows(builder, w, nothing, 1, I8)
        x_rows = _Rows(builder, x, x_stride, rows, I16)
        scale_rows = _Rows(builder, scales, scales_stride, rows, F32)
        sums = _Sums(builder, rows, 1)
        wanted = _Ahead(builder, ahead, ahead_step)

        def add_group(at: Any, width: int) -> None:
            wanted.ask(width)
            group = builder.sdiv(at, ir.Constant(I64, GROUP))
            places = [builder.add(at, ir.Constant(I64, lane)) for lane in range(0, width, LANES)]
            weights = [w_rows.load(0, place, LANES) for place in places]
            for r in range(rows):
                whole = None
                for place, weight in zip(places, weights, strict=True):
                    product = _int8_products(builder, weight, x_rows.load(r, place, LANES))
                    whole = product if whole is None else builder.add(whole, product)
                scale = _in_every_lane(builder, scale_rows.load_one(r, group))
                sums.add_product(r, 0, builder.sitofp(whole, sums.kind), scale)

        full = builder.and_(size, ir.Constant(I64, -GROUP))
        step = ir.Constant(I64, GROUP)
        with cgutils.for_range_slice(builder, nothing, full, step) as (at, _):
            add_group(at, GROUP)
        half = ir.Constant(I64, _HALF_GROUP)
        with cgutils.for_range_slice(builder, full, size, half) as (at, _):
            add_group(at, _HALF_GROUP)
        never = ir.Constant(ir.IntType(1), 0)
        _store_totals(builder, [sums], rows, 1, out, out_stride, never)
        return context.get_dummy_value()

    def typing(
        typingctx: Any, w: Any, x: Any, x_stride: Any, size: Any, scales: Any, scales_stride: Any,
        out: Any, out_stride: Any, ahead: Any, ahead_step: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.int64] * 10), codegen

    return intrinsic(typing)


def _in_every_lane(builder: Any, value: Any) -> Any:
    none = ir.Constant(ir.VectorType(F32, 8), ir.Undefined)
    first = builder.insert_element(none, value, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, 8), [ir.Constant(I32, 0)] * 8)
    return builder.shuffle_vector(first, none, mask)


def _element_bytes(element: Any) -> int:
    return 4 if element is F32 else int(element.width) // 8


atomic_add = intrinsic(_atomic_add)
atomic_load = intrinsic(_atomic_load)
atomic_store = intrinsic(_atomic_store)
give_way = intrinsic(_give_way)
as_pointer = intrinsic(_as_pointer)
as_float, as_bits = intrinsic(_as_float), intrinsic(_as_bits)
