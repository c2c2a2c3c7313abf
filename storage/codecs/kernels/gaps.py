"""Kernels of the codec `gap`: find what differs and write gaps and steps; read them back, every position checked.

Kernels return an error code instead of raising, so that they stay free of Python; 0 is success. Must not know streams.
"""

import numpy as np

from weighbridge.storage.codecs.kernels.compiler import inlined, kernel
from weighbridge.storage.codecs.kernels.lanes import changed_mask, count_bits, lowest_bit
from weighbridge.storage.codecs.kernels.memory import load, store, width_of

TRUNCATED, BEYOND_END, BAD_STEP, LEFT_OVER = 1, 2, 3, 4
REASONS = {
    TRUNCATED: "a stream ends early",
    BEYOND_END: "a position lies beyond the part's end",
    BAD_STEP: "a step that no encoder writes",
    LEFT_OVER: "a stream has bytes left over",
}


@inlined
def rank_of(pattern, sign, mask):  # type: ignore[no-untyped-def]
    """A bit pattern's place in the order."""
    return pattern ^ (mask if pattern & sign else sign)


@inlined
def pattern_of(rank, sign, mask):  # type: ignore[no-untyped-def]
    """The bit pattern of a rank."""
    return rank ^ (sign if (rank & sign) == sign else mask)


@inlined
def step_code(old, new, sign, mask):  # type: ignore[no-untyped-def]
    """Zigzag of the step between two patterns that differ, less one: 0 is one rank down, 1 one up, 2 two down, ..."""
    step = (rank_of(new, sign, mask) - rank_of(old, sign, mask)) & mask
    zigzag = ((step << np.uint64(1)) & mask) ^ (mask if step > mask >> np.uint64(1) else np.uint64(0))
    return zigzag - np.uint64(1)


@inlined
def stepped(old, code, sign, mask):  # type: ignore[no-untyped-def]
    """The pattern that a step's code leads to; `code` must be below `mask`."""
    zigzag = code + np.uint64(1)
    step = (zigzag >> np.uint64(1)) ^ (mask if zigzag & np.uint64(1) else np.uint64(0))
    return pattern_of((rank_of(old, sign, mask) + step) & mask, sign, mask)


@kernel
def differ(old, new, unit):  # type: ignore[no-untyped-def]
    """Whether two byte arrays of one size differ; stops where they first do. `unit` is of 8 bytes."""
    whole = new.size // 512 * 512
    for start in range(0, whole, 512):
        if changed_mask(new, old, start, unit):
            return True
    for i in range(whole, new.size):  # noqa: SIM110 - a kernel has no generators
        if new[i] != old[i]:
            return True
    return False


@kernel
def count_changed(old, new, unit):  # type: ignore[no-untyped-def]
    """How many elements differ."""
    count = new.size // width_of(unit)
    total = 0
    for start in range(0, count, 64):
        if start + 64 <= count:
            word = changed_mask(new, old, start * width_of(unit), unit)
        else:
            word = np.uint64(0)
            for j in range(count - start):
                index = (start + j) * width_of(unit)
                if load(new, index, unit) != load(old, index, unit):
                    word |= np.uint64(1) << np.uint64(j)
        total += count_bits(word)
    return total


@kernel
def scan_gaps(old, new, unit, sign, mask, first, state, gaps, steps, wide):  # type: ignore[no-untyped-def]
    """Appends gaps and steps of a chunk whose first element is the part's `first`.

    `state` holds the last position in the part, then how much of `gaps`, `steps` and `wide` is used. The caller leaves
    room: a step for every element, a gap byte more for every 255 elements since the last position.
    """
    count = new.size // width_of(unit)
    last, gap_end, step_end, wide_end = state[0], state[1], state[2], state[3]
    for start in range(0, count, 64):
        if start + 64 <= count:
            word = changed_mask(new, old, start * width_of(unit), unit)
        else:
            word = np.uint64(0)
            for j in range(count - start):
                index = (start + j) * width_of(unit)
                if load(new, index, unit) != load(old, index, unit):
                    word |= np.uint64(1) << np.uint64(j)
        while word:
            index = start + lowest_bit(word)
            word &= word - np.uint64(1)
            position = first + index
            gap = position - last - 1
            last = position
            while gap >= 255:
                gaps[gap_end] = 255
                gap_end += 1
                gap -= 255
            gaps[gap_end] = gap
            gap_end += 1
            at = index * width_of(unit)
            code = step_code(load(old, at, unit), load(new, at, unit), sign, mask)
            if code < np.uint64(255):
                steps[step_end] = code
            else:
                steps[step_end] = 255
                wide[wide_end] = code
                wide_end += 1
            step_end += 1
    state[0], state[1], state[2], state[3] = last, gap_end, step_end, wide_end


@kernel
def read_gaps(old, first, unit, sign, mask, state, streams, positions, values, new):  # type: ignore[no-untyped-def]
    """Decodes a chunk whose first element is the part's `first` into the part's `positions` and `values`, and into
    `new`, which holds the old chunk.

    `state` holds the last position (or the next one, where `state[4]` says so), and how much of `gaps`, `steps` and
    `wide` is used. Returns an error code.
    """
    gaps, steps, wide = streams
    limit = first + old.size // width_of(unit)
    position, gap_end, step_end, wide_end, pending = state[0], state[1], state[2], state[3], state[4]
    error = 0
    while step_end < steps.size:
        if not pending:
            piece = np.int64(255)
            position += 1
            while piece == 255 and gap_end < gaps.size:
                piece = np.int64(gaps[gap_end])
                gap_end += 1
                position += piece
            if piece == 255:
                error = TRUNCATED
                break
            pending = 1
        if position >= limit:
            break
        code = np.uint64(steps[step_end])
        if code == np.uint64(255):
            if wide_end >= wide.size:
                error = TRUNCATED
                break
            code = np.uint64(wide[wide_end])
            wide_end += 1
            if code < np.uint64(255):
                error = BAD_STEP
                break
        if code >= mask:
            error = BAD_STEP
            break
        positions[step_end] = position
        pattern = stepped(load(old, (position - first) * width_of(unit), unit), code, sign, mask)
        store(values, step_end * width_of(unit), pattern, unit)
        store(new, (position - first) * width_of(unit), pattern, unit)
        step_end += 1
        pending = 0
    state[0], state[1], state[2], state[3], state[4] = position, gap_end, step_end, wide_end, pending
    return error
