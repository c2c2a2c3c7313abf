"""The codec `overwrite`: positions and new elements as they are, zstd over each. Exact and plain, for exchange with
others that do the same, and to compare with. Must not know shards or manifests."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

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

_STREAMS = ("extents", "positions", "values")


class OverwriteEncoder(Encoder):
    """Gathers positions and values of a shard's parts."""

    def __init__(self) -> None:
        self._positions: list[npt.NDArray[np.uint32]] = []
        self._values: list[Bytes] = []
        self._counts: list[int] = []
        self._width, self._first = 1, 0

    def begin(self, *, dtype: str, nbytes: int) -> None:
        """See Encoder."""
        self._width = whole_elements(dtype, nbytes)
        self._first = 0
        self._counts.append(0)

    def feed(self, *, old: Bytes, new: Bytes) -> int:
        """See Encoder."""
        before, after = old.reshape(-1, self._width), new.reshape(-1, self._width)
        changed = np.flatnonzero((before != after).any(axis=1))
        self._positions.append((changed + self._first).astype(np.uint32))
        self._values.append(after[changed].reshape(-1))
        self._first += len(after)
        self._counts[-1] += changed.size
        return int(changed.size)

    def finish(self) -> Mapping[str, bytes]:
        """See Encoder."""
        return {
            "extents": streams.compress(np.array(self._counts, "<u4")),
            "positions": streams.compress(np.concatenate(self._positions).astype("<u4")),
            "values": streams.compress(np.concatenate(self._values)),
        }


class OverwriteDecoder(Decoder):
    """The decompressed positions and values, and each part's share of them."""

    def __init__(self, data: Mapping[str, memoryview], parts: Sequence[PartShape]) -> None:
        extents, positions, values = streams.take(data, _STREAMS)
        self._parts = tuple(parts)
        counts = streams.numbers(extents, len(parts)).tolist()
        if any(count > count_elements(part) for count, part in zip(counts, parts, strict=True)):
            raise PayloadCorrupt("overwrite: more elements than a part has; nothing was written")
        sizes = [count * item_bytes(part.dtype) for count, part in zip(counts, parts, strict=True)]
        self._edges = [0, *np.cumsum(counts).tolist()]
        self._byte_edges = [0, *np.cumsum(sizes).tolist()]
        self._positions = streams.decompress(positions, 4 * self._edges[-1]).view("<u4").astype(np.uint32)
        self._values = streams.decompress(values, self._byte_edges[-1])

    def part(self, index: int) -> PartDecoder:
        """See Decoder."""
        positions = self._positions[self._edges[index] : self._edges[index + 1]]
        values = self._values[self._byte_edges[index] : self._byte_edges[index + 1]]
        part = self._parts[index]
        if positions.size:
            ascending = bool((positions[1:] > positions[:-1]).all())
            if not ascending or int(positions[-1]) >= count_elements(part):
                raise PayloadCorrupt("overwrite: positions that do not ascend or lie beyond the end; nothing written")
        return OverwritePartDecoder(part, positions, values)


class OverwritePartDecoder(PartDecoder):
    """Hands out the positions chunk by chunk."""

    def __init__(self, part: PartShape, positions: npt.NDArray[np.uint32], values: Bytes) -> None:
        self._patch = Patch(item_bytes(part.dtype), positions, values)
        self._nbytes = part.nbytes
        self._done = self._written = 0

    def feed(self, old: Bytes, new: Bytes) -> None:
        """See PartDecoder."""
        new[:] = old
        self._written = kernels.write_stretch(new, self._done // self._patch.width, self._patch, self._written)
        self._done += old.size

    def finish(self) -> Patch:
        """See PartDecoder."""
        if self._done != self._nbytes:
            raise PayloadCorrupt("overwrite: a part of another size than declared; nothing was written")
        return self._patch


class OverwriteCodec(Codec):
    """See the module."""

    name = "overwrite"

    def encoder(self, samples: Sequence[Sample]) -> Encoder:
        """See Codec."""
        return OverwriteEncoder()

    def decoder(self, streams: Mapping[str, memoryview], parts: Sequence[PartShape]) -> Decoder:
        """See Codec."""
        return OverwriteDecoder(streams, parts)
