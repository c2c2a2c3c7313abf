"""The compiled loops under the codecs, behind functions that check what they are given. Must not know streams."""

import functools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from weighbridge.errors import PayloadCorrupt
from weighbridge.storage.codecs.contract import Bytes, Patch
from weighbridge.storage.codecs.elements import Element
from weighbridge.storage.codecs.kernels import finite, gaps, patches
from weighbridge.storage.codecs.kernels.memory import UNITS

Scalar = TypeVar("Scalar", bound=np.generic)
Words = npt.NDArray[np.uint64]
Indexes = npt.NDArray[np.int64]
Positions = npt.NDArray[np.uint32]


def fixed(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """A read-only plain view: kernels are compiled once, for read-only inputs."""
    view = np.asarray(array)
    if view.ndim == 1 and view.flags.c_contiguous and not view.flags.writeable:
        return view
    view = view.view()
    if not view.flags.c_contiguous or view.ndim != 1:
        raise ValueError("kernels take one-dimensional contiguous arrays")
    view.flags.writeable = False
    return view


def same(old: Bytes, new: Bytes) -> bool:
    """Whether two byte arrays of one size are equal; stops where they first are not."""
    if old.size != new.size or old.dtype != np.uint8 or new.dtype != np.uint8:
        raise ValueError("old and new bytes differ in size")
    return not gaps.differ(fixed(old), fixed(new), UNITS[8])


def count_changed(old: Bytes, new: Bytes, width: int) -> int:
    """How many elements of `width` bytes differ between two arrays of one size."""
    if old.size != new.size or old.dtype != np.uint8 or new.dtype != np.uint8:
        raise ValueError("old and new bytes differ in size")
    return int(gaps.count_changed(fixed(old), fixed(new), UNITS[width]))


def count_turned_nonfinite(old: Bytes, new: Bytes, width: int, mask: int, value: int) -> int:
    """How many elements of `width` bytes are NaN or infinite in `new` (`value` under `mask`) and were not in `old`."""
    if old.size != new.size or old.dtype != np.uint8 or new.dtype != np.uint8:
        raise ValueError("old and new bytes differ in size")
    unit, bits, wanted, new = UNITS[width], np.uint64(mask), np.uint64(value), fixed(new)
    begins = 0
    if mask >> (8 * width - 1) == 0:  # as good as always there is none, and whole words say so at memory speed
        begins = new.size // 8 * 8 if finite.none_matches(new, UNITS[8], *_words(width, mask, value)) else 0
    if begins == new.size or not finite.count_matching(new[begins:], unit, bits, wanted):
        return 0
    return int(finite.count_turned(fixed(old)[begins:], new[begins:], unit, bits, wanted))


@functools.cache
def _words(width: int, mask: int, value: int) -> tuple[np.uint64, ...]:
    """What `finite.none_matches` takes, for elements of `width` bytes."""
    lanes = sum(1 << (8 * width * lane) for lane in range(8 // width))
    top = 1 << (8 * width - 1)
    return tuple(np.uint64(number * lanes) for number in (mask, value, top - 1, top))


def scan_gaps(
    old: Bytes, new: Bytes, element: Element, first: int, state: Indexes, into: tuple[Bytes, Bytes, Words]
) -> None:
    """Appends a chunk's gaps, steps and wide steps; see `gaps.scan_gaps`. Checks that there is room."""
    count = new.size // element.width
    if old.size != new.size or old.dtype != np.uint8 or new.dtype != np.uint8:
        raise ValueError("old and new bytes differ in size")
    behind = first + count - int(state[0])
    room = (state[1] + count + behind // 255 + 1, state[2] + count, state[3] + count)
    if into[0].size < room[0] or into[1].size < room[1] or into[2].size < room[2]:
        raise ValueError("no room left for a chunk's gaps and steps")
    gaps.scan_gaps(fixed(old), fixed(new), UNITS[element.width], element.sign, element.mask, first, state, *into)


def refuse(codec: str, error: int) -> None:
    """Raises PayloadCorrupt for a kernel's error code that is not 0."""
    if error:
        raise PayloadCorrupt(f"{codec}: {gaps.REASONS[error]}; nothing was written. Fetch the shard again.")


def scatter(target: Bytes, patch: Patch) -> None:
    """Applies a patch to a part's bytes. Raises PayloadCorrupt, with nothing written, where it does not fit."""
    if target.dtype != np.uint8 or target.ndim != 1 or not target.flags.c_contiguous or not target.flags.writeable:
        raise ValueError("a patch is applied to writable, contiguous bytes")
    check_patch(patch, target.size)
    if patch.positions is None:
        target[:] = patch.values
    else:
        patches.write_values(np.asarray(target), UNITS[patch.width], fixed(patch.positions), fixed(patch.values))


def check_patch(patch: Patch, nbytes: int) -> None:
    """Raises PayloadCorrupt where a patch does not fit a part of `nbytes`."""
    width, positions, values = patch.width, patch.positions, patch.values
    if positions is None:
        if values.size != nbytes:
            raise PayloadCorrupt(f"a patch of {values.size} bytes for a part of {nbytes}; nothing was written")
        return
    if width not in (1, 2, 4, 8) or values.size != positions.size * width or values.dtype != np.uint8:
        raise PayloadCorrupt(f"a patch of {positions.size} elements with {values.size} bytes; nothing was written")
    if positions.dtype != np.uint32 or not patches.check_positions(fixed(positions), nbytes // width):
        raise PayloadCorrupt("a patch writes beyond the part's end; nothing was written. Fetch the shard again.")


def write_stretch(target: Bytes, first: int, patch: Patch, cursor: int) -> int:
    """Writes the entries from `cursor` on that lie in a stretch from element `first`; returns the next entry."""
    if patch.positions is None:
        raise ValueError("a patch of all elements has no stretches")
    positions, values = fixed(patch.positions), fixed(patch.values)
    return int(patches.write_stretch(target, UNITS[patch.width], first, positions, values, cursor))


def merge(source: Bytes, width: int, positions: Sequence[Positions]) -> Patch:
    """One patch, ascending, of all elements at `positions` (checked by the caller), with their bytes in `source`."""
    bitmap = np.zeros(-(-source.size // width // 64), np.uint64)
    for some in positions:
        patches.mark(bitmap, fixed(some))
    empty = np.empty(0, np.uint32)
    count = patches.gather_marked(bitmap, fixed(source), UNITS[width], empty, np.empty(0, np.uint8))
    patch = Patch(width, np.empty(count, np.uint32), np.empty(count * width, np.uint8))
    patches.gather_marked(bitmap, fixed(source), UNITS[width], patch.positions, patch.values)
    return patch
