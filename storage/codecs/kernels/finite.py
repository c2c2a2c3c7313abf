"""Kernels that count numbers which are none: NaN and infinity, by their bits. Must not know dtypes by name."""

from weighbridge.storage.codecs.kernels.compiler import kernel
from weighbridge.storage.codecs.kernels.memory import load, width_of


@kernel
def none_matches(new, word, masks, values, carry, tops):  # type: ignore[no-untyped-def]
    """Whether no element in whole words of `new` is its value under its mask, several elements a word; the rest of the
    bytes is the caller's. `masks` and `values` repeat one element's, whose top bit is clear in both; `tops` has the top
    bit of each, `carry` all others, so that adding it sets the top bit unless an element is left with nothing."""
    seen = tops
    for index in range(new.size // 8):
        seen &= ((load(new, index * 8, word) & masks) ^ values) + carry
    return (seen & tops) == tops


@kernel
def count_matching(new, unit, mask, value):  # type: ignore[no-untyped-def]
    """How many elements of `new` are `value` under `mask`."""
    count = 0
    width = width_of(unit)
    for element in range(new.size // width):
        if (load(new, element * width, unit) & mask) == value:
            count += 1
    return count


@kernel
def count_turned(old, new, unit, mask, value):  # type: ignore[no-untyped-def]
    """How many elements are `value` under `mask` in `new` and were not in `old`. The caller checks the sizes."""
    count = 0
    width = width_of(unit)
    for element in range(new.size // width):
        if (load(new, element * width, unit) & mask) == value and (load(old, element * width, unit) & mask) != value:
            count += 1
    return count
