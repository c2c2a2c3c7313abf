"""Disks that fail: one that dies at a chosen write (a killed process, or a power cut that also loses what was not
synced), and one that is full. They wrap the real disk, so the code under test runs on real files."""

import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.faults.medium import Medium, MediumDisk

from weighbridge.errors import DiskFull
from weighbridge.storage.digests import Buffer
from weighbridge.storage.localdisk import PRIVATE_FILE, SHARED_FILE, SHARED_FOLDER, Durability, LocalDisk


class Crash(BaseException):
    """The process is dead from here on."""


class RecordingDisk(LocalDisk):
    """Numbers every write; a subclass decides what happens at each. `log` has verb and file name of each.

    It says that it is durable and does not wait for the real disk, which would only make the tests slow.
    """

    def __init__(self, durability: Durability = "power") -> None:
        super().__init__(durability)
        self.real: LocalDisk = LocalDisk("process")
        self.log: list[tuple[str, str]] = []
        self._turn = threading.RLock()

    def step(self, verb: str, path: Path, whole: Callable[[], None], torn: Callable[[], None]) -> None:
        """One write. `whole` does it, `torn` leaves what a crash in the middle of it leaves."""
        with self._turn:
            self.log.append((verb, path.name))
            whole()

    def make_folder(self, path: Path, *, mode: int = SHARED_FOLDER) -> None:
        self.step("make_folder", path, lambda: self.real.make_folder(path, mode=mode), _nothing)

    def write_atomic(self, path: Path, data: bytes, *, mode: int = PRIVATE_FILE) -> None:
        def torn() -> None:
            path.with_name(path.name + ".tmp").write_bytes(data[: len(data) // 2])

        self.step("write_atomic", path, lambda: self.real.write_atomic(path, data, mode=mode), torn)

    def append(self, path: Path, pieces: Sequence[Buffer], *, mode: int = PRIVATE_FILE) -> None:
        def torn() -> None:
            data = b"".join(bytes(piece) for piece in pieces)
            self.real.append(path, [data[: len(data) // 2]], mode=mode)

        self.step("append", path, lambda: self.real.append(path, pieces, mode=mode), torn)

    def pwrite(self, path: Path, offset: int, data: Buffer) -> None:
        def torn() -> None:
            half = bytes(data)[: memoryview(data).nbytes // 2]
            self.real.pwrite(path, offset, half)

        self.step("pwrite", path, lambda: self.real.pwrite(path, offset, data), torn)

    def sync(self, path: Path) -> None:
        self.step("sync", path, lambda: self.real.sync(path), _nothing)

    def sync_folder(self, path: Path) -> None:
        self.step("sync_folder", path, lambda: self.real.sync_folder(path), _nothing)

    def rename(self, source: Path, target: Path) -> None:
        self.step("rename", target, lambda: self.real.rename(source, target), _nothing)

    def point(self, link: Path, target: str) -> None:
        def torn() -> None:
            temporary = link.with_name(link.name + ".tmp")
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(target)

        self.step("point", link, lambda: self.real.point(link, target), torn)

    def unlink(self, path: Path) -> None:
        self.step("unlink", path, lambda: self.real.unlink(path), _nothing)

    def remove_tree(self, path: Path) -> None:
        def torn() -> None:
            for file in sorted(p for p in path.rglob("*") if p.is_file())[::2]:
                file.unlink()

        self.step("remove_tree", path, lambda: self.real.remove_tree(path), torn)

    def copy(self, source: Path, target: Path, *, mode: int = SHARED_FILE) -> None:
        def torn() -> None:
            data = source.read_bytes()
            target.write_bytes(data[: len(data) // 2])

        self.step("copy", target, lambda: self.real.copy(source, target, mode=mode), torn)

    def set_mtime(self, path: Path, mtime_ns: int) -> int:
        self.step("set_mtime", path, lambda: os.utime(path, ns=(mtime_ns, mtime_ns)), _nothing)
        return path.stat().st_mtime_ns


class CrashDisk(RecordingDisk):
    """Dies at its `at`-th write: before it, after it, or with it half done. After that every write dies, since the
    process is gone; only locks are given back, as the kernel does."""

    def __init__(self, at: int, how: str, durability: Durability = "power") -> None:
        super().__init__(durability)
        self._at, self._how = at, how
        self.dead = False

    def step(self, verb: str, path: Path, whole: Callable[[], None], torn: Callable[[], None]) -> None:
        with self._turn:
            if self.dead:
                raise Crash
            self.log.append((verb, path.name))
            if len(self.log) <= self._at:
                whole()
                return
            self.dead = True
            if self._how == "after":
                whole()
            elif self._how == "torn":
                torn()
            raise Crash


class PowerCutDisk(CrashDisk):
    """Dies at its `at`-th write, and then loses what never reached the medium, or only some of it."""

    def __init__(self, at: int, machine: Path) -> None:
        super().__init__(at, "before")
        self._rng = random.Random(at)
        self._medium = Medium(machine)
        self._medium.settle()
        self.real = MediumDisk(self._medium)

    def lose(self) -> None:
        """What the power cut does: call it once the process is gone."""
        self._medium.cut_power(self._rng, keep=0.3)


class FullDisk(RecordingDisk):
    """Has no room from its `at`-th write on, for those that need any; removing and renaming still work."""

    NEEDS_ROOM = frozenset({"make_folder", "write_atomic", "append", "copy", "pwrite", "point"})

    def __init__(self, at: int) -> None:
        super().__init__("power")
        self._at = at
        self.full = False

    def step(self, verb: str, path: Path, whole: Callable[[], None], torn: Callable[[], None]) -> None:
        with self._turn:
            self.log.append((verb, path.name))
            if len(self.log) > self._at and verb in self.NEEDS_ROOM and not (verb == "make_folder" and path.is_dir()):
                self.full = True
                if verb in ("append", "copy", "pwrite"):
                    torn()
                raise DiskFull(f"{path}: no room for it")
            whole()


def _nothing() -> None:
    pass
