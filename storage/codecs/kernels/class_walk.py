"""Kernels that decode for `expgap`: read changes ahead, and find the place of each rank. Must not know streams."""

import numpy as np

from weighbridge.storage.codecs.kernels.classes import (
    AHEAD,
    AHEAD_AT,
    BITS,
    DENSE,
    FILLED,
    GAP,
    GAP_END,
    LOW,
    MAX_CLASSES,
    MAX_ELEMENTS,
    NEVER,
    NEXT,
    NO_CLASS,
    QUEUE,
    SEEN,
    SHIFT,
    STEP,
    SUMS,
    SYMBOL,
    SYMBOL_END,
    TAKEN,
    WAITING,
    WIDE,
    WIDE_END,
    class_of,
)
from weighbridge.storage.codecs.kernels.compiler import inlined, kernel
from weighbridge.storage.codecs.kernels.gaps import BAD_STEP, BEYOND_END, LEFT_OVER, TRUNCATED, stepped
from weighbridge.storage.codecs.kernels.lanes import (
    SPAN,
    STRETCH,
    class_mask,
    copy_block,
    count_bits,
    count_class,
    exponent_classes,
    find_span,
    select_bit,
)
from weighbridge.storage.codecs.kernels.memory import fetch_ahead, load, store, width_of


@kernel
def end_classes(table):  # type: ignore[no-untyped-def]
    """Whether a part used up exactly what is its own. Returns an error code."""
    for which in range(table.shape[0]):
        if table[which, TAKEN] < table[which, FILLED] or table[which, SYMBOL] < table[which, SYMBOL_END]:
            return BEYOND_END
        if table[which, GAP] != table[which, GAP_END] or table[which, WIDE] != table[which, WIDE_END]:
            return LEFT_OVER
    return 0


@inlined
def read_ahead(which, table, streams, mask, queue):  # type: ignore[no-untyped-def]
    """Fills a class's queue with its next changes, at least one while there are any. Returns an error code.

    Apart from the walk through the members, so that each is a short loop that a processor can run ahead in.
    """
    gaps, low, steps, wide, byte, _, four, eight = streams
    shift, bits, dense = table[which, SHIFT], table[which, BITS], np.uint64(table[which, DENSE])
    symbol_at, symbol_end = table[which, SYMBOL], table[which, SYMBOL_END]
    gap_at, gap_end = table[which, GAP], table[which, GAP_END]
    wide_at, wide_end = table[which, WIDE], table[which, WIDE_END]
    ahead = table[which, WAITING]
    kept = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    escape = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    filled = np.int64(0)
    while filled == 0 and symbol_at < symbol_end:
        for at in range(symbol_at, min(symbol_end, symbol_at + QUEUE)):
            bit = table[which, STEP] + at * bits
            symbol = (load(steps, bit >> 3, byte) >> np.uint64(bit & 7)) & escape
            code = symbol - dense
            if symbol == escape:
                if wide_at >= wide_end:
                    return TRUNCATED
                code = load(wide, wide_at * 4, four)
                wide_at += 1
                if code < escape - dense or code >= mask:
                    return BAD_STEP
            if dense:
                ahead += 1
            else:
                if gap_at >= gap_end:
                    return TRUNCATED
                piece = np.int64(load(gaps, gap_at, byte))
                gap_at += 1
                gap = piece
                while piece == 255:
                    if gap_at >= gap_end:
                        return TRUNCATED
                    piece = np.int64(load(gaps, gap_at, byte))
                    gap_at += 1
                    gap += piece
                bit = table[which, LOW] + at * shift
                tail = (load(low, bit >> 3, eight) >> np.uint64(bit & 7)) & kept
                # A gap beyond the largest part is as good as the largest: it is found out at the part's end.
                ahead = min(1 + ((gap << shift) | np.int64(tail)), np.int64(MAX_ELEMENTS))
            word = (np.uint64(ahead) << np.uint64(AHEAD_AT)) | (code & np.uint64((1 << AHEAD_AT) - 1))
            store(queue, (which * QUEUE + filled) * 8, word, eight)
            # An unchanged member's word is written over, and it counts for the next: better than a branch.
            filled += np.int64(1) if symbol >= dense else np.int64(0)
            ahead = np.int64(0) if symbol >= dense else ahead
        symbol_at = min(symbol_end, symbol_at + QUEUE)
    table[which, SYMBOL], table[which, GAP], table[which, WIDE] = symbol_at, gap_at, wide_at
    table[which, TAKEN], table[which, FILLED], table[which, WAITING] = 0, filled, ahead
    return 0


