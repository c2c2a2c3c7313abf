"""Makes the history's segments from manifests and records, puts short ones together into longer ones, and removes those
that no reader takes any more. Safe beside a running trainer, hosts and other compactors: everything is put-if-absent,
and nothing but segments is ever removed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import structlog

from weighbridge.errors import CorruptData, LineageError, ManifestCorrupt, ObjectMissing, what_happened
from weighbridge.storage.clock import Clock, SystemClock
from weighbridge.storage.commit import put_if_absent
from weighbridge.storage.digests import chain_digest
from weighbridge.storage.history.reader import History
from weighbridge.storage.history.segment_file import open_segment, segment_of
from weighbridge.storage.history.segments import (
    Kind,
    Segment,
    cover,
    covered_upto,
    due_blocks,
    due_merges,
    list_segments,
    superseded,
)
from weighbridge.storage.history.tables import (
    records_table,
    sorted_parts,
    sorted_records,
    table_records,
    to_parquet,
    versions_table,
)
from weighbridge.storage.manifest import OpenManifest, manifest_key
from weighbridge.storage.records import head_of, record_hosts, record_key, record_keys
from weighbridge.storage.stores.contract import MOST_SMALL_BYTES, Store

log = structlog.get_logger("weighbridge.compact")

RECORDS_BEHIND = 64
"""Records are compacted once the head is so far beyond them: by then those who were at work have written theirs."""
_MOST_ROWS: dict[Kind, int] = {"versions": 1 << 16, "parts": 1 << 18, "records": 1 << 20}
"""Segments grow to so many rows, which a reader can hold."""


@dataclass(slots=True)
class Compaction:
    """What a compaction did. `faults` names what could not be read and keeps a stretch from being compacted."""

    head: int
    written: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    faults: list[CorruptData] = field(default_factory=list)


def compact(store: Store, *, mend: bool = False, clock: Clock | None = None) -> Compaction:
    """Brings the history's segments up to date. `mend` first reads all of them, and removes those that are not what
    their names promise, so that they are made anew.

    Raises LineageError for a root without a run. What an unreadable manifest keeps from being compacted is read from
    the manifests; an unreadable record is left out, by name, until it can be read.
    """
    work = _Compactor(store, clock or SystemClock())
    if mend:
        work.mend()
    work.chain()
    work.records()
    for kind in ("parts", "versions", "records"):
        work.merge(kind)
    work.sweep()
    log.info("compacted", head=work.done.head, written=len(work.done.written), removed=len(work.done.removed))
    return work.done


class _Compactor:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._history = History(store)
        self._run = self._history.lineage.run.run_id
        self.done = Compaction(self._history.head, faults=self._history.faults)

    def mend(self) -> None:
        """Removes segments whose bytes are not those that their names promise, or that no reader takes."""
        for kind in _MOST_ROWS:
            for segment in list_segments(self._store, kind):
                if segment.nbytes > MOST_SMALL_BYTES or not _is_sound(segment, self._store.get(segment.key)):
                    self._remove(segment)

    def sweep(self) -> None:
        """Removes what nobody takes, so that nothing is told twice to whoever just reads all there is. A reader that
        counted on it looks again."""
        for kind in _MOST_ROWS:
            for segment in superseded(list_segments(self._store, kind)):
                self._remove(segment)

    def chain(self) -> None:
        """Writes the blocks of versions and parts that no segment has, as far as the chain can be proven."""
        missing: dict[Kind, set[tuple[int, int]]] = {
            kind: set(due_blocks(list_segments(self._store, kind), self.done.head)) for kind in ("parts", "versions")
        }
        for first, last in sorted(missing["parts"] | missing["versions"]):
            try:
                opened = list(self._proven(first, last))
                index = self._history.index
                changes = [index.change(one) for one in opened if one.head.version > 0]
            except (ManifestCorrupt, LineageError) as error:
                self._history.note(error)
                continue
            if (first, last) in missing["parts"]:
                self._write("parts", first, last, index.table(changes))
            if (first, last) in missing["versions"]:
                self._write("versions", first, last, versions_table(opened))

    def records(self) -> None:
        """Writes the blocks of records that no segment has, and new editions of those to which some came late."""
        segments = list_segments(self._store, "records")
        keys = [key for host in record_hosts(self._store) for key in record_keys(self._store, host)]
        for first, last in due_blocks(segments, self.done.head - RECORDS_BEHIND):
            found = self._history.read_records([key for key in keys if first <= head_of(key) <= last])
            self._write("records", first, last, records_table(found))
        for segment in cover(segments, 0, covered_upto(segments)):
            if isinstance(segment, Segment):
                self._add_late(segment, [key for key in keys if segment.first <= head_of(key) <= segment.last])

    def _add_late(self, segment: Segment, keys: Sequence[str]) -> None:
        """Records that cannot be read are looked at again each time, until somebody restores them."""
        try:
            file = open_segment(self._store, segment)
            if file.rows == len(keys):
                return
            held = table_records(file.read())
        except ObjectMissing:  # another compactor was faster
            return
        except CorruptData as error:
            self._history.note(error)
            return
        late = list(self._history.read_records(sorted(set(keys) - {record_key(record) for record in held})))
        if late:
            table = records_table([*held, *late])
            self._write("records", *segment.span, table, edition=segment.edition + 1)

    def merge(self, kind: Kind) -> None:
        """Puts short segments together, as long as that makes longer ones that a reader can hold."""
        seen: set[tuple[int, int]] = set()
        while due := [(s, p) for s, p in due_merges(list_segments(self._store, kind)) if s not in seen]:
            for span, parts in due:
                seen.add(span)
                if sum(self._rows(part) for part in parts) <= _MOST_ROWS[kind]:
                    self._merge(kind, span, parts)

    def _merge(self, kind: Kind, span: tuple[int, int], parts: Sequence[Segment]) -> None:
        tables = list(self._whole(parts))
        if len(tables) == len(parts):
            sort = {"parts": sorted_parts, "records": sorted_records, "versions": pa.concat_tables}[kind]
            self._write(kind, *span, sort(tables))

    def _rows(self, segment: Segment) -> int:
        """How many rows a segment has; none for one that is not there or not to be read, which `_whole` tells."""
        try:
            return open_segment(self._store, segment).rows
        except (ObjectMissing, CorruptData):
            return 0

    def _whole(self, segments: Iterable[Segment]) -> Iterator[pa.Table]:
        """The tables of those segments that are what their names promise."""
        for segment in segments:
            try:
                data = self._store.get(segment.key)
            except ObjectMissing:  # another compactor was faster
                continue
            if segment.is_whole(data):
                try:
                    yield segment_of(segment, data).read()
                except CorruptData as error:
                    self._history.note(error)
            else:
                self._history.note(
                    CorruptData(f"{segment.key} is not what its name promises; `weighbridge compact --mend` it.")
                )

    def _proven(self, first: int, last: int) -> Iterator[OpenManifest]:
        """The manifests of a block, each the child of the one before."""
        parent = self._history.lineage.open(first - 1).head.digest if first > 0 else ""
        expected = first
        for opened in self._history.manifests(first, last):
            head = opened.head
            if head.version != expected or head.parent_digest != parent:
                raise ManifestCorrupt(
                    f"{manifest_key(head.version)} does not follow on what stands before it: the versions {first} to "
                    f"{last} were not compacted. Nothing was changed; audit the store."
                )
            yield opened
            parent, expected = head.digest, expected + 1
        if expected != last + 1:
            raise ManifestCorrupt(
                f"{manifest_key(expected)} cannot be read: the versions {first} to {last} were not compacted. Nothing "
                "was changed; audit the store."
            )

    def _write(self, kind: Kind, first: int, last: int, table: pa.Table, *, edition: int = 0) -> None:
        about = {"format": "1", "run_id": self._run, "kind": kind, "first": str(first), "last": str(last)}
        data = to_parquet(kind, table, about)
        segment = Segment(kind, first, last, edition, chain_digest(data), len(data))
        try:
            segment_of(segment, data).read()
        except CorruptData as error:  # records or labels that nobody writes: what no reader takes is not written
            self._history.note(
                CorruptData(f"{kind} of the versions {first} to {last} were not compacted: {what_happened(error)}.")
            )
            return
        # Others who write the same may have done so: by its name it has the same bytes.
        put_if_absent(self._store, segment.key, data, clock=self._clock)
        self.done.written.append(segment.key)

    def _remove(self, segment: Segment) -> None:
        self._store.delete(segment.key)
        self.done.removed.append(segment.key)


def _is_sound(segment: Segment, data: bytes) -> bool:
    """Whether bytes are those that a segment's name promises, and such as readers take."""
    try:
        return segment.is_whole(data) and segment_of(segment, data).read() is not None
    except CorruptData:
        return False
