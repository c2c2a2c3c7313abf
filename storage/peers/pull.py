"""Brings a replica to what a neighbour published, in one call: by way of a mirror in the replica's own folder. Must not
know layouts."""

from dataclasses import replace
from pathlib import Path

from weighbridge.errors import UsageError
from weighbridge.storage.clock import Clock, SystemClock
from weighbridge.storage.localdisk import Disk, Durability, LocalDisk
from weighbridge.storage.peers.contract import Layout
from weighbridge.storage.peers.mirror import Mirror
from weighbridge.storage.replica.layout import Layout as Folder
from weighbridge.storage.replica.pull import PullResult, bring_up
from weighbridge.storage.replica.replica import open_replica
from weighbridge.storage.stores.contract import Store


def open_mirror(folder: Path, *, layout: Layout, foreign: Store, base: Path, disk: Disk, clock: Clock) -> Mirror:
    """The mirror of a replica. Raises like `Mirror`, and UsageError for a folder that holds something else."""
    place = Folder(folder.absolute())
    if place.folder.is_dir() and not place.mirror.exists() and any(place.folder.iterdir()):
        raise UsageError(
            f"{folder} is not empty, and not a replica that follows a neighbour. Nothing was changed; give an empty "
            "folder."
        )
    disk.make_folder(place.folder)
    return Mirror(place.mirror, layout=layout, foreign=foreign, base=base, disk=disk, clock=clock)


def bring_up_from_peer(
    folder: Path,
    *,
    layout: Layout,
    foreign: Store,
    base: Path,
    version: int | None = None,
    copies: int = 2,
    durability: Durability = "power",
    lock_seconds: float = 10.0,
    scrub: bool = False,
    threads: int = 2,
    clock: Clock | None = None,
    disk: Disk | None = None,
) -> PullResult:
    """Makes, mends and brings the replica in `folder` to a neighbour's version (None: its newest); the result counts in
    the neighbour's versions. A version older than what it holds leaves it where it is ("superseded").

    Raises like `bring_up` and `Mirror.advance`; whatever fails, the version that `current` leads to stays whole.
    """
    clock, disk = clock or SystemClock(), disk or LocalDisk(durability)
    mirror = open_mirror(folder, layout=layout, foreign=foreign, base=base, disk=disk, clock=clock)
    options = {"copies": copies, "durability": durability, "lock_seconds": lock_seconds, "threads": threads}

    def settle(*, scrub: bool) -> PullResult:
        return bring_up(folder, store=mirror.store, base=base, clock=clock, disk=disk, scrub=scrub, **options)  # type: ignore[arg-type]

    first = settle(scrub=scrub)  # an earlier pull may have died between the mirror and the replica
    before = mirror.foreign_version
    # The lock of the replica is held while its bytes are read, so that nobody moves them meanwhile.
    with open_replica(folder, store=mirror.store, base=base, clock=clock, disk=disk, **options) as replica:  # type: ignore[arg-type]
        moved = mirror.advance(replica.current, upto=version)
    result = settle(scrub=False) if moved else first
    mirror.tidy(result.folder)
    stays = "current" if version is None or version == before else "superseded"
    return replace(
        result,
        outcome="applied" if moved else stays,
        version=mirror.foreign_version,
        from_version=before,
        repaired=first.repaired + (result.repaired if moved else 0),
        recovery=first.recovery,
    )
