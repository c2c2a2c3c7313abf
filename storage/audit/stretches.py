"""A long chain on this machine's own disk, proven in stretches, each by a process of its own: what all of them find
sound is sound. Whatever else comes of it is for the one walk over all (`chain`), which says what is wrong. This file is
the processes' program too. Must not judge a manifest."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from weighbridge.errors import WeighbridgeError
from weighbridge.storage.audit.chain import Walk, version_rows
from weighbridge.storage.audit.report import Audit
from weighbridge.storage.audit.segments import compare, read_segment
from weighbridge.storage.history.segments import Segment, list_segments
from weighbridge.storage.history.tables import PartIndex
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.state import RollingState
from weighbridge.storage.stores import open_store
from weighbridge.storage.stores.directory import DirectoryStore

LEAST = 2000
"""Versions in a stretch: fewer are proven before another process has started."""
_MOST = 4
_LOOK_BACK = 512
"""Manifests that are read to know the state before a stretch."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A sound stretch of the chain: the digests of the manifests before it and at its end, what its versions say of
    themselves (a table), and how much was read."""

    parent: str
    last: str
    rows: Any
    manifests: int
    segments: int
    nbytes: int


def prove_in_stretches(lineage: Lineage, audit: Audit) -> bool:
    """Proves manifests and segments as `chain` does, if there is so much that it pays, and if all is well: then it is
    added to the audit. False, and nothing added, otherwise; so where keys are trusted, which other processes are not
    given."""
    store, last = lineage.store, audit.head
    if not isinstance(store, DirectoryStore) or lineage.trust is not None or last < 2 * LEAST:
        return False
    parts, versions = (list_segments(store, kind) for kind in ("parts", "versions"))
    if max((s.last for s in (*parts, *versions)), default=0) > last:
        return False
    count = min(len(os.sched_getaffinity(0)), _MOST, last // LEAST)
    ends = [-1, *_cuts(parts, last, count), last]
    if len(ends) < 3:
        return False
    spans = [(before + 1, upto) for before, upto in pairwise(ends)]
    with ExitStack() as stack:
        others = [stack.enter_context(_start(store.url, *span)) for span in spans[1:]]
        for other in others:
            stack.callback(other.kill)
        stretches = [prove_stretch(lineage, *spans[0]), *(_told(other) for other in others)]
    sound = [stretch for stretch in stretches if stretch is not None]
    if len(sound) < len(spans) or any(one.last != next_.parent for one, next_ in pairwise(sound)):
        return False
    told = Audit(last)
    rows = pa.concat_tables(stretch.rows for stretch in sound).combine_chunks()
    for segment in versions:
        compare(segment, read_segment(store, segment, told), rows.slice(segment.first, _length(segment)), told)
    if not told.ok:
        return False
    audit.manifests += sum(stretch.manifests for stretch in sound)
    audit.segments += told.segments + sum(stretch.segments for stretch in sound)
    audit.nbytes += told.nbytes + sum(stretch.nbytes for stretch in sound)
    return True


def prove_stretch(lineage: Lineage, first: int, last: int) -> Stretch | None:
    """Proves the versions `first` to `last`, from what version `first - 1` claims; None unless all is well."""
    audit = Audit(last)
    parts = [s for s in list_segments(lineage.store, "parts") if first <= s.first and s.last <= last]
    rows: list[dict[str, Any]] = []
    walk = Walk(lineage, audit, parts, lambda _, row: rows.append(row))
    before = ""
    if first > 0:
        begun = _state_before(lineage, first)
        if begun is None:
            return None
        index, digests, before = begun
        walk.begin(index, digests, before)
    walk.go(first, last, lambda _: None)
    if not audit.ok:
        return None
    return Stretch(before, walk.parent, version_rows(rows), audit.manifests, audit.segments, audit.nbytes)


def _state_before(lineage: Lineage, first: int) -> tuple[PartIndex, Any, str] | None:
    """The digests by part that the state digest of version `first - 1` is of, and its manifest's own digest. Found by
    trying: nothing else has that state digest, so nothing has to be believed of where they were read."""
    index = PartIndex(lineage.open(0))
    digests, open_ = index.digests.copy(), np.ones(len(index.keys), np.bool_)
    claimed = lineage.open(first - 1).head
    for version in range(first - 1, max(0, first - 1 - _LOOK_BACK), -1):
        change = index.change(lineage.open(version))
        is_newest = open_[change.numbers]
        digests[change.numbers[is_newest]] = change.after[is_newest]
        open_[change.numbers] = False
        if not open_.any():
            break
    if RollingState(index.keys, digests).hexdigest() != claimed.state_digest:
        return None
    return index, digests, claimed.digest


def _cuts(parts: Sequence[Segment], last: int, count: int) -> list[int]:
    """Versions after which a stretch ends: near equal lengths, and within no segment."""
    targets = [last * number // count for number in range(1, count)]
    if not parts:
        return targets
    free = [s.first - 1 for s in parts if s.first > 0 and not any(p.first < s.first <= p.last for p in parts)]
    return sorted({min(free, key=lambda place: abs(place - target)) for target in targets if free})


def _length(segment: Segment) -> int:
    return segment.last - segment.first + 1


def _start(url: str, first: int, last: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", __name__, url, str(first), str(last)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _told(other: "subprocess.Popen[bytes]") -> Stretch | None:
    said, _ = other.communicate()
    try:
        told = json.loads(said) if other.returncode == 0 else None
        if told is None:
            return None
        told["rows"] = pa.ipc.open_stream(base64.b64decode(told["rows"])).read_all()
        return Stretch(**told)
    except (ValueError, KeyError, TypeError, pa.ArrowException):
        return None


def main(url: str, first: int, last: int) -> None:
    """Writes what came of a stretch to standard output, as JSON; null unless all is well."""
    try:
        found = prove_stretch(Lineage(open_store(url)), first, last)
    except WeighbridgeError:
        found = None
    if found is None:
        sys.stdout.write("null")
        return
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, found.rows.schema) as writer:
        writer.write_table(found.rows)
    told = {name: getattr(found, name) for name in ("parent", "last", "manifests", "segments", "nbytes")}
    sys.stdout.write(json.dumps({**told, "rows": base64.b64encode(sink.getvalue()).decode()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
