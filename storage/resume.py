"""Where a writer's snapshot begins: at the base, at an anchor, or at a replica on this machine that proves equal, by
whichever the rest of the way is shortest. Must not know what is published next."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import structlog

from weighbridge.errors import CheckpointError, DigestMismatch, VersionUnknown
from weighbridge.storage.anchor import state_at
from weighbridge.storage.anchor_sources import held_version
from weighbridge.storage.attempt import Snapshot
from weighbridge.storage.checkpoint import Checkpoint, open_checkpoint
from weighbridge.storage.claim import Base
from weighbridge.storage.clock import Clock
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import Disk
from weighbridge.storage.replica.fetch import Spool, fetchers
from weighbridge.storage.replica.image import FolderImage, MemoryImage
from weighbridge.storage.replica.rebuild import Rebuild, specs_of
from weighbridge.storage.replica.room import Room
from weighbridge.storage.ways import Way, find_way
from weighbridge.values import Manifest, PartKey

log = structlog.get_logger("weighbridge.publisher")


def first_snapshot(
    lineage: Lineage,
    base: Base,
    *,
    replica: Path | None,
    spool: Path,
    disk: Disk,
    clock: Clock,
    threads: int,
    room: Room,
) -> Snapshot:
    """The snapshot from which the deltas to the head are fewest bytes, whole in `room` and proven part by part.

    A replica that is not what its store says is passed over. Raises VersionRetired when collected shards are in every
    way, CheckpointError when the base changed since it was digested, and what a fetch raises.
    """
    head = max(lineage.head(), 0)
    held = {0: 1}
    mine = _own_version(lineage, replica)
    if mine is not None:
        held[mine[0]] = 0
    way = find_way(lineage, head, held=held)
    if mine is not None and way.anchor is None and way.start == mine[0]:
        try:
            snapshot = _from_folder(lineage, way.start, open_checkpoint(mine[1]), disk, room)
        except (CheckpointError, DigestMismatch) as error:
            log.warning("a replica is no source for the snapshot", folder=str(mine[1]), error=str(error))
            way = find_way(lineage, head, held={0: 1})
        else:
            log.info("snapshot from a replica", version=way.start, folder=str(mine[1]))
            return snapshot
    if way.anchor is not None:
        return _from_anchor(lineage, way.anchor, spool=spool, disk=disk, clock=clock, threads=threads, room=room)
    return _from_base(lineage, base, room)


def _own_version(lineage: Lineage, replica: Path | None) -> tuple[int, Path] | None:
    held = held_version(replica) if replica is not None else None
    try:
        return held if held is not None and lineage.manifest(held[0]) else None
    except VersionUnknown:
        return None


def _from_base(lineage: Lineage, base: Base, room: Room) -> Snapshot:
    checkpoint = base.checkpoint
    image = MemoryImage(
        {
            name: (spec, checkpoint.read(name, room.array(name, spec.nbytes)))
            for name, spec in checkpoint.specs().items()
        }
    )
    for key, digest in base.parts.items():
        if digest_bytes(base.digest_kind, image.view(key).data) != digest:
            raise CheckpointError(
                f"{checkpoint.folder} changed while it was read ({key.tensor}). Nothing was published."
            )
    return Snapshot(lineage.manifest(0), image, base.parts)


def _from_folder(lineage: Lineage, version: int, checkpoint: Checkpoint, disk: Disk, room: Room) -> Snapshot:
    source = FolderImage(checkpoint, disk)
    digests = {key: row.after for key, row in state_at(lineage, version).rows.items()}
    if source.parts.keys() != digests.keys():
        raise CheckpointError(f"{checkpoint.folder} has other tensors than the run's base")

    def part_of(key: PartKey) -> Bytes:
        data = source.read(key, np.empty(source.parts[key].nbytes, np.uint8))
        if digest_bytes(lineage.run.digest_kind, data.data) != digests[key]:
            raise DigestMismatch(f"{checkpoint.folder}: {key.tensor} is not that of version {version}")
        return data

    return _filled(lineage, lineage.manifest(version), digests, part_of, room)


def _from_anchor(
    lineage: Lineage, anchor: Manifest, *, spool: Path, disk: Disk, clock: Clock, threads: int, room: Room
) -> Snapshot:
    shards = Spool(spool / "anchor", lineage, disk=disk, clock=clock, threads=fetchers(threads))
    way = Way(anchor.version, anchor.version, anchor, (), anchor.wire_bytes)
    try:
        rebuild = Rebuild(lineage, way, source=None, start={}, path_of=shards.path_of, disk=disk)
        try:
            log.info("snapshot from an anchor", version=anchor.version, fetch_bytes=anchor.wire_bytes)
            return _filled(lineage, lineage.manifest(anchor.version), rebuild.digests, rebuild.part, room)
        finally:
            rebuild.close()
    finally:
        shards.empty()


def _filled(
    lineage: Lineage,
    manifest: Manifest,
    digests: dict[PartKey, bytes],
    part_of: Callable[[PartKey], Bytes],
    room: Room,
) -> Snapshot:
    """A snapshot whose parts are brought one at a time; so the room is the model's, and memory one part more."""
    whole = {spec.name: (spec, room.array(spec.name, spec.nbytes)) for spec in specs_of(lineage.manifest(0))}
    for key in digests:
        data = part_of(key)
        whole[key.tensor][1][key.offset : key.offset + data.size] = data
    return Snapshot(manifest, MemoryImage(whole), digests)
