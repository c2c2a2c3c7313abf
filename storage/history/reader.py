"""Reads a run's history as Arrow tables: segments where they stand, manifests and records where they do not. What
cannot be read is named and left out. Must not know what is asked of the tables."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from weighbridge.errors import CorruptData, LineageError, ManifestCorrupt, ObjectMissing, ObjectTooLarge, StoreError
from weighbridge.storage.history.fetching import fetch_all
from weighbridge.storage.history.segment_file import open_segment
from weighbridge.storage.history.segments import Gap, Kind, Segment, cover, covered_upto, list_segments
from weighbridge.storage.history.tables import (
    VERSIONS,
    PartIndex,
    parts_schema,
    records_table,
    sorted_records,
    versions_table,
)
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import OpenManifest, manifest_key, open_bytes
from weighbridge.storage.records import parse_record, read_record, record_hosts, record_keys, version_of
from weighbridge.storage.sealed_json import MOST_SEALED_BYTES
from weighbridge.storage.stores.contract import Store
from weighbridge.values import HostRecord

_MOST_MISSING = 64
_PER_TABLE = 64
"""Manifests that are read into one table, so that a long history without segments fits into memory."""


class History:
    """What a root remembers, as of the moment when it was first asked. Not thread-safe.

    `faults` names what could not be read and is missing from the tables; each is found by `audit` too.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.faults: list[CorruptData] = []
        self._segments: dict[Kind, list[Segment]] = {}
        self._unreadable: set[str] = set()
        self._index: PartIndex | None = None
        self.lineage = Lineage(store, floor=self._floor())
        self._missing = 0
        self._head: int | None = None

    @property
    def head(self) -> int:
        """The newest version; -1 when there is none."""
        if self._head is None:
            self._head = self.lineage.head()
        return self._head

    @property
    def index(self) -> PartIndex:
        """The parts of the model. Raises VersionUnknown, ManifestCorrupt for a root whose version 0 is no use."""
        if self._index is None:
            self._index = PartIndex(self.lineage.open(0))
        return self._index

    def segments(self, kind: Kind) -> list[Segment]:
        """The segments of a kind that stand and were not found unreadable."""
        if kind not in self._segments:
            self._segments[kind] = [s for s in list_segments(self.store, kind) if s.key not in self._unreadable]
        return self._segments[kind]

    def versions(self, first: int = 0, last: int | None = None, *, columns: Sequence[str] | None = None) -> Any:
        """A table of `tables.VERSIONS`, or of some of its columns, with the versions from `first` to `last` (None: the
        head), in order."""
        last = self.head if last is None else min(last, self.head)
        names = list(columns or VERSIONS.names)
        wanted = list(dict.fromkeys([*names, "version"]))

        def from_segment(segment: Segment, first: int, last: int) -> Any:
            return _within(open_segment(self.store, segment).read(wanted), first, last).select(names)

        def from_manifests(gap: Gap) -> Any:
            return versions_table(self.manifests(gap.first, gap.last)).select(names)

        schema = pa.schema([VERSIONS.field(name) for name in names])
        return _together(self._tables("versions", first, last, from_segment, from_manifests), schema)

    def parts(
        self,
        first: int = 0,
        last: int | None = None,
        *,
        tensor: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[Any]:
        """Tables with the parts that versions `first` to `last` changed, of all tensors or of one; `columns` of
        `tables.parts_schema`, which see. In no promised order; version 0 changes nothing."""
        first, last = max(first, 1), self.head if last is None else min(last, self.head)
        names = list(columns or parts_schema(1).names)
        wanted = list(dict.fromkeys([*names, "version", *(["tensor"] if tensor is not None else [])]))

        def from_segment(segment: Segment, first: int, last: int) -> Any:
            file = open_segment(self.store, segment)
            groups = None if tensor is None else file.groups_with(tensor)
            return _within(of_tensor(file.read(wanted, groups=groups)), first, last).select(names)

        def from_manifests(gap: Gap) -> Any:
            changes = [self.index.change(opened) for opened in self.manifests(gap.first, gap.last)]
            return of_tensor(self.index.table(changes)).select(names)

        def of_tensor(table: Any) -> Any:
            return table if tensor is None else table.filter(pc.equal(table.column("tensor"), tensor))

        return self._tables("parts", first, last, from_segment, from_manifests)

    def records(self, *, version: int | None = None, since: int = 0) -> Any:
        """A table of `tables.RECORDS` with the hosts' records: of all versions, of one, or of those who knew of
        version `since` or a newer one.

        A record that came so late that its segment was there already shows with the next compaction.
        """
        segments = self.segments("records")
        upto = min(covered_upto(segments), self.head)
        at_least = since if version is None else version

        def from_segment(segment: Segment, first: int, last: int) -> Any:
            file = open_segment(self.store, segment)
            if version is None:
                return _within(file.read(), first, last, by="head")
            table = file.read(groups=file.groups_with(version))
            return _within(table.filter(pc.equal(table.column("version"), version)), first, last, by="head")

        def from_records(gap: Gap) -> Any:
            return records_table(self._records(gap.first, gap.last, version))

        tables = list(self._tables("records", at_least, upto, from_segment, from_records)) if at_least <= upto else []
        tables.append(records_table(self._records(max(at_least, upto + 1), None, version)))
        return sorted_records(tables)

    def records_before(self, upto: int, *, host: str) -> Iterator[Any]:
        """Tables with a host's records up to a `head` that segments reach, those of the newest versions first."""

        def of_host(table: Any) -> Any:
            return table.filter(pc.equal(table.column("host"), host))

        upto = min(upto, self.head)
        for piece in reversed(list(cover(self.segments("records"), 0, upto)) if upto >= 0 else []):
            yield from self._tables(
                "records",
                piece.first,
                piece.last,
                lambda segment, first, last: of_host(
                    _within(open_segment(self.store, segment).read(), first, last, by="head")
                ),
                lambda gap: of_host(records_table(self._records(gap.first, gap.last, None))),
            )

    def manifests(self, first: int, last: int) -> Iterator[OpenManifest]:
        """The manifests of versions that no segment has, those that can be read. Others are named in `faults`. Raises
        ManifestCorrupt where too many in a row are missing: then what says that there are so many lies."""
        keys = (manifest_key(version) for version in range(first, last + 1))
        for version, (key, data) in enumerate(fetch_all(self.store, keys), first):
            self._missing = self._missing + 1 if isinstance(data, ObjectMissing) else 0
            if self._missing > _MOST_MISSING:
                raise ManifestCorrupt(
                    f"more than {_MOST_MISSING} versions in a row up to {version} are missing in {self.store.url}, and "
                    "its history names newer ones: audit the store. Nothing was changed."
                )
            try:
                yield self._proven(key, data, version)
            except (CorruptData, LineageError) as error:
                self.note(error)

    def note(self, fault: Exception) -> None:
        """Names what could not be read, once."""
        if str(fault) not in map(str, self.faults):
            # Its words alone: by its traceback a fault would keep in memory whatever could not be read.
            self.faults.append(CorruptData(str(fault)))

    def read_records(self, keys: Sequence[str]) -> Iterator[HostRecord]:
        """Records by their keys, in that order; those that cannot be read are named in `faults`."""
        for key, data in fetch_all(self.store, keys, most=MOST_SEALED_BYTES):
            try:
                if isinstance(data, ObjectMissing):
                    continue  # listed a moment ago, and removed since
                if isinstance(data, bytes):
                    with contextlib.suppress(CorruptData):
                        yield parse_record(data, key)
                        continue
                elif not isinstance(data, ObjectTooLarge):
                    raise data
                yield read_record(self.store, key)  # a bit may have flipped on the way
            except CorruptData as error:
                self.note(error)

    def _records(self, first: int, last: int | None, version: int | None) -> Iterator[HostRecord]:
        keys = [
            key
            for host in record_hosts(self.store)
            for key in record_keys(self.store, host, head=first, upto=last)
            if version is None or version_of(key) == version
        ]
        return self.read_records(keys)

    def _proven(self, key: str, data: bytes | StoreError, version: int) -> OpenManifest:
        if isinstance(data, ObjectMissing):
            raise ManifestCorrupt(f"{key} is missing, though newer versions stand: audit the store") from data
        if isinstance(data, ObjectTooLarge):
            raise ManifestCorrupt(str(data)) from data
        if isinstance(data, StoreError):
            raise data
        try:
            opened = open_bytes(data, where=key)
        except ManifestCorrupt:  # a bit may have flipped on the way; one that did in the store did so twice
            opened = open_bytes(self.store.get(key), where=key)
        self.lineage.check(opened.head, version)
        return opened

    def _tables(
        self,
        kind: Kind,
        first: int,
        last: int,
        from_segment: Callable[[Segment, int, int], Any],
        from_source: Callable[[Gap], Any],
    ) -> Iterator[Any]:
        for piece in cover(self.segments(kind), first, last):
            if isinstance(piece, Gap):
                for start in range(piece.first, piece.last + 1, _PER_TABLE):
                    yield from_source(Gap(start, min(start + _PER_TABLE - 1, piece.last)))
                continue
            span = max(first, piece.first), min(last, piece.last)
            try:
                table = from_segment(piece, *span)
            except ObjectMissing:  # a compactor put it into a longer one
                self._let_go(piece)
            except CorruptData as error:
                self.note(error)
                self._let_go(piece)
            else:
                yield table
                continue
            yield from self._tables(kind, *span, from_segment, from_source)

    def _floor(self) -> int:
        """The newest version that a segment tells of and that stands: nothing below it need be listed."""
        told = sorted({s.last for s in self.segments("versions")}, reverse=True)
        lineage = Lineage(self.store)
        return next((version for version in told if lineage.is_committed(version)), -1)

    def _let_go(self, segment: Segment) -> None:
        """Looks for segments again, without this one."""
        self._unreadable.add(segment.key)
        self._segments.pop(segment.kind, None)


def _within(table: Any, first: int, last: int, *, by: str = "version") -> Any:
    column = table.column(by)
    extremes = pc.min_max(column).as_py() if table.num_rows else {"min": first, "max": last}
    if extremes["min"] >= first and extremes["max"] <= last:
        return table
    return table.filter(pc.and_(pc.greater_equal(column, first), pc.less_equal(column, last)))


def _together(tables: Iterator[Any], schema: Any) -> Any:
    found = [table.replace_schema_metadata(None) for table in tables]
    return pa.concat_tables(found) if found else schema.empty_table()
