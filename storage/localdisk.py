"""Every write to the host's own disk: a crash test or a simulator replaces this one class and can stop the house at
each write. Must not know what the files mean. Reading needs no door of its own: it changes nothing.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

from weighbridge.errors import DiskFull, ReplicaError
from weighbridge.storage.digests import Buffer

Durability = Literal["power", "process"]

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700
SHARED_FILE = 0o644
SHARED_FOLDER = 0o755
TEMPORARY_SUFFIX = ".tmp"

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
_NO_FAST_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF}
_COPY_BYTES = 8 << 20


class Disk(Protocol):
    """What this house asks of a local disk. Every method that writes raises DiskFull when there is no room.

    `durability` "power" survives a power cut: what `sync`, `sync_folder` or `write_atomic` returned from is on the
    medium. "process" survives a killed process only, and skips the waiting; another `boot_id` then proves nothing.
    """

    durability: Durability

    def make_folder(self, path: Path, *, mode: int = SHARED_FOLDER) -> None:
        """Creates a folder and its parents, all with that mode; one that is there stays as it is."""
        ...

    def write_atomic(self, path: Path, data: bytes, *, mode: int = PRIVATE_FILE) -> None:
        """Replaces a small file: readers, and whoever comes after a crash, find the old bytes or the new ones."""
        ...

    def append(self, path: Path, pieces: Sequence[Buffer], *, mode: int = PRIVATE_FILE) -> None:
        """Adds bytes at the end of a file, which is created when it is not there. Not synced."""
        ...

    def pwrite(self, path: Path, offset: int, data: Buffer) -> None:
        """Writes bytes into a file that is there. Not synced."""
        ...

    def reserve(self, path: Path, offset: int, nbytes: int) -> None:
        """Takes the blocks of a stretch of a file that is there, so that writing to it later cannot lack room."""
        ...

    def sync(self, path: Path) -> None:
        """Waits until a file's bytes are on the medium."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Waits until a folder's entries are on the medium."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Renames within one file system, atomically, and syncs the target's folder."""
        ...

    def point(self, link: Path, target: str) -> None:
        """Makes `link` a symbolic link to `target`, atomically, whatever it pointed to before."""
        ...

    def unlink(self, path: Path) -> None:
        """Removes a file; none there is no error."""
        ...

    def remove_tree(self, path: Path) -> None:
        """Removes a folder and all in it; none there is no error."""
        ...

    def copy(self, source: Path, target: Path, *, mode: int = SHARED_FILE) -> None:
        """A real copy (shared blocks where the file system has them, never a shared inode), synced."""
        ...

    def set_mtime(self, path: Path, mtime_ns: int) -> int:
        """Sets a file's time of change, and returns the time that the file system really keeps."""
        ...

    def free_bytes(self, path: Path) -> int:
        """Bytes that may still be written on the file system that holds `path`."""
        ...

    def boot_id(self) -> str:
        """Names this boot of the machine."""
        ...

    def try_lock(self, path: Path, owner: bytes) -> int | None:
        """An exclusive lock on a file as a descriptor, or None when another holds it. Never waits.

        The file then holds `owner`, for others to read; it is empty again after `unlock`.
        """
        ...

    def unlock(self, descriptor: int) -> None:
        """Gives a lock back, also in processes that were forked while it was held."""
        ...


