"""Kernels that encode for `expgap`: find what changed, its rank in its class, and write it. Must not know streams."""

import numpy as np

from weighbridge.storage.codecs.kernels.classes import (
    AHEAD,
    AT_ONCE,
    BITS,
    CLASS_AT,
    CODE_BITS,
    DENSE,
    GAP,
    GAP_AT,
    LOW,
    MANY,
    MAX_CLASSES,
    NO_CLASS,
    SHIFT,
    STEP,
    SUMS,
    SYMBOL,
    WIDE,
    class_of,
)
from weighbridge.storage.codecs.kernels.compiler import inlined, kernel
from weighbridge.storage.codecs.kernels.gaps import step_code
from weighbridge.storage.codecs.kernels.lanes import (
    SPAN,
    STRETCH,
    changed_mask,
    class_mask,
    count_before,
    count_bits,
    count_class,
    exponent_classes,
    lowest_bit,
)
from weighbridge.storage.codecs.kernels.memory import fetch_ahead, load, store, width_of


@inlined
def logged(gap, which, code):  # type: ignore[no-untyped-def]
    """A change as one word."""
    return (np.uint64(gap) << np.uint64(GAP_AT)) | (np.uint64(which) << np.uint64(CLASS_AT)) | code


@inlined
def turns(old, new, bits):  # type: ignore[no-untyped-def]
    """1 where an element becomes the second of `bits` under the first, else 0."""
    return np.int64((new & bits[0]) == bits[1]) & np.int64((old & bits[0]) != bits[1])


@kernel
def survey(old, new, unit, order, window, stride, members, steps):  # type: ignore[no-untyped-def]
    """Counts every stride-th element by the value of the field that `window` names, and the codes of those that differ.

    `steps` has a row a field value, a column a code; the last column takes all wider ones.
    """
    shift, field = np.uint64(window[0]), np.uint64(window[1])
    sign, mask = order
    count = new.size // width_of(unit)
    for i in range(0, count, stride):
        members[np.int64((load(old, i * width_of(unit), unit) >> shift) & field)] += 1
    for start in range(0, count, 64):
        word = np.uint64(0)
        if start + 64 <= count:
            word = changed_mask(new, old, start * width_of(unit), unit)
        else:
            for j in range(count - start):
                index = (start + j) * width_of(unit)
                if load(new, index, unit) != load(old, index, unit):
                    word |= np.uint64(1) << np.uint64(j)
        while word:
            index = (start + lowest_bit(word)) * width_of(unit)
            word &= word - np.uint64(1)
            pattern = load(old, index, unit)
            code = step_code(pattern, load(new, index, unit), sign, mask)
            steps[np.int64((pattern >> shift) & field), min(np.int64(code), steps.shape[1] - 1)] += 1


