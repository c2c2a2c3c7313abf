"""A manifest's bytes: Arrow IPC in, `Manifest` out, and back. docs/FORMAT.md specifies them. Must not know stores:
whether a manifest is committed, and which one comes next, is `commit.py` and `lineage.py`."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from weighbridge.errors import ManifestCorrupt, UsageError
from weighbridge.storage.digests import DIGESTS, chain_digest
from weighbridge.values import Manifest, PartKey, PartRow, ShardInfo

FORMAT_VERSION = 1
NO_SIGNATURE = "0" * 128
_NO_DIGEST = "0" * 64
_COLUMNS = pa.schema(
    [
        pa.field("tensor", pa.utf8(), nullable=False),
        pa.field("offset", pa.uint64(), nullable=False),
        pa.field("dtype", pa.utf8(), nullable=False),
        pa.field("shape", pa.list_(pa.field("item", pa.int64(), nullable=False)), nullable=False),
        pa.field("bytes", pa.uint64(), nullable=False),
        pa.field("codec", pa.utf8(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("changed", pa.uint64(), nullable=False),
        pa.field("before", pa.binary(), nullable=False),
        pa.field("after", pa.binary(), nullable=False),
        pa.field("tensor_digest", pa.binary(), nullable=False),
    ]
)
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_SHARD_NAME = re.compile(r"[0-9a-f]{32}-[a-z0-9]{1,16}\.safetensors")
_HEX64 = re.compile(r"[0-9a-f]{64}")
_HEX128 = re.compile(r"[0-9a-f]{128}")


def version_folder(version: int) -> str:
    """The key of a version's folder."""
    return f"versions/{version:012d}"


def manifest_key(version: int) -> str:
    """The key whose creation commits a version."""
    return f"{version_folder(version)}/manifest.arrow"


def shard_key(version: int, shard: ShardInfo) -> str:
    """The key of one of a version's shards."""
    return f"{version_folder(version)}/{shard.name}"


def check_name(what: str, name: str) -> str:
    """`name`, if it may stand in a key (a run id, a host); else a UsageError that says what a name may hold."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{what} {name!r} is not a name: 1 to 64 of a-z A-Z 0-9 . _ -, not starting with a dot")
    return name


def to_bytes(manifest: Manifest) -> tuple[bytes, Manifest]:
    """The manifest's file, and the manifest with its own digest filled in. `digest` of the argument is ignored."""
    zeroed = _write(replace(manifest, digest=_NO_DIGEST, signature=NO_SIGNATURE))
    digest = chain_digest(zeroed)
    sealed = replace(manifest, digest=digest, signature=manifest.signature or NO_SIGNATURE)
    data = _write(sealed)
    if _zeroed(data, sealed.digest, sealed.signature) != zeroed:
        raise ManifestCorrupt("a manifest's own digest also stands elsewhere in it; nothing was committed: push again")
    return data, sealed


def from_bytes(data: bytes, *, where: str = "manifest") -> Manifest:
    """Parses one manifest and proves it against its own digest. Raises ManifestCorrupt, naming `where`."""
    try:
        with pa.ipc.open_file(pa.BufferReader(data)) as reader:
            schema = reader.schema
            if reader.num_record_batches != 1:
                raise ManifestCorrupt(f"{where}: {reader.num_record_batches} record batches instead of one")
            batch = reader.get_batch(0)
            batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _corrupt(where, f"not an Arrow file ({error})") from error
    if not schema.remove_metadata().equals(_COLUMNS):
        raise _corrupt(where, "its columns are not those of format 1")
    try:
        manifest = _parse({k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}, batch)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _corrupt(where, f"{type(error).__name__}: {error}") from error
    if chain_digest(_zeroed(data, manifest.digest, manifest.signature, where)) != manifest.digest:
        raise _corrupt(where, "its bytes do not have the digest that it names")
    return manifest


def _corrupt(where: str, why: str) -> ManifestCorrupt:
    return ManifestCorrupt(f"{where}: {why}. Nothing was read from it; restore the object or audit the store.")


