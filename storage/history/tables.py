"""Manifests and hosts' records as Arrow tables, and those tables as Parquet: docs/FORMAT.md, "history". Must not know
stores or segments."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from weighbridge.errors import ManifestCorrupt
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.manifest import NO_SIGNATURE, OpenManifest, manifest_key
from weighbridge.values import HostRecord, Manifest, PartKey, TensorSpec

Ints = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint8]
"""One row a digest."""

_MOMENT = pa.timestamp("ns", tz="UTC")
_ROW_GROUP: Mapping[str, int] = {"versions": 1 << 13, "parts": 1 << 15, "records": 1 << 14}
_JSON = json.JSONEncoder(sort_keys=True, ensure_ascii=False, allow_nan=False)
_DIGESTS = frozenset({"digest", "part_digest"})

VERSIONS = pa.schema(
    [
        ("version", pa.int64()),
        ("parent", pa.int64()),
        ("kind", pa.string()),
        ("created", _MOMENT),
        ("writer", pa.string()),
        ("commit_id", pa.string()),
        ("digest", pa.string()),
        ("parent_digest", pa.string()),
        ("state_digest", pa.string()),
        ("signed", pa.bool_()),
        ("tensors", pa.int64()),
        ("parts", pa.int64()),
        ("changed", pa.int64()),
        ("wire_bytes", pa.int64()),
        ("shards", pa.int64()),
        ("model_elements", pa.int64()),
        ("model_bytes", pa.int64()),
        ("model_tensors", pa.int64()),
        ("labels", pa.string()),
    ]
)
"""One row a version, in order."""

RECORDS = pa.schema(
    [
        ("run_id", pa.string()),
        ("host", pa.string()),
        ("version", pa.int64()),
        ("head", pa.int64()),
        ("attempt", pa.string()),
        ("outcome", pa.string()),
        ("stage", pa.string()),
        ("from_version", pa.int64()),
        ("state_digest", pa.string()),
        ("started", _MOMENT),
        ("ended", _MOMENT),
        ("fetched_bytes", pa.int64()),
        ("repaired", pa.int64()),
        ("seconds", pa.map_(pa.string(), pa.float64())),
        ("engine", pa.string()),
        ("error", pa.string()),
        ("by", pa.string()),
    ]
)
"""One row a record, by version, host and the time it ended."""


def parts_schema(digest_bytes: int) -> Any:
    """One row a changed part, by tensor, offset and version. `digest` is the whole tensor's after the version;
    `part_digest` the part's own where a tensor has several, else null."""
    return pa.schema(
        [
            ("tensor", pa.string()),
            ("offset", pa.int64()),
            ("version", pa.int64()),
            ("dtype", pa.string()),
            ("shape", pa.list_(pa.int64())),
            ("bytes", pa.int64()),
            ("codec", pa.string()),
            ("changed", pa.int64()),
            ("digest", pa.binary(digest_bytes)),
            ("part_digest", pa.binary(digest_bytes)),
        ]
    )


@dataclass(frozen=True, slots=True)
class Change:
    """The rows of one manifest as arrays: `numbers` are the parts' in a PartIndex, `codecs` those in its list of them,
    digests have a row each. Digests lie in the manifest's own bytes, and keep them in memory."""

    version: int
    numbers: npt.NDArray[np.int32]
    changed: Ints
    codecs: npt.NDArray[np.int8]
    before: Digests
    after: Digests
    whole: Digests

    def detached(self) -> "Change":
        """The same without the manifest, and without what the versions before it say too."""
        after = self.after.copy()
        whole = after if self.whole.tobytes() == after.tobytes() else self.whole.copy()
        return replace(self, before=self.before[:0], after=after, whole=whole)


