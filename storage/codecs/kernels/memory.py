"""Unaligned loads and stores for kernels written in numba. Must not know what is loaded.

All arrays are uint8, all indexes are bytes, at any alignment, little-endian. An element's width comes from the type of
`unit`, an empty array of uint8, 16, 32 or 64: so each kernel is compiled for each width that is used. NOTHING HERE
CHECKS BOUNDS: kernels do, before they call. The plain-Python twins (NUMBA_DISABLE_JIT=1) do check, so that tests find a
kernel that did not.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.codecs.kernels.compiler import JIT

WORD = ir.IntType(64)


def address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, element: ir.Type) -> Any:
    """Pointer to an `element` at a byte index of an array, in LLVM's terms."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), element.as_pointer())


def load_any(context: Any, builder: Any, array_type: Any, array: Any, index: Any, element: ir.Type) -> Any:
    """A value of any LLVM type, scalar or vector, at a byte index of an array."""
    value = builder.load(address(context, builder, array_type, array, index, element), typ=element)
    value.align = 1
    return value


def checked(array: Bytes, index: int, size: int) -> Bytes:
    """The bytes that a twin is about to touch. Raises IndexError where they are not the array's."""
    if index < 0 or index + size > array.size:
        raise IndexError(f"a kernel touched bytes {index} to {index + size} of {array.size}")
    return array[index : index + size]


@intrinsic
def _load(typing: Any, array: Any, index: Any, unit: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = ir.IntType(unit.dtype.bitwidth)
        value = load_any(context, builder, signature.args[0], args[0], args[1], element)
        return value if unit.dtype.bitwidth == 64 else builder.zext(value, WORD)

    return types.uint64(array, types.int64, unit), codegen


def _plain_load(array: Bytes, index: int, unit: Any) -> np.uint64:
    return np.uint64(int.from_bytes(checked(array, index, unit.itemsize).tobytes(), "little"))


@intrinsic
def _store(typing: Any, array: Any, index: Any, value: Any, unit: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = ir.IntType(unit.dtype.bitwidth)
        low = args[2] if unit.dtype.bitwidth == 64 else builder.trunc(args[2], element)
        builder.store(low, address(context, builder, signature.args[0], args[0], args[1], element), align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64, unit), codegen


def _plain_store(array: Bytes, index: int, value: np.uint64, unit: Any) -> None:
    low = int(value).to_bytes(8, "little")[: unit.itemsize]
    checked(array, index, unit.itemsize)[:] = np.frombuffer(low, np.uint8)


@intrinsic
def _fetch_ahead(typing: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        pointer = ir.IntType(8).as_pointer()
        name = "llvm.prefetch.p0i8"
        prefetch = builder.module.globals.get(name)
        if prefetch is None:
            kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
            prefetch = ir.Function(builder.module, kind, name=name)
        place = address(context, builder, signature.args[0], args[0], args[1], ir.IntType(8))
        builder.call(prefetch, [place, *(ir.Constant(number, value) for value in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


def _plain_fetch_ahead(array: Bytes, index: int) -> None:
    """Fetching is a hint: nothing to see, and beyond the end nothing to fear."""


@intrinsic
def _width_of(typing: Any, unit: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(WORD, unit.dtype.bitwidth // 8)

    return types.int64(unit), codegen


def _plain_width_of(unit: Any) -> int:
    return int(unit.itemsize)


width_of: Callable[..., Any] = _width_of if JIT else _plain_width_of
"""width_of(unit): its width in bytes, which the compiler knows, other than `unit.itemsize`."""

load: Callable[..., Any] = _load if JIT else _plain_load
"""load(array, index, unit): the element at a byte index, as uint64."""

store: Callable[..., Any] = _store if JIT else _plain_store
"""store(array, index, value, unit): writes the low bytes of a uint64 as an element at a byte index."""

fetch_ahead: Callable[..., Any] = _fetch_ahead if JIT else _plain_fetch_ahead
"""fetch_ahead(array, index): asks for the 64 bytes about a byte index; a hint, harmless beyond the array's end."""

UNITS: dict[int, Any] = {
    np.dtype(kind).itemsize: np.empty(0, kind) for kind in (np.uint8, np.uint16, np.uint32, np.uint64)
}
"""The `unit` of each width in bytes."""
