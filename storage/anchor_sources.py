"""Where the parts of an anchor come from: a folder that holds the version, or the store's own deltas and an older
anchor or the base. Must not know how an anchor is written."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from weighbridge.errors import CheckpointError
from weighbridge.storage.anchor import make_anchor
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.clock import Clock, SystemClock
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import PRIVATE_FOLDER, Disk, LocalDisk
from weighbridge.storage.replica.fetch import OnProgress, Spool, fetch_way, fetchers
from weighbridge.storage.replica.image import FolderImage
from weighbridge.storage.replica.layout import Layout, read_identity
from weighbridge.storage.replica.rebuild import Rebuild
from weighbridge.storage.replica.state import read_state
from weighbridge.storage.state import base_digests
from weighbridge.values import Manifest, PartKey


def anchor_from_folder(
    lineage: Lineage, version: int, folder: Path, *, spool: Path, disk: Disk | None = None, threads: int = 1
) -> Manifest:
    """Makes a version's anchor from an HF folder that holds it: the base for version 0, a replica's `current`.

    Nobody's lock is needed, since every part is proven: a folder that moves on meanwhile is a DigestMismatch. Raises
    CheckpointError, and like `make_anchor`.
    """
    disk = disk or LocalDisk("process")
    image = FolderImage(open_checkpoint(folder), disk)

    def part_of(key: PartKey) -> Bytes:
        if key not in image.parts:
            raise CheckpointError(f"{folder} has no tensor {key.tensor!r} of that size. No anchor was made.")
        return image.read(key, np.empty(image.parts[key].nbytes, np.uint8))

    return make_anchor(lineage, version, part_of, spool=spool, disk=disk, clock=SystemClock(), threads=threads)


def held_version(replica: Path) -> tuple[int, Path] | None:
    """Which version a replica's `current` leads to, and its folder, by the replica's own word; None if it has none."""
    layout = Layout(replica.absolute())
    identity, copy = read_identity(layout.identity), layout.pointed()
    if identity is None or copy is None:
        return None
    state = read_state(layout.state(copy), replica_id=identity.replica_id, copy=copy)
    return None if state is None or not state.clean else (state.version, layout.copy(copy))


def anchor_from_store(
    lineage: Lineage,
    version: int,
    *,
    base: Path | None,
    spool: Path,
    disk: Disk | None = None,
    clock: Clock | None = None,
    threads: int = 1,
    on_progress: OnProgress | None = None,
) -> Manifest:
    """Makes a version's anchor from what the store has, and the base folder if no older anchor leads there.

    `spool` takes the shards that are needed, and is emptied. Raises like `find_way`, `Spool.fetch` and `make_anchor`.
    """
    disk, clock = disk or LocalDisk("process"), clock or SystemClock()
    with rebuilding(
        lineage, version, base=base, spool=spool, disk=disk, clock=clock, threads=threads, on_progress=on_progress
    ) as rebuild:
        return make_anchor(
            lineage, version, rebuild.part, keys=rebuild.keys, spool=spool, disk=disk, clock=clock, threads=threads
        )


@contextmanager
def rebuilding(
    lineage: Lineage,
    version: int,
    *,
    base: Path | None,
    spool: Path,
    disk: Disk,
    clock: Clock,
    threads: int,
    on_progress: OnProgress | None = None,
) -> Iterator[Rebuild]:
    """The parts of a version, by the shortest way from the base or an anchor; its shards are fetched, and go again."""
    source = None if base is None else open_checkpoint(base)
    fetched = Spool(spool / "shards", lineage, disk=disk, clock=clock, threads=fetchers(threads))
    with ExitStack() as undo:
        disk.make_folder(spool / "shards", mode=PRIVATE_FOLDER)
        undo.callback(fetched.empty)
        held = {} if source is None else {0: 0}
        way = fetch_way(fetched, lineage, version, held=held, clock=clock, on_progress=on_progress)
        start = base_digests(lineage.manifest(0))
        rebuild = Rebuild(lineage, way, source=source, start=start, path_of=fetched.path_of, disk=disk)
        undo.callback(rebuild.close)
        yield rebuild
