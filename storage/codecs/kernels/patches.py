"""Kernels that apply patches: everything is checked before the first write. Must not know codecs."""

import numpy as np

from weighbridge.storage.codecs.kernels.compiler import kernel
from weighbridge.storage.codecs.kernels.lanes import lowest_bit
from weighbridge.storage.codecs.kernels.memory import load, store, width_of


@kernel
def check_positions(positions, count):  # type: ignore[no-untyped-def]
    """Whether all positions lie below `count`."""
    highest = np.int64(-1)
    for i in range(positions.size):
        highest = max(highest, np.int64(positions[i]))
    return highest < count


@kernel
def write_values(target, unit, positions, values):  # type: ignore[no-untyped-def]
    """Writes elements at positions that were checked."""
    for i in range(positions.size):
        store(target, np.int64(positions[i]) * width_of(unit), load(values, i * width_of(unit), unit), unit)


@kernel
def write_stretch(target, unit, first, positions, values, cursor):  # type: ignore[no-untyped-def]
    """Writes, into a stretch that starts at element `first`, the entries from `cursor` on that lie in it.

    Returns the first entry that does not: one after the stretch, or one that is out of order.
    """
    count = target.size // width_of(unit)
    while cursor < positions.size:
        index = np.int64(positions[cursor]) - first
        if index < 0 or index >= count:
            break
        store(target, index * width_of(unit), load(values, cursor * width_of(unit), unit), unit)
        cursor += 1
    return cursor


@kernel
def mark(bitmap, positions):  # type: ignore[no-untyped-def]
    """Sets a bit for every position; the caller checked them."""
    for i in range(positions.size):
        position = np.int64(positions[i])
        bitmap[position // 64] |= np.uint64(1) << np.uint64(position % 64)


@kernel
def gather_marked(bitmap, source, unit, positions, values):  # type: ignore[no-untyped-def]
    """Fills positions and values, ascending, from the marked elements; returns how many there are.

    With room for none it only counts.
    """
    found = 0
    for block in range(bitmap.size):
        word = bitmap[block]
        while word:
            position = block * 64 + lowest_bit(word)
            word &= word - np.uint64(1)
            if positions.size:
                positions[found] = position
                store(values, found * width_of(unit), load(source, position * width_of(unit), unit), unit)
            found += 1
    return found
