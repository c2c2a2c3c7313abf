"""What was published and what came of it, read from manifests and hosts' records: the answers behind `log`, `show`,
`diff` and `status`. Only reads."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby

from weighbridge.errors import UsageError
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.records import latest, outcome_of, read_records
from weighbridge.values import HostRecord, Label, Manifest, PartKey


@dataclass(frozen=True, slots=True)
class VersionLine:
    """One version as `log` shows it. `digest` is its manifest's own, `tensors` counts those that changed, `created` is
    the writer's clock (ISO 8601, UTC)."""

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


def describe(manifest: Manifest) -> VersionLine:
    """A manifest as one line."""
    return VersionLine(
        version=manifest.version,
        parent=manifest.parent,
        kind=manifest.kind,
        digest=manifest.digest,
        state_digest=manifest.state_digest,
        tensors=len({row.key.tensor for row in manifest.rows}),
        changed_elements=manifest.changed_elements,
        model_elements=manifest.model_elements,
        model_bytes=manifest.model_bytes,
        wire_bytes=0 if manifest.kind == "base" else manifest.wire_bytes,
        created=iso(manifest.created_ns),
        writer=manifest.writer,
        labels=dict(manifest.labels),
    )


def log(lineage: Lineage, *, limit: int | None = None) -> Iterator[VersionLine]:
    """The versions, newest first, at most `limit`."""
    head = lineage.head()
    last = -1 if limit is None else max(-1, head - limit)
    for version in range(head, last, -1):
        yield describe(lineage.manifest(version))


def show(lineage: Lineage, version: int) -> VersionDetail:
    """One version, its tensors and what its hosts said. Raises VersionUnknown."""
    manifest = lineage.manifest(version)
    records = read_records(lineage.store, version=version)
    return VersionDetail(
        line=describe(manifest),
        tensors=_changes([manifest]),
        hosts=tuple(records),
        outcome=outcome_of(records),
        retired=lineage.is_retired(version),
    )


def diff(lineage: Lineage, older: int, newer: int) -> tuple[TensorChange, ...]:
    """What the versions after `older`, up to `newer`, changed, tensor by tensor. Raises VersionUnknown, UsageError."""
    if older > newer:
        raise UsageError(f"diff goes from an older version to a newer one, not from {older} to {newer}")
    return _changes(lineage.chain(older, newer))


def outcome(lineage: Lineage, version: int) -> str:
    """A version's outcome from its hosts' records; see `records.outcome_of`."""
    return outcome_of(read_records(lineage.store, version=version))


def status(lineage: Lineage) -> tuple[HostLine, ...]:
    """Every host that ever reported, by name."""
    head = lineage.head()
    lines = []
    for host, of_host in groupby(read_records(lineage.store), key=lambda r: r.host):
        records = sorted(of_host, key=lambda r: r.ended_ns)
        served = [r for r in records if r.outcome == "served"]
        # The last one that served is what the host has now, also when that was a roll-back to an older version.
        version = served[-1].version if served else -1
        last = latest(r for r in records if r.version == records[-1].version)[host]
        lines.append(
            HostLine(
                host=host,
                version=version,
                lag=head - version,
                outcome=last.outcome,
                stage=last.stage,
                last_version=last.version,
                at=iso(last.ended_ns),
                pause_seconds=last.seconds.get("pause", 0.0),
                error=last.error,
            )
        )
    return tuple(lines)


def _changes(manifests: list[Manifest] | tuple[Manifest, ...]) -> tuple[TensorChange, ...]:
    found: dict[str, TensorChange] = {}
    counted: set[PartKey] = set()
    for manifest in manifests:
        seen: set[str] = set()
        for row in manifest.rows:
            known = found.get(row.key.tensor)
            found[row.key.tensor] = TensorChange(
                tensor=row.key.tensor,
                dtype=row.dtype,
                shape=row.shape,
                nbytes=(known.nbytes if known else 0) + (0 if row.key in counted else row.nbytes),
                changed=row.changed + (known.changed if known else 0),
                steps=(known.steps if known else 0) + (row.key.tensor not in seen),
                codecs=tuple(sorted({row.codec, *(known.codecs if known else ())})),
                after=row.tensor_digest.hex(),
            )
            seen.add(row.key.tensor)
            counted.add(row.key)
    return tuple(found[name] for name in sorted(found))
