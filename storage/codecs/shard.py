"""A shard's payload: parts in, a safetensors file of U8 streams out, and back. Must not know manifests or stores.

Encoding is one pass: each chunk is diffed, coded and digested while it is in the processor's cache. Every part's codec
is chosen from a sample of it. Several shards are encoded and decoded in parallel by the caller's threads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import save

from weighbridge.errors import HeaderError, PayloadCorrupt, UsageError
from weighbridge.storage.codecs import kernels
from weighbridge.storage.codecs.choice import choose_codec, take_sample
from weighbridge.storage.codecs.contract import (
    CHUNK_BYTES,
    Bytes,
    Decoder,
    Encoder,
    PartDecoder,
    PartInput,
    PartShape,
    Patch,
    Sample,
)
from weighbridge.storage.codecs.elements import NONFINITE
from weighbridge.storage.codecs.registry import get_codec
from weighbridge.storage.digests import new_hasher
from weighbridge.storage.safetensors_header import parse_header
from weighbridge.values import PartKey, item_bytes

_WHOLE = "full"


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """One changed part: its codec, how many units of `item_bytes(dtype)` differ, the raw digest of its new bytes, and
    how many elements turned NaN or infinite."""

    key: PartKey
    codec: str
    changed: int
    after: bytes
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class EncodedShard:
    """A payload and the parts that it holds, in the order in which `open_shard` must be told of them.

    Parts that did not change are not in the payload; `unchanged` names them. `payload` is empty when all are.
    """

    payload: bytes
    parts: tuple[EncodedPart, ...]
    unchanged: tuple[PartKey, ...]


def encode_shard(parts: Sequence[PartInput], *, digest_kind: str, codec: str | None = None) -> EncodedShard:
    """Encodes the parts of one shard against their old bytes. `codec` names one for all parts instead of choosing.

    Raises UsageError for parts that no codec can take, before anything is encoded.
    """
    for part in parts:
        _check(part)
    sampled = [(part, take_sample(part)) for part in parts]
    sampled = [(part, some) for part, some in sampled if _differs(part, some)]
    changed = [part for part, _ in sampled]
    names = [codec or choose_codec(some) for _, some in sampled]
    encoders = {
        name: get_codec(name).encoder([some for (_, some), its in zip(sampled, names, strict=True) if its == name])
        for name in dict.fromkeys(names)
    }
    encoded = tuple(_encode(part, name, encoders[name], digest_kind) for part, name in zip(changed, names, strict=True))
    kept = {part.key for part in changed}
    unchanged = tuple(part.key for part in parts if part.key not in kept)
    if not encoded:
        return EncodedShard(b"", (), unchanged)
    streams = {
        f"{name}/{stream}": np.frombuffer(data, np.uint8)
        for name, encoder in encoders.items()
        for stream, data in encoder.finish().items()
    }
    return EncodedShard(save(streams), encoded, unchanged)


def encode_whole(parts: Sequence[tuple[PartKey, str, Bytes]], *, digest_kind: str) -> EncodedShard:
    """Encodes all bytes of parts (key, dtype, bytes), whatever the old ones were, by the codec `full`: for anchors.

    Every part is in the payload; `changed` is 0, since nothing is compared. Raises UsageError like `encode_shard`.
    """
    encoder = get_codec(_WHOLE).encoder(())
    encoded = []
    for key, dtype, data in parts:
        part = PartInput(key, dtype, data, data)
        _check(part)
        encoded.append(_encode(part, _WHOLE, encoder, digest_kind))
    streams = {f"{_WHOLE}/{name}": np.frombuffer(data, np.uint8) for name, data in encoder.finish().items()}
    return EncodedShard(save(streams), tuple(encoded), ())


def _differs(part: PartInput, some: Sample) -> bool:
    return not kernels.same(some.old, some.new) or not kernels.same(part.old, part.new)


def _check(part: PartInput) -> None:
    for data in (part.old, part.new):
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise UsageError(f"{part.key.tensor}: a part is given as one-dimensional contiguous bytes")
    if part.old.size != part.new.size:
        raise UsageError(f"{part.key.tensor}: {part.new.size} new bytes for {part.old.size} old ones")


def _encode(part: PartInput, codec: str, encoder: Encoder, digest_kind: str) -> EncodedPart:
    hasher = new_hasher(digest_kind)
    encoder.begin(dtype=part.dtype, nbytes=part.new.size)
    old, new = kernels.fixed(part.old), kernels.fixed(part.new)
    changed = nonfinite = 0
    bits = NONFINITE.get(part.dtype) if part.old is not part.new else None
    for start in range(0, new.size, CHUNK_BYTES):
        chunk, before = new[start : start + CHUNK_BYTES], old[start : start + CHUNK_BYTES]
        changed += encoder.feed(old=before, new=chunk)
        hasher.update(chunk.data)
        if encoder.turned is not None:
            nonfinite += encoder.turned
        elif bits is not None:
            nonfinite += kernels.count_turned_nonfinite(before, chunk, item_bytes(part.dtype), *bits)
    return EncodedPart(part.key, codec, changed, hasher.digest(), nonfinite)


class ShardDecoder:
    """Decodes the parts of one shard, each alone and in any order. Thread-safe."""

    def __init__(self, decoders: Mapping[str, Decoder], rows: Sequence[tuple[str, int]]) -> None:
        self._decoders = decoders
        self._rows = tuple(rows)

    def decode(self, row: int, old: Bytes) -> Patch:
        """The patch of the row-th part, given its old bytes, which stay as they are. Raises PayloadCorrupt."""
        part, old = self._part(row), kernels.fixed(old)
        new = np.empty(min(CHUNK_BYTES, old.size), np.uint8)
        for start in range(0, old.size, CHUNK_BYTES):
            chunk = old[start : start + CHUNK_BYTES]
            part.feed(chunk, new[: chunk.size])
        return part.finish()

    def decode_digested(self, row: int, old: Bytes, *, digest_kind: str) -> tuple[Patch, bytes]:
        """The same, and the raw digest that the part will have: in one pass, while each chunk is in the cache."""
        part, old, hasher = self._part(row), kernels.fixed(old), new_hasher(digest_kind)
        new = np.empty(min(CHUNK_BYTES, old.size), np.uint8)
        for start in range(0, old.size, CHUNK_BYTES):
            chunk = old[start : start + CHUNK_BYTES]
            part.feed(chunk, new[: chunk.size])
            hasher.update(new[: chunk.size].data)
        return part.finish(), hasher.digest()

    def _part(self, row: int) -> PartDecoder:
        codec, index = self._rows[row]
        return self._decoders[codec].part(index)


def open_shard(payload: bytes | bytearray | memoryview, rows: Sequence[tuple[str, PartShape]]) -> ShardDecoder:
    """A decoder for a payload, which must outlive it. `rows` gives codec and shape of its parts in their order.

    `payload` may be a mapped file. Raises PayloadCorrupt for whatever no encoder writes; memory is bounded by the
    shapes.
    """
    view = memoryview(payload).cast("B")
    streams: dict[str, dict[str, memoryview]] = {}
    for name, data in _tensors(view).items():
        codec, _, stream = name.partition("/")
        streams.setdefault(codec, {})[stream] = data
    shapes: dict[str, list[PartShape]] = {}
    places: list[tuple[str, int]] = []
    for codec, shape in rows:
        places.append((codec, len(shapes.setdefault(codec, []))))
        shapes[codec].append(shape)
    if set(shapes) != set(streams):
        raise PayloadCorrupt(f"the shard has codecs {sorted(streams)}, the manifest {sorted(shapes)}; nothing written")
    decoders = {codec: get_codec(codec).decoder(streams[codec], shapes[codec]) for codec in shapes}
    return ShardDecoder(decoders, places)


def _tensors(view: memoryview) -> dict[str, memoryview]:
    if not len(view):
        return {}
    try:
        # A view's copy is made of the header alone; its length is the first eight bytes, checked by the parser.
        length = int.from_bytes(view[:8], "little")
        header = parse_header(bytes(view[: 8 + min(length, len(view))]), len(view))
    except HeaderError as error:
        raise PayloadCorrupt(f"the payload is not a safetensors file: {error}; nothing was written") from None
    out = {}
    for name, place in header.tensors.items():
        if place.spec.dtype != "U8" or place.spec.shape != (place.spec.nbytes,):
            raise PayloadCorrupt(f"the stream {name[:80]!r} is not a row of bytes; nothing was written")
        out[name] = view[place.start : place.start + place.spec.nbytes]
    return out
