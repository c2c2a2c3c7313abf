"""A manifest's bytes: Arrow IPC in, `Manifest` out, and back. docs/FORMAT.md specifies them. Must not know stores:
whether a manifest is committed, and which one comes next, is `commit.py` and `lineage.py`."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from weighbridge.errors import ManifestCorrupt, UsageError
from weighbridge.storage import parts, strict_json
from weighbridge.storage.arrow_bounds import check_plain
from weighbridge.storage.digests import DIGESTS, chain_digest, digest_bytes
from weighbridge.values import Label, Manifest, PartKey, PartRow, ShardInfo

if TYPE_CHECKING:
    from weighbridge.storage.signing import Signer, Trust

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
_MOST_DIMENSIONS = 64
MOST_JSON = 16 << 20
"""Characters of a field that is JSON: a hundred thousand shards' names take half of it."""
MOST_VALUES = 1 << 26
"""In the rows of a manifest, of which each becomes an object: those of four million parts."""
ANCHORS_FOLDER = "anchors"
SHARD_NAME = re.compile(r"(?P<anchor>anchor-)?(?P<commit_id>[0-9a-f]{32})-[a-z0-9]{1,16}\.safetensors")
"""What a publisher, or a maker of anchors, names a shard."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)
_HEX = re.compile(r"[0-9a-f]*")
_FIELDS = frozenset({
    "format_version", "kind", "run_id", "writer", "commit_id", "version", "parent", "parent_digest", "created_ns",
    "digest_kind", "state_digest", "model_bytes", "model_elements", "tensors", "shards", "labels", "aliases", "files",
    "digest", "signature",
})  # fmt: skip


def version_folder(version: int) -> str:
    """The key of a version's folder."""
    return f"versions/{version:012d}"


def manifest_key(version: int) -> str:
    """The key whose creation commits a version."""
    return f"{version_folder(version)}/manifest.arrow"


def anchor_key(version: int) -> str:
    """The key whose creation commits a version's anchor, its second form."""
    return f"{version_folder(version)}/anchor.arrow"


def anchor_hint_key(version: int) -> str:
    """The key by which one listing shows that a version has an anchor."""
    return f"{ANCHORS_FOLDER}/{version:012d}"


def retired_key(manifest: Manifest) -> str:
    """The key of the mark that the shards which a manifest (a version's, or an anchor's) names are collected."""
    return f"{version_folder(manifest.version)}/{'anchor-retired' if manifest.kind == 'anchor' else 'retired'}"


def shard_key(version: int, shard: ShardInfo) -> str:
    """The key of one of a version's shards."""
    return f"{version_folder(version)}/{shard.name}"


