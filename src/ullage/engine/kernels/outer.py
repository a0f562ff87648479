"""Small float32 matrix products whose right side lies row by row: sums of outer products.

Scores (queries × keys turned) and what weights make of values are such products. Sums stay in
registers; how many rows and columns are taken at once is what the processor's registers hold.
"""

# ruff: noqa: ARG001 (numba types an intrinsic by the names of the arguments it may not need)
from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ullage.engine.kernels.compiling import compiled

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()

# 32 registers of 16 floats, or (AVX2) 16 of 8: twelve rows or six by two vectors fill them.
_WIDE = binding.get_host_cpu_features().get("avx512f", False)
LANES = 16 if _WIDE else 8
ROWS = 12 if _WIDE else 6
# The width of an output is a multiple of this.
COLUMNS = 2 * LANES


def _outer_block(rows: int, vectors: int = 2) -> Any:
    """An intrinsic (a, a_stride, b, b_stride, depth, out, out_stride, adds) on addresses.

    out[r, n] = Σ_d a[r, d]·b[d, n], and what is there if `adds` is not 0, for `rows` rows and
    `vectors` × LANES columns. Strides are in elements.
    """
    vector = ir.VectorType(_F32, LANES)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, a_stride, b, b_stride, depth, out, out_stride, adds = args

        def pointer(base: Any, row: Any, stride: Any, column: Any, kind: Any) -> Any:
            index = builder.add(builder.mul(row, stride), column)
            offset = builder.mul(index, ir.Constant(_I64, 4))
            return builder.inttoptr(builder.add(base, offset), kind.as_pointer())

        def column(v: int) -> Any:
            return ir.Constant(_I64, v * LANES)

        sums = [[cgutils.alloca_once(builder, vector) for _ in range(vectors)] for _ in range(rows)]
        old_too = builder.icmp_signed("!=", adds, ir.Constant(_I64, 0))
        with builder.if_else(old_too) as (old, new):
            with old:
                for r in range(rows):
                    for v in range(vectors):
                        place = pointer(out, ir.Constant(_I64, r), out_stride, column(v), vector)
                        builder.store(builder.load(place, align=4), sums[r][v])
            with new:
                for one in (x for row in sums for x in row):
                    builder.store(ir.Constant(vector, [ir.Constant(_F32, 0.0)] * LANES), one)
        with cgutils.for_range(builder, depth, intp=_I64) as loop:
            d = loop.index
            bs = [
                builder.load(pointer(b, d, b_stride, column(v), vector), align=4)
                for v in range(vectors)
            ]
            for r in range(rows):
                one = builder.load(pointer(a, ir.Constant(_I64, r), a_stride, d, _F32), align=4)
                x = _in_every_lane(builder, one, vector)
                for v in range(vectors):
                    product = builder.fmul(x, bs[v], flags=("contract",))
                    total = builder.fadd(builder.load(sums[r][v]), product, flags=("contract",))
                    builder.store(total, sums[r][v])
        for r in range(rows):
            for v in range(vectors):
                place = pointer(out, ir.Constant(_I64, r), out_stride, column(v), vector)
                builder.store(builder.load(sums[r][v]), place, align=4)
        return context.get_dummy_value()

    def typing(
        typingctx: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, depth: Any, out: Any,
        out_stride: Any, adds: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.int64] * 8), codegen

    return intrinsic(typing)


def _in_every_lane(builder: Any, value: Any, vector: Any) -> Any:
    empty = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, vector.count), [ir.Constant(_I32, 0)] * vector.count)
    return builder.shuffle_vector(first, empty, zeros)


def _maximum(typingctx: Any, a: Any, b: Any) -> Any:
    """The greater of two float32, NaN if either is; unlike max(), a loop of it becomes vectors."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_F32, [_F32, _F32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.maximum.f32")
        return builder.call(function, args, fastmath=("nsz", "reassoc"))

    return types.float32(types.float32, types.float32), codegen


maximum = intrinsic(_maximum)
_block_many, _block_four, _block_one = _outer_block(ROWS), _outer_block(4), _outer_block(1)


def _multiply(
    a: int, a_stride: int, b: int, b_stride: int, rows: int, depth: int, width: int, out: int,
    out_stride: int, adds: int,
) -> None:  # fmt: skip
    """out[rows, width] = a[rows, depth]·b[depth, width] (+ out if `adds`); addresses of float32.

    `width` is rounded up to a multiple of COLUMNS, for which b and out must have room.
    """
    for n in range(0, width, COLUMNS):
        b_n, r = b + 4 * n, 0
        while r < rows:
            a_r, out_r = a + 4 * r * a_stride, out + 4 * (r * out_stride + n)
            if rows - r >= ROWS:
                _block_many(a_r, a_stride, b_n, b_stride, depth, out_r, out_stride, adds)
                r += ROWS
            elif rows - r >= 4:
                _block_four(a_r, a_stride, b_n, b_stride, depth, out_r, out_stride, adds)
                r += 4
            else:
                _block_one(a_r, a_stride, b_n, b_stride, depth, out_r, out_stride, adds)
                r += 1


multiply = compiled(_multiply)
