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
    """The sum of a vector's lanes, halves added to halves."""
    count = vector.type.count
    add = builder.add if isinstance(vector.type.element, ir.IntType) else builder.fadd
    none = ir.Constant(vector.type, ir.Undefined)
    while count > 1:
        count //= 2
        mask = ir.Constant(
            ir.VectorType(I32, 8), [ir.Constant(I32, (i + count) % 8) for i in range(8)]
        )
        vector = add(vector, builder.shuffle_vector(vector, none, mask))
    return builder.extract_element(vector, ir.Constant(I32, 0))


class _Kind:
    """How one weight type is multiplied: element types, lanes of a step, how sums are kept."""

    def __init__(self, weight: Any, x: Any, out: Any, lanes: int) -> None:
        self.weight, self.x, self.out, self.lanes = weight, x, out, lanes

    def accumulate(self, builder: Any, total: Any, weights: Any, x: Any) -> Any:
        if self.weight is I8:
            return builder.add(total, _int8_products(builder, weights, x))
        return builder.fadd(
            total, builder.fmul(weights, x, flags=("contract",)), flags=("contract",)
        )

    def widen(self, builder: Any, weights: Any) -> Any:
        return _from_bfloat16(builder, weights) if self.weight is I16 else weights


INT8 = _Kind(I8, I16, I32, 16)
FLOAT32 = _Kind(F32, F32, F32, 8)
BFLOAT16 = _Kind(I16, F32, F32, 8)


def dot_block(kind: _Kind, rows: int, columns: int, unroll: int = 1) -> Any:
    """An intrinsic (w, w_stride, x, x_stride, size, out, out_stride) on addresses and counts.

    out[r, c] = Σ_i w[c, i]·x[r, i] for `rows` rows of x and `columns` rows of w; strides are in
    elements, `size` is a multiple of kind.lanes × unroll. Every sum stays in a register.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        w, w_stride, x, x_stride, size, out, out_stride = args
        lane_count = ir.Constant(I64, kind.lanes * unroll)

        def pointers(base: Any, stride: Any, count: int, element: Any) -> list[Any]:
            first = builder.inttoptr(base, element.as_pointer())
            return [
                builder.gep(first, [builder.mul(stride, ir.Constant(I64, n))]) for n in range(count)
            ]

        w_rows = pointers(w, w_stride, columns, kind.weight)
        x_rows = pointers(x, x_stride, rows, kind.x)
        sums_type = ir.VectorType(kind.out, 8)
        zero = ir.Constant(sums_type, [ir.Constant(kind.out, 0)] * 8)
        sums = [
            [
                [cgutils.alloca_once_value(builder, zero) for _ in range(columns)]
                for _ in range(rows)
            ]
            for _ in range(unroll)
        ]
        for part in sums:
            for row in part:
                for slot in row:
                    builder.store(zero, slot)

        def load(base: Any, at: Any, element: Any) -> Any:
            pointer = builder.bitcast(
                builder.gep(base, [at]), ir.VectorType(element, kind.lanes).as_pointer()
            )
            return builder.load(pointer, align=element_bytes(element))

        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), size, lane_count) as (at, _):
            for copy, sums_RC in enumerate(sums):
                here = builder.add(at, ir.Constant(I64, copy * kind.lanes))
                xs = [load(row, here, kind.x) for row in x_rows]
                for c, w_row in enumerate(w_rows):
                    weights = kind.widen(builder, load(w_row, here, kind.weight))
                    for r in range(rows):
                        slot = sums_RC[r][c]
                        total = kind.accumulate(builder, builder.load(slot), weights, xs[r])
                        builder.store(total, slot)
        first = builder.inttoptr(out, kind.out.as_pointer())
        add = builder.add if kind.out is I32 else builder.fadd
        for r in range(rows):
            for c in range(columns):
                total = builder.load(sums[0][r][c])
                for sums_RC in sums[1:]:
                    total = add(total, builder.load(sums_RC[r][c]))
                at = builder.add(builder.mul(out_stride, ir.Constant(I64, r)), ir.Constant(I64, c))
                builder.store(_sum_lanes(builder, total), builder.gep(first, [at]))
        return context.get_dummy_value()

    def typing(
        typingctx: Any, w: Any, w_stride: Any, x: Any, x_stride: Any, size: Any, out: Any,
        out_stride: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.int64] * 7), codegen

    return intrinsic(typing)


def element_bytes(element: Any) -> int:
    return 4 if element is F32 else int(element.width) // 8


atomic_add = intrinsic(_atomic_add)
atomic_load = intrinsic(_atomic_load)
atomic_store = intrinsic(_atomic_store)
give_way = intrinsic(_give_way)
as_pointer = intrinsic(_as_pointer)
as_float, as_bits = intrinsic(_as_float), intrinsic(_as_bits)
