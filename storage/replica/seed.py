"""Seeds a copy: a whole folder beside the old one, proven by digest, then put in its place. Must not know why a copy is
seeded. A crash or a full disk on the way leaves what was there before."""

from collections.abc import Mapping
from pathlib import Path

import structlog

from weighbridge.errors import ReplicaError, WeighbridgeError
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.replica.fetch import fetch_way, need_room
from weighbridge.storage.replica.rebuild import write_folder
from weighbridge.storage.replica.site import Site
from weighbridge.storage.replica.state import CopyState, listed
from weighbridge.storage.state import base_digests
from weighbridge.storage.ways import Way
from weighbridge.values import PartKey

_log = structlog.get_logger("weighbridge.replica")


def seed_from_base(site: Site, copy: str) -> CopyState:
    """Seeds a copy with version 0 from the base folder.

    Raises ForeignRun when that folder holds other weights than the run's base, ReplicaError without a base folder.
    """
    base = site.lineage.manifest(0)
    if site.base is None:
        raise ReplicaError(
            f"{site.layout.folder}: a copy has to be seeded and no base folder was given. Nothing was changed; give "
            f"the folder of the checkpoint on which run {base.run_id} is based."
        )
    return seed_by_way(site, copy, Way(0, 0, None, (), 0), site.base, base_digests(base))


def seed_from_copy(site: Site, copy: str, source: CopyState) -> CopyState:
    """Seeds a copy with what another, clean copy holds. Raises DigestMismatch when that one is not right."""
    way = Way(source.version, source.version, None, (), 0)
    return seed_by_way(site, copy, way, site.folder(source.copy), source.parts)


def seed_from_anchor(site: Site, copy: str, *, upto: int | None = None) -> CopyState:
    """Seeds a copy with the newest version, up to `upto`, that has an anchor: no base folder is needed.

    Raises ReplicaError when there is none, and what a fetch raises.
    """
    for version in reversed(site.lineage.anchors()):
        if upto is None or version <= upto:
            way = fetch_way(site.spool, site.lineage, version, held={}, clock=site.clock)
            return seed_by_way(site, copy, way, None, {})
    raise ReplicaError(
        f"{site.layout.folder}: a copy has to be seeded, no base folder was given, and {site.lineage.store.url} has no "
        f"anchor{'' if upto is None else f' up to version {upto}'}. Nothing was changed; give the folder of the "
        f"checkpoint on which run {site.identity.run_id} is based."
    )


def seed_by_way(site: Site, copy: str, way: Way, source: Path | None, start: Mapping[PartKey, bytes]) -> CopyState:
    """Seeds a copy with the target of a way. `source` is a folder with the state that the way begins with, whose
    digests by part are `start`; None for an anchor, which lays its files out anew.

    What is seeded gets its name only when all of it was read back and proven, so that `current` never leads to a
    version on the way. Raises like `write_folder`, DiskFull.
    """
    layout, disk = site.layout, site.disk
    seeding = layout.seeding(copy)
    disk.remove_tree(seeding)
    disk.make_folder(seeding.parent)
    manifest = site.lineage.manifest(way.target)
    _log.info("seeding a copy", copy=copy, version=way.target, source=str(source) if source else f"anchor {way.start}")
    opened = None if source is None else open_checkpoint(source)
    need_room(disk, layout.copies, manifest.model_bytes, f"seeding copy {copy} with version {way.target}")
    try:
        seeded, parts = write_folder(
            site.lineage,
            way,
            seeding,
            source=opened,
            start=start,
            path_of=site.spool.path_of,
            files=site.spool.small_files(),
            disk=disk,
            threads=site.threads,
        )
    except WeighbridgeError:  # refused, or no room: a copy that was not proven is of no use to anybody
        disk.remove_tree(seeding)
        raise
    state = CopyState(
        replica_id=site.identity.replica_id,
        copy=copy,
        version=manifest.version,
        manifest=manifest.digest,
        dirty_to=None,
        durability=disk.durability,
        boot_id=disk.boot_id(),
        files=site.stamp(seeded, listed(seeding)),
        parts=parts,
    )
    disk.unlink(layout.state(copy))  # from here on the old copy is unknown, and soon gone
    disk.remove_tree(layout.hidden(copy))
    disk.remove_tree(layout.copy(copy))
    disk.rename(seeding, layout.copy(copy))
    return site.save(state)
