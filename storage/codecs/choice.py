"""Which codec a part gets: measured on a sample of it, never guessed from its name. Must not know shards."""

import numpy as np

from weighbridge.storage.codecs import kernels
from weighbridge.storage.codecs.contract import Bytes, PartInput, Sample
from weighbridge.storage.codecs.elements import element

_EVERY, _PIECE = 256 << 10, 4 << 10  # of a large part one page in 64 is looked at
_DENSE = 0.25  # below it, gaps and steps win whatever the steps are: they cost less than the raw elements
_ENOUGH = 1 << 17  # bytes by which a dense part is judged


def take_sample(part: PartInput) -> Sample:
    """Pieces of a part at even distances; all of a small one."""
    return Sample(part.dtype, part.new.size, _pieces(part.old), _pieces(part.new))


def choose_codec(sample: Sample) -> str:
    """The name of the codec for a part that changed."""
    unit = element(sample.dtype)
    sparse = "expgap" if unit.exponent_bits else "gap"
    if kernels.count_changed(sample.old, sample.new, unit.width) < _DENSE * (sample.new.size // unit.width):
        return sparse
    old, new = sample.old[:_ENOUGH], sample.new[:_ENOUGH]
    return sparse if _gap_bits(old, new, sample.dtype) < _full_bits(new, unit.width) else "full"


def _pieces(data: Bytes) -> Bytes:
    if data.size < 4 * _EVERY:
        return data
    whole = data[: data.size // _EVERY * _EVERY].reshape(-1, _EVERY)
    return np.ascontiguousarray(whole[:, :_PIECE]).reshape(-1)


def _gap_bits(old: Bytes, new: Bytes, dtype: str) -> float:
    """What `gap` would need for the sample: the gaps' and steps' entropy, and the wide steps raw."""
    unit = element(dtype)
    count = new.size // unit.width
    into = (np.empty(count + count // 255 + 2, np.uint8), np.empty(count, np.uint8), np.empty(count, np.uint64))
    state = np.array([-1, 0, 0, 0], np.int64)
    kernels.scan_gaps(old, new, unit, 0, state, into)
    return _entropy(into[0][: state[1]]) + _entropy(into[1][: state[2]]) + float(state[3]) * 8 * unit.width


def _full_bits(new: Bytes, width: int) -> float:
    return sum(_entropy(new[plane::width]) for plane in range(width))


def _entropy(data: Bytes) -> float:
    """Bits that an order-0 coder needs for all of `data`."""
    counts = np.bincount(data, minlength=256)
    counts = counts[counts > 0]
    return float((counts * np.log2(data.size / counts)).sum())
