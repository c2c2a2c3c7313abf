"""The questions that people ask of a history, and their answers as values: log, show, diff, blame, hosts, status. Only
reads; how the history is kept is none of its business."""

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weighbridge.errors import UsageError, VersionUnknown
from weighbridge.storage.history.reader import History
from weighbridge.storage.history.segments import covered_upto
from weighbridge.storage.history.tables import Ints, table_records, versions_table
from weighbridge.storage.manifest import OpenManifest, version_folder
from weighbridge.storage.records import SERVED, latest, outcome_of, read_records, record_hosts, record_keys
from weighbridge.values import HostRecord, Label, PartKey

_FEW = 64
_CHANGE = ("tensor", "offset", "version", "bytes", "codec", "changed", "digest")


@dataclass(frozen=True, slots=True)
class VersionLine:
    """One version as `log` shows it. `digest` is its manifest's own, `tensors` counts those that changed, `created` is
    the writer's clock (ISO 8601, UTC). `retired`: its delta was collected; `has_anchor`: its whole state is kept."""

    version: int
    parent: int
    kind: str
    digest: str
    state_digest: str
    tensors: int
    changed_elements: int
    model_elements: int
    model_bytes: int
    wire_bytes: int
    created: str
    writer: str
    labels: Mapping[str, Label]
    retired: bool
    has_anchor: bool

    @property
    def density(self) -> float:
        """Changed elements over all."""
        return self.changed_elements / self.model_elements if self.model_elements else 0.0


@dataclass(frozen=True, slots=True)
class TensorChange:
    """One tensor of a version, or between two: `after` is the whole tensor's digest, hex.

    `nbytes` are those of its parts that changed: all of it, unless it is cut into several. `steps` counts the versions
    that changed it; `changed` adds up over them, so an element that changed twice counts twice. `codecs` are those that
    carried it.
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    changed: int
    steps: int
    codecs: tuple[str, ...]
    after: str


@dataclass(frozen=True, slots=True)
class VersionDetail:
    """One version as `show` shows it."""

    line: VersionLine
    tensors: tuple[TensorChange, ...]
    hosts: tuple[HostRecord, ...]
    outcome: str
    retired: bool


@dataclass(frozen=True, slots=True)
class Blame:
    """One version that changed a tensor: elements and bytes of its parts that did, and the tensor's digest after."""

    version: int
    created: str
    changed: int
    nbytes: int
    codecs: tuple[str, ...]
    after: str
    labels: Mapping[str, Label]


@dataclass(frozen=True, slots=True)
class HostLine:
    """One host as `status` shows it: the newest version it served, how far behind the head that is, its last record."""

    host: str
    version: int
    lag: int
    outcome: str
    stage: str
    last_version: int
    at: str
    pause_seconds: float
    error: str


def iso(moment_ns: int) -> str:
    """A moment in nanoseconds since the epoch as ISO 8601, UTC."""
    return datetime.fromtimestamp(moment_ns / 1e9, UTC).isoformat(timespec="milliseconds")


def log(history: History, *, limit: int | None = None) -> Iterator[VersionLine]:
    """The versions, newest first, at most `limit`."""
    first = 0 if limit is None else max(0, history.head - limit + 1)
    return _lines(history.versions(first).sort_by([("version", "descending")]), forms_kept(history, first))


def describe(history: History, opened: OpenManifest) -> VersionLine:
    """A manifest as one line."""
    version = opened.head.version
    (line,) = _lines(versions_table([opened]), forms_kept(history, version, version))
    return line


@dataclass(frozen=True, slots=True)
class FormsKept:
    """The versions whose delta is retired, and those that have an anchor."""

    retired: frozenset[int]
    anchors: frozenset[int]


def forms_kept(history: History, first: int, last: int | None = None) -> FormsKept:
    """What marks and hints say of the versions from `first` to `last` (None: the head): asked one by one of a few, else
    in one listing."""
    last = history.head if last is None else last
    anchors = frozenset(history.lineage.anchors())
    if last - first < _FEW:
        marked: Iterator[int] = (v for v in range(first, last + 1) if history.lineage.is_retired(v))
    else:
        listed = history.store.list_after("versions", version_folder(first))
        marked = (int(info.key.split("/")[1]) for info in listed if info.key.endswith("/retired"))
    return FormsKept(frozenset(marked), anchors)


