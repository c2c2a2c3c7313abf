"""How elements of a dtype are compared and ordered, by bit pattern alone. Must not know what a pattern is worth.

The step from an old to a new element is the difference of their ranks in an order of all bit patterns, modulo
2^bits. Floats with a sign bit rank as `u ^ sign` where the sign is clear and `~u` where it is set, so that neighbours
in value are neighbours in rank (also across zero, with +0 and -0 apart). All others rank as unsigned integers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weighbridge.errors import PayloadCorrupt, UsageError
from weighbridge.storage.codecs.contract import PartShape
from weighbridge.values import item_bytes

_SIGNED_FLOATS = {"F8_E5M2", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F16", "BF16", "F32", "F64"}
# Lowest bit and number of bits of the exponent, where classes by it are worth while.
_EXPONENTS: Mapping[str, tuple[int, int]] = {
    "BF16": (7, 8), "F16": (10, 5), "F32": (23, 8),
    "F8_E4M3": (3, 4), "F8_E4M3FNUZ": (3, 4), "F8_E5M2": (2, 5), "F8_E5M2FNUZ": (2, 5),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Element:
    """Width in bytes; `mask` of all bits and `sign` (0: ranks as unsigned) as kernels take them."""

    width: int
    mask: np.uint64
    sign: np.uint64
    exponent_shift: int
    exponent_bits: int


def element(dtype: str) -> Element:
    """The element of a dtype; unknown and sub-byte ones are opaque bytes."""
    width = item_bytes(dtype)
    sign = 1 << (8 * width - 1) if dtype in _SIGNED_FLOATS else 0
    shift, bits = _EXPONENTS.get(dtype, (0, 0))
    return Element(width, np.uint64((1 << (8 * width)) - 1), np.uint64(sign), shift, bits)


def whole_elements(dtype: str, nbytes: int) -> int:
    """The width of a part's elements. Raises UsageError where its size is no whole number of them."""
    width = item_bytes(dtype)
    if nbytes % width:
        raise UsageError(f"a part of {nbytes} bytes holds no whole number of {dtype}")
    return width


def count_elements(shape: PartShape) -> int:
    """Elements of a declared part. Raises PayloadCorrupt where its size is no whole number of them."""
    width = item_bytes(shape.dtype)
    if shape.nbytes < 0 or shape.nbytes % width:
        raise PayloadCorrupt(f"a part of {shape.nbytes} bytes holds no whole number of {shape.dtype}; nothing written")
    return shape.nbytes // width


NONFINITE: Mapping[str, tuple[int, int]] = {
    "F8_E5M2": (0x7C, 0x7C), "F8_E4M3": (0x7F, 0x7F), "F8_E5M2FNUZ": (0xFF, 0x80), "F8_E4M3FNUZ": (0xFF, 0x80),
    "F8_E8M0": (0xFF, 0xFF),
    "F16": (0x7C00, 0x7C00), "BF16": (0x7F80, 0x7F80), "F32": (0x7F800000, 0x7F800000),
    "F64": (0x7FF << 52, 0x7FF << 52),
}  # fmt: skip
"""For each floating dtype a mask and what is under it in every NaN and infinity, and in nothing else."""