@inlined
def pick(first, second, third, fourth, rank):  # type: ignore[no-untyped-def]
    """The place of the bit of that rank in four words that follow each other."""
    one = count_bits(first)
    two = one + count_bits(second)
    three = two + count_bits(third)
    word = second if rank >= one else first
    below = one if rank >= one else np.int64(0)
    word = third if rank >= two else word
    below = two if rank >= two else below
    word = fourth if rank >= three else word
    below = three if rank >= three else below
    block = np.int64(rank >= one) + np.int64(rank >= two) + np.int64(rank >= three)
    return block * 64 + select_bit(word, rank - below)


@kernel
def read_classes(old, first, unit, order, window, table, scratch, streams, queue, positions, values, used, new):  # type: ignore[no-untyped-def]
    """Decodes a chunk whose first element is the part's `first`; returns how much of `positions` is used, or -error.

    `order` is sign and mask; `streams` are gaps, low bits (8 bytes longer than what they hold), steps, wide codes (as
    bytes, four each) and the units of 1, 2, 4 and 8 bytes. `scratch` is as `scan_classes` wants it. `queue` (QUEUE
    words a class) and `positions` are given as bytes, too. `positions` and `values` have room for all symbols that the
    part has left. `new` gets the chunk as it becomes.
    """
    sign, mask = order
    two, four, eight = streams[5], streams[6], streams[7]
    count = old.size // width_of(unit)
    totals = np.zeros(MAX_CLASSES, np.int64)
    for start in range(0, count, STRETCH):
        size = min(STRETCH, count - start)
        spans = (size + SPAN - 1) // SPAN
        totals[:] = 0
        for span in range(spans):
            for j in range(span * SPAN, (span + 1) * SPAN, 64):
                index = (start + j) * width_of(unit)
                if j + 64 <= size:
                    fetch_ahead(old, index + AHEAD)
                    fetch_ahead(old, index + AHEAD + 64)
                    exponent_classes(old, index, scratch, j, unit, window)
                    copy_block(old, new, index, unit)
                else:
                    for i in range(64):
                        which = np.int64(NO_CLASS)
                        if j + i < size:
                            pattern = load(old, index + i * width_of(unit), unit)
                            store(new, index + i * width_of(unit), pattern, unit)
                            which = class_of(pattern, window)
                        scratch[j + i] = which
            for each in range(table.shape[0]):
                store(scratch, STRETCH + SUMS * each + 2 * span, np.uint64(totals[each]), two)
                totals[each] += count_class(scratch, span * SPAN, each)
        for each in range(table.shape[0]):
            total = totals[each]
            sums = STRETCH + SUMS * each
            for span in range(spans, STRETCH // SPAN + 1):
                store(scratch, sums + 2 * span, np.uint64(total), two)
            seen = table[each, SEEN]
            stop = seen + total
            table[each, SEEN] = stop
            wanted = table[each, NEXT]
            taken, filled = table[each, TAKEN], table[each, FILLED]
            while wanted < stop:
                if wanted >= 0:
                    code = load(queue, (each * QUEUE + taken) * 8, eight) & np.uint64((1 << AHEAD_AT) - 1)
                    taken += 1
                    span = find_span(scratch, sums + 2, wanted - seen)
                    rank = wanted - seen - np.int64(load(scratch, sums + 2 * span, two))
                    first_lane = span * SPAN
                    index = start + first_lane
                    index += pick(
                        class_mask(scratch, first_lane, each),
                        class_mask(scratch, first_lane + 64, each),
                        class_mask(scratch, first_lane + 128, each),
                        class_mask(scratch, first_lane + 192, each),
                        rank,
                    )
                    pattern = stepped(load(old, index * width_of(unit), unit), code, sign, mask)
                    store(positions, used * 4, np.uint64(first + index), four)
                    store(values, used * width_of(unit), pattern, unit)
                    store(new, index * width_of(unit), pattern, unit)
                    used += 1
                if taken == filled:
                    error = read_ahead(each, table, streams, mask, queue)
                    if error:
                        return -error
                    taken, filled = np.int64(0), table[each, FILLED]
                    if filled == 0:
                        wanted = np.int64(NEVER)
                        break
                ahead = load(queue, (each * QUEUE + taken) * 8, eight) >> np.uint64(AHEAD_AT)
                wanted += np.int64(ahead)
            table[each, NEXT], table[each, TAKEN] = wanted, taken
    return used