def show(history: History, version: int) -> VersionDetail:
    """One version, its tensors and what its hosts said. Raises VersionUnknown, ManifestCorrupt."""
    opened = history.lineage.open(version)
    records = table_records(history.records(version=version))
    changes = _Changes(history)
    changes.add(history.index.table([history.index.change(opened)]))
    line = describe(history, opened)
    return VersionDetail(
        line=line,
        tensors=changes.all(),
        hosts=tuple(records),
        outcome=outcome_of(records),
        retired=line.retired,
    )


def diff(history: History, older: int, newer: int) -> tuple[TensorChange, ...]:
    """What the versions after `older`, up to `newer`, changed, by tensor; nothing where both have the same state.

    A tensor that was changed and changed back beside others is listed: its elements did change. Raises VersionUnknown,
    UsageError.
    """
    if older > newer:
        raise UsageError(f"diff goes from an older version to a newer one, not from {older} to {newer}")
    for version in (older, newer):
        if not 0 <= version <= history.head:
            raise VersionUnknown(f"{history.store.url} has no version {version}; its head is {history.head}")
    ends = (
        history.versions(v, v, columns=("state_digest",)).column("state_digest").to_pylist() for v in (older, newer)
    )
    before, after = ends
    if before == after:
        return ()
    changes = _Changes(history)
    for table in history.parts(older + 1, newer, columns=_CHANGE):
        changes.add(table)
    return changes.all()


def blame(history: History, tensor: str) -> tuple[Blame, ...]:
    """The versions that changed a tensor, newest first. Raises UsageError when the model has no such tensor."""
    names = sorted({key.tensor for key in history.index.keys})
    if tensor not in names:
        near = difflib.get_close_matches(tensor, names, 3) or names[:3]
        raise UsageError(f"the model has no tensor {tensor!r}; it has {', '.join(near)} and others. Nothing was read.")
    rows = [row for table in history.parts(tensor=tensor, columns=_CHANGE) for row in table.to_pylist()]
    about = history.versions(columns=("version", "created", "labels"))
    lines = zip(about.column("created").cast(pa.int64()).to_pylist(), about.column("labels").to_pylist(), strict=True)
    told = dict(zip(about.column("version").to_pylist(), lines, strict=True))
    found = []
    for version, of_version in groupby(sorted(rows, key=lambda r: -r["version"]), key=lambda r: r["version"]):
        parts = list(of_version)
        created, labels = told.get(version, (0, "{}"))
        found.append(
            Blame(
                version=version,
                created=iso(created),
                changed=sum(part["changed"] for part in parts),
                nbytes=sum(part["bytes"] for part in parts),
                codecs=tuple(sorted({part["codec"] for part in parts})),
                after=parts[0]["digest"].hex(),
                labels=json.loads(labels),
            )
        )
    return tuple(found)


def hosts(history: History, *, host: str | None = None, limit: int | None = None) -> tuple[HostRecord, ...]:
    """Who served what, when, and how long the pause was: the hosts' records, newest first, at most `limit`."""
    table = history.records()
    if host is not None:
        table = table.filter(pc.equal(table.column("host"), host))
    newest = table.sort_by([("ended", "descending"), ("host", "ascending")]).slice(0, limit)
    return tuple(table_records(newest))


def outcome(history: History, version: int) -> str:
    """A version's outcome from its hosts' records; see `records.outcome_of`."""
    return outcome_of(read_records(history.store, version=version, on_corrupt=history.note))


def status(history: History) -> tuple[HostLine, ...]:
    """Every host that ever reported, by name. Reads of each host only its newest records, back to one that served."""
    return tuple(line for host in record_hosts(history.store) if (line := _status(history, host)) is not None)


def _status(history: History, host: str) -> HostLine | None:
    records: list[HostRecord] = []
    for record in _newest_first(history, host):
        records.append(record)
        if any(r.outcome == SERVED for r in records) and record.head < records[0].head:
            break
    if not records:
        return None
    records.sort(key=lambda r: r.ended_ns)
    served = [r for r in records if r.outcome == SERVED]
    # The last one that served is what the host has now, also when that was a roll-back to an older version.
    version = served[-1].version if served else -1
    last = latest(r for r in records if r.version == records[-1].version)[host]
    return HostLine(
        host=host,
        version=version,
        lag=history.head - version,
        outcome=last.outcome,
        stage=last.stage,
        last_version=last.version,
        at=iso(last.ended_ns),
        pause_seconds=last.seconds.get("pause", 0.0),
        error=last.error,
    )


