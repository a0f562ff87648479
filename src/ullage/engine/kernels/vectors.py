"""Eight float32 as one value for compiled loops, loaded from any storage that KV is kept in.

A `Vec8` lives in a register, which numba's arrays do not; LLVM makes two or four narrower ones of
it where the processor has no such register. Indices are elements of flat arrays.
"""

# ruff: noqa: ARG001 (numba types an intrinsic by the names of the arguments it may not need)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from ullage.engine.kernels.llvm import sums_of_four

LANES = 8
I8, I16, I32 = (ir.IntType(bits) for bits in (8, 16, 32))
F32 = ir.FloatType()
F32x8, I32x8 = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


class Vec8Type(types.Type):  # type: ignore[misc]  # numba has no types
    """numba's name for <8 x float>."""

    def __init__(self) -> None:
        super().__init__(name="Vec8")


vec8 = Vec8Type()


@register_model(Vec8Type)
class _Vec8Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, F32x8)


def _constant(value: int) -> Any:
    return ir.Constant(I32x8, [ir.Constant(I32, value)] * LANES)


def _same(builder: Any, value: Any) -> Any:
    """`value` in every lane."""
    empty = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, empty, _constant(0))


def _chosen(builder: Any, a: Any, b: Any, *lanes: int) -> Any:
    """Lanes of a (0 … 7) and b (8 … 15)."""
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), [ir.Constant(I32, n) for n in lanes])
    return builder.shuffle_vector(a, b, mask)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any, element: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    vector = ir.VectorType(element, LANES)
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _zero8(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(F32x8, [ir.Constant(F32, 0.0)] * LANES)

    return vec8(), codegen


def _splat8(typingctx: Any, value: Any) -> Any:
    """A float32 in every lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _same(builder, args[0])

    return vec8(types.float32), codegen


def _fma8(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a·b + c, one rounding where the processor can."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        product = builder.fmul(args[0], args[1], flags=("contract",))
        return builder.fadd(product, args[2], flags=("contract",))

    return vec8(vec8, vec8, vec8), codegen


def _load8(typingctx: Any, array: Any, start: Any, dim: Any, width: Any) -> Any:
    """Dimensions dim … dim + 7 of the row of `width` elements that begins at array[start].

    Of float32, of int8, of uint16 that are bfloat16's patterns, or of uint8 that hold two whole
    numbers from −8 to 7, each plus 8: dimension d < width below, dimension d + width above.
    """
    elements = {types.float32: F32, types.uint16: I16, types.int8: I8, types.uint8: I8}
    element = elements.get(array.dtype)
    if element is None:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, at, width_here = args[1:]
        if array.dtype == types.uint8:
            above = builder.icmp_signed(">=", at, width_here)
            at = builder.select(above, builder.sub(at, width_here), at)
            shift = builder.select(above, ir.Constant(I32, 4), ir.Constant(I32, 0))
        index = builder.add(row, at)
        pointer = _pointer(context, builder, signature.args[0], args[0], index, element)
        found = builder.load(pointer, align=1 if element is I8 else 2 if element is I16 else 4)
        if array.dtype == types.float32:
            return found
        if array.dtype == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(found, I32x8), _constant(16)), F32x8)
        if array.dtype == types.int8:
            return builder.sitofp(builder.sext(found, I32x8), F32x8)
        bits = builder.lshr(builder.zext(found, I32x8), _same(builder, shift))
        return builder.sitofp(builder.sub(builder.and_(bits, _constant(15)), _constant(8)), F32x8)

    return vec8(array, types.intp, types.intp, types.intp), codegen


def _bfloat16_at(typingctx: Any, array: Any, index: Any) -> Any:
    """The float32 that array[index], a pattern of bfloat16, stands for."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        bits = builder.zext(builder.load(builder.gep(data, [args[1]])), I32)
        return builder.bitcast(builder.shl(bits, ir.Constant(I32, 16)), F32)

    return types.float32(array, types.intp), codegen


def _store8(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index : index + 8] = value, float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], F32)
        builder.store(args[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, vec8), codegen


def _sum8(typingctx: Any, value: Any) -> Any:
    """The sum of the lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        halves = args[0]
        for half in (4, 2, 1):
            low = _chosen(builder, halves, halves, *range(half))
            high = _chosen(builder, halves, halves, *range(half, 2 * half))
            halves = builder.fadd(low, high)
        return builder.extract_element(halves, ir.Constant(I32, 0))

    return types.float32(vec8), codegen


def _store_sums4(typingctx: Any, a: Any, b: Any, c: Any, d: Any, array: Any, index: Any) -> Any:
    """array[index : index + 4] = the sums of the lanes of a, b, c, d; cheaper than four times."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums = sums_of_four(builder, *args[:4])
        data = context.make_array(signature.args[4])(context, builder, args[4]).data
        place = builder.gep(data, [args[5]])
        builder.store(sums, builder.bitcast(place, sums.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(vec8, vec8, vec8, vec8, array, types.intp), codegen


def _scratch(typingctx: Any, size: Any) -> Any:
    """The address of `size` words (a literal) on the stack, gone when the function returns."""
    count = size.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(64), count))
        return builder.bitcast(room, context.get_value_type(signature.return_type))

    return types.voidptr(types.literal(count)), codegen


zero8, splat8, fma8 = intrinsic(_zero8), intrinsic(_splat8), intrinsic(_fma8)
load8, store8 = intrinsic(_load8), intrinsic(_store8)
bfloat16_at = intrinsic(_bfloat16_at)
sum8, store_sums4 = intrinsic(_sum8), intrinsic(_store_sums4)
scratch = intrinsic(prefer_literal=True)(_scratch)
