"""What a disk's medium holds, apart from what its file system shows: bytes and names reach it when they are synced, or
by chance. A power cut leaves the medium's view, each unsynced block, time and name in it or not as a coin says."""

import os
import random
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weighbridge.storage.localdisk import Durability, LocalDisk

BLOCK_BYTES = 512
"""Written back as a whole or not at all."""

UNUSED_INODES = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where roots should lie: a file system that does not use an inode's number again, as tmpfs."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it stands on the medium."""

    data: bytes
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class _Name:
    """A folder's entry: which inode it names, and where a link leads."""

    inode: int
    kind: int
    target: str = ""


class Medium:
    """The medium under one folder, `root`, which itself never gets lost. Not thread-safe.

    Strict as POSIX is: syncing a file does not make its name durable, syncing its folder does, and a name taken away
    may come back. Kinder in one thing, as every journaling file system is: a rename happens as a whole or not at all.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[int, _File] = {}
        self._folders: dict[int, dict[str, _Name]] = {}

    def flush(self, descriptor: int) -> None:
        """What an fsync of an open file or folder does."""
        status = os.fstat(descriptor)
        here = Path(f"/proc/self/fd/{descriptor}")
        if stat.S_ISDIR(status.st_mode):
            self._folders[status.st_ino] = _names(here.resolve())
        else:
            self._files[status.st_ino] = _File(here.read_bytes(), status.st_mtime_ns)

    def settle(self) -> None:
        """Brings everything under the root to the medium, as time does."""
        self._files.clear()
        self._folders.clear()
        for folder, _, files in os.walk(self.root):
            self._folders[Path(folder).stat().st_ino] = _names(Path(folder))
            for file in files:
                path = Path(folder, file)
                if not path.is_symlink():
                    self._files[path.stat().st_ino] = _File(path.read_bytes(), path.stat().st_mtime_ns)

    def cut_power(self, rng: random.Random, *, keep: float) -> None:
        """Leaves under the root what the medium held; `keep` is the chance of each thing that was not synced."""
        seen: dict[int, Path] = {}
        for folder, subfolders, files in os.walk(self.root):
            subfolders.sort()
            seen |= {Path(folder, name).lstat().st_ino: Path(folder, name) for name in sorted([*subfolders, *files])}
        left = self.root.with_name(self.root.name + ".left")
        left.mkdir()
        self._rebuild(self.root.stat().st_ino, self.root, left, seen, rng, keep)
        shutil.rmtree(self.root)
        left.rename(self.root)
        self.settle()

    def _rebuild(
        self,
        inode: int,
        shown: Path | None,
        target: Path,
        seen: Mapping[int, Path],
        rng: random.Random,
        keep: float,
    ) -> None:
        """Makes `target` the folder `inode` as the cut leaves it; `shown` is where the file system still has it."""
        held = self._folders.get(inode, {})
        now = _names(shown) if shown is not None else {}
        for name, entry in sorted(_surviving(held, now, rng, keep).items()):
            path = target / name
            if stat.S_ISLNK(entry.kind):
                path.symlink_to(entry.target)
            elif stat.S_ISDIR(entry.kind):
                path.mkdir()
                self._rebuild(entry.inode, seen.get(entry.inode), path, seen, rng, keep)
            else:
                self._rebuild_file(entry.inode, seen.get(entry.inode), path, rng, keep)

    def _rebuild_file(self, inode: int, shown: Path | None, target: Path, rng: random.Random, keep: float) -> None:
        held = self._files.get(inode, _File(b"", 0))
        now = _File(shown.read_bytes(), shown.stat().st_mtime_ns) if shown is not None else held
        size = len(now.data) if rng.random() < keep else len(held.data)
        blocks = []
        for start in range(0, size, BLOCK_BYTES):
            end = min(start + BLOCK_BYTES, size)
            source = now if rng.random() < keep else held
            blocks.append(source.data[start:end].ljust(end - start, b"\0"))
        target.write_bytes(b"".join(blocks))
        mtime = now.mtime_ns if rng.random() < keep else held.mtime_ns
        os.utime(target, ns=(mtime, mtime))


class MediumDisk(LocalDisk):
    """The machine's own disk, whose syncs reach a medium of ours instead of the kernel's."""

    def __init__(self, medium: Medium, durability: Durability = "power") -> None:
        super().__init__(durability)
        self.medium = medium

    def _sync(self, file: int) -> None:
        if self.durability == "power":
            self.medium.flush(file)


def _names(folder: Path) -> dict[str, _Name]:
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            target = str(Path(entry.path).readlink()) if entry.is_symlink() else ""
            found[entry.name] = _Name(status.st_ino, status.st_mode, target)
    return found


def _surviving(
    held: Mapping[str, _Name], now: Mapping[str, _Name], rng: random.Random, keep: float
) -> dict[str, _Name]:
    """A folder's entries after the cut: each change since the last sync is kept or not; a rename as a whole."""
    after = dict(held)
    was = {entry.inode: name for name, entry in held.items()}
    for name in sorted(held.keys() | now.keys()):
        old, new = held.get(name), now.get(name)
        if old == new or rng.random() >= keep:
            continue
        if new is None:
            after.pop(name, None)
        else:
            after[name] = new
    for name, entry in sorted(after.items()):
        before = was.get(entry.inode)
        if now.get(name) == entry and before is not None and before != name and after.get(before) == held[before]:
            del after[before]  # it was renamed, and that was kept
    for name, entry in sorted(held.items()):
        to = next((n for n, e in sorted(now.items()) if e.inode == entry.inode), None)
        if name not in after and to is not None and after.get(to) != entry:
            after[name] = entry  # it was renamed, and that was not kept
    return after
