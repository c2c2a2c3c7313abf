"""Kernels of the codec `expgap`: positions counted within classes of the old exponent. Must not know streams.

An element's class comes from its old bits, which both sides have; its rank is how many of its class come before it in
the part. A STRETCH of elements is walked at a time: their classes are laid down as bytes, each class is counted SPAN by
SPAN with vector compares, and between a rank and a place there is no branch that depends on the data, which no
processor could guess. Tables are int64, one row a class; the names below are their columns.
"""

import numpy as np

from weighbridge.storage.codecs.kernels.compiler import inlined, kernel
from weighbridge.storage.codecs.kernels.gaps import (
    BAD_STEP,
    BEYOND_END,
    LEFT_OVER,
    TRUNCATED,
    step_code,
    stepped,
)
from weighbridge.storage.codecs.kernels.lanes import (
    SPAN,
    STRETCH,
    changed_mask,
    class_mask,
    copy_block,
    count_before,
    count_bits,
    count_class,
    exponent_classes,
    find_span,
    lowest_bit,
    select_bit,
)
from weighbridge.storage.codecs.kernels.memory import fetch_ahead, load, store, width_of

# A logged change is one word: its gap in class, its class, the code of its step.
GAP_AT, CLASS_AT, CLASS_BITS, CODE_BITS = 36, 32, 4, 32
MAX_CLASSES = 1 << CLASS_BITS
MAX_ELEMENTS = 1 << (64 - GAP_AT)

# How a class is written: SHIFT low bits of a gap are kept apart, symbols take BITS bits, DENSE classes have a symbol
# for every member instead of gaps. LOW and STEP are where its bits start in their streams.
SHIFT, BITS, DENSE, LOW, STEP = 0, 1, 2, 3, 4
# Where an encoder or a decoder is: next gap byte, symbol and wide code, and (decoder) their ends.
GAP, SYMBOL, WIDE, GAP_END, SYMBOL_END, WIDE_END = 5, 6, 7, 8, 9, 10
# A decoder's class: members seen so far; the rank of the next changed one (-1 before the first); what of its queue is
# used and filled; and how many unchanged members wait to be counted before the next changed one of a dense class.
SEEN, NEXT, TAKEN, FILLED, WAITING = 11, 12, 13, 14, 15
COLUMNS = 16
QUEUE = 512
"""Changes of a class that are read ahead: each a word, how far its rank is ahead of the one before, and its code."""
AHEAD_AT = 32
NEVER = 1 << 62
NO_CLASS = 255
"""The class of elements beyond a part's end."""
MANY = 12
"""Changes a span in one stretch from which on it pays, in the next, to make every class's masks beforehand."""
AT_ONCE = 4
"""Changes that are taken from a word of 64 without a branch."""
AHEAD = 4096
"""Bytes by which memory is asked for before it is needed: a processor does not look beyond its page by itself."""
SUMS = 2 * (1 + STRETCH // SPAN)
"""Bytes of a class's sums: a zero, then the members up to the end of each span, 16 bits each."""
SCRATCH = STRETCH + SUMS * MAX_CLASSES + 2 * (STRETCH + AT_ONCE)


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
                            field = np.int64((pattern >> np.uint64(window[0])) & np.uint64(window[1]))
                            which = np.int64(min(max(field, window[2]) - window[2], window[3]))
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
                    code = step_code(a, b, sign, mask)
                    odd += np.int64((b & bits[0]) == bits[1]) & np.int64((a & bits[0]) != bits[1])
                    log[used] = (np.uint64(gap) << np.uint64(GAP_AT)) | (np.uint64(which) << np.uint64(CLASS_AT)) | code
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
            code = step_code(a, b, sign, mask)
            odd += np.int64((b & bits[0]) == bits[1]) & np.int64((a & bits[0]) != bits[1])
            log[used] = (np.uint64(gap) << np.uint64(GAP_AT)) | (np.uint64(which) << np.uint64(CLASS_AT)) | code
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
                            field = np.int64((pattern >> np.uint64(window[0])) & np.uint64(window[1]))
                            which = np.int64(min(max(field, window[2]) - window[2], window[3]))
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