class LocalDisk:
    """The machine's own disk, by its kernel's calls. Thread-safe."""

    def __init__(self, durability: Durability = "power") -> None:
        self.durability: Durability = durability

    def make_folder(self, path: Path, *, mode: int = SHARED_FOLDER) -> None:
        """See Disk."""
        created = [folder for folder in path.parents if not folder.exists()]
        with _room(path):
            for folder in (*reversed(created), path):
                folder.mkdir(mode=mode, exist_ok=True)
        for folder in (path, *created):
            self.sync_folder(folder.parent)

    def write_atomic(self, path: Path, data: bytes, *, mode: int = PRIVATE_FILE) -> None:
        """See Disk."""
        temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        with _room(path):
            try:
                temporary.unlink(missing_ok=True)  # in a folder of others it may be theirs, or lead elsewhere
                with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as file:
                    _write_all(file, data)
                    self._sync(file)
                temporary.replace(path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
        self.sync_folder(path.parent)

    def append(self, path: Path, pieces: Sequence[Buffer], *, mode: int = PRIVATE_FILE) -> None:
        """See Disk."""
        with _room(path), _opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode) as file:
            for piece in pieces:
                _write_all(file, piece)

    def pwrite(self, path: Path, offset: int, data: Buffer) -> None:
        """See Disk."""
        left = memoryview(data).cast("B")
        with _room(path), _opened(path, os.O_WRONLY) as file:
            while left:
                written = os.pwrite(file, left, offset)
                left, offset = left[written:], offset + written

    def reserve(self, path: Path, offset: int, nbytes: int) -> None:
        """See Disk."""
        with _room(path), _opened(path, os.O_WRONLY) as file:
            os.posix_fallocate(file, offset, nbytes)

    def sync(self, path: Path) -> None:
        """See Disk."""
        with _room(path), _opened(path, os.O_RDONLY) as file:
            self._sync(file)

    def sync_folder(self, path: Path) -> None:
        """See Disk."""
        with _room(path), _opened(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
            self._sync(folder)

    def rename(self, source: Path, target: Path) -> None:
        """See Disk."""
        with _room(target):
            source.replace(target)
        self.sync_folder(target.parent)

    def point(self, link: Path, target: str) -> None:
        """See Disk."""
        temporary = link.with_name(link.name + TEMPORARY_SUFFIX)
        with _room(link):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(target)
            temporary.replace(link)
        self.sync_folder(link.parent)

    def unlink(self, path: Path) -> None:
        """See Disk."""
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """See Disk."""
        if path.exists():
            shutil.rmtree(path)

    def copy(self, source: Path, target: Path, *, mode: int = SHARED_FILE) -> None:
        """See Disk."""
        with (
            _room(target),
            _opened(source, os.O_RDONLY) as old,
            _opened(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode) as new,
        ):
            _copy_all(old, new)
            self._sync(new)

    def set_mtime(self, path: Path, mtime_ns: int) -> int:
        """See Disk."""
        os.utime(path, ns=(mtime_ns, mtime_ns))
        return path.stat().st_mtime_ns

    def free_bytes(self, path: Path) -> int:
        """See Disk."""
        return shutil.disk_usage(path).free

    def boot_id(self) -> str:
        """See Disk."""
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def try_lock(self, path: Path, owner: bytes) -> int | None:
        """See Disk."""
        with _room(path):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        except OSError as error:
            os.close(file)
            if error.errno not in _NO_LOCKS:
                raise
            raise ReplicaError(
                f"{path}: this file system has no locks ({error.strerror}), so it cannot hold a replica. Nothing was "
                "changed; give a folder on the host's own disk or on tmpfs."
            ) from error
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, owner, 0)
        except OSError as error:
            if error.errno not in _NO_ROOM:  # the lock holds without the note too, and a full disk must not stop it
                os.close(file)
                raise
        return file

    def unlock(self, descriptor: int) -> None:
        """See Disk."""
        os.ftruncate(descriptor, 0)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone would leave it to a forked child that still has it open
        os.close(descriptor)

    def _sync(self, file: int) -> None:
        """Every wait for the medium, of a file or a folder, goes through here."""
        if self.durability == "power":
            os.fsync(file)


@contextmanager
def _room(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM or isinstance(error, DiskFull):
            raise
        raise DiskFull(
            f"{path}: no room for it ({error.strerror}). The last good version stays as it was, and loadable; make "
            "room and run the same again."
        ) from error


@contextmanager
def _opened(path: Path, flags: int, mode: int = PRIVATE_FILE) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield file
    finally:
        os.close(file)


def _write_all(file: int, data: Buffer) -> None:
    left = memoryview(data).cast("B")
    while left:
        left = left[os.write(file, left) :]


def _copy_all(old: int, new: int) -> None:
    """In the kernel, which shares blocks where it can; through memory where the kernel cannot."""
    fast = True
    while True:
        try:
            copied = os.copy_file_range(old, new, 1 << 30) if fast else _copy_piece(old, new)
        except OSError as error:
            if not fast or error.errno not in _NO_FAST_COPY:
                raise
            fast = False
        else:
            if not copied:
                return


def _copy_piece(old: int, new: int) -> int:
    data = os.read(old, _COPY_BYTES)
    _write_all(new, data)
    return len(data)
