"""What a codec is: pure, bytes in and bytes out, exact for every bit pattern. Must not know files, stores or tensors.

A codec works on a whole shard: an encoder takes the shard's parts one after the other, each in chunks that fit a
processor's cache (so that a digest finds them there), and ends with named streams. A decoder gets the streams back and
decodes any one part alone. Streams of all parts lie end to end, so that entropy coding sees enough of each; the stream
`extents` says where each part's stretch begins.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from weighbridge.values import PartKey

Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES = 256 << 10
"""What an encoder is fed at a time: every chunk of a part but its last has this size. Part of the format of `full`."""


@dataclass(frozen=True, slots=True)
class PartInput:
    """A part to encode. `old` and `new` are one-dimensional, contiguous, of equal size, at any alignment."""

    key: PartKey
    dtype: str
    old: Bytes
    new: Bytes


@dataclass(frozen=True, slots=True)
class Sample:
    """Some of a part's old and new bytes, whole elements at the same places, by which a codec sets itself up.

    `whole_bytes` is the part's size.
    """

    dtype: str
    whole_bytes: int
    old: Bytes
    new: Bytes


@dataclass(frozen=True, slots=True)
class PartShape:
    """What a decoder is told of a part from the manifest, and trusts only as a bound: dtype and size in bytes."""

    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Patch:
    """New values for some elements of a part: absolute, so that applying one twice is the same as once.

    `positions` are element indexes (uint32), all checked against the part's length, none twice; None means all
    elements. Those in one stretch of CHUNK_BYTES come before those in the next, in any order within. `values` are the
    new elements' bytes, `width` bytes each, in the order of `positions`.
    """

    width: int
    positions: npt.NDArray[np.uint32] | None
    values: Bytes


class Encoder(ABC):
    """Takes the parts of one shard in order. Not thread-safe: one encoder, one thread."""

    turned: int | None = None
    """Of the chunk fed last, how many elements turned NaN or infinite, from an encoder that sees them as it goes."""

    @abstractmethod
    def begin(self, *, dtype: str, nbytes: int) -> None:
        """Starts the next part."""

    @abstractmethod
    def feed(self, *, old: Bytes, new: Bytes) -> int:
        """Adds the part's next chunk and returns how many units of `item_bytes(dtype)` differ in it.

        `old` and `new` are one-dimensional, contiguous, at any alignment, both of CHUNK_BYTES or the part's rest.
        """

    @abstractmethod
    def finish(self) -> Mapping[str, bytes]:
        """The shard's streams by name, compressed. Called once, last."""


class PartDecoder(ABC):
    """Decodes one part, chunk by chunk in order. Not thread-safe."""

    @abstractmethod
    def feed(self, old: Bytes, new: Bytes) -> None:
        """Decodes the next chunk: CHUNK_BYTES of the part's old bytes, or its rest, into as many new ones.

        `new` is another array, and of no use after an error. Raises PayloadCorrupt for input that no encoder writes,
        before anything out of bounds is touched; with another `old` than the encoder's the result is wrong, or
        PayloadCorrupt is raised.
        """

    @abstractmethod
    def finish(self) -> Patch:
        """The patch of the whole part. Raises PayloadCorrupt where the part's stretch of a stream was not used up."""


class Decoder(ABC):
    """Decodes parts of one shard. Thread-safe once it is built."""

    @abstractmethod
    def part(self, index: int) -> PartDecoder:
        """A decoder of the `index`-th part of this codec in the shard. Raises PayloadCorrupt."""


class Codec(ABC):
    """A codec, registered by name in `weighbridge.storage.codecs`."""

    name: ClassVar[str]

    @abstractmethod
    def encoder(self, samples: Sequence[Sample]) -> Encoder:
        """A fresh encoder for one shard. It will be fed the parts that `samples` were taken from, in this order."""

    @abstractmethod
    def decoder(self, streams: Mapping[str, memoryview], parts: Sequence[PartShape]) -> Decoder:
        """A decoder for the streams of one shard; allocates no more than the declared sizes allow.

        `parts` lists the shard's parts of this codec in manifest order. Raises PayloadCorrupt.
        """
