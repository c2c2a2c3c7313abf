"""Manifests for tests, and forged ones: written with Arrow directly and sealed by docs/FORMAT.md's own-digest rule, so
that nothing but the forged detail is wrong with them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import blake3
import pyarrow as pa

from weighbridge.storage.manifest import to_bytes
from weighbridge.values import Manifest, PartKey, PartRow, ShardInfo

ZERO_DIGEST = "0" * 64
ZERO_SIGNATURE = "0" * 128


def some_row(name: str = "model.layers.0.w", **changes: Any) -> PartRow:
    row = PartRow(
        key=PartKey(name, 0),
        dtype="BF16",
        shape=(2, 3),
        nbytes=12,
        codec="gap",
        shard=0,
        changed=4,
        before=b"\x01" * 16,
        after=b"\x02" * 16,
        tensor_digest=b"\x02" * 16,
    )
    return replace(row, **changes)


def some_shard(number: int = 0) -> ShardInfo:
    return ShardInfo(f"{'c0ffee00' * 4}-{number:05d}.safetensors", 1234 + number, bytes([number]) * 16)


def some_manifest(**changes: Any) -> Manifest:
    """A delta with two shards, a tensor in two parts, a scalar, an empty shape's neighbour, labels of every kind."""
    manifest = Manifest(
        run_id="run-7.a_B",
        version=12,
        parent=11,
        parent_digest="ab" * 32,
        writer="writer of a test",
        commit_id="c0ffee00" * 4,
        created_ns=1_700_000_000_123_456_789,
        digest_kind="xxh3-128",
        state_digest="cd" * 32,
        model_bytes=6_000_000_000,
        model_elements=3_000_000_000,
        tensors=5,
        shards=(some_shard(0), some_shard(1)),
        rows=(
            some_row(),
            some_row("big", shape=(3_000_000_000,), nbytes=268_435_456, dtype="F8_E4M3"),
            some_row(
                "big", key=PartKey("big", 268_435_456), shape=(3_000_000_000,), nbytes=9, codec="full", dtype="F8_E4M3"
            ),
            some_row("größe.∆", shape=(), nbytes=8, dtype="I64", shard=1, changed=1, tensor_digest=b"\x07" * 16),
        ),
        labels={"step": 1, "loss": 0.25, "note": "übung", "good": True, "none": None},
        aliases={"lm_head.weight": "model.embed.weight"},
    )
    return replace(manifest, **changes)


def some_base(**changes: Any) -> Manifest:
    shard = ShardInfo(f"{'c0ffee00' * 4}-files.safetensors", 99, b"\x05" * 16)
    rows = tuple(
        some_row(name, codec="base", shard=-1, changed=0, before=b"", after=bytes([n]) * 16)
        for n, name in enumerate(("a", "b"))
    )
    base = some_manifest(
        version=0, parent=-1, parent_digest="", kind="base", shards=(shard,), files=shard.name, rows=rows, tensors=2
    )
    return replace(base, **changes)


def some_anchor(**changes: Any) -> Manifest:
    """The second form of a version: named shards of its own, no bytes before."""
    shards = tuple(replace(some_shard(n), name=f"anchor-{some_shard(n).name}") for n in range(2))
    rows = tuple(replace(row, codec="full", before=b"", changed=0) for row in some_manifest().rows)
    return some_manifest(**{"kind": "anchor", "parent": 12, "shards": shards, "rows": rows, "labels": {}, **changes})


def written(batch: Any, options: Any = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def sealed(batch: Any, metadata: Mapping[str, str], options: Any = None) -> bytes:
    """The batch with this metadata as a file that has the digest it names. A field that `metadata` lacks stays away."""
    zeroed = {**metadata, "digest": ZERO_DIGEST, "signature": ZERO_SIGNATURE}
    digest = blake3.blake3(written(batch.replace_schema_metadata(zeroed), options)).hexdigest()
    return written(batch.replace_schema_metadata({**zeroed, "digest": digest}), options)


def opened(data: bytes) -> tuple[Any, dict[str, str]]:
    """A manifest's one batch, and its metadata."""
    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        return reader.get_batch(0), {k.decode(): v.decode() for k, v in reader.schema.metadata.items()}


def forged(
    change: Callable[[dict[str, str]], object] = lambda _: None,
    columns: Mapping[str, list[Any]] | None = None,
    manifest: Manifest | None = None,
) -> bytes:
    """A rightly sealed manifest whose metadata was changed by `change`, and some columns replaced."""
    batch, metadata = opened(to_bytes(manifest or some_manifest())[0])
    change(metadata)
    for name, values in (columns or {}).items():
        place = batch.schema.get_field_index(name)
        batch = batch.set_column(place, batch.schema.field(place), pa.array(values, batch.schema.field(place).type))
    return sealed(batch, metadata)
