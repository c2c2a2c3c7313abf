"""Rebuilds a retained version as a plain HF folder from the base and the deltas, proven before it gets its name. Must
not know replicas' copies and states: a checkout belongs to nobody and is never patched again."""

from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import structlog

from weighbridge.errors import DigestMismatch, ReplicaError, UsageError
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.clock import Clock, SystemClock
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import PRIVATE_FOLDER, Disk, LocalDisk
from weighbridge.storage.replica.fetch import OnProgress, Spool, need_room
from weighbridge.storage.replica.image import FolderImage
from weighbridge.storage.replica.parallel import in_parallel
from weighbridge.storage.replica.patching import Deltas, prove_part
from weighbridge.storage.replica.scratch import Scratch
from weighbridge.storage.replica.seed import copy_proven
from weighbridge.storage.state import base_digests, state_digest
from weighbridge.values import PartKey

_log = structlog.get_logger("weighbridge.checkout")


@dataclass(frozen=True, slots=True)
class Checkout:
    """A version that was rebuilt: where, its state digest, what was downloaded for it, and how long it took."""

    version: int
    folder: Path
    state_digest: str
    fetched_bytes: int
    seconds: float


def checkout(
    version: int,
    folder: Path,
    *,
    lineage: Lineage,
    base: Path | None,
    threads: int = 2,
    disk: Disk | None = None,
    clock: Clock | None = None,
    on_progress: OnProgress | None = None,
) -> Checkout:
    """Rebuilds `version` in `folder`, a new or empty one, with the base's files and file layout.

    The folder appears only once every part was read back and proven; after a failure nothing of it is there. Raises
    UsageError for a folder that is not empty, VersionUnknown, VersionRetired, ForeignRun for another base,
    ReplicaError without one, DigestMismatch, DiskFull.
    """
    disk, clock = disk or LocalDisk(), clock or SystemClock()
    folder = folder.absolute()
    started = clock.monotonic()
    target = lineage.manifest(version)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there and not empty. Nothing was written; name a new folder.")
    if base is None:
        raise ReplicaError(
            f"version {version} is kept as changes since the base, and no base folder was given. Nothing was written; "
            f"give the folder of the checkpoint on which run {target.run_id} is based."
        )
    deltas = lineage.chain(0, version)
    source = open_checkpoint(base)
    disk.make_folder(folder.parent)
    building, shards = folder.with_name(f".{folder.name}.building"), folder.with_name(f".{folder.name}.shards")
    spool = Spool(shards, lineage, disk=disk, clock=clock, threads=max(threads, 4))
    with ExitStack() as undo:
        for leftover in (building, shards):
            disk.remove_tree(leftover)
            undo.callback(disk.remove_tree, leftover)
        disk.make_folder(shards, mode=PRIVATE_FOLDER)
        need_room(disk, folder.parent, source.nbytes + spool.missing_bytes(deltas), f"a checkout of version {version}")
        spool.fetch(deltas, on_progress)
        files, parts = spool.small_files(), base_digests(lineage.manifest(0))
        copied = copy_proven(source, building, parts, kind=target.digest_kind, files=files, disk=disk, threads=threads)
        image = FolderImage(copied, disk)
        _patch(image, Deltas(deltas, spool.path_of), target.digest_kind, threads)
        found = state_digest(copied.digests(target.digest_kind, threads=threads)[0])
        if found != target.state_digest:
            raise DigestMismatch(
                f"version {version} was rebuilt with the state digest {found} and was published with "
                f"{target.state_digest}. Nothing was kept; audit the store."
            )
        for name in copied.weight_files:
            disk.sync(building / name)
        disk.rename(building, folder)
    result = Checkout(version, folder, found, spool.downloaded_bytes, clock.monotonic() - started)
    _log.info("checked out", version=version, folder=str(folder), seconds=round(result.seconds, 3))
    return result


def _patch(image: FolderImage, deltas: Deltas, kind: str, threads: int) -> None:
    scratch = Scratch()

    def one(key: PartKey) -> None:
        image.scatter(key, prove_part(image, deltas, key, digest_kind=kind, scratch=scratch).patches)

    with closing(deltas):
        for _ in in_parallel(one, deltas.keys, threads=threads):
            pass
