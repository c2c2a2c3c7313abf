"""Seeds a copy: a whole folder beside the old one, proven by digest, then put in its place. Must not know why a copy is
seeded. A crash or a full disk on the way leaves what was there before."""

from collections.abc import Mapping
from pathlib import Path

import structlog

from weighbridge.errors import DigestMismatch, DiskFull, ForeignRun, ReplicaError
from weighbridge.storage.checkpoint import Checkpoint, open_checkpoint
from weighbridge.storage.checkpoint_writer import copy_checkpoint
from weighbridge.storage.localdisk import SHARED_FILE, Disk
from weighbridge.storage.replica.fetch import need_room
from weighbridge.storage.replica.site import Site
from weighbridge.storage.replica.state import CopyState, listed
from weighbridge.storage.state import base_digests
from weighbridge.values import Manifest, PartKey

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
    return _seed(site, copy, site.base, base, base_digests(base))


def seed_from_copy(site: Site, copy: str, source: CopyState) -> CopyState:
    """Seeds a copy with what another, clean copy holds. Raises DigestMismatch when that one is not right."""
    manifest = site.lineage.manifest(source.version)
    return _seed(site, copy, site.folder(source.copy), manifest, source.parts)


def _seed(site: Site, copy: str, source: Path, manifest: Manifest, parts: Mapping[PartKey, bytes]) -> CopyState:
    layout, disk = site.layout, site.disk
    seeding = layout.seeding(copy)
    disk.remove_tree(seeding)
    disk.make_folder(seeding.parent)
    _log.info("seeding a copy", copy=copy, version=manifest.version, source=str(source))
    opened = open_checkpoint(source)
    need_room(disk, layout.copies, opened.nbytes, f"seeding copy {copy} from {source}")
    try:
        copied = copy_proven(
            opened, seeding, parts, kind=site.kind, files=site.spool.small_files(), disk=disk, threads=site.threads
        )
    except DiskFull:
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
        files=site.stamp(copied, listed(seeding)),
        parts=dict(parts),
    )
    disk.unlink(layout.state(copy))  # from here on the old copy is unknown, and soon gone
    disk.remove_tree(layout.hidden(copy))
    disk.remove_tree(layout.copy(copy))
    disk.rename(seeding, layout.copy(copy))
    return site.save(state)


def copy_proven(
    source: Checkpoint,
    target: Path,
    parts: Mapping[PartKey, bytes],
    *,
    kind: str,
    files: Mapping[str, bytes],
    disk: Disk,
    threads: int,
) -> Checkpoint:
    """Copies a checkpoint into a new folder with `files` as its small files, and proves every part of the copy.

    Raises ForeignRun when the source holds other tensors, DigestMismatch when it holds other bytes.
    """
    copied = copy_checkpoint(source, target, disk=disk)
    for name in set(copied.files) - set(files):
        disk.unlink(target / name)
    for name, data in files.items():
        if name not in copied.files or (target / name).read_bytes() != data:
            disk.make_folder((target / name).parent)
            disk.write_atomic(target / name, data, mode=SHARED_FILE)
    found, _ = copied.digests(kind, threads=threads)
    if set(found) != set(parts):
        raise ForeignRun(
            f"{source.folder} has other tensors than this run's base. Nothing was replaced; give the folder of the "
            "checkpoint on which the run is based."
        )
    wrong = sorted({key.tensor for key, digest in found.items() if digest != parts[key]})
    if wrong:
        raise DigestMismatch(
            f"{source.folder}: {len(wrong)} of {len(source.tensors)} tensors do not have the run's bytes "
            f"({', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''}). Nothing was replaced; give the folder of "
            "the checkpoint on which the run is based, unharmed."
        )
    return open_checkpoint(target)
