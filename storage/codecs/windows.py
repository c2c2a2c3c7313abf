"""Which exponents get a class of their own: measured on samples. Must not know streams.

Classes are neighbouring values of the exponent; the least takes all below it, the top class all above. What a window
costs is the entropy of positions and steps, class by class, and a little for each class's tables and time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weighbridge.storage.codecs import kernels
from weighbridge.storage.codecs.contract import Sample
from weighbridge.storage.codecs.elements import Element, element
from weighbridge.storage.codecs.kernels.class_scan import survey
from weighbridge.storage.codecs.kernels.classes import MAX_CLASSES
from weighbridge.storage.codecs.kernels.memory import UNITS

Counts = npt.NDArray[np.int64]

_CODES = 64  # codes told apart when steps are surveyed
_STRIDE = 4  # of a sample's elements, every so many-th is counted
_CLASS_SHARE = 0.0005  # a class must save this share of all bits, for the time that it takes,
_CLASS_BITS = 400.0  # and what its Huffman tables and extents take


@dataclass(frozen=True, slots=True)
class Window:
    """`classes` neighbouring exponents from `low` on."""

    low: int
    classes: int

    def for_kernels(self, unit: Element) -> tuple[int, int, int, int]:
        """Shift and mask of the field, its least value, the top class."""
        return unit.exponent_shift, (1 << unit.exponent_bits) - 1, self.low, self.classes - 1


def choose_window(samples: Sequence[Sample]) -> Window:
    """The window for the parts of one dtype that `samples` were taken from."""
    unit = element(samples[0].dtype)
    members, steps = np.zeros(256, np.int64), np.zeros((256, _CODES), np.int64)
    field = Window(0, 1).for_kernels(unit)
    for sample in samples:
        old, new = kernels.fixed(sample.old), kernels.fixed(sample.new)
        survey(old, new, UNITS[unit.width], (unit.sign, unit.mask), field, _STRIDE, members, steps)
    # Members are estimated; those that changed are members for certain.
    members = np.maximum(members * _STRIDE, steps.sum(axis=1))
    taken = max(1, sum(sample.new.size for sample in samples))
    return best_window(members, steps, sum(sample.whole_bytes for sample in samples) / taken)


def best_window(members: Counts, steps: Counts, scale: float) -> Window:
    """The cheapest window, given elements by exponent and, of those that changed, the codes of their steps.

    Both were counted in a sample of 1 / `scale` of them all.
    """
    used = np.flatnonzero(steps.any(axis=1))
    if not used.size:
        return Window(0, 1)
    first, last = int(used[0]), int(used[-1])
    singles = _bits(steps, members)
    below = _bits(np.cumsum(steps, axis=0), np.cumsum(members))
    above = _bits(np.cumsum(steps[::-1], axis=0), np.cumsum(members[::-1]))[::-1]
    sums = np.concatenate([[0.0], np.cumsum(singles)])
    whole = float(below[-1])
    best, least = Window(first, 1), whole
    for low in range(first, last):
        for top in range(low + 1, min(last, low + MAX_CLASSES - 1) + 1):
            classes = top - low + 1
            bits = float(below[low] + sums[top] - sums[low + 1] + above[top])
            cost = bits + (classes - 1) * (_CLASS_SHARE * whole + _CLASS_BITS / scale)
            if cost < least:
                best, least = Window(low, classes), cost
    return best


def _bits(steps: Counts, members: Counts) -> npt.NDArray[np.float64]:
    """Bits, row by row, that the positions and the steps of the changed among so many members need."""
    changed = steps.sum(axis=1)
    return _log_bits(np.stack([changed, members - changed], axis=1)) + _log_bits(steps)


def _log_bits(counts: Counts) -> npt.NDArray[np.float64]:
    """Bits for all draws of a row together, from the histogram that the row is."""
    numbers = counts.astype(np.float64)
    total = numbers.sum(axis=1)
    # n log n is 0 for 0.
    each = (numbers * np.log2(np.maximum(numbers, 1))).sum(axis=1)
    bits: npt.NDArray[np.float64] = total * np.log2(np.maximum(total, 1)) - each
    return bits
