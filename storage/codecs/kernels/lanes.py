"""Vector compares to bit masks, for kernels written in numba. Must not know codecs.

LLVM lowers a compare of 64 lanes, cast to 64 bits, to whatever the machine has: AVX-512 masks, AVX2 or SSE move-mask,
NEON. As in `memory`, nothing here checks bounds, and the plain-Python twins do.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.codecs.kernels.compiler import JIT, inlined
from weighbridge.storage.codecs.kernels.memory import WORD, address, checked, load_any

SPAN = 256
"""Elements whose classes are counted together: large enough to spread the cost of adding up lanes, small enough that a
rank within is found by looking at all of them, without a branch."""

STRETCH = 32 * SPAN
"""Elements that are walked class by class: their classes fit in L1, and their spans' sums in one vector."""

_BYTE = ir.IntType(8)
_BYTES = ir.VectorType(_BYTE, 64)
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _host_features() -> set[str]:
    """What the processor can do, by LLVM's names; numba's cache on disk is kept apart by the same."""
    return {name for name, there in llvmlite.binding.get_host_cpu_features().items() if there}


def _bits(flags: Any) -> np.uint64:
    return np.uint64(np.packbits(flags, bitorder="little").view(np.uint64)[0])


@intrinsic
def _changed_mask(typing: Any, new: Any, old: Any, index: Any, unit: Any) -> Any:
    lanes = ir.VectorType(ir.IntType(unit.dtype.bitwidth), 64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a = load_any(context, builder, signature.args[0], args[0], args[2], lanes)
        b = load_any(context, builder, signature.args[1], args[1], args[2], lanes)
        return builder.bitcast(builder.icmp_unsigned("!=", a, b), WORD)

    return types.uint64(new, old, types.int64, unit), codegen


def _plain_changed_mask(new: Bytes, old: Bytes, index: int, unit: Any) -> np.uint64:
    a, b = (checked(data, index, 64 * unit.itemsize).view(unit.dtype) for data in (new, old))
    return _bits(a != b)


def _splat(builder: Any, scalar: Any, lanes: int) -> Any:
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


@intrinsic
def _exponent_classes(typing: Any, data: Any, index: Any, out: Any, place: Any, unit: Any, window: Any) -> Any:
    lane = ir.IntType(unit.dtype.bitwidth)
    lanes = ir.VectorType(lane, 64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        shift, mask, low, top = (builder.extract_value(args[5], i) for i in range(4))
        value = load_any(context, builder, signature.args[0], args[0], args[1], lanes)
        value = builder.lshr(value, _splat(builder, shift if lane == WORD else builder.trunc(shift, lane), 64))
        field = value if lane == _BYTE else builder.trunc(value, _BYTES)
        keep, least, most = (_splat(builder, builder.trunc(number, _BYTE), 64) for number in (mask, low, top))
        field = builder.and_(field, keep)
        field = builder.sub(builder.select(builder.icmp_unsigned("<", field, least), least, field), least)
        field = builder.select(builder.icmp_unsigned(">", field, most), most, field)
        builder.store(field, address(context, builder, signature.args[2], args[2], args[3], _BYTES), align=1)
        return context.get_dummy_value()

    return types.void(data, types.int64, out, types.int64, unit, types.UniTuple(types.int64, 4)), codegen


def _plain_exponent_classes(
    data: Bytes, index: int, out: Bytes, place: int, unit: Any, window: tuple[int, int, int, int]
) -> None:
    shift, mask, low, top = window
    field = (checked(data, index, 64 * unit.itemsize).view(unit.dtype) >> shift) & mask
    checked(out, place, 64)[:] = np.clip(field, low, low + top) - low


def _add_up(builder: Any, minus_ones: Any, lanes: int) -> Any:
    """How many of up to 255 * 64 lanes are -1 rather than 0, as a word."""
    total = ir.Constant(_BYTES, [0] * 64)
    for start in range(0, lanes, 64):
        total = builder.sub(total, minus_ones(start))
    wide = ir.VectorType(ir.IntType(32), 64)
    name = "llvm.vector.reduce.add.v64i32"
    reduce = builder.module.globals.get(name)
    if reduce is None:
        reduce = ir.Function(builder.module, ir.FunctionType(ir.IntType(32), [wide]), name=name)
    return builder.zext(builder.call(reduce, [builder.zext(total, wide)]), WORD)


@intrinsic
def _count_class(typing: Any, classes: Any, index: Any, wanted: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = _splat(builder, builder.trunc(args[2], _BYTE), 64)

        def equal(start: int) -> Any:
            at = builder.add(args[1], ir.Constant(WORD, start))
            value = load_any(context, builder, signature.args[0], args[0], at, _BYTES)
            return builder.sext(builder.icmp_unsigned("==", value, target), _BYTES)

        return _add_up(builder, equal, SPAN)

    return types.int64(classes, types.int64, types.int64), codegen


def _plain_count_class(classes: Bytes, index: int, wanted: int) -> int:
    return int((checked(classes, index, SPAN) == wanted).sum())


@intrinsic
def _count_before(typing: Any, classes: Any, index: Any, wanted: Any, ramp: Any, place: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = _splat(builder, builder.trunc(args[2], _BYTE), 64)
        first = builder.sub(ir.Constant(WORD, SPAN), args[4])

        def equal(start: int) -> Any:
            offset = ir.Constant(WORD, start)
            value = load_any(context, builder, signature.args[0], args[0], builder.add(args[1], offset), _BYTES)
            counts = load_any(context, builder, signature.args[3], args[3], builder.add(first, offset), _BYTES)
            return builder.and_(builder.sext(builder.icmp_unsigned("==", value, target), _BYTES), counts)

        return _add_up(builder, equal, SPAN)

    return types.int64(classes, types.int64, types.int64, ramp, types.int64), codegen


def _plain_count_before(classes: Bytes, index: int, wanted: int, ramp: Bytes, place: int) -> int:
    counted = checked(ramp, SPAN - place, SPAN) > 127
    return int(((checked(classes, index, SPAN) == wanted) & counted).sum())


@intrinsic
def _class_mask(typing: Any, classes: Any, index: Any, wanted: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = load_any(context, builder, signature.args[0], args[0], args[1], _BYTES)
        target = _splat(builder, builder.trunc(args[2], _BYTE), 64)
        return builder.bitcast(builder.icmp_unsigned("==", value, target), WORD)

    return types.uint64(classes, types.int64, types.int64), codegen


def _plain_class_mask(classes: Bytes, index: int, wanted: int) -> np.uint64:
    return _bits(checked(classes, index, 64) == wanted)


@intrinsic
def _lowest_bit(typing: Any, word: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), codegen


@intrinsic
def _count_bits(typing: Any, word: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


def _plain_lowest_bit(word: np.uint64) -> int:
    return (int(word) & -int(word)).bit_length() - 1 if word else 64


def _plain_count_bits(word: np.uint64) -> int:
    return int(word).bit_count()


@intrinsic
def _select_bit(typing: Any, word: Any, rank: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name = "llvm.x86.bmi.pdep.64"
        deposit = builder.module.globals.get(name)
        if deposit is None:
            deposit = ir.Function(builder.module, ir.FunctionType(WORD, [WORD, WORD]), name=name)
        one = builder.call(deposit, [builder.shl(ir.Constant(WORD, 1), args[1]), args[0]])
        return builder.cttz(one, ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64, types.int64), codegen


@inlined
def _select_bit_anywhere(word, rank):  # type: ignore[no-untyped-def]
    for _ in range(rank):
        word &= word - np.uint64(1)
    return lowest_bit(word)


def _plain_select_bit(word: np.uint64, rank: int) -> int:
    return [bit for bit in range(64) if (int(word) >> bit) & 1][rank]


@intrinsic
def _copy_block(typing: Any, old: Any, new: Any, index: Any, unit: Any) -> Any:
    lanes = ir.VectorType(ir.IntType(unit.dtype.bitwidth), 64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = load_any(context, builder, signature.args[0], args[0], args[2], lanes)
        builder.store(value, address(context, builder, signature.args[1], args[1], args[2], lanes), align=1)
        return context.get_dummy_value()

    return types.void(old, new, types.int64, unit), codegen


def _plain_copy_block(old: Bytes, new: Bytes, index: int, unit: Any) -> None:
    size = 64 * unit.itemsize
    checked(new, index, size)[:] = checked(old, index, size)


@intrinsic
def _find_span(typing: Any, sums: Any, index: Any, rank: Any) -> Any:
    spans = STRETCH // SPAN
    lanes = ir.VectorType(ir.IntType(16), spans)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = load_any(context, builder, signature.args[0], args[0], args[1], lanes)
        wanted = _splat(builder, builder.trunc(args[2], ir.IntType(16)), spans)
        below = builder.bitcast(builder.icmp_signed("<=", value, wanted), ir.IntType(spans))
        return builder.zext(builder.ctpop(below), WORD)

    return types.int64(sums, types.int64, types.int64), codegen


def _plain_find_span(sums: Bytes, index: int, rank: int) -> int:
    return int((checked(sums, index, 2 * (STRETCH // SPAN)).view(np.int16) <= rank).sum())


lowest_bit: Callable[..., Any] = _lowest_bit if JIT else _plain_lowest_bit
"""lowest_bit(word): the place of the lowest bit that is set, 64 for none."""

count_bits: Callable[..., Any] = _count_bits if JIT else _plain_count_bits
"""count_bits(word): how many bits are set."""

changed_mask: Callable[..., Any] = _changed_mask if JIT else _plain_changed_mask
"""changed_mask(new, old, index, unit): bit j is set where the j-th of the 64 elements from a byte index on differs."""

exponent_classes: Callable[..., Any] = _exponent_classes if JIT else _plain_exponent_classes
"""exponent_classes(data, index, out, place, unit, window): the classes of 64 elements as bytes.

`window` is the shift and mask of a bit field, its least value (class 0, with all below it), the top class (with all
above it).
"""

count_class: Callable[..., Any] = _count_class if JIT else _plain_count_class
"""count_class(classes, index, wanted): how many of the SPAN bytes from `index` on are equal to one."""

count_before: Callable[..., Any] = _count_before if JIT else _plain_count_before
"""count_before(classes, index, wanted, ramp, place): how many of the `place` bytes from `index` on are equal to one.

`place` is below SPAN, all SPAN bytes are the array's, and `ramp` is SPAN times 255 and then SPAN zeros.
"""

class_mask: Callable[..., Any] = _class_mask if JIT else _plain_class_mask
"""class_mask(classes, index, wanted): bit j is set where the j-th of the 64 bytes from `index` on is equal to one."""

select_bit: Callable[..., Any] = _plain_select_bit
"""select_bit(word, rank): the place of the bit that has `rank` set bits below it; there is one."""
if JIT:
    has_deposit = "bmi2" in _host_features()
    select_bit = _select_bit if has_deposit else _select_bit_anywhere

copy_block: Callable[..., Any] = _copy_block if JIT else _plain_copy_block
"""copy_block(old, new, index, unit): copies the 64 elements from a byte index on."""

find_span: Callable[..., Any] = _find_span if JIT else _plain_find_span
"""find_span(sums, index, rank): how many of the STRETCH / SPAN int16 from a byte index on are at most `rank`."""
