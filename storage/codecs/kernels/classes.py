"""Kernels of the codec `expgap`: positions counted within classes of the old exponent. Must not know streams.

An element's class comes from its old bits, which both sides have; its rank is how many of its class come before it in
the part. Classes are counted SPAN elements at a time with vector compares, and only where something changed is a rank
worked out bit by bit. Tables are int64, one row a class; the names below are their columns.
"""

import numpy as np

from weighbridge.storage.codecs.kernels.compiler import inlined, kernel
from weighbridge.storage.codecs.kernels.gaps import (
    BAD_STEP,
    BEYOND_END,
    LEFT_OVER,
    TRUNCATED,
    block_mask,
    step_code,
    stepped,
)
from weighbridge.storage.codecs.kernels.lanes import (
    SPAN,
    class_mask,
    count_bits,
    count_class,
    exponent_classes,
    load,
    load8,
    lowest_bit,
    store,
    store8,
)

# A logged change is one word: its gap in class, its class, the code of its step.
GAP_AT, CLASS_AT, CLASS_BITS, CODE_BITS = 36, 32, 4, 32
MAX_CLASSES = 1 << CLASS_BITS
MAX_ELEMENTS = 1 << (64 - GAP_AT)

# How a class is written: SHIFT low bits of a gap are kept apart, symbols take BITS bits, DENSE classes have a symbol
# for every member instead of gaps. LOW and STEP are where its bits start in their streams.
SHIFT, BITS, DENSE, LOW, STEP = 0, 1, 2, 3, 4
# Where an encoder or a decoder is: next gap byte, symbol and wide code, and (decoder) their ends.
GAP, SYMBOL, WIDE, GAP_END, SYMBOL_END, WIDE_END = 5, 6, 7, 8, 9, 10
# A decoder's class: members seen so far, and the rank of the next one that has a symbol.
SEEN, NEXT = 11, 12
COLUMNS = 13
NEVER = 1 << 62


@inlined
def fill_classes(data, start, count, width, window, classes):  # type: ignore[no-untyped-def]
    """The classes of SPAN elements from `start`; 255, which is no class, for those that do not exist."""
    if start + SPAN <= count:
        for j in range(0, SPAN, 64):
            exponent_classes(data, (start + j) * width, classes, j, width, window)
        return
    for j in range(SPAN):
        if start + j < count:
            field = np.int64((load(data, (start + j) * width, width) >> np.uint64(window[0])) & np.uint64(window[1]))
            classes[j] = min(max(field, window[2]) - window[2], window[3])
        else:
            classes[j] = 255


@kernel
def survey(old, new, width, window, members, changed):  # type: ignore[no-untyped-def]
    """Counts elements, and those that differ, by the value of the field that `window` names."""
    for start in range(0, new.size, width):
        a, b = load(old, start, width), load(new, start, width)
        field = np.int64((a >> np.uint64(window[0])) & np.uint64(window[1]))
        members[field] += 1
        if a != b:
            changed[field] += 1


