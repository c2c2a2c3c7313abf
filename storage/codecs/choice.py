"""Which codec a part gets: measured on a sample of it, never guessed from its name. Must not know shards."""

import numpy as np

from weighbridge.storage.codecs import kernels
from weighbridge.storage.codecs.contract import Bytes, PartInput
from weighbridge.storage.codecs.elements import element

_SAMPLES, _SAMPLE_BYTES = 64, 2048
_DENSE = 0.25  # below it, gaps and steps win whatever the steps are: they cost less than the raw elements


def choose_codec(part: PartInput) -> str:
    """The name of the codec for a part that changed."""
    old, new = _sample(part.old), _sample(part.new)
    width = element(part.dtype).width
    if kernels.count_changed(old, new, width) < _DENSE * (new.size // width):
        return "gap"
    return "gap" if _gap_bits(old, new, part.dtype) < _full_bits(new, width) else "full"


def _sample(data: Bytes) -> Bytes:
    """Up to _SAMPLES pieces at even distances, each of a whole number of elements of any width."""
    if data.size <= _SAMPLES * _SAMPLE_BYTES:
        return data
    stride = data.size // _SAMPLES // 8 * 8
    return np.concatenate([data[i * stride : i * stride + _SAMPLE_BYTES] for i in range(_SAMPLES)])


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
