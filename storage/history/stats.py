"""A run in figures, a row a version: how much changed, what it weighed on the wire, how long it took hosts. Only reads;
charts are drawn elsewhere."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import pyarrow as pa
import pyarrow.compute as pc

from weighbridge.storage.history.questions import forms_kept, iso
from weighbridge.storage.history.reader import History
from weighbridge.storage.records import SERVED

PHASES = ("fetch", "apply", "pause")


@dataclass(frozen=True, slots=True)
class VersionStats:
    """One version in figures. `density` is changed over all elements, `ratio` the model's bytes over those on the wire
    (0 when there are none), `bytes_per_change` wire bytes over changed elements, `step_seconds` the time since the
    version before by the writers' clocks. Of the hosts that served it: their number, and medians in seconds. `retired`:
    its delta was collected; `has_anchor`: its whole state is kept."""

    version: int
    created: str
    tensors: int
    changed: int
    density: float
    wire_bytes: int
    ratio: float
    bytes_per_change: float
    step_seconds: float
    hosts: int
    fetch_seconds: float
    apply_seconds: float
    pause_seconds: float
    retired: bool
    has_anchor: bool


def stats(history: History, *, limit: int | None = None) -> Sequence[VersionStats]:
    """Every version but the base, oldest first; the newest `limit` of them."""
    first = 1 if limit is None else max(1, history.head - limit + 1)
    if first > history.head:
        return ()
    columns = ("version", "created", "tensors", "changed", "wire_bytes", "model_elements", "model_bytes")
    table = history.versions(first - 1, columns=columns)
    moments = table.column("created").cast(pa.int64()).to_pylist()
    times = _host_times(history, first)
    kept = forms_kept(history, first)
    found = []
    before: int | None = None
    for row, moment in zip(table.drop_columns(["created"]).to_pylist(), moments, strict=True):
        if row["version"] >= first:
            changed, wire = row["changed"], row["wire_bytes"]
            of_hosts = times.get(row["version"], [])
            fetch, apply, pause = map(median, zip(*(of_hosts or [(0.0,) * len(PHASES)]), strict=True))
            found.append(
                VersionStats(
                    version=row["version"],
                    created=iso(moment),
                    tensors=row["tensors"],
                    changed=changed,
                    density=changed / row["model_elements"] if row["model_elements"] else 0.0,
                    wire_bytes=wire,
                    ratio=row["model_bytes"] / wire if wire else 0.0,
                    bytes_per_change=wire / changed if changed else 0.0,
                    step_seconds=0.0 if before is None else (moment - before) / 1e9,
                    hosts=len(of_hosts),
                    fetch_seconds=fetch,
                    apply_seconds=apply,
                    pause_seconds=pause,
                    retired=row["version"] in kept.retired,
                    has_anchor=row["version"] in kept.anchors,
                )
            )
        before = moment
    return found


def _host_times(history: History, first: int) -> dict[int, list[tuple[float, ...]]]:
    """Of every served record since a version, the seconds of PHASES, by version."""
    records = history.records(since=first).select(["version", "outcome", "seconds"])
    served = records.filter(
        pc.and_(pc.equal(records.column("outcome"), SERVED), pc.greater_equal(records.column("version"), first))
    )
    found: dict[int, list[tuple[float, ...]]] = defaultdict(list)
    for row in served.select(["version", "seconds"]).to_pylist():
        seconds = dict(row["seconds"])
        found[row["version"]].append(tuple(seconds.get(phase, 0.0) for phase in PHASES))
    return found
