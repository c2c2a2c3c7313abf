"""The codec `expgap`: gaps counted within classes of the old exponent, and steps. For floats of one, two or four bytes.

An element changes more often the finer its grid is, and both sides know the old exponents: so each exponent's elements
make a class, gaps count unchanged elements of the same class, and every class is written in the way that suits how
often it changes. A class's entries lie end to end over all parts of the shard that have the same dtype. docs/FORMAT.md
has the streams to the bit. Must not know shards or manifests.
"""

from collections.abc import Mapping, Sequence

from weighbridge.errors import PayloadCorrupt
from weighbridge.storage.codecs.contract import Bytes, Codec, Decoder, Encoder, PartDecoder, PartShape, Sample
from weighbridge.storage.codecs.expgap_decoder import GroupDecoder
from weighbridge.storage.codecs.expgap_encoder import GroupEncoder


class ExpGapEncoder(Encoder):
    """Sends each part to the encoder of its dtype."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._groups = {
            dtype: GroupEncoder(dtype, [sample for sample in samples if sample.dtype == dtype])
            for dtype in dict.fromkeys(sample.dtype for sample in samples)
        }
        self._current: GroupEncoder | None = None

    def begin(self, *, dtype: str, nbytes: int) -> None:
        """See Encoder."""
        self._current = self._groups[dtype]
        self._current.begin(nbytes)

    def feed(self, *, old: Bytes, new: Bytes) -> int:
        """See Encoder."""
        if self._current is None:
            raise ValueError("a part begins before it is fed")
        found = self._current.feed(old, new)
        self.turned = self._current.turned
        return found

    def finish(self) -> Mapping[str, bytes]:
        """See Encoder."""
        return {
            f"{dtype}.{name}": data for dtype, group in self._groups.items() for name, data in group.finish().items()
        }


class ExpGapDecoder(Decoder):
    """The groups, and which of them has each part."""

    def __init__(self, streams: Mapping[str, memoryview], parts: Sequence[PartShape]) -> None:
        shapes: dict[str, list[PartShape]] = {}
        self._places: list[tuple[str, int]] = []
        for part in parts:
            its = shapes.setdefault(part.dtype, [])
            self._places.append((part.dtype, len(its)))
            its.append(part)
        by_dtype: dict[str, dict[str, memoryview]] = {}
        for name, data in streams.items():
            dtype, _, stream = name.rpartition(".")
            by_dtype.setdefault(dtype, {})[stream] = data
        if set(by_dtype) != set(shapes):
            raise PayloadCorrupt("expgap: streams of other dtypes than the parts have; nothing was written")
        self._groups = {dtype: GroupDecoder(dtype, by_dtype[dtype], its) for dtype, its in shapes.items()}

    def part(self, index: int) -> PartDecoder:
        """See Decoder."""
        dtype, place = self._places[index]
        return self._groups[dtype].part(place)


class ExpGapCodec(Codec):
    """See the module."""

    name = "expgap"

    def encoder(self, samples: Sequence[Sample]) -> Encoder:
        """See Codec."""
        return ExpGapEncoder(samples)

    def decoder(self, streams: Mapping[str, memoryview], parts: Sequence[PartShape]) -> Decoder:
        """See Codec."""
        return ExpGapDecoder(streams, parts)