class PartIndex:
    """The parts of a run's model by number, in the order in which the state digest takes them; from version 0."""

    def __init__(self, base: OpenManifest) -> None:
        rows = base.rows
        names, offsets = rows.column("tensor").to_pylist(), rows.column("offset").to_pylist()
        order = sorted(range(len(names)), key=lambda n: (names[n].encode(), offsets[n]))
        taken = pa.array(order, pa.int64())
        self.keys = [PartKey(names[n], offsets[n]) for n in order]
        self.base = base
        self.digests: Digests = _digests(rows.column("after"), _digest_bytes(base))[order]
        self._constants = {
            "tensor": rows.column("tensor").take(taken),
            "offset": rows.column("offset").take(taken).cast(pa.int64()),
            "dtype": rows.column("dtype").take(taken),
            "shape": rows.column("shape").take(taken).cast(pa.list_(pa.int64())),
            "bytes": rows.column("bytes").take(taken).cast(pa.int64()),
        }
        self.specs: dict[str, TensorSpec] = {}
        told = (self._constants[name].to_pylist() for name in ("dtype", "shape", "bytes"))
        for key, dtype, shape, nbytes in zip(self.keys, *told, strict=True):
            before = self.specs[key.tensor].nbytes if key.offset else 0
            self.specs[key.tensor] = TensorSpec(key.tensor, dtype, tuple(shape), before + nbytes)
        self._codes = {key: code for code, key in enumerate(self.keys)}
        self.parts_of = Counter(key.tensor for key in self.keys)
        self._codecs: list[str] = []
        self._last_codecs: tuple[Any, npt.NDArray[np.int8]] | None = None
        self._last: tuple[Any, npt.NDArray[np.int32]] | None = None

    def change(self, opened: OpenManifest) -> Change:
        """A delta's rows by number. Raises ManifestCorrupt for a row that is no part of the base."""
        rows, size = opened.rows, _digest_bytes(self.base)
        try:
            return Change(
                opened.head.version,
                self._numbers(rows.select([0, 1, 2, 3, 4])),
                rows.column("changed").to_numpy().astype(np.int64),
                self._codec_numbers(rows.column("codec")),
                *(_digests(rows.column(name), size) for name in ("before", "after", "tensor_digest")),
            )
        except (KeyError, ValueError) as error:
            raise ManifestCorrupt(
                f"{manifest_key(opened.head.version)} has rows that are no parts of version 0: {error}. Nothing was "
                "read from it; audit the store."
            ) from error

    def table(self, changes: Sequence[Change]) -> Any:
        """The rows of several deltas as one table of `parts_schema`."""
        size = self.digests.shape[1]
        numbers = _joined([c.numbers for c in changes], np.int32)
        versions = np.repeat([c.version for c in changes], [len(c.numbers) for c in changes]).astype(np.int64)
        order = np.argsort(numbers.astype(np.int64) << 32 | versions, kind="stable")
        taken = pa.array(numbers[order])
        after, whole = (
            np.concatenate([getattr(c, name) for c in changes] or [np.empty((0, size), np.uint8)])[order]
            for name in ("after", "whole")
        )
        columns = {name: column.take(taken) for name, column in self._constants.items()}
        columns |= {
            "version": pa.array(versions[order]),
            "codec": pa.array(self._codecs, pa.string()).take(
                pa.array(_joined([c.codecs for c in changes], np.int8)[order])
            ),
            "changed": pa.array(_joined([c.changed for c in changes], np.int64)[order]),
            "digest": _binary(whole),
            "part_digest": _binary(after, present=(after != whole).any(axis=1)),
        }
        schema = parts_schema(size)
        return pa.table([columns[name] for name in schema.names], schema=schema)

    def _codec_numbers(self, column: Any) -> npt.NDArray[np.int8]:
        if self._last_codecs is not None and column.equals(self._last_codecs[0]):
            return self._last_codecs[1]
        encoded = column.dictionary_encode()
        names = encoded.dictionary.to_pylist()
        self._codecs += [name for name in names if name not in self._codecs]
        known = np.array([self._codecs.index(name) for name in names], np.int8)
        found: npt.NDArray[np.int8] = known[encoded.indices.to_numpy()]
        self._last_codecs = column, found
        return found

    def _numbers(self, what: Any) -> npt.NDArray[np.int32]:
        """The parts' numbers. Most versions change the same parts as the one before, in the same order."""
        if self._last is not None and what.equals(self._last[0]):
            return self._last[1]
        names, offsets = what.column("tensor").to_pylist(), what.column("offset").to_pylist()
        found = np.array([self._codes[PartKey(*key)] for key in zip(names, offsets, strict=True)], np.int32)
        if len(np.unique(found)) != len(found):
            raise ValueError("a part stands in it twice")
        for name, column in self._constants.items():
            if not column.take(pa.array(found)).equals(what.column(name).cast(column.type)):
                raise ValueError(f"{name} is another than there")
        self._last = what, found
        return found


def versions_table(manifests: Iterable[OpenManifest]) -> Any:
    """One row a manifest."""
    rows = [version_row(opened.head, opened.rows) for opened in manifests]
    return pa.Table.from_pylist(rows, schema=VERSIONS)


def version_row(m: Manifest, rows: Any) -> dict[str, Any]:
    """A manifest as one row of VERSIONS; `rows` as Arrow has them."""
    return {
        "version": m.version,
        "parent": m.parent,
        "kind": m.kind,
        "created": m.created_ns,
        "writer": m.writer,
        "commit_id": m.commit_id,
        "digest": m.digest,
        "parent_digest": m.parent_digest,
        "state_digest": m.state_digest,
        "signed": m.signature != NO_SIGNATURE,
        "tensors": _tensors(rows),
        "parts": rows.num_rows,
        "changed": int(rows.column("changed").to_numpy().sum(dtype=np.int64)),
        "wire_bytes": 0 if m.kind == "base" else m.wire_bytes,
        "shards": len(m.shards),
        "model_elements": m.model_elements,
        "model_bytes": m.model_bytes,
        "model_tensors": m.tensors,
        "labels": _JSON.encode(dict(m.labels)),
    }


