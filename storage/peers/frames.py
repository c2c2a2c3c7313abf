"""The bytes inside neighbours' frames: XOR and overwrite of a whole tensor, and their checksums. Pure; bounded by the
tensor's own size. Must not know files or layouts."""

import hashlib
import zlib
from collections.abc import Callable, Mapping
from typing import Protocol

import blake3
import numpy as np
import xxhash
import zstandard

from weighbridge.errors import DigestMismatch, PayloadCorrupt
from weighbridge.storage.codecs import streams
from weighbridge.storage.codecs.contract import CHUNK_BYTES, Bytes
from weighbridge.storage.digests import Buffer

XOR, OVERWRITE = "xor", "overwrite"
OVERWRITE_BYTES = 1 << 32
"""Positions are u32 bytes: a tensor of this size or more has bytes that none can name."""


class TextHasher(Protocol):
    """A running checksum whose result is text."""

    def update(self, data: Buffer, /) -> object:
        """Adds bytes."""
        ...

    def hexdigest(self) -> str:
        """The checksum as layouts write it."""
        ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Buffer, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


CHECKSUMS: Mapping[str, Callable[[], TextHasher]] = {
    "xxh3-128": xxhash.xxh3_128,
    "blake3": blake3.blake3,
    "adler32": _Adler32,
    "sha256": hashlib.sha256,
}


def checksum(kind: str, data: Bytes) -> str:
    """The checksum of a tensor's bytes as text. Raises PayloadCorrupt for a kind that is not known here."""
    if kind not in CHECKSUMS:
        raise PayloadCorrupt(
            f"checksum {kind[:40]!r} is not known here (known: {', '.join(CHECKSUMS)}); nothing written"
        )
    hasher = CHECKSUMS[kind]()
    hasher.update(np.ascontiguousarray(data).data)
    return hasher.hexdigest()


def check(kind: str, data: Bytes, expected: object, name: str) -> Bytes:
    """`data`, if it has the checksum that was published. Raises DigestMismatch, PayloadCorrupt."""
    if checksum(kind, data) != expected:
        raise DigestMismatch(
            f"{name}: the delta does not lead from the bytes here to the checksum that was published: these are "
            "another version's bytes, or the delta is damaged. Nothing was written."
        )
    return data


def xor_frame(old: Bytes, new: Bytes) -> bytes:
    """The frame of `old XOR new`. Holds a chunk of the difference at a time."""
    packer = zstandard.ZstdCompressor(level=1, write_content_size=True).compressobj(size=new.size)
    pieces = [
        packer.compress((old[at : at + CHUNK_BYTES] ^ new[at : at + CHUNK_BYTES]).data)
        for at in range(0, new.size, CHUNK_BYTES)
    ]
    return b"".join([*pieces, packer.flush()])


def overwrite_frame(old: Bytes, new: Bytes) -> bytes:
    """The frame of count, positions and bytes, for a tensor of less than OVERWRITE_BYTES."""
    if new.size >= OVERWRITE_BYTES:
        raise ValueError(f"u32 positions do not reach {new.size} bytes")  # whoever publishes asked before: see `demand`
    positions = np.flatnonzero(old != new).astype("<u4")
    packed = np.concatenate(
        [np.array([positions.size], "<u4").view(np.uint8), positions.view(np.uint8), new[positions]]
    )
    return streams.compress(packed)


FRAMES: Mapping[str, Callable[[Bytes, Bytes], bytes]] = {XOR: xor_frame, OVERWRITE: overwrite_frame}


def most_frame_bytes(encoding: str, nbytes: int) -> int:
    """The most bytes that the frame of a tensor can need, by zstd's own bound."""
    content = nbytes if encoding == XOR else 4 + 5 * nbytes
    return content + (content >> 8) + 1024


def apply_frame(encoding: str, frame: memoryview, old: Bytes) -> Bytes:
    """The new bytes, from a frame and the old ones, which stay. Raises PayloadCorrupt before anything oversized is
    allocated, and for positions that do not ascend or lie outside."""
    if encoding == XOR:
        return np.asarray(streams.decompress(frame, old.size) ^ old)
    if encoding != OVERWRITE:
        raise PayloadCorrupt(
            f"delta encoding {encoding[:40]!r} is not known here (xor, overwrite); nothing was written"
        )
    content = streams.decompress_bounded(frame, 4 + 5 * min(old.size, OVERWRITE_BYTES))
    count = int(content[:4].view("<u4")[0]) if content.size >= 4 else -1
    if count < 0 or content.size != 4 + 5 * count:
        raise PayloadCorrupt("overwrite: its count does not fit its size; nothing was written")
    positions = content[4 : 4 + 4 * count].view("<u4")
    if count and (int(positions[-1]) >= old.size or not bool((positions[1:] > positions[:-1]).all())):
        raise PayloadCorrupt("overwrite: positions that do not ascend, or lie outside the tensor; nothing was written")
    new = old.copy()
    new[positions] = content[4 + 4 * count :]
    return new
