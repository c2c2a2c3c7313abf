"""Classes of the old exponent, by which the codec `expgap` counts positions: their words and tables, for the kernels
that scan (`class_scan`) and those that walk back (`class_walk`). Must not know streams.

An element's class comes from its old bits, which both sides have; its rank is how many of its class come before it in
the part. A STRETCH of elements is gone through at a time: their classes are laid down as bytes, each class is counted
SPAN by SPAN with vector compares, and between a rank and a place there is no branch that depends on the data, which no
processor could guess. Tables are int64, one row a class; the names below are their columns.
"""

import numpy as np

from weighbridge.storage.codecs.kernels.compiler import inlined
from weighbridge.storage.codecs.kernels.lanes import SPAN, STRETCH

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


@inlined
def class_of(pattern, window):  # type: ignore[no-untyped-def]
    """An element's class: what `lanes.exponent_classes` says of 64 of them."""
    field = np.int64((pattern >> np.uint64(window[0])) & np.uint64(window[1]))
    return np.int64(min(max(field, window[2]) - window[2], window[3]))
