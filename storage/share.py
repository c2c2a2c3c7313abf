"""A rank's share of the snapshot: the tensors that it publishes, brought when they are first asked for, from the base
or an anchor and the deltas after it. Must not know who owns what."""

import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import structlog

from weighbridge.errors import ForeignRun, ObjectMissing, ShardCorrupt, VersionRetired
from weighbridge.storage.anchor import state_at
from weighbridge.storage.attempt import Snapshot
from weighbridge.storage.checkpoint import Checkpoint
from weighbridge.storage.clock import Clock
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import Disk
from weighbridge.storage.parts import cut
from weighbridge.storage.replica.fetch import PLANS, Spool, fetchers
from weighbridge.storage.replica.image import ShareImage
from weighbridge.storage.replica.rebuild import Rebuild, specs_of
from weighbridge.storage.replica.room import Room
from weighbridge.storage.state import base_digests
from weighbridge.storage.ways import find_way, learn_gaps

log = structlog.get_logger("weighbridge.publisher")


def empty_snapshot(lineage: Lineage, base: Checkpoint, *, version: int | None = None) -> Snapshot:
    """A version's manifest and digests (None: the head's), and none of its bytes yet. Raises ForeignRun for another
    base."""
    specs = specs_of(lineage.manifest(0))
    if {spec.name: spec for spec in specs} != base.specs():
        raise ForeignRun(
            f"{base.folder} has other tensors than the base of run {lineage.run.run_id}. Nothing was changed; give "
            "every rank the base that the run began with."
        )
    found = state_at(lineage, max(lineage.head(), 0) if version is None else version)
    return Snapshot(found.manifest, ShareImage(specs), {key: row.after for key, row in found.rows.items()})


class Share:
    """Puts tensors into a snapshot's image, proven by their digests. Thread-safe while the snapshot stands still."""

    def __init__(
        self, lineage: Lineage, base: Checkpoint, *, room: Room, spool: Path, disk: Disk, clock: Clock, threads: int
    ) -> None:
        self._lineage, self._base, self._room, self._disk = lineage, base, room, disk
        self._shards = Spool(spool, lineage, disk=disk, clock=clock, threads=fetchers(threads))
        self._lock = threading.Lock()
        self._busy: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._rebuild: Rebuild | None = None

    def hold(self, snapshot: Snapshot, names: Iterable[str]) -> None:
        """Makes sure that tensors are in the image. Raises VersionRetired, CheckpointError, DigestMismatch and what a
        fetch raises."""
        image = snapshot.image
        if not isinstance(image, ShareImage):
            return  # all of it is there
        for name in dict.fromkeys(names):
            with self._lock:
                busy = self._busy[name]
            with busy:
                if not image.holds(name):
                    image.put(name, self._bring(snapshot, name))

    def rest(self) -> None:
        """Lets go of the shards that were needed: the next tensors are asked for at another version."""
        if self._rebuild is not None:
            self._rebuild.close()
            self._rebuild = None
            self._shards.empty()

    def _bring(self, snapshot: Snapshot, name: str) -> Bytes:
        version, spec = snapshot.manifest.version, snapshot.image.specs[name]
        for attempt in range(1, PLANS + 1):
            rebuild = self._way_to(version)
            with self._lock:
                data = self._room.array(name, spec.nbytes)
            try:
                for part in cut(spec):
                    data[part.key.offset : part.key.offset + part.nbytes] = rebuild.part(part.key)
                return data
            except (ObjectMissing, VersionRetired, ShardCorrupt) as error:
                if attempt == PLANS:
                    raise
                log.warning("a way to the snapshot is closed, planning again", version=version, error=str(error))
                with self._lock:
                    learn_gaps(self._lineage, rebuild.way, damaged=self._shards.damaged)
                    self._rebuild = None
        raise AssertionError("the loop ends by returning or raising")

    def _way_to(self, version: int) -> Rebuild:
        with self._lock:
            if self._rebuild is None or self._rebuild.way.target != version:
                self._rebuild = Rebuild(
                    self._lineage,
                    find_way(self._lineage, version, held={0: 1}, weigh=self._shards.missing_bytes_of),
                    source=self._base,
                    start=base_digests(self._lineage.manifest(0)),
                    path_of=self._shards.path_of,
                    disk=self._disk,
                )
            return self._rebuild
