"""What a codec is: pure, bytes in and bytes out, exact for every bit pattern. Must not know files, stores or tensors.

A codec works on a whole shard: an encoder takes the shard's parts one after the other and ends with named streams; a
decoder gets the streams back and decodes any one part alone. Streams of all parts lie end to end, so that entropy
coding sees enough of each; the stream `extents` says where each part's stretch begins.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PartShape:
    """What a decoder is told of a part from the manifest, and trusts only as a bound: dtype and size in bytes."""

    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Patch:
    """New values for some elements of a part: absolute, so that applying one twice is the same as once.

    `positions` are element indexes (uint32), in any order, all checked against the part's length; None means all
    elements. `values` are the new elements' bytes, `width` bytes each, in the order of `positions`.
    """

    width: int
    positions: npt.NDArray[np.uint32] | None
    values: Bytes


class Encoder(ABC):
    """Takes the parts of one shard in order. Not thread-safe: one encoder, one thread."""

    @abstractmethod
    def add(self, *, old: Bytes, new: Bytes, dtype: str) -> int:
        """Adds a part that differs and returns how many units of `item_bytes(dtype)` differ.

        `old` and `new` are one-dimensional, contiguous, of equal size, at any alignment.
        """

    @abstractmethod
    def finish(self) -> Mapping[str, bytes]:
        """The shard's streams by name, compressed. Called once, last."""


class Decoder(ABC):
    """Decodes parts of one shard. Thread-safe once it is built."""

    @abstractmethod
    def decode(self, index: int, old: Bytes) -> Patch:
        """The patch of the `index`-th part of this codec in the shard, given the part's old bytes.

        Raises PayloadCorrupt for input that no encoder writes, before anything out of bounds is touched.
        """


class Codec(ABC):
    """A codec, registered by name in `weighbridge.storage.codecs`."""

    name: ClassVar[str]

    @abstractmethod
    def encoder(self) -> Encoder:
        """A fresh encoder for one shard."""

    @abstractmethod
    def decoder(self, streams: Mapping[str, memoryview], parts: Sequence[PartShape]) -> Decoder:
        """A decoder for the streams of one shard; allocates no more than the declared sizes allow.

        `parts` lists the shard's parts of this codec in manifest order. Raises PayloadCorrupt.
        """