def _tensors(rows: Any) -> int:
    offsets = rows.column("offset").to_numpy()
    return len(rows.column("tensor").unique()) if offsets.any() else rows.num_rows


def records_table(records: Iterable[HostRecord]) -> Any:
    """One row a record, in the order of RECORDS."""
    ordered = sorted(records, key=lambda r: (r.version, r.host, r.ended_ns, r.attempt))
    columns = {
        "started": [r.started_ns for r in ordered],
        "ended": [r.ended_ns for r in ordered],
        "seconds": [sorted((name, float(taken)) for name, taken in r.seconds.items()) for r in ordered],
    }
    return pa.table(
        [columns.get(f.name) or [getattr(r, f.name) for r in ordered] for f in RECORDS] if ordered else _none(RECORDS),
        schema=RECORDS,
    )


def table_records(table: Any) -> list[HostRecord]:
    """The records of a table of RECORDS, in its order."""
    moments = {name: table.column(name).cast(pa.int64()).to_pylist() for name in ("started", "ended")}
    rest = table.drop_columns(["started", "ended"]).to_pylist()
    return [
        HostRecord(**{**row, "seconds": dict(row["seconds"]), "started_ns": started, "ended_ns": ended})
        for row, started, ended in zip(rest, moments["started"], moments["ended"], strict=True)
    ]


def sorted_parts(tables: Sequence[Any]) -> Any:
    """Several tables of parts as one, in the order of one."""
    return pa.concat_tables(tables).sort_by(
        [("tensor", "ascending"), ("offset", "ascending"), ("version", "ascending")]
    )


def sorted_records(tables: Sequence[Any]) -> Any:
    """Several tables of records as one, in the order of one."""
    keys = ("version", "host", "ended", "attempt")
    return pa.concat_tables(tables).sort_by([(key, "ascending") for key in keys])


def to_parquet(kind: str, table: Any, about: Mapping[str, str]) -> bytes:
    """A table as a Parquet file whose pages carry checksums; `about` goes into its metadata."""
    # Digests of versions and parts are noise: compressing them, or keeping their extremes, buys nothing.
    noise = [name for name in table.schema.names if name in _DIGESTS and kind == "parts"]
    told = [name for name in table.schema.names if name not in noise]
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata({f"weighbridge.{name}": value for name, value in about.items()}),
        sink,
        row_group_size=_ROW_GROUP[kind],
        compression={name: "none" if name in noise else "zstd" for name in leaves(table.schema)},
        use_dictionary=[name for name in leaves(table.schema) if name not in noise],
        write_statistics=told,
        write_page_checksum=True,
    )
    return bytes(sink.getvalue())


def leaves(schema: Any) -> list[str]:
    """A schema's columns as Parquet names them: a list is one, a map two."""
    inner = {"shape": ["shape.list.element"], "seconds": ["seconds.key_value.key", "seconds.key_value.value"]}
    return [leaf for name in schema.names for leaf in inner.get(name, [name])]


def _digest_bytes(manifest: OpenManifest) -> int:
    return len(digest_bytes(manifest.head.digest_kind, b""))


def _digests(column: Any, size: int) -> Digests:
    """A column of digests, all of one size (or all empty, as `before` is in version 0), as one row each."""
    count = len(column)
    if count == 0:
        return np.empty((0, size), np.uint8)
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int32, count + 1, 4 * column.offset)
    start = int(ends[0])
    if start == ends[-1]:
        return np.empty((count, 0), np.uint8)
    if ends.tobytes() != _even(start, count, size):
        raise ValueError("digests of another length")
    return np.frombuffer(data, np.uint8, count * size, start).reshape(count, size)


@lru_cache(maxsize=16)
def _even(start: int, count: int, size: int) -> bytes:
    """Where digests of one size end, one after the other: as in nearly every manifest of a run."""
    return np.arange(start, start + (count + 1) * size, size, dtype=np.int32).tobytes()


def _binary(digests: Digests, *, present: npt.NDArray[np.bool_] | None = None) -> Any:
    kind = pa.binary(digests.shape[1])
    valid = None if present is None else pa.py_buffer(np.packbits(present, bitorder="little").tobytes())
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(digests), [valid, pa.py_buffer(digests.tobytes())])


def _joined(arrays: Sequence[Any], kind: Any) -> Any:
    return np.concatenate(arrays) if arrays else np.empty(0, kind)


def _none(schema: Any) -> list[Any]:
    return [pa.array([], field.type) for field in schema]
