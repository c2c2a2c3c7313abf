"""Vector compares to bit masks, and unaligned loads and stores, for kernels written in numba. Must not know codecs.

LLVM lowers a compare of 64 lanes, cast to 64 bits, to whatever the machine has: AVX-512 masks, AVX2 or SSE move-mask,
NEON. All arrays are uint8, all indexes are bytes, at any alignment. NOTHING HERE CHECKS BOUNDS: kernels do, before they
call. The plain-Python twins (NUMBA_DISABLE_JIT=1) do check, so that tests find a kernel that did not.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.codecs.kernels.compiler import JIT, inlined

SPAN = 512
"""Elements whose classes are counted together: large enough to spread the cost of adding up lanes, small in L1."""

_WORD, _BYTE = ir.IntType(64), ir.IntType(8)
_BYTES = ir.VectorType(_BYTE, 64)
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, element: ir.Type) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), element.as_pointer())


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: Any, element: ir.Type) -> Any:
    value = builder.load(_address(context, builder, array_type, array, index, element), typ=element)
    value.align = 1
    return value


def _changed(width: int) -> Callable[..., Any]:
    """Bit j of the result is set where the j-th of 64 elements differs between two arrays."""
    lanes = ir.VectorType(ir.IntType(8 * width), 64)

    @intrinsic
    def compiled(typing: Any, new: Any, new_index: Any, old: Any, old_index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            a = _load(context, builder, signature.args[0], args[0], args[1], lanes)
            b = _load(context, builder, signature.args[2], args[2], args[3], lanes)
            return builder.bitcast(builder.icmp_unsigned("!=", a, b), _WORD)

        return types.uint64(new, types.int64, old, types.int64), codegen

    def plain(new: Bytes, new_index: int, old: Bytes, old_index: int) -> np.uint64:
        a, b = (_slice(x, i, 64 * width).view(_WIDTHS[width]) for x, i in ((new, new_index), (old, old_index)))
        return np.uint64(np.packbits(a != b, bitorder="little").view(np.uint64)[0])

    return compiled if JIT else plain


def _splat(builder: Any, scalar: Any, lanes: int) -> Any:
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


def _classes(width: int) -> Callable[..., Any]:
    """Writes the classes of 64 elements as bytes: a bit field of each, clamped to a window that starts at `low`."""
    lanes, lane = ir.VectorType(ir.IntType(8 * width), 64), ir.IntType(8 * width)

    @intrinsic
    def compiled(
        typing: Any, data: Any, index: Any, out: Any, out_index: Any, shift: Any, mask: Any, low: Any, top: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = _load(context, builder, signature.args[0], args[0], args[1], lanes)
            value = builder.lshr(value, _splat(builder, builder.trunc(args[4], lane), 64))
            field = value if width == 1 else builder.trunc(value, _BYTES)
            keep, least, most = (_splat(builder, builder.trunc(args[i], _BYTE), 64) for i in (5, 6, 7))
            field = builder.and_(field, keep)
            field = builder.sub(builder.select(builder.icmp_unsigned("<", field, least), least, field), least)
            field = builder.select(builder.icmp_unsigned(">", field, most), most, field)
            builder.store(field, _address(context, builder, signature.args[2], args[2], args[3], _BYTES), align=1)
            return context.get_dummy_value()

        return types.void(data, types.int64, out, *[types.int64] * 5), codegen

    def plain(data: Bytes, index: int, out: Bytes, out_index: int, shift: int, mask: int, low: int, top: int) -> None:
        value = (_slice(data, index, 64 * width).view(_WIDTHS[width]) >> shift) & mask
        _slice(out, out_index, 64)[:] = np.clip(value, low, low + top) - low

    return compiled if JIT else plain


@intrinsic
def _count_class(typing: Any, classes: Any, wanted: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = _splat(builder, builder.trunc(args[1], _BYTE), 64)
        total = ir.Constant(_BYTES, [0] * 64)
        for start in range(0, SPAN, 64):
            index = ir.Constant(_WORD, start)
            value = _load(context, builder, signature.args[0], args[0], index, _BYTES)
            # A lane that is equal is -1 as a signed byte; at most SPAN / 64 of them are added up in each.
            total = builder.sub(total, builder.sext(builder.icmp_unsigned("==", value, target), _BYTES))
        wide = ir.VectorType(ir.IntType(32), 64)
        name = "llvm.vector.reduce.add.v64i32"
        reduce = builder.module.globals.get(name)
        if reduce is None:
            reduce = ir.Function(builder.module, ir.FunctionType(ir.IntType(32), [wide]), name=name)
        return builder.zext(builder.call(reduce, [builder.zext(total, wide)]), _WORD)

    return types.int64(classes, types.int64), codegen


def _plain_count_class(classes: Bytes, wanted: int) -> int:
    return int((_slice(classes, 0, SPAN) == wanted).sum())


@intrinsic
def _class_mask(typing: Any, classes: Any, index: Any, wanted: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _load(context, builder, signature.args[0], args[0], args[1], _BYTES)
        target = _splat(builder, builder.trunc(args[2], _BYTE), 64)
        return builder.bitcast(builder.icmp_unsigned("==", value, target), _WORD)

    return types.uint64(classes, types.int64, types.int64), codegen


def _plain_class_mask(classes: Bytes, index: int, wanted: int) -> np.uint64:
    return np.uint64(np.packbits(_slice(classes, index, 64) == wanted, bitorder="little").view(np.uint64)[0])


def _element_load(width: int) -> Callable[..., Any]:
    """One element as uint64."""
    element = ir.IntType(8 * width)

    @intrinsic
    def compiled(typing: Any, array: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = _load(context, builder, signature.args[0], args[0], args[1], element)
            return value if width == 8 else builder.zext(value, _WORD)

        return types.uint64(array, types.int64), codegen

    def plain(array: Bytes, index: int) -> np.uint64:
        return np.uint64(int.from_bytes(_slice(array, index, width).tobytes(), "little"))

    return compiled if JIT else plain


def _element_store(width: int) -> Callable[..., Any]:
    """Writes the low bytes of a uint64 as one element."""
    element = ir.IntType(8 * width)

    @intrinsic
    def compiled(typing: Any, array: Any, index: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            low = args[2] if width == 8 else builder.trunc(args[2], element)
            builder.store(low, _address(context, builder, signature.args[0], args[0], args[1], element), align=1)
            return context.get_dummy_value()

        return types.void(array, types.int64, types.uint64), codegen

    def plain(array: Bytes, index: int, value: np.uint64) -> None:
        _slice(array, index, width)[:] = np.frombuffer(int(value).to_bytes(8, "little")[:width], np.uint8)

    return compiled if JIT else plain


def _slice(array: Bytes, index: int, size: int) -> Bytes:
    if index < 0 or index + size > array.size:
        raise IndexError(f"a kernel touched bytes {index} to {index + size} of {array.size}")
    return array[index : index + size]


@intrinsic
def _lowest_bit(typing: Any, word: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


@intrinsic
def _count_bits(typing: Any, word: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


def _plain_lowest_bit(word: np.uint64) -> int:
    return (int(word) & -int(word)).bit_length() - 1


def _plain_count_bits(word: np.uint64) -> int:
    return int(word).bit_count()


lowest_bit: Callable[..., Any] = _lowest_bit if JIT else _plain_lowest_bit
count_bits: Callable[..., Any] = _count_bits if JIT else _plain_count_bits
count_class: Callable[..., Any] = _count_class if JIT else _plain_count_class
class_mask: Callable[..., Any] = _class_mask if JIT else _plain_class_mask
classes1, classes2, classes4 = (_classes(width) for width in (1, 2, 4))
changed1, changed2, changed4, changed8 = (_changed(width) for width in _WIDTHS)
load1, load2, load4, load8 = (_element_load(width) for width in _WIDTHS)
store1, store2, store4, store8 = (_element_store(width) for width in _WIDTHS)


@inlined
def changed_mask(new, new_index, old, old_index, width):  # type: ignore[no-untyped-def]
    """Which of 64 elements differ: bit j is set where the j-th does."""
    if width == 2:
        return changed2(new, new_index, old, old_index)
    if width == 1:
        return changed1(new, new_index, old, old_index)
    if width == 4:
        return changed4(new, new_index, old, old_index)
    return changed8(new, new_index, old, old_index)


@inlined
def exponent_classes(data, index, out, out_index, width, window):  # type: ignore[no-untyped-def]
    """The classes of 64 elements as bytes; `window` is the field's shift and mask, its least value, the top class."""
    if width == 2:
        classes2(data, index, out, out_index, window[0], window[1], window[2], window[3])
    elif width == 1:
        classes1(data, index, out, out_index, window[0], window[1], window[2], window[3])
    else:
        classes4(data, index, out, out_index, window[0], window[1], window[2], window[3])


@inlined
def load(array, index, width):  # type: ignore[no-untyped-def]
    """The element at a byte index, as uint64."""
    if width == 2:
        return load2(array, index)
    if width == 1:
        return load1(array, index)
    if width == 4:
        return load4(array, index)
    return load8(array, index)


@inlined
def store(array, index, value, width):  # type: ignore[no-untyped-def]
    """Writes an element at a byte index."""
    if width == 2:
        store2(array, index, value)
    elif width == 1:
        store1(array, index, value)
    elif width == 4:
        store4(array, index, value)
    else:
        store8(array, index, value)
