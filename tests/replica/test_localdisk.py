"""The host's disk: atomic where it says so, full in a way that is told, locked by one."""

import errno
import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weighbridge.errors import DiskFull, ReplicaError
from weighbridge.storage.localdisk import LocalDisk


@contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    """No file of this process may grow beyond this: a full disk without a disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_atomic_write_on_a_full_disk_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    disk = LocalDisk()
    disk.write_atomic(tmp_path / "state", b"old")
    with file_limit(1000), pytest.raises(DiskFull, match="make room"):
        disk.write_atomic(tmp_path / "state", b"n" * 2000)
    assert (tmp_path / "state").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("verb", ["append", "pwrite", "copy"])
def test_every_write_without_room_is_a_full_disk(tmp_path: Path, verb: str) -> None:
    disk = LocalDisk()
    (tmp_path / "big").write_bytes(b"b" * 4000)
    (tmp_path / "file").write_bytes(b"f")
    with file_limit(1000), pytest.raises(DiskFull):
        if verb == "append":
            disk.append(tmp_path / "file", [b"x" * 4000])
        elif verb == "pwrite":
            disk.pwrite(tmp_path / "file", 900, b"x" * 4000)
        else:
            disk.copy(tmp_path / "big", tmp_path / "copy")


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, None])
def test_a_copy_is_real_whatever_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None
) -> None:
    def refuse(*_: object) -> int:
        assert error is not None
        raise OSError(error, os.strerror(error))

    if error is not None:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    data = os.urandom(100_000)
    (tmp_path / "old").write_bytes(data)
    LocalDisk().copy(tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == data
    assert (tmp_path / "new").stat().st_ino != (tmp_path / "old").stat().st_ino


def test_a_copy_that_fails_is_not_taken_for_a_slow_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "the disk is dying")

    monkeypatch.setattr(os, "copy_file_range", fail)
    (tmp_path / "old").write_bytes(b"1")
    with pytest.raises(OSError, match="dying"):
        LocalDisk().copy(tmp_path / "old", tmp_path / "new")


def test_a_link_moves_from_one_target_to_the_next(tmp_path: Path) -> None:
    disk = LocalDisk()
    disk.point(tmp_path / "current", "a")
    (tmp_path / "current.tmp").symlink_to("left by a crash")
    disk.point(tmp_path / "current", "b")
    assert str((tmp_path / "current").readlink()) == "b"
    assert [p.name for p in tmp_path.iterdir()] == ["current"]


def test_a_lock_is_one_owners_names_it_and_is_empty_after(tmp_path: Path) -> None:
    disk = LocalDisk()
    held = disk.try_lock(tmp_path / "lock", b"me")
    assert held is not None
    assert disk.try_lock(tmp_path / "lock", b"you") is None
    assert (tmp_path / "lock").read_bytes() == b"me"
    disk.unlock(held)
    assert (tmp_path / "lock").read_bytes() == b""
    again = disk.try_lock(tmp_path / "lock", b"you")
    assert again is not None
    disk.unlock(again)


def test_a_lock_given_back_is_free_although_a_forked_child_still_has_it_open(tmp_path: Path) -> None:
    disk = LocalDisk()
    held = disk.try_lock(tmp_path / "lock", b"me")
    assert held is not None
    os.set_inheritable(held, True)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        disk.unlock(held)
        again = disk.try_lock(tmp_path / "lock", b"you")
        assert again is not None
        disk.unlock(again)
    finally:
        child.communicate(b"\n")


def test_a_lock_does_not_need_room(tmp_path: Path) -> None:
    with file_limit(0):
        held = LocalDisk().try_lock(tmp_path / "lock", b"me")
    assert held is not None
    LocalDisk().unlock(held)


def test_a_file_system_without_locks_is_told_apart_from_a_held_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ReplicaError, match="own disk"):
        LocalDisk().try_lock(tmp_path / "lock", b"me")


def test_a_file_that_somebody_laid_in_the_way_is_neither_followed_nor_written_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    for name in ("state.tmp", "lock"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    disk = LocalDisk("process")
    disk.write_atomic(tmp_path / "state", b"new")
    assert (tmp_path / "state").read_bytes() == b"new" and not (tmp_path / "state").is_symlink()
    with pytest.raises(OSError, match="symbolic link"):
        disk.try_lock(tmp_path / "lock", b"me")
    (tmp_path / "key.tmp").write_bytes(b"")
    (tmp_path / "key.tmp").chmod(0o666)
    disk.write_atomic(tmp_path / "key", b"secret")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "precious").read_text() == "precious"
