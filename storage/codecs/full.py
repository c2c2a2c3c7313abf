"""The codec `full`: all new bytes, as byte planes, whatever the old ones were. For anchors and dense changes.

A part is cut into chunks of CHUNK_BYTES; each byte plane of a chunk is one zstd frame, and all frames lie end to end in
`planes`. `extents` has the size of every frame. Must not know shards or manifests.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from weighbridge.errors import PayloadCorrupt
from weighbridge.storage.codecs import kernels, streams
from weighbridge.storage.codecs.contract import (
    CHUNK_BYTES,
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

_STREAMS = ("extents", "planes")


class FullEncoder(Encoder):
    """Compresses chunk by chunk."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._width = 1

    def begin(self, *, dtype: str, nbytes: int) -> None:
        """See Encoder."""
        self._width = whole_elements(dtype, nbytes)

    def feed(self, *, old: Bytes, new: Bytes) -> int:
        """See Encoder."""
        planes = streams.to_planes(new, self._width).reshape(self._width, -1)
        self._frames.extend(streams.compress(plane) for plane in planes)
        return kernels.count_changed(old, new, self._width)

    def finish(self) -> Mapping[str, bytes]:
        """See Encoder."""
        sizes = np.array([len(frame) for frame in self._frames], "<u4")
        return {"extents": streams.compress(sizes), "planes": b"".join(self._frames)}


class FullDecoder(Decoder):
    """Knows where each part's frames lie; decompresses a part when asked."""

    def __init__(self, data: Mapping[str, memoryview], parts: Sequence[PartShape]) -> None:
        extents, self._planes = streams.take(data, _STREAMS)
        self._parts = tuple(parts)
        frames = [_frame_count(part) for part in parts]
        self._first = np.concatenate([[0], np.cumsum(frames, dtype=np.int64)])
        sizes = streams.numbers(extents, sum(frames))
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        if self._starts[-1] != len(self._planes):
            raise PayloadCorrupt("full: the frames do not fill their stream; nothing was written")

    def part(self, index: int) -> PartDecoder:
        """See Decoder."""
        edges = self._starts[self._first[index] : self._first[index + 1] + 1].tolist()
        return FullPartDecoder(self._parts[index], [self._planes[a:b] for a, b in itertools.pairwise(edges)])


class FullPartDecoder(PartDecoder):
    """Decompresses a part's frames in turn."""

    def __init__(self, part: PartShape, frames: Sequence[memoryview]) -> None:
        self._width = item_bytes(part.dtype)
        self._values = np.empty(part.nbytes, np.uint8)
        self._frames = iter(frames)
        self._done = 0

    def feed(self, old: Bytes, new: Bytes) -> None:
        """See PartDecoder."""
        chunk = self._values[self._done : self._done + CHUNK_BYTES]
        if old.size != chunk.size:
            raise PayloadCorrupt("full: a part of another size than declared; nothing was written")
        self._done += old.size
        by_element = chunk.reshape(-1, self._width)
        for plane, frame in zip(range(self._width), self._frames, strict=False):
            by_element[:, plane] = streams.decompress(frame, len(by_element))
        new[:] = chunk

    def finish(self) -> Patch:
        """See PartDecoder."""
        if self._done != self._values.size:
            raise PayloadCorrupt("full: a part of another size than declared; nothing was written")
        return Patch(self._width, None, self._values)


def _frame_count(part: PartShape) -> int:
    count_elements(part)
    return -(-part.nbytes // CHUNK_BYTES) * item_bytes(part.dtype)


class FullCodec(Codec):
    """See the module."""

    name = "full"

    def encoder(self, samples: Sequence[Sample]) -> Encoder:
        """See Codec."""
        return FullEncoder()

    def decoder(self, streams: Mapping[str, memoryview], parts: Sequence[PartShape]) -> Decoder:
        """See Codec."""
        return FullDecoder(streams, parts)