def check_name(what: str, name: str) -> str:
    """`name`, if it may stand in a key (a run id, a host); else a UsageError that says what a name may hold."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{what} {name!r} is not a name: 1 to 64 of a-z A-Z 0-9 . _ -, not starting with a dot")
    return name


def check_labels(labels: Mapping[str, Label]) -> Mapping[str, Label]:
    """`labels`, if a manifest can carry them and every reader gets the same back; else a UsageError that names one."""
    for name, value in labels.items():
        fits = (
            isinstance(name, str)
            and _is_text(name)
            and (value is None or isinstance(value, str | int | float))
            and (not isinstance(value, str) or _is_text(value))
            and (not isinstance(value, float) or math.isfinite(value))
            and (not isinstance(value, int) or -(1 << 63) <= value < 1 << 63)
        )
        if not fits:
            raise UsageError(
                f"the label {name!r} is {value!r}: a label is a text, a whole number of 64 bits, a finite number, a "
                "boolean or None, under a name. Nothing was published."
            )
    return labels


def to_bytes(manifest: Manifest, *, signer: "Signer | None" = None) -> tuple[bytes, Manifest]:
    """The manifest's file, and the manifest with its own digest filled in, and signed when a `signer` is given.
    `digest` of the argument is ignored.

    Raises UsageError for labels that a manifest cannot carry.
    """
    check_labels(manifest.labels)
    zeroed = _write(replace(manifest, digest=_NO_DIGEST, signature=NO_SIGNATURE))
    digest = chain_digest(zeroed)
    signature = manifest.signature or NO_SIGNATURE if signer is None else signer.sign(zeroed)
    sealed = replace(manifest, digest=digest, signature=signature)
    data = _write(sealed)
    if _zeroed(data, sealed.digest, sealed.signature) != zeroed:
        raise ManifestCorrupt("a manifest's own digest also stands elsewhere in it; nothing was committed: push again")
    return data, sealed


@dataclass(frozen=True, slots=True)
class OpenManifest:
    """A manifest proven against its own digest whose rows are still Arrow's: `head` is all of it but the rows, `rows` a
    record batch with the columns of the format. For whoever reads thousands of them."""

    head: Manifest
    rows: Any


def from_bytes(data: bytes, *, where: str = "manifest", trust: "Trust | None" = None) -> Manifest:
    """Parses one manifest and proves it against its own digest, and as signed by a key of `trust` where that is given.
    Raises ManifestCorrupt, or NotTrusted, naming `where`."""
    opened = open_bytes(data, where=where, trust=trust)
    head = opened.head
    try:
        digest_size = len(digest_bytes(head.digest_kind, b""))
        rows = _rows(opened.rows, len(head.shards), kind=head.kind, digest_size=digest_size)
    except (ValueError, KeyError, TypeError) as error:
        raise _corrupt(where, f"{type(error).__name__}: {error}") from error
    return replace(head, rows=rows)


def open_bytes(data: bytes, *, where: str = "manifest", trust: "Trust | None" = None) -> OpenManifest:
    """The same without a look into the rows, beyond that they are what was sealed."""
    try:
        check_plain(data)  # or reading it could take any amount of memory
        reader = pa.ipc.RecordBatchFileReader(data)
        schema, count = reader.schema, reader.num_record_batches
        batch = reader.get_batch(0) if count else None
        if batch is not None:
            batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _corrupt(where, f"not an Arrow file ({error})") from error
    if count != 1:
        raise _corrupt(where, f"{count} record batches instead of one")
    if not schema.equals(_COLUMNS, check_metadata=False):
        raise _corrupt(where, "its columns are not those of format 1")
    try:
        _need(_lies_in(data, batch), "it is compressed")
        head = _head({k.decode(): v.decode() for k, v in (schema.metadata or {}).items()})
    except (ValueError, KeyError, TypeError) as error:
        raise _corrupt(where, f"{type(error).__name__}: {error}") from error
    zeroed = _zeroed(data, head.digest, head.signature, where)
    if chain_digest(zeroed) != head.digest:
        raise _corrupt(where, "its bytes do not have the digest that it names")
    if trust is not None:
        trust.check(head, zeroed, where)
    return OpenManifest(head, batch)


def _corrupt(where: str, why: str) -> ManifestCorrupt:
    return ManifestCorrupt(f"{where}: {why}. Nothing was read from it; restore the object or audit the store.")


def _zeroed(data: bytes, digest: str, signature: str, where: str = "manifest") -> bytes:
    """The bytes with both self-referring fields zeroed; each stands twice, in the schema and in the footer's copy."""
    for value in (digest, signature):
        if set(value) != {"0"}:
            pieces = data.split(value.encode())
            if len(pieces) != 3:
                raise _corrupt(where, "a self-referring field does not stand in it exactly twice")
            data = (b"0" * len(value)).join(pieces)
    return data