def _zeroed(data: bytes, digest: str, signature: str, where: str = "manifest") -> bytes:
    """The bytes with both self-referring fields zeroed; each stands twice, in the schema and in the footer's copy."""
    for value in (digest, signature):
        if set(value) != {"0"}:
            if data.count(value.encode()) != 2:
                raise _corrupt(where, "a self-referring field does not stand in it exactly twice")
            data = data.replace(value.encode(), b"0" * len(value))
    return data


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _write(m: Manifest) -> bytes:
    metadata = {
        "format_version": str(m.format_version),
        "kind": m.kind,
        "run_id": m.run_id,
        "writer": m.writer,
        "commit_id": m.commit_id,
        "version": str(m.version),
        "parent": str(m.parent),
        "parent_digest": m.parent_digest,
        "created_ns": str(m.created_ns),
        "digest_kind": m.digest_kind,
        "state_digest": m.state_digest,
        "model_bytes": str(m.model_bytes),
        "model_elements": str(m.model_elements),
        "tensors": str(m.tensors),
        "shards": _canonical([[s.name, s.nbytes, s.digest.hex()] for s in m.shards]),
        "labels": _canonical(dict(m.labels)),
        "aliases": _canonical(dict(m.aliases)),
        "files": m.files,
        "digest": m.digest,
        "signature": m.signature,
    }
    rows = m.rows
    batch = pa.record_batch(
        [
            pa.array([r.key.tensor for r in rows], pa.utf8()),
            pa.array([r.key.offset for r in rows], pa.uint64()),
            pa.array([r.dtype for r in rows], pa.utf8()),
            pa.array([list(r.shape) for r in rows], _COLUMNS.field("shape").type),
            pa.array([r.nbytes for r in rows], pa.uint64()),
            pa.array([r.codec for r in rows], pa.utf8()),
            pa.array([r.shard for r in rows], pa.int32()),
            pa.array([r.changed for r in rows], pa.uint64()),
            pa.array([r.before for r in rows], pa.binary()),
            pa.array([r.after for r in rows], pa.binary()),
            pa.array([r.tensor_digest for r in rows], pa.binary()),
        ],
        schema=_COLUMNS.with_metadata(metadata),
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _need(condition: bool, why: str) -> None:
    if not condition:
        raise ValueError(why)


def _parse(meta: Mapping[str, str], batch: Any) -> Manifest:
    _need(meta["format_version"] == str(FORMAT_VERSION), f"format {meta['format_version']!r} is not known here")
    _need(meta["digest_kind"] in DIGESTS, f"digest kind {meta['digest_kind']!r} is not known here")
    _need(meta["kind"] in ("base", "delta", "anchor"), f"kind {meta['kind']!r} is not known here")
    for field, pattern in (("digest", _HEX64), ("signature", _HEX128), ("state_digest", _HEX64)):
        _need(pattern.fullmatch(meta[field]) is not None, f"{field} is not hex of its length")
    _need(set(meta["digest"]) != {"0"}, "it names no digest of its own")
    shards = tuple(ShardInfo(name, _size(n), bytes.fromhex(d)) for name, n, d in json.loads(meta["shards"]))
    _need(all(_SHARD_NAME.fullmatch(s.name) for s in shards), "a shard's name is not one that a publisher gives")
    _need(len({s.name for s in shards}) == len(shards), "two shards of one name")
    columns = batch.to_pydict()
    rows = tuple(
        PartRow(PartKey(tensor, offset), dtype, tuple(shape), nbytes, codec, shard, changed, before, after, whole)
        for tensor, offset, dtype, shape, nbytes, codec, shard, changed, before, after, whole in zip(
            *(columns[name] for name in _COLUMNS.names), strict=True
        )
    )
    _need(len({r.key for r in rows}) == len(rows), "a part stands in it twice")
    for row in rows:
        _need(-1 <= row.shard < len(shards), f"{row.key.tensor}: no shard {row.shard}")
        _need((row.shard == -1) == (row.codec == "base"), f"{row.key.tensor}: codec and shard contradict each other")
        _need(all(n >= 0 for n in row.shape), f"{row.key.tensor}: a negative shape")
    _need(meta["files"] == "" or meta["files"] in {s.name for s in shards}, "the shard of small files is not listed")
    return Manifest(
        run_id=check_name("run", meta["run_id"]),
        version=int(meta["version"]),
        parent=int(meta["parent"]),
        parent_digest=meta["parent_digest"],
        writer=meta["writer"],
        commit_id=meta["commit_id"],
        created_ns=int(meta["created_ns"]),
        digest_kind=meta["digest_kind"],
        state_digest=meta["state_digest"],
        model_bytes=int(meta["model_bytes"]),
        model_elements=int(meta["model_elements"]),
        tensors=int(meta["tensors"]),
        shards=shards,
        rows=rows,
        labels=json.loads(meta["labels"]),
        aliases=json.loads(meta["aliases"]),
        files=meta["files"],
        kind=meta["kind"],
        digest=meta["digest"],
        signature=meta["signature"],
    )


def _size(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a shard's size is {value!r}")
    return value
