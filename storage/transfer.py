"""Shards up and down: in ranges, in parallel, each retried, resumed after a crash, and proved by digest before the
final name exists. Must not know what a shard holds, nor keep more of it in memory than the ranges in flight."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from weighbridge.errors import DiskFull, ObjectMissing, ShardCorrupt, StoreError, StoreRefused
from weighbridge.storage.backoff import Backoff
from weighbridge.storage.clock import Clock
from weighbridge.storage.digests import Hasher, new_hasher
from weighbridge.storage.localdisk import Disk, LocalDisk
from weighbridge.storage.stores.contract import Store
from weighbridge.values import ShardInfo

RANGE_BYTES = 8 << 20
RANGES_IN_FLIGHT = 4
RANGES_AHEAD = 8  # those that arrived before an earlier one wait here, while others are in flight
PART_SUFFIX = ".part"
_CHUNK_BYTES = 4 << 20

T = TypeVar("T")

Progress = Callable[[int], None]
"""Called with the number of bytes that have just arrived (negative when they turned out bad and are fetched again)."""


def part_path(path: Path) -> Path:
    """Where a fetch of a shard stands while it is under way."""
    return path.with_name(path.name + PART_SUFFIX)


def fetch_object(
    store: Store,
    key: str,
    path: Path,
    *,
    info: ShardInfo,
    digest_kind: str,
    clock: Clock,
    deadline_seconds: float = 600.0,
    downloads: int = 3,
    backoff: Backoff | None = None,
    progress: Progress | None = None,
    disk: Disk | None = None,
) -> None:
    """Fetches an object to `path`, which appears only whole, right by `info`'s size and digest, and synced.

    Bytes go to `path` + ".part" in order, so what an earlier process left there is where this one goes on; a file that
    is already at `path` and right is kept. Memory is bounded by RANGES_AHEAD + 1 ranges of RANGE_BYTES. A download with
    a wrong digest is done again from the start, `downloads` in all, then it is ShardCorrupt. Raises ObjectMissing and
    StoreRefused at once, StoreError after the deadline, DiskFull (the part file is then removed). `disk` says how
    durable a file is made; `progress` is called in the caller's thread.
    """
    source = _Source(store, key, info, _Retry(clock, clock.monotonic() + deadline_seconds, backoff or Backoff()))
    report = progress or _ignore
    part = part_path(path)
    if _is_right(path, info, digest_kind):
        report(info.nbytes)
        return
    target = disk or LocalDisk()
    try:
        target.make_folder(path.parent)
        for _ in range(downloads):
            if _complete(target, part, source, new_hasher(digest_kind), report) == info.digest:
                target.rename(part, path)
                return
            target.unlink(part)
            report(-info.nbytes)
    except DiskFull:
        target.unlink(part)  # the room is worth more than the bytes, which the store still has
        raise
    raise ShardCorrupt(
        f"{key} in {store.url} was downloaded {downloads} times and never had the digest {info.digest.hex()} that its "
        "manifest names. Nothing was applied from it; the replica keeps its version. If other hosts see the same, the "
        "shard is damaged in the store: publish an anchor, and hosts will go on from there."
    )


def upload_file(
    store: Store,
    key: str,
    path: Path,
    *,
    clock: Clock,
    deadline_seconds: float = 600.0,
    backoff: Backoff | None = None,
    progress: Progress | None = None,
) -> None:
    """Uploads a file under a key that is unique to its writer, until the store says that the object has its size.

    Raises StoreRefused at once, and StoreError after the deadline; what is left is an orphan that gc collects.
    """
    nbytes = path.stat().st_size

    def attempt() -> None:
        store.put_file(key, path)
        try:
            stored = store.size(key)
        except ObjectMissing as missing:
            raise StoreError(f"{key} was uploaded to {store.url} but is not there.") from missing
        if stored != nbytes:
            raise StoreError(f"{key} was uploaded to {store.url} with {nbytes} bytes but has {stored} there.")

    _Retry(clock, clock.monotonic() + deadline_seconds, backoff or Backoff())(attempt)
    (progress or _ignore)(nbytes)


@dataclass(frozen=True, slots=True)
class _Retry:
    """Tries again whatever may pass by itself, until a moment of the clock."""

    clock: Clock
    deadline: float
    backoff: Backoff

    def __call__(self, action: Callable[[], T]) -> T:
        waits = self.backoff.waits()
        while True:
            try:
                return action()
            except (ObjectMissing, StoreRefused):
                raise
            except StoreError as failure:
                pause = next(waits)
                if self.clock.monotonic() + pause >= self.deadline:
                    raise StoreError(f"{failure} It was tried until the deadline; nothing was changed.") from failure
            self.clock.sleep(pause)


@dataclass(frozen=True, slots=True)
class _Source:
    """The object that is fetched."""

    store: Store
    key: str
    info: ShardInfo
    retry: _Retry

    def get(self, start: int, length: int) -> bytes:
        """One range, tried until the deadline."""
        return self.retry(lambda: self._try(start, length))

    def _try(self, start: int, length: int) -> bytes:
        try:
            data = self.store.get_range(self.key, start, length)
        except (ObjectMissing, StoreRefused):
            raise
        except StoreError:
            stored = self.store.size(self.key)
            if stored < self.info.nbytes:
                raise ShardCorrupt(
                    f"{self.key} in {self.store.url} has {stored} bytes, {self.info.nbytes} by its manifest. Nothing "
                    "was applied from it; the replica keeps its version. Publish an anchor, and hosts go on from there."
                ) from None
            raise
        if len(data) != length:
            raise StoreError(f"{self.store.url} answered {len(data)} of {length} bytes from {start} of {self.key}.")
        return data


def _complete(disk: Disk, part: Path, source: _Source, hasher: Hasher, report: Progress) -> bytes:
    """Completes a part file and returns the digest of all of it, what an earlier process left there included."""
    if _size(part) > source.info.nbytes:
        disk.unlink(part)
    done = _digest_into(hasher, part)
    report(done)
    if not done:
        disk.append(part, [])  # an empty shard is a file too
    for data in _in_order(source, done):
        disk.append(part, [data])
        hasher.update(data)
        report(len(data))
    disk.sync(part)
    return hasher.digest()


def _in_order(source: _Source, done: int) -> Iterator[bytes]:
    """The ranges that are missing, in order, a few fetched ahead in threads. The first failure ends it, once what is in
    flight has ended."""
    end = source.info.nbytes
    if end - done <= RANGE_BYTES:
        if done < end:
            yield source.get(done, end - done)
        return
    starts = iter(range(done, end, RANGE_BYTES))
    ahead: deque[Future[bytes]] = deque()
    pool = ThreadPoolExecutor(RANGES_IN_FLIGHT, thread_name_prefix="fetch")
    try:
        while True:
            while len(ahead) < RANGES_AHEAD and (at := next(starts, None)) is not None:
                ahead.append(pool.submit(source.get, at, min(RANGE_BYTES, end - at)))
            if not ahead:
                return
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _is_right(path: Path, info: ShardInfo, digest_kind: str) -> bool:
    if not path.exists() or _size(path) != info.nbytes:
        return False
    hasher = new_hasher(digest_kind)
    _digest_into(hasher, path)
    return hasher.digest() == info.digest


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _digest_into(hasher: Hasher, path: Path) -> int:
    """Adds a file's bytes, none when it is not there, and returns how many."""
    done = 0
    if path.exists():
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
                done += len(chunk)
    return done


def _ignore(nbytes: int) -> None:
    del nbytes
