"""The digest of a whole state: what a version proves and what every host must reach. docs/FORMAT.md, "Parts and
digests", gives its bytes. Knows digests by part and nothing else."""

import struct
from collections.abc import Iterable, Mapping, Sequence

import blake3
import numpy as np
import numpy.typing as npt

from weighbridge.values import Manifest, PartKey, PartRow


def state_digest(digests: Mapping[PartKey, bytes]) -> str:
    """Hex blake3 over all parts, sorted by the name's UTF-8 bytes and the offset."""
    hasher = blake3.blake3()
    named = sorted((key.tensor.encode(), key.offset, digest) for key, digest in digests.items())
    for name, offset, digest in named:
        hasher.update(struct.pack("<I", len(name)) + name + struct.pack("<QB", offset, len(digest)) + digest)
    return hasher.hexdigest()


def advance(digests: Mapping[PartKey, bytes], rows: Iterable[PartRow]) -> dict[PartKey, bytes]:
    """The digests by part after the changes of one manifest's rows; `digests` itself stays as it is."""
    return {**digests, **{row.key: row.after for row in rows}}


def base_digests(base: Manifest) -> dict[PartKey, bytes]:
    """The digests by part of version 0, or of an anchor's version, from its manifest."""
    return {row.key: row.after for row in base.rows}


class RollingState:
    """The state digest of one version after the other, at the price of what each of them changes.

    Parts are numbered as in `keys`, which must be in the state digest's order; digests are rows of bytes.
    """

    def __init__(self, keys: Sequence[PartKey], digests: npt.NDArray[np.uint8]) -> None:
        size = digests.shape[1]
        pieces = [
            struct.pack("<I", len(name := key.tensor.encode())) + name + struct.pack("<QB", key.offset, size)
            for key in keys
        ]
        state = bytearray(b"".join(p + d.tobytes() for p, d in zip(pieces, digests, strict=True)))
        self._bytes = np.frombuffer(state, np.uint8)
        self._starts = np.cumsum([len(piece) + size for piece in pieces], dtype=np.int64) - size
        # A digest from every byte on: places of digests as numbers of one array, each moved as a whole.
        self._at = np.ndarray((max(0, len(state) - size + 1),), f"V{size}", state, strides=(1,))

    def digests(self, numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        """The digests of some parts as they are now."""
        found: npt.NDArray[np.uint8] = self._at[self._starts[numbers]].view(np.uint8)
        return found.reshape(len(numbers), self._at.itemsize)

    def replace(self, numbers: npt.NDArray[np.int32], digests: npt.NDArray[np.uint8]) -> None:
        """Gives some parts new digests."""
        self._at[self._starts[numbers]] = np.ascontiguousarray(digests).view(self._at.dtype)[:, 0]

    def hexdigest(self) -> str:
        """The state digest."""
        return blake3.blake3(self._bytes.data).hexdigest()
