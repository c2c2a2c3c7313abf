"""A store in a directory: a local disk, or one that many machines share (NFS, Lustre, JuiceFS). The commit is link(2),
which POSIX makes atomic. Must not rely on locks, on rename without replacement, or on what a directory cache says."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from weighbridge.errors import ObjectExists, ObjectMissing, StoreError, StoreRefused, StoreUnfit, UsageError
from weighbridge.storage.stores.contract import MOST_SMALL_BYTES, ObjectInfo, Store, Unfinished, too_large
from weighbridge.storage.stores.keys import (
    TEMP_PREFIX,
    checked_create,
    checked_key,
    checked_prefix,
    is_temp_name,
    temp_name,
)

T = TypeVar("T")

_COPY_BYTES = 4 << 20
_STALE_TRIES = 2
_FOLDER_TRIES = 100  # another process may remove a folder that it emptied while we fill it
_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP)


class DirectoryStore(Store):
    """Objects are files under `root`, which is made by the first write. A read never makes or changes anything.

    Files and folders get the modes that the umask leaves of 0666 and 0777, so that writers of one group can share a
    root. An operating system call on a hung network mount cannot be cut short: mount it with a timeout (NFS `soft`).
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.url = str(self.root)

    def create(self, key: str, data: bytes) -> None:
        """See Store. A temp file is written, synced and linked to its final name; a name that is taken is looked at,
        because a server may carry out a link whose reply is then lost."""
        final = self._path(checked_create(key, data))
        with self._failures("create", key, len(data)):
            temp, status = self._write_temp(final.parent, lambda out: out.write(data))
            try:
                self._link(temp, final, status, key)
            finally:
                with contextlib.suppress(OSError):  # a temp file that stays is collected as a leftover
                    temp.unlink()
            _sync_folder(final.parent)

    def put(self, key: str, data: bytes) -> None:
        """See Store."""
        self._replace(key, len(data), lambda out: out.write(data))

    def put_file(self, key: str, path: Path) -> None:
        """See Store. Copies, never links: the source may change afterwards."""

        try:
            source = path.open("rb")
        except OSError as error:
            raise UsageError(f"{path} cannot be read, so it was not uploaded: {error.strerror}.") from error
        with source:
            self._replace(
                key, os.fstat(source.fileno()).st_size, lambda out: shutil.copyfileobj(source, out, _COPY_BYTES)
            )

    def get(self, key: str, *, most: int = MOST_SMALL_BYTES) -> bytes:
        """See Store."""

        def read(file: BinaryIO) -> bytes:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes > most:
                raise too_large(key, self.url, nbytes, most)
            return file.read(nbytes)  # and no more, though it may have grown since

        return self._read(key, read)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See Store."""

        def read(file: BinaryIO) -> bytes:
            file.seek(start)
            return file.read(length)

        data = self._read(key, read)
        if len(data) != length:
            raise StoreError(
                f"{key} in {self.url} ends at byte {start + len(data)}, not {start + length} as was asked for."
            )
        return data

    def size(self, key: str) -> int:
        """See Store. Opens the file: network file systems answer a plain stat from a cache."""
        return self._read(key, lambda file: os.fstat(file.fileno()).st_size)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store."""
        return self._walk(checked_prefix(prefix), after="")

    def list_after(self, prefix: str, key: str) -> Iterator[ObjectInfo]:
        """See Store."""
        return self._walk(checked_prefix(prefix), after=key)

    def folders(self, prefix: str) -> Iterator[str]:
        """See Store. A folder that a writer is just filling shows although it is empty yet."""
        return iter([e.name for e in self._scan(checked_prefix(prefix)) if e.is_dir(follow_symlinks=False)])

    def delete(self, key: str) -> None:
        """See Store. Folders that it empties go too, as on a store that has none."""
        path = self._path(checked_key(key))
        with self._failures("delete", key, 0):
            try:
                path.unlink()
            except _GONE:
                return
        with contextlib.suppress(OSError):  # not empty, or being filled
            for folder in path.parents:
                if folder == self.root or self.root not in folder.parents:
                    break
                folder.rmdir()

    def unfinished(self) -> Iterator[Unfinished]:
        """See Store: temp files."""
        for folder, _, names in os.walk(self.root):
            for name in sorted(filter(is_temp_name, names)):
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    where = str(path.relative_to(self.root))
                    yield Unfinished(where, where, status.st_size, status.st_mtime_ns)

    def discard(self, unfinished: Unfinished) -> None:
        """See Store."""
        path = self.root / unfinished.handle
        if not is_temp_name(path.name):
            raise UsageError(f"{unfinished.handle!r} is not the name of a temp file, so it was not removed.")
        with self._failures("delete", unfinished.key, 0):
            path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.root / key

    def _write_temp(self, folder: Path, fill: Callable[[BinaryIO], object]) -> tuple[Path, os.stat_result]:
        """A synced temp file in `folder`, made if need be, and its status; none stays behind when filling it fails."""
        if os.path.realpath(folder) != str(Path(os.path.realpath(self.root)) / folder.relative_to(self.root)):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))  # or we would write wherever a link leads
        temp = folder / temp_name()
        descriptor = _open_new(temp)
        try:
            with open(descriptor, "wb") as out:
                fill(out)
                out.flush()
                os.fsync(out.fileno())
                return temp, os.fstat(out.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                temp.unlink()
            raise

    def _link(self, temp: Path, final: Path, status: os.stat_result, key: str) -> None:
        try:
            os.link(temp, final)
        except OSError as error:
            if self._is_ours(final, status):
                return
            if isinstance(error, FileExistsError):
                raise ObjectExists(f"{key} exists in {self.url} already; it was left as it is.") from error
            if error.errno in _NO_LINKS:
                raise StoreUnfit(
                    f"the file system of {self.url} cannot link files ({error.strerror}), so no commit on it would be "
                    "safe. Nothing was written. Use a directory on another file system, or an object store."
                ) from error
            raise

    @staticmethod
    def _is_ours(final: Path, status: os.stat_result) -> bool:
        """Whether a failed link was carried out after all: the final name is our own temp file, which has two names."""
        try:
            standing = final.lstat()
        except OSError:
            return False
        return os.path.samestat(standing, status) and standing.st_nlink == 2

    def _replace(self, key: str, nbytes: int, fill: Callable[[BinaryIO], object]) -> None:
        final = self._path(checked_key(key))
        with self._failures("write", key, nbytes):
            temp, _ = self._write_temp(final.parent, fill)
            try:
                temp.replace(final)
            except OSError:
                with contextlib.suppress(OSError):
                    temp.unlink()
                raise
            _sync_folder(final.parent)

    def _read(self, key: str, action: Callable[[BinaryIO], T]) -> T:
        """What `action` makes of an object, opened afresh when it was replaced on another machine in the meantime."""
        path = self._path(checked_key(key))
        with self._failures("read", key, 0):
            for _ in range(_STALE_TRIES - 1):
                try:
                    return _act(path, action)
                except FileNotFoundError:
                    self._look_again(path)
                except OSError as error:
                    if error.errno != errno.ESTALE:
                        raise
            return _act(path, action)

    def _look_again(self, path: Path) -> None:
        """NFS remembers for up to a minute that a name was missing; opening its folders asks the server again."""
        inner = [folder for folder in path.parents if folder == self.root or self.root in folder.parents]
        with contextlib.suppress(OSError):
            for folder in reversed(inner):
                os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))

    def _walk(self, prefix: str, *, after: str) -> Iterator[ObjectInfo]:
        for entry in self._scan(prefix):
            key = f"{prefix}/{entry.name}" if prefix else entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(key, after=after)
            elif key > after and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # deleted since the folder was read
                    status = entry.stat(follow_symlinks=False)
                    yield ObjectInfo(key, status.st_size, status.st_mtime_ns)

    def _scan(self, prefix: str) -> Sequence["os.DirEntry[str]"]:
        """A folder's entries without temp files, in the order of the keys under them ("a-b" before "a/b")."""
        with self._failures("list", prefix or "the root", 0):
            try:
                with os.scandir(self.root / prefix) as entries:
                    kept = [entry for entry in entries if not entry.name.startswith(TEMP_PREFIX)]
            except _GONE:
                return []
            return sorted(kept, key=lambda e: e.name + "/" if e.is_dir(follow_symlinks=False) else e.name)

    @contextlib.contextmanager
    def _failures(self, verb: str, key: str, nbytes: int) -> Iterator[None]:
        """Tells operating system errors in this house's words."""
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            reason = error.strerror or type(error).__name__
            if verb == "read" and isinstance(error, _GONE):
                raise ObjectMissing(f"{key} is not in {self.url}.") from error
            if error.errno in _FULL:
                raise StoreRefused(
                    f"{self.url} has no room for {key} ({nbytes} bytes): {reason}. What was there is untouched, and "
                    "nothing of it was written. Free some space, then do the same again."
                ) from error
            if error.errno == errno.ELOOP:
                raise StoreRefused(
                    f"{key} in {self.url} is a symbolic link, or lies behind one, and weighbridge makes none there. "
                    "It was not followed; find out who made it."
                ) from error
            if error.errno in _DENIED:
                raise StoreRefused(
                    f"{self.url} does not let this process {verb} {key}: {reason}. Nothing was changed. Check the "
                    "owner and mode of the directory, and that it is mounted writable."
                ) from error
            raise StoreError(f"{self.url} could not {verb} {key}: {reason}.") from error


def _act(path: Path, action: Callable[[BinaryIO], T]) -> T:
    # A root may be others' to write: a link would lead out of it, and opening a pipe would wait for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a file")
        return action(file)


def _open_new(path: Path) -> int:
    """A descriptor of a new file, its folders made and synced first."""
    for _ in range(_FOLDER_TRIES):
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            _make_folder(path.parent)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _make_folder(folder: Path) -> None:
    """Makes a folder and those above it, each entry synced: also one that another process has just made, since it may
    not have come to that yet and we must not promise what a power cut undoes."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for made in reversed(missing):
        try:
            made.mkdir()
        except FileExistsError:
            if not made.is_dir():
                raise
        except (
            FileNotFoundError
        ):  # another process removed the folder above, emptied by a delete: the caller tries again
            return
        _sync_folder(made.parent)


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # emptied and removed by a delete that came after our write
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)