@kernel
def scan_classes(old, new, width, sign, mask, window, seen, last, classes, log):  # type: ignore[no-untyped-def]
    """Logs a chunk's changes and returns how many; `log` has room for one an element.

    `seen` and `last` are, per class, the members so far in the part and the last changed one's rank.
    """
    count = new.size // width
    used = np.int64(0)
    marks = np.zeros(SPAN // 64, np.uint64)
    before, reached = np.zeros(MAX_CLASSES, np.int64), np.zeros(MAX_CLASSES, np.int64)
    for start in range(0, count, SPAN):
        some = np.uint64(0)
        for block in range(SPAN // 64):
            marks[block] = np.uint64(0)
            if start + block * 64 < count:
                marks[block] = block_mask(old, new, start + block * 64, count, width)
            some |= marks[block]
        fill_classes(old, start, count, width, window, classes)
        if some:
            before[:] = 0
            reached[:] = 0
            for block in range(SPAN // 64):
                word = marks[block]
                while word:
                    bit = lowest_bit(word)
                    word &= word - np.uint64(1)
                    which = np.int64(classes[block * 64 + bit])
                    while reached[which] < block:
                        before[which] += count_bits(class_mask(classes, reached[which] * 64, which))
                        reached[which] += 1
                    below = (np.uint64(1) << np.uint64(bit)) - np.uint64(1)
                    rank = seen[which] + before[which] + count_bits(class_mask(classes, block * 64, which) & below)
                    gap = rank - last[which] - 1
                    last[which] = rank
                    index = (start + block * 64 + bit) * width
                    code = step_code(load(old, index, width), load(new, index, width), sign, mask)
                    head = (np.uint64(gap) << np.uint64(GAP_AT)) | (np.uint64(which) << np.uint64(CLASS_AT))
                    log[used] = head | code
                    used += np.int64(1)
        for each in range(window[3] + 1):
            seen[each] += count_class(classes, each)
    return used


@kernel
def tally(log, stride, counts, small):  # type: ignore[no-untyped-def]
    """Of every stride-th logged change: how many per class, and how many of them have codes below 2, 14 and 254."""
    for i in range(0, log.size, stride):
        which = np.int64((log[i] >> np.uint64(CLASS_AT)) & np.uint64(MAX_CLASSES - 1))
        code = log[i] & np.uint64((1 << CODE_BITS) - 1)
        counts[which] += 1
        small[which, 0] += code < np.uint64(2)
        small[which, 1] += code < np.uint64(14)
        small[which, 2] += code < np.uint64(254)


@kernel
def write_classes(log, table, gaps, low, steps, wide):  # type: ignore[no-untyped-def]
    """Writes logged changes into the streams of their classes; `low` and `steps` were zero. The caller leaves room."""
    for i in range(log.size):
        which = np.int64((log[i] >> np.uint64(CLASS_AT)) & np.uint64(MAX_CLASSES - 1))
        code = log[i] & np.uint64((1 << CODE_BITS) - 1)
        gap = np.int64(log[i] >> np.uint64(GAP_AT))
        symbol = code
        at = table[which, SYMBOL]
        if table[which, DENSE]:
            at += gap
            symbol += np.uint64(1)
        else:
            shift = table[which, SHIFT]
            if shift:
                bit = table[which, LOW] + at * shift
                kept = np.uint64(gap) & ((np.uint64(1) << np.uint64(shift)) - np.uint64(1))
                store8(low, bit >> 3, load8(low, bit >> 3) | (kept << np.uint64(bit & 7)))
                gap >>= shift
            end = table[which, GAP]
            while gap >= 255:
                gaps[end] = 255
                end += 1
                gap -= 255
            gaps[end] = gap
            table[which, GAP] = end + 1
        bits = table[which, BITS]
        escape = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
        if symbol >= escape:
            wide[table[which, WIDE]] = code
            table[which, WIDE] += 1
            symbol = escape
        bit = table[which, STEP] + at * bits
        steps[bit >> 3] |= np.uint8(symbol << np.uint64(bit & 7))
        table[which, SYMBOL] = at + 1


@inlined
def next_rank(table, which, rank, gaps, low):  # type: ignore[no-untyped-def]
    """Moves a class from the changed member of `rank` (-1: none yet) to its next. Returns an error code."""
    if table[which, SYMBOL] >= table[which, SYMBOL_END]:
        table[which, NEXT] = NEVER
        return 0
    gap, piece, at = np.int64(0), np.int64(255), table[which, GAP]
    while piece == 255:
        if at >= table[which, GAP_END]:
            return TRUNCATED
        piece = np.int64(gaps[at])
        at += 1
        gap += piece
    table[which, GAP] = at
    shift = table[which, SHIFT]
    if shift:
        bit = table[which, LOW] + table[which, SYMBOL] * shift
        kept = (load8(low, bit >> 3) >> np.uint64(bit & 7)) & ((np.uint64(1) << np.uint64(shift)) - np.uint64(1))
        gap = (gap << shift) | np.int64(kept)
    table[which, NEXT] = rank + 1 + gap
    return 0


@kernel
def start_classes(table, gaps, low):  # type: ignore[no-untyped-def]
    """Finds the first changed member of every class of a part. Returns an error code."""
    for which in range(table.shape[0]):
        if table[which, DENSE]:
            table[which, NEXT] = 0 if table[which, SYMBOL] < table[which, SYMBOL_END] else NEVER
        else:
            error = next_rank(table, which, np.int64(-1), gaps, low)
            if error:
                return error
    return 0


@kernel
def end_classes(table):  # type: ignore[no-untyped-def]
    """Whether a part used up exactly what is its own. Returns an error code."""
    for which in range(table.shape[0]):
        if table[which, SYMBOL] < table[which, SYMBOL_END]:
            return BEYOND_END
        if table[which, GAP] != table[which, GAP_END] or table[which, WIDE] != table[which, WIDE_END]:
            return LEFT_OVER
    return 0


@inlined
def next_code(table, which, steps, wide, mask):  # type: ignore[no-untyped-def]
    """The code of a class's next symbol, and moves on; `mask` (no code) for a dense class's unchanged member.

    One above `mask` would not fit: errors are codes of `mask` with the class's WIDE set beyond its end.
    """
    bits = table[which, BITS]
    bit = table[which, STEP] + table[which, SYMBOL] * bits
    table[which, SYMBOL] += 1
    escape = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    symbol = (np.uint64(steps[bit >> 3]) >> np.uint64(bit & 7)) & escape
    dense = np.uint64(table[which, DENSE])
    if symbol < dense:
        return mask
    code = symbol - dense
    if symbol == escape:
        at = table[which, WIDE]
        table[which, WIDE] = at + 1
        if at >= table[which, WIDE_END]:
            table[which, WIDE] = NEVER
            return mask
        wider = np.uint64(wide[at])
        if wider < code:
            table[which, WIDE] = NEVER
            return mask
        code = wider
    if code >= mask:
        table[which, WIDE] = NEVER
        return mask
    return code


@kernel
def read_classes(old, first, unit, window, table, classes, streams, positions, values, used):  # type: ignore[no-untyped-def]
    """Decodes a chunk whose first element is the part's `first`; returns how much of `positions` is used, or -error.

    `unit` is width, sign and mask, `streams` gaps, low bits, steps and wide codes. There is room in `positions` and
    `values` for every symbol that the part has left.
    """
    width, sign, mask = unit
    gaps, low, steps, wide = streams
    count = old.size // width
    for start in range(0, count, SPAN):
        fill_classes(old, start, count, width, window, classes)
        for which in range(table.shape[0]):
            seen = table[which, SEEN]
            stop = seen + count_class(classes, which)
            table[which, SEEN] = stop
            if table[which, NEXT] >= stop:
                continue
            dense = table[which, DENSE]
            for block in range(0, SPAN, 64):
                word = class_mask(classes, block, which)
                inside = seen + count_bits(word)
                while table[which, NEXT] < inside:
                    rank = table[which, NEXT]
                    while seen < rank:
                        word &= word - np.uint64(1)
                        seen += 1
                    bit = lowest_bit(word)
                    code = next_code(table, which, steps, wide, mask)
                    if code < mask:
                        index = start + block + bit
                        positions[used] = first + index
                        pattern = stepped(load(old, index * width, width), code, sign, mask)
                        store(values, used * width, pattern, width)
                        used += 1
                    elif table[which, WIDE] == NEVER:
                        return -BAD_STEP
                    if not dense:
                        error = next_rank(table, which, rank, gaps, low)
                        if error:
                            return -error
                    elif table[which, SYMBOL] < table[which, SYMBOL_END]:
                        table[which, NEXT] = rank + 1
                    else:
                        table[which, NEXT] = NEVER
                if table[which, NEXT] >= stop:
                    break
                seen = inside
    return used
