"""Compressed streams: one zstd frame each, with its content size, which a reader knows beforehand or can bound.

A frame's own claim about its size is never trusted: memory is allocated for what the declared parts imply, no more.
Must not know what the bytes mean.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import zstandard

from weighbridge.errors import PayloadCorrupt
from weighbridge.storage.codecs.contract import Bytes

# For streams that have no repetitions, only an uneven histogram: level 1 as far from looking for matches as it goes.
# Matches that it does find are accidents, and cost more than the Huffman codes that they replace.
_ENTROPY_ONLY = zstandard.ZstdCompressionParameters.from_level(
    1, min_match=7, hash_log=6, chain_log=6, write_content_size=True
)


def compress_symbols(data: Bytes) -> bytes:
    """One zstd frame for symbols drawn independently, or nothing for nothing."""
    return zstandard.ZstdCompressor(compression_params=_ENTROPY_ONLY).compress(_raw(data)) if data.size else b""


def compress(data: npt.NDArray[np.generic] | bytes, *, level: int = 1) -> bytes:
    """One zstd frame that states its content size."""
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(_raw(data))


def stated_size(frame: memoryview) -> int:
    """The content size that a frame claims. Raises PayloadCorrupt when it is no such frame."""
    try:
        size = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise PayloadCorrupt(f"a stream is not a zstd frame ({error}); nothing was written") from None
    if size < 0:
        raise PayloadCorrupt("a stream does not state its size; nothing was written")
    return size


def decompress(frame: memoryview, size: int) -> Bytes:
    """The frame's content, which must have exactly `size` bytes. Raises PayloadCorrupt."""
    if stated_size(frame) != size:
        raise PayloadCorrupt(f"a stream claims {stated_size(frame)} bytes where {size} are due; nothing was written")
    try:
        # With the size stated and checked, exactly that much is allocated.
        data = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadCorrupt(f"a stream does not decompress ({error}); nothing was written") from None
    if len(data) != size:
        raise PayloadCorrupt(f"a stream has {len(data)} bytes where {size} are due; nothing was written")
    return np.frombuffer(data, np.uint8)


def decompress_bounded(frame: memoryview, most: int) -> Bytes:
    """The frame's content, of at most `most` bytes. Raises PayloadCorrupt."""
    size = stated_size(frame)
    if size > most:
        raise PayloadCorrupt(f"a stream claims {size} bytes where at most {most} are possible; nothing was written")
    return decompress(frame, size)


def numbers(frame: memoryview, count: int) -> npt.NDArray[np.int64]:
    """The frame's content, which must be so many u32. Raises PayloadCorrupt."""
    return decompress(frame, 4 * count).view("<u4").astype(np.int64)


def take(streams: Mapping[str, memoryview], names: tuple[str, ...]) -> tuple[memoryview, ...]:
    """The streams of these names, which must be all there are. Raises PayloadCorrupt."""
    if set(streams) != set(names):
        raise PayloadCorrupt(f"streams {sorted(streams)} where {sorted(names)} are due; nothing was written")
    return tuple(streams[name] for name in names)


def to_planes(data: Bytes, width: int) -> Bytes:
    """The first bytes of all elements, then all second bytes, and so on."""
    return np.ascontiguousarray(data.reshape(-1, width).T).reshape(-1)


def from_planes(planes: Bytes, width: int) -> Bytes:
    """Undoes to_planes."""
    return np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1)


def _raw(data: npt.NDArray[np.generic] | bytes) -> bytes | memoryview:
    return data if isinstance(data, bytes) else np.ascontiguousarray(data).data.cast("B")
