"""Shards up and down: in ranges, in parallel, each retried, resumed after a crash, and proved by digest before the
final name exists. Must not know what a shard holds, nor keep more of it in memory than the ranges in flight."""

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from weighbridge.errors import DiskFull, ObjectMissing, ShardCorrupt, StoreError, StoreRefused
from weighbridge.storage.backoff import Backoff
from weighbridge.storage.clock import Clock
from weighbridge.storage.digests import Hasher, new_hasher
from weighbridge.storage.stores.contract import Store
from weighbridge.values import ShardInfo

RANGE_BYTES = 16 << 20
RANGES_IN_FLIGHT = 4
PART_SUFFIX = ".part"
_CHUNK_BYTES = 4 << 20

T = TypeVar("T")

Progress = Callable[[int], None]
"""Called with the number of bytes that have just arrived (negative when they turned out bad and are fetched again)."""


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
    durable: bool = True,
) -> None:
    """Fetches an object to `path`, which appears only whole, right by `info`'s size and digest, and synced.

    Bytes go to `path` + ".part" in order, so what an earlier process left there is where this one goes on; a file that
    is already at `path` and right is kept. Memory is bounded by RANGES_IN_FLIGHT ranges of RANGE_BYTES. A download with
    a wrong digest is done again from the start, `downloads` in all, then it is ShardCorrupt. Raises ObjectMissing and
    StoreRefused at once, StoreError after the deadline, DiskFull (the part file is then removed).
    `durable=False` skips fsync, for a replica on tmpfs.
    """
    source = _Source(store, key, info, _Retry(clock, clock.monotonic() + deadline_seconds, backoff or Backoff()))
    report = progress or _ignore
    part = path.with_name(path.name + PART_SUFFIX)
    with _local_failures(part, info):
        if _is_right(path, info, digest_kind):
            report(info.nbytes)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(downloads):
            if _complete(part, source, new_hasher(digest_kind), report, durable) == info.digest:
                part.replace(path)
                if durable:
                    _sync_folder(path.parent)
                return
            part.unlink()
            report(-info.nbytes)
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


def _complete(part: Path, source: _Source, hasher: Hasher, report: Progress, durable: bool) -> bytes:
    """Completes a part file and returns the digest of all of it, what an earlier process left there included."""
    with part.open("a+b") as out:
        if out.seek(0, os.SEEK_END) > source.info.nbytes:
            out.truncate(0)
        out.seek(0)
        done = _digest_into(hasher, out)
        report(done)
        for data in _in_order(source, done):
            out.write(data)
            hasher.update(data)
            report(len(data))
        out.flush()
        if durable:
            os.fsync(out.fileno())
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
            while len(ahead) < RANGES_IN_FLIGHT and (at := next(starts, None)) is not None:
                ahead.append(pool.submit(source.get, at, min(RANGE_BYTES, end - at)))
            if not ahead:
                return
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _is_right(path: Path, info: ShardInfo, digest_kind: str) -> bool:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != info.nbytes:
                return False
            hasher = new_hasher(digest_kind)
            _digest_into(hasher, file)
            return hasher.digest() == info.digest
    except FileNotFoundError:
        return False


def _digest_into(hasher: Hasher, file: BinaryIO) -> int:
    done = 0
    while chunk := file.read(_CHUNK_BYTES):
        hasher.update(chunk)
        done += len(chunk)
    return done


@contextmanager
def _local_failures(part: Path, info: ShardInfo) -> Iterator[None]:
    """A full local disk gets its room back: the part file goes, and the replica's versions are not touched."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            part.unlink(missing_ok=True)
            raise DiskFull(
                f"no room for {info.name} ({info.nbytes} bytes) in {part.parent}: {error.strerror}. The replica keeps "
                "the version that it has. Free some space; the next sync fetches it again."
            ) from error
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ignore(nbytes: int) -> None:
    del nbytes