def _newest_first(history: History, host: str) -> Iterator[HostRecord]:
    """A host's records by `head`, newest first: asked of the store after what is compacted, then of the segments."""
    since = covered_upto(history.segments("records"))
    for key in reversed(list(record_keys(history.store, host, head=since + 1))):
        yield from history.read_records([key])
    for table in history.records_before(since, host=host):
        yield from sorted(table_records(table), key=lambda r: (r.head, r.ended_ns), reverse=True)


def _lines(table: Any, kept: FormsKept) -> Iterator[VersionLine]:
    created = table.column("created").cast(pa.int64()).to_pylist()
    for row, moment in zip(table.drop_columns(["created"]).to_pylist(), created, strict=True):
        yield VersionLine(
            version=row["version"],
            parent=row["parent"],
            kind=row["kind"],
            digest=row["digest"],
            state_digest=row["state_digest"],
            tensors=row["tensors"],
            changed_elements=row["changed"],
            model_elements=row["model_elements"],
            model_bytes=row["model_bytes"],
            wire_bytes=row["wire_bytes"],
            created=iso(moment),
            writer=row["writer"],
            labels=json.loads(row["labels"]),
            retired=row["version"] in kept.retired,
            has_anchor=row["version"] in kept.anchors,
        )


class _Changes:
    """Adds up tables of parts, tensor by tensor; each table has versions of its own."""

    def __init__(self, history: History) -> None:
        self._specs = history.index.specs
        self._found: dict[str, TensorChange] = {}
        self._last: dict[str, int] = {}
        self._parts: set[PartKey] = set()

    def add(self, table: Any) -> None:
        """Adds one table with the columns _CHANGE."""
        if not table.num_rows:
            return
        tensors = _encoded(table, "tensor")
        codecs = _encoded(table, "codec")
        version, offset, nbytes, changed = (
            table.column(name).to_numpy() for name in ("version", "offset", "bytes", "changed")
        )
        by_version = np.lexsort((version, tensors.codes))
        code, of = tensors.codes[by_version], version[by_version]
        starts = np.flatnonzero(np.r_[True, code[1:] != code[:-1]])
        steps = np.add.reduceat(np.r_[True, (code[1:] != code[:-1]) | (of[1:] != of[:-1])].astype(np.int64), starts)
        sums = np.add.reduceat(changed[by_version], starts)
        last = by_version[np.r_[starts[1:], len(code)] - 1]
        digests = table.column("digest").take(pa.array(last)).to_pylist()
        carried: dict[int, set[str]] = {}
        for pair in np.unique(tensors.codes.astype(np.int64) * len(codecs.names) + codecs.codes):
            number, codec = divmod(int(pair), len(codecs.names))
            carried.setdefault(number, set()).add(codecs.names[codec])
        weights = self._new_bytes(tensors, offset, nbytes)
        for number, place in enumerate(last):
            one = int(code[starts[number]])
            name = tensors.names[one]
            known = self._found.get(name)
            newest = self._last.get(name, -1) < version[place]
            self._last[name] = max(self._last.get(name, -1), int(version[place]))
            self._found[name] = TensorChange(
                tensor=name,
                dtype=self._specs[name].dtype,
                shape=self._specs[name].shape,
                nbytes=(known.nbytes if known else 0) + weights.get(name, 0),
                changed=(known.changed if known else 0) + int(sums[number]),
                steps=(known.steps if known else 0) + int(steps[number]),
                codecs=tuple(sorted(carried[one].union(known.codecs if known else ()))),
                after=digests[number].hex() if newest or known is None else known.after,
            )

    def all(self) -> tuple[TensorChange, ...]:
        """What was added, by the tensors' names."""
        return tuple(self._found[name] for name in sorted(self._found))

    def _new_bytes(self, tensors: "_Encoded", offset: Ints, nbytes: Ints) -> dict[str, int]:
        """Bytes by tensor of the parts that no table before had."""
        order = np.lexsort((offset, tensors.codes))
        code, place = tensors.codes[order], offset[order]
        first = order[np.r_[True, (code[1:] != code[:-1]) | (place[1:] != place[:-1])]]
        found: dict[str, int] = {}
        for row in first:
            key = PartKey(tensors.names[tensors.codes[row]], int(offset[row]))
            if key not in self._parts:
                self._parts.add(key)
                found[key.tensor] = found.get(key.tensor, 0) + int(nbytes[row])
        return found


@dataclass(frozen=True, slots=True)
class _Encoded:
    codes: Ints
    names: list[str]


def _encoded(table: Any, name: str) -> _Encoded:
    column = table.column(name).combine_chunks().dictionary_encode()
    return _Encoded(column.indices.to_numpy().astype(np.int64), column.dictionary.to_pylist())
