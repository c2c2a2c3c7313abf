"""Rebuilds a retained version as a plain HF folder, by the shortest way from base or anchor, proven before it gets its
name. Must not know replicas' copies and states: a checkout belongs to nobody and is never patched again."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog

from weighbridge.errors import UsageError
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.clock import Clock, SystemClock
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import PRIVATE_FOLDER, Disk, LocalDisk
from weighbridge.storage.replica.fetch import OnProgress, Spool, fetch_way, fetchers, need_room
from weighbridge.storage.replica.rebuild import write_folder
from weighbridge.storage.state import base_digests, state_digest

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
    """Rebuilds `version` in `folder`, a new or empty one, with the base's small files; with its file layout too, unless
    an anchor is the shorter way.

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
    source = None if base is None else open_checkpoint(base)
    disk.make_folder(folder.parent)
    building, shards = folder.with_name(f".{folder.name}.building"), folder.with_name(f".{folder.name}.shards")
    spool = Spool(shards, lineage, disk=disk, clock=clock, threads=fetchers(threads))
    with ExitStack() as undo:
        for leftover in (building, shards):
            disk.remove_tree(leftover)
            undo.callback(disk.remove_tree, leftover)
        disk.make_folder(shards, mode=PRIVATE_FOLDER)
        need_room(disk, folder.parent, target.model_bytes, f"a checkout of version {version}")
        held = {} if source is None else {0: 0}
        way = fetch_way(spool, lineage, version, held=held, clock=clock, on_progress=on_progress)
        written, parts = write_folder(
            lineage,
            way,
            building,
            source=source,
            start=base_digests(lineage.manifest(0)),
            path_of=spool.path_of,
            files=spool.small_files(),
            disk=disk,
            threads=threads,
        )
        for name in written.weight_files:
            disk.sync(building / name)
        disk.rename(building, folder)
    found = state_digest(parts)
    result = Checkout(version, folder, found, spool.downloaded_bytes, clock.monotonic() - started)
    _log.info("checked out", version=version, folder=str(folder), seconds=round(result.seconds, 3))
    return result
