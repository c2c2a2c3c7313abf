"""Where shards are put that come to a host by another way than from the store: to the part files from which a fetch
goes on, which proves them by digest or fetches them anew. Must not know that way."""

from dataclasses import dataclass, field
from typing import Protocol

from weighbridge.errors import DiskFull
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.localdisk import PRIVATE_FOLDER, Disk
from weighbridge.storage.replica.fetch import Spool
from weighbridge.storage.transfer import part_path
from weighbridge.values import Manifest, ShardInfo


@dataclass(slots=True)
class Landing:
    """One version's shards on their way in. `nbytes` is what has been put down."""

    manifest: Manifest
    spool: Spool
    disk: Disk
    nbytes: int = 0
    _begun: set[str] = field(default_factory=set)
    _full: bool = False

    def take(self, shard: ShardInfo, data: Bytes) -> None:
        """Adds bytes to a shard, in order; `data` may be written over afterwards. A shard that is at hand stays, and a
        full disk is no error here: then the rest is let go, and the fetch will say so."""
        path = self.spool.place(self.manifest, shard)
        if self._full or path.exists():
            return
        part = part_path(path)
        try:
            if shard.name not in self._begun:
                self._begun.add(shard.name)
                self.disk.make_folder(path.parent, mode=PRIVATE_FOLDER)
                self.disk.unlink(part)  # what a fetch before this one left
            self.disk.append(part, [data.data])
        except DiskFull:
            self._full = True
            self.disk.unlink(part)
            return
        self.nbytes += data.size


def open_landing(manifest: Manifest, spool: Spool, disk: Disk, *, newest: int) -> Landing | None:
    """A landing for a version's shards. None when they are at hand already, or when a version that new is held."""
    return Landing(manifest, spool, disk) if manifest.version > newest and spool.missing_bytes_of(manifest) else None


class Transport(Protocol):
    """Another way than by the store for the shards of a version that was just committed."""

    def receive(self, host: str, landing: Landing) -> int:
        """Brings what it can, by its own deadline; returns the bytes that came. Never raises for what did not."""
        ...
