"""The codec `xor`: old XOR new of every byte, a zstd frame a part. Exact and plain, for exchange with others that do
the same, and to compare with. Must not know shards or manifests."""

from collections.abc import Mapping, Sequence

import numpy as np
import zstandard

from weighbridge.errors import PayloadCorrupt
from weighbridge.storage.codecs import kernels, streams
from weighbridge.storage.codecs.contract import (
    Bytes,
    Codec,
    Decoder,
    Encoder,
    PartDecoder,
    PartShape,
    Patch,
    Sample,
)
from weighbridge.storage.codecs.elements import count_elements, whole_elements
from weighbridge.values import item_bytes

_STREAMS = ("extents", "frames")


class XorEncoder(Encoder):
    """Compresses the difference chunk by chunk, one frame a part."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._pieces: list[bytes] = []
        self._width, self._left = 1, 0

    def begin(self, *, dtype: str, nbytes: int) -> None:
        """See Encoder."""
        self._width = whole_elements(dtype, nbytes)
        self._left = nbytes
        self._frame = zstandard.ZstdCompressor(level=1).compressobj(size=nbytes)

    def feed(self, *, old: Bytes, new: Bytes) -> int:
        """See Encoder."""
        self._pieces.append(self._frame.compress((old ^ new).data))
        self._left -= new.size
        if not self._left:
            self._frames.append(b"".join([*self._pieces, self._frame.flush()]))
            self._pieces = []
        return kernels.count_changed(old, new, self._width)

    def finish(self) -> Mapping[str, bytes]:
        """See Encoder."""
        sizes = np.array([len(frame) for frame in self._frames], "<u4")
        return {"extents": streams.compress(sizes), "frames": b"".join(self._frames)}


class XorDecoder(Decoder):
    """Knows where each part's frame lies."""

    def __init__(self, data: Mapping[str, memoryview], parts: Sequence[PartShape]) -> None:
        extents, self._frames = streams.take(data, _STREAMS)
        self._parts = tuple(parts)
        for part in parts:
            count_elements(part)
        sizes = streams.numbers(extents, len(parts))
        self._starts = [0, *np.cumsum(sizes).tolist()]
        if self._starts[-1] != len(self._frames):
            raise PayloadCorrupt("xor: the frames do not fill their stream; nothing was written")

    def part(self, index: int) -> PartDecoder:
        """See Decoder."""
        part = self._parts[index]
        frame = self._frames[self._starts[index] : self._starts[index + 1]]
        return XorPartDecoder(item_bytes(part.dtype), streams.decompress(frame, part.nbytes))


class XorPartDecoder(PartDecoder):
    """Turns the difference into new bytes, chunk by chunk."""

    def __init__(self, width: int, difference: Bytes) -> None:
        self._width, self._difference = width, difference
        self._values = np.empty(difference.size, np.uint8)
        self._done = 0

    def feed(self, old: Bytes, new: Bytes) -> None:
        """See PartDecoder."""
        at = slice(self._done, self._done + old.size)
        if at.stop > self._values.size:
            raise PayloadCorrupt("xor: a part of another size than declared; nothing was written")
        np.bitwise_xor(old, self._difference[at], out=self._values[at])
        self._done = at.stop
        new[:] = self._values[at]

    def finish(self) -> Patch:
        """See PartDecoder."""
        if self._done != self._values.size:
            raise PayloadCorrupt("xor: a part of another size than declared; nothing was written")
        return Patch(self._width, None, self._values)


class XorCodec(Codec):
    """See the module."""

    name = "xor"

    def encoder(self, samples: Sequence[Sample]) -> Encoder:
        """See Codec."""
        return XorEncoder()

    def decoder(self, streams: Mapping[str, memoryview], parts: Sequence[PartShape]) -> Decoder:
        """See Codec."""
        return XorDecoder(streams, parts)
