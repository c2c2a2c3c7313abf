"""Groups a stream of tensors into batches, each of which becomes one shard. Holds one batch at a time, so that a model
is never held twice. Must not know where tensors come from or what becomes of a batch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.parts import cut
from weighbridge.values import Part, TensorSpec


@dataclass(frozen=True, slots=True)
class NewPart:
    """A part and its new bytes (one-dimensional uint8, contiguous, `part.nbytes` long)."""

    part: Part
    new: Bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """What one shard is made from: parts worth some `shard_bytes` of model, in the order in which they arrived.

    `whole` holds all bytes of each tensor that is cut into several parts, with its first part: its own digest is due.
    """

    index: int
    parts: tuple[NewPart, ...]
    whole: tuple[tuple[str, Bytes], ...] = ()


@dataclass(slots=True)
class _Filling:
    parts: list[NewPart] = field(default_factory=list)
    whole: list[tuple[str, Bytes]] = field(default_factory=list)
    nbytes: int = 0


def batches(tensors: Iterable[tuple[TensorSpec, Bytes]], *, shard_bytes: int) -> Iterator[Batch]:
    """Cuts tensors into parts and groups them; a part larger than `shard_bytes` is a batch of its own."""
    filling, index = _Filling(), 0
    for spec, data in tensors:
        parts = cut(spec)
        for part in parts:
            if filling.parts and filling.nbytes + part.nbytes > shard_bytes:
                yield Batch(index, tuple(filling.parts), tuple(filling.whole))
                filling, index = _Filling(), index + 1
            if len(parts) > 1 and part.key.offset == 0:
                filling.whole.append((spec.name, data))
            filling.parts.append(NewPart(part, data[part.key.offset : part.key.offset + part.nbytes]))
            filling.nbytes += part.nbytes
    if filling.parts:
        yield Batch(index, tuple(filling.parts), tuple(filling.whole))
