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

_WORD = ir.IntType(64)
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