def _canonical(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    if len(text) > MOST_JSON:
        raise UsageError(
            f"labels, shards or aliases of {len(text):,} characters: {MOST_JSON:,} fit. Nothing was published."
        )
    return text


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


def _lies_in(data: bytes, batch: Any) -> bool:
    """Whether a batch's buffers are stretches of the file itself, as they are unless they had to be decompressed."""
    start = pa.py_buffer(data).address
    end = start + len(data)
    for column in batch.columns:
        for buffer in column.buffers():
            if buffer is not None and (size := buffer.size) and not start <= buffer.address <= end - size:
                return False
    return True


def _is_text(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _need(condition: bool, why: str) -> None:
    if not condition:
        raise ValueError(why)


def _head(meta: Mapping[str, str]) -> Manifest:
    if meta.keys() != _FIELDS:
        raise ValueError(f"its fields are not those of format 1: {sorted(meta.keys() ^ _FIELDS)}")
    _need(meta["format_version"] == str(FORMAT_VERSION), f"format {meta['format_version']!r} is not known here")
    _need(meta["digest_kind"] in DIGESTS, f"digest kind {meta['digest_kind']!r} is not known here")
    _need(meta["kind"] in ("base", "delta", "anchor"), f"kind {meta['kind']!r} is not known here")
    for field, digits in (("digest", 64), ("signature", 128), ("state_digest", 64), ("commit_id", 32)):
        _need(_is_hex(meta[field], digits), f"{field} is not hex of its length")
    _need(_is_hex(meta["parent_digest"], 0 if meta["kind"] == "base" else 64), "parent_digest is not hex of its length")
    _need(set(meta["digest"]) != {"0"}, "it names no digest of its own")
    digest_size = len(digest_bytes(meta["digest_kind"], b""))
    shards = _shards(meta["shards"], digest_size, of_anchor=meta["kind"] == "anchor")
    _need(meta["files"] == "" or meta["files"] in {s.name for s in shards}, "the shard of small files is not listed")
    aliases = _object("aliases", meta["aliases"])
    _need(all(isinstance(name, str) for name in aliases.values()), "an alias is of no name")
    return Manifest(
        run_id=check_name("run", meta["run_id"]),
        version=_integer("version", meta["version"]),
        parent=_integer("parent", meta["parent"], least=-1),
        parent_digest=meta["parent_digest"],
        writer=meta["writer"],
        commit_id=meta["commit_id"],
        created_ns=_integer("created_ns", meta["created_ns"]),
        digest_kind=meta["digest_kind"],
        state_digest=meta["state_digest"],
        model_bytes=_integer("model_bytes", meta["model_bytes"]),
        model_elements=_integer("model_elements", meta["model_elements"]),
        tensors=_integer("tensors", meta["tensors"]),
        shards=shards,
        rows=(),
        labels=check_labels(_object("labels", meta["labels"])),
        aliases=aliases,
        files=meta["files"],
        kind=meta["kind"],
        digest=meta["digest"],
        signature=meta["signature"],
    )


def _shards(text: str, digest_size: int, *, of_anchor: bool) -> tuple[ShardInfo, ...]:
    listed = _parsed("shards", text)
    if not isinstance(listed, list):
        raise ValueError("its shards are no list")
    shards = tuple(_shard(*entry, digest_size=digest_size, of_anchor=of_anchor) for entry in listed)
    _need(len({s.name for s in shards}) == len(shards), "two shards of one name")
    return shards


def _shard(name: object, nbytes: object, digest: object, *, digest_size: int, of_anchor: bool) -> ShardInfo:
    named = SHARD_NAME.fullmatch(name) if isinstance(name, str) else None
    if not isinstance(name, str) or named is None or (named["anchor"] is not None) != of_anchor:
        raise ValueError(f"no publisher names a shard {name!r}")
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise ValueError(f"a shard's size is {nbytes!r}")
    if not (isinstance(digest, str) and _is_hex(digest, 2 * digest_size)):
        raise ValueError(f"a shard's digest is {digest!r}")
    return ShardInfo(name, nbytes, bytes.fromhex(digest))


def _rows(batch: Any, shards: int, *, kind: str, digest_size: int) -> tuple[PartRow, ...]:
    dimensions = len(batch.column("shape").flatten())
    _need(batch.num_rows * batch.num_columns + dimensions <= MOST_VALUES, "it has more parts than any model")
    columns = batch.to_pydict()
    rows = tuple(
        PartRow(PartKey(tensor, offset), dtype, tuple(shape), nbytes, codec, shard, changed, before, after, whole)
        for tensor, offset, dtype, shape, nbytes, codec, shard, changed, before, after, whole in zip(
            *(columns[name] for name in _COLUMNS.names), strict=True
        )
    )
    _need(len({r.key for r in rows}) == len(rows), "a part stands in it twice")
    is_base = kind == "base"
    before = digest_size if kind == "delta" else 0
    for row in rows:
        name = row.key.tensor
        _need((row.codec == "base") == is_base, f"{name}: codec {row.codec!r} does not go with this kind of manifest")
        _need(row.shard == -1 if is_base else 0 <= row.shard < shards, f"{name}: no shard {row.shard}")
        _need_part(row)
        _need(
            len(row.before) == before and len(row.after) == len(row.tensor_digest) == digest_size,
            f"{name}: digests of another length",
        )
    return rows


def _need_part(row: PartRow) -> None:
    """Whether a row describes a part as tensors are cut, so that its size bounds what a decoder takes."""
    name, at = row.key.tensor, row.key.offset
    _need(len(row.shape) <= _MOST_DIMENSIONS and all(n >= 0 for n in row.shape), f"{name}: an absurd shape")
    _need(
        at % parts.PART_BYTES == 0 and row.nbytes <= parts.PART_BYTES, f"{name}: no part begins at {at} or ends there"
    )


def _object(field: str, text: str) -> dict[str, Any]:
    value = _parsed(field, text)
    if not isinstance(value, dict):
        raise ValueError(f"{field} is no JSON object")
    return value


def _parsed(field: str, text: str) -> object:
    _need(len(text) <= MOST_JSON, f"{field} has {len(text):,} characters")
    return strict_json.parse(text.encode())


def _integer(field: str, text: str, *, least: int = 0) -> int:
    value = int(text) if _INTEGER.fullmatch(text) else least - 1
    if not least <= value < 1 << 63:
        raise ValueError(f"{field} is {text[:40]!r}")
    return value


def _is_hex(text: str, digits: int) -> bool:
    return len(text) == digits and _HEX.fullmatch(text) is not None
