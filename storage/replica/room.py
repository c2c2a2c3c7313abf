"""Where a snapshot's bytes lie: in memory, or in a file that is mapped, which the kernel writes out and reads back as
it needs room. Must not know what the bytes mean."""

import mmap
import os
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.localdisk import PRIVATE_FOLDER, Disk

Kind = Literal["memory", "mmap"]


class Room(Protocol):
    """Gives writable, contiguous arrays of bytes, each under a name."""

    def array(self, name: str, nbytes: int) -> Bytes:
        """A one-dimensional array of uint8; its bytes are any. Raises DiskFull."""
        ...


class Memory:
    """Arrays in memory."""

    def array(self, name: str, nbytes: int) -> Bytes:
        """See Room."""
        return np.empty(nbytes, np.uint8)


class MappedFile:
    """Arrays in one file on the local disk. Blocks are reserved before they are written through the mapping: a full
    disk is then an error and not a signal. A name that comes again gets its place again."""

    def __init__(self, folder: Path, nbytes: int, *, disk: Disk) -> None:
        disk.make_folder(folder, mode=PRIVATE_FOLDER)
        self._path, self._disk = folder / "snapshot", disk
        self._starts: dict[str, int] = {}
        self._end = 0
        disk.unlink(self._path)
        disk.append(self._path, [])
        with self._path.open("r+b") as file:
            os.truncate(file.fileno(), max(nbytes, 1))  # takes no block yet
            self._all = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)

    def array(self, name: str, nbytes: int) -> Bytes:
        """See Room."""
        if name not in self._starts:
            if nbytes:
                self._disk.reserve(self._path, self._end, nbytes)
            self._starts[name], self._end = self._end, self._end + nbytes
        start = self._starts[name]
        found: Bytes = self._all[start : start + nbytes]
        return found


def open_room(kind: Kind, folder: Path, nbytes: int, *, disk: Disk) -> Room:
    """A room for arrays of at most `nbytes` together; a file goes into `folder`, which its owner removes."""
    return Memory() if kind == "memory" else MappedFile(folder, nbytes, disk=disk)
