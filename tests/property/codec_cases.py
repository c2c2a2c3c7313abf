"""Parts for the codec tests, of any dtype, length, alignment and kind of change, and the round trip they survive."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from weighbridge.storage import codecs
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.codecs.elements import element
from weighbridge.storage.digests import digest_bytes
from weighbridge.values import DTYPE_BITS, PartKey, item_bytes

DTYPES = (*DTYPE_BITS, "A_DTYPE_OF_TOMORROW")
LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 1000, 4096, 5003)


@dataclass(frozen=True, slots=True)
class Change:
    """How a part is made: `kind` of its bytes and steps, `density` of changes, bytes off alignment."""

    dtype: str
    elements: int
    density: float
    kind: str
    offset: int
    seed: int


changes = st.builds(
    Change,
    dtype=st.sampled_from(DTYPES),
    elements=st.one_of(st.sampled_from(LENGTHS), st.integers(0, 700)),
    density=st.sampled_from((0.0, 0.002, 0.02, 0.3, 1.0)),
    kind=st.sampled_from(("noise", "weights", "steps", "ends", "constant")),
    offset=st.integers(0, 9),
    seed=st.integers(0, 1 << 30),
)


def part(name: str, change: Change) -> codecs.PartInput:
    """The part that a change describes."""
    rng = np.random.default_rng(change.seed)
    width = item_bytes(change.dtype)
    shape = (change.elements, width)
    old = rng.integers(0, 256, shape).astype(np.uint8)
    if change.kind == "weights" and width in (2, 4):
        values = (rng.standard_normal(change.elements) * 0.02).astype(np.float32).view(np.uint32)
        old = (values >> (32 - 8 * width)).astype(f"<u{width}").view(np.uint8).reshape(shape)
    elif change.kind == "constant":
        old[:] = old[:1]
    new = old.copy()
    hit = rng.random(change.elements) < change.density
    if change.kind in ("weights", "steps"):
        words = new.view(f"<u{width}").reshape(-1)
        words[hit] += rng.choice(np.array([1, 2, -1, -2, 300]), int(hit.sum())).astype("<i8").astype(f"<u{width}")
    elif change.kind == "ends":
        new[:1] ^= 255
        new[-1:] ^= 1
    else:
        new[hit] = rng.integers(0, 256, (int(hit.sum()), width))
    return codecs.PartInput(
        PartKey(name, 0), change.dtype, misaligned(old, change.offset), misaligned(new, change.offset)
    )


def misaligned(data: Bytes, offset: int) -> Bytes:
    """The same bytes, one-dimensional, `offset` bytes after an aligned address, and read-only as a mapped file is."""
    room = np.empty(data.size + offset, np.uint8)
    room[offset:] = data.reshape(-1)
    room.flags.writeable = False
    return room[offset:]


def rows_of(
    shard: codecs.EncodedShard, parts: Sequence[codecs.PartInput]
) -> tuple[tuple[tuple[str, codecs.PartShape], ...], tuple[codecs.PartInput, ...]]:
    """What a manifest would say of a shard's rows, and the part of each row."""
    by_key = {p.key: p for p in parts}
    order = tuple(by_key[row.key] for row in shard.parts)
    return tuple(
        (row.codec, codecs.PartShape(p.dtype, p.new.size)) for row, p in zip(shard.parts, order, strict=True)
    ), order


def round_trip(parts: Sequence[codecs.PartInput], codec: str | None) -> codecs.EncodedShard:
    """Encodes, decodes, and checks every promise of the codecs on the way. `expgap` gets the parts that it takes."""
    if codec == "expgap":
        parts = [p for p in parts if element(p.dtype).exponent_bits]
    shard = codecs.encode_shard(parts, digest_kind="xxh3-128", codec=codec)
    rows, order = rows_of(shard, parts)
    assert set(shard.unchanged) == {p.key for p in parts if np.array_equal(p.old, p.new)}
    assert {row.key for row in shard.parts} | set(shard.unchanged) == {p.key for p in parts}
    if not rows:
        assert shard.payload == b""
        return shard
    decoder = codecs.open_shard(shard.payload, rows)
    for index in reversed(range(len(rows))):
        source, row = order[index], shard.parts[index]
        width = item_bytes(source.dtype)
        before = source.old.tobytes()
        patch = decoder.decode(index, source.old)
        assert source.old.tobytes() == before
        assert row.changed == int((source.old.reshape(-1, width) != source.new.reshape(-1, width)).any(1).sum())
        assert row.after == digest_bytes("xxh3-128", source.new.tobytes())
        assert codecs.patched_digest(source.old, patch, digest_kind="xxh3-128") == row.after
        target = source.old.copy()
        codecs.scatter(target, patch)
        codecs.scatter(target, patch)
        assert target.tobytes() == source.new.tobytes()
    return shard