@kernel
def scan_classes(old, new, unit, order, window, seen, last, scratch, ramp, two, bits, turned, log):  # type: ignore[no-untyped-def]
    """Logs a chunk's changes and returns how many; `log` has room for one an element.

    `order` is sign and mask. `seen` and `last` are, per class, the members so far in the part and the last changed
    one's rank. `scratch` has SCRATCH bytes: STRETCH for classes, SUMS for each class, then the places of changes.
    `ramp` is as `count_before` wants it, `two` the unit of 2 bytes. `turned` gets how many elements are the second of
    `bits` under the first, and were not.
    """
    sign, mask = order
    count = new.size // width_of(unit)
    places = STRETCH + SUMS * MAX_CLASSES
    marks = np.zeros(SPAN // 64, np.uint64)
    totals = np.zeros(MAX_CLASSES, np.int64)
    members = np.zeros((MAX_CLASSES, SPAN // 64), np.uint64)
    ranks = np.zeros((MAX_CLASSES, SPAN // 64), np.int64)
    used = np.int64(0)
    many = False
    odd = np.int64(0)
    for start in range(0, count, STRETCH):
        size = min(STRETCH, count - start)
        before, found = used, np.int64(0)
        totals[:] = 0
        for span in range(0, size, SPAN):
            for block in range(SPAN // 64):
                j = span + 64 * block
                index = (start + j) * width_of(unit)
                if j + 64 <= size:
                    fetch_ahead(old, index + AHEAD)
                    fetch_ahead(old, index + AHEAD + 64)
                    fetch_ahead(new, index + AHEAD)
                    fetch_ahead(new, index + AHEAD + 64)
                    exponent_classes(old, index, scratch, j, unit, window)
                    word = changed_mask(new, old, index, unit)
                else:
                    word = np.uint64(0)
                    for i in range(64):
                        which = np.int64(NO_CLASS)
                        if j + i < size:
                            at = index + i * width_of(unit)
                            pattern = load(old, at, unit)
                            which = class_of(pattern, window)
                            word |= np.uint64(load(new, at, unit) != pattern) << np.uint64(i)
                        scratch[j + i] = which
                marks[block] = word
                if not many:
                    more = found + count_bits(word)
                    for i in range(AT_ONCE):  # places of no change are written over
                        store(scratch, places + 2 * (found + i), np.uint64(j + lowest_bit(word)), two)
                        word &= word - np.uint64(1)
                    found += AT_ONCE
                    while word:
                        store(scratch, places + 2 * found, np.uint64(j + lowest_bit(word)), two)
                        word &= word - np.uint64(1)
                        found += np.int64(1)
                    found = more
            if not many:
                for each in range(window[3] + 1):
                    store(scratch, STRETCH + SUMS * each + 2 * (span // SPAN), np.uint64(totals[each]), two)
                    totals[each] += count_class(scratch, span, each)
                continue
            for each in range(window[3] + 1):
                rank = seen[each]
                for block in range(SPAN // 64):
                    word = class_mask(scratch, span + 64 * block, each)
                    members[each, block] = word
                    ranks[each, block] = rank
                    rank += count_bits(word)
                seen[each] = rank
            for block in range(SPAN // 64):
                word = marks[block]
                while word:
                    bit = lowest_bit(word)
                    word &= word - np.uint64(1)
                    place = span + 64 * block + bit
                    which = np.int64(scratch[place])
                    below = (np.uint64(1) << np.uint64(bit)) - np.uint64(1)
                    rank = ranks[which, block] + count_bits(members[which, block] & below)
                    gap = rank - last[which] - 1
                    last[which] = rank
                    index = (start + place) * width_of(unit)
                    a, b = load(old, index, unit), load(new, index, unit)
                    odd += turns(a, b, bits)
                    log[used] = logged(gap, which, step_code(a, b, sign, mask))
                    used += np.int64(1)
        for i in range(found):
            place = np.int64(load(scratch, places + 2 * i, two))
            which = np.int64(scratch[place])
            first = place // SPAN * SPAN
            rank = seen[which] + np.int64(load(scratch, STRETCH + SUMS * which + 2 * (place // SPAN), two))
            rank += count_before(scratch, first, which, ramp, place - first)
            gap = rank - last[which] - 1
            last[which] = rank
            index = (start + place) * width_of(unit)
            a, b = load(old, index, unit), load(new, index, unit)
            odd += turns(a, b, bits)
            log[used] = logged(gap, which, step_code(a, b, sign, mask))
            used += np.int64(1)
        for each in range(window[3] + 1):
            seen[each] += totals[each]
        many = used - before > MANY * (size // SPAN)
    turned[0] = odd
    return used


@kernel
def tally(log, stride, counts, small):  # type: ignore[no-untyped-def]
    """How many logged changes each class has; and, of every stride-th one, how many have codes below 2, 14 and 254.

    The last column of `small` counts those that were looked at.
    """
    for i in range(log.size):
        counts[(log[i] >> np.uint64(CLASS_AT)) & np.uint64(MAX_CLASSES - 1)] += 1
    for i in range(0, log.size, stride):
        which = (log[i] >> np.uint64(CLASS_AT)) & np.uint64(MAX_CLASSES - 1)
        code = log[i] & np.uint64((1 << CODE_BITS) - 1)
        small[which, 0] += code < np.uint64(2)
        small[which, 1] += code < np.uint64(14)
        small[which, 2] += code < np.uint64(254)
        small[which, 3] += 1


@kernel
def write_classes(log, table, gaps, low, steps, wide, byte, word):  # type: ignore[no-untyped-def]
    """Writes logged changes into the streams of their classes; `low` and `steps` were zero. The caller leaves room.

    `byte` and `word` are the units of 1 and 8 bytes. Nothing here branches on the class, which no processor could
    guess: a dense class keeps no low bits (its SHIFT is 0), and the one gap byte that is written for it is not used.
    """
    for i in range(log.size):
        which = (log[i] >> np.uint64(CLASS_AT)) & np.uint64(MAX_CLASSES - 1)
        code = log[i] & np.uint64((1 << CODE_BITS) - 1)
        gap = np.int64(log[i] >> np.uint64(GAP_AT))
        dense, shift, at = table[which, DENSE], table[which, SHIFT], table[which, SYMBOL]
        bit = table[which, LOW] + at * shift
        kept = np.uint64(gap) & ((np.uint64(1) << np.uint64(shift)) - np.uint64(1))
        store(low, bit >> 3, load(low, bit >> 3, word) | (kept << np.uint64(bit & 7)), word)
        at += gap * dense
        high = (gap >> shift) * (1 - dense)
        end = table[which, GAP]
        while high >= 255:
            store(gaps, end, np.uint64(255), byte)
            end += 1
            high -= 255
        store(gaps, end, np.uint64(high), byte)
        table[which, GAP] = end + 1 - dense
        bits = table[which, BITS]
        escape = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
        symbol = code + np.uint64(dense)
        if symbol >= escape:
            wide[table[which, WIDE]] = code
            table[which, WIDE] += 1
            symbol = escape
        bit = table[which, STEP] + at * bits
        store(steps, bit >> 3, load(steps, bit >> 3, byte) | (symbol << np.uint64(bit & 7)), byte)
        table[which, SYMBOL] = at + 1
