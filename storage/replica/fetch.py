"""The spool: shards of committed versions on the host's disk, fetched when they are first needed and right by their
digest. Must not know what is done with them."""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import structlog

from weighbridge.errors import CheckpointError, DiskFull, ObjectMissing, ReplicaError, ShardCorrupt, VersionRetired
from weighbridge.storage.backoff import Backoff
from weighbridge.storage.checkpoint import is_small_file
from weighbridge.storage.clock import Clock
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import PRIVATE_FOLDER, Disk
from weighbridge.storage.manifest import shard_key
from weighbridge.storage.replica.parallel import in_parallel
from weighbridge.storage.safetensors_header import parse_header
from weighbridge.storage.stores.contract import MOST_SMALL_BYTES
from weighbridge.storage.transfer import fetch_object
from weighbridge.storage.ways import Way, explain_missing, find_way, learn_gaps
from weighbridge.values import Manifest, ShardInfo

_log = structlog.get_logger("weighbridge.replica")

Plan = TypeVar("Plan")
Result = TypeVar("Result")

PLANS = 4
"""How often a reader plans, when shards that it counted on are gone, before it gives up."""

OnProgress = Callable[[int, int], None]
"""Called with the bytes at hand so far and the bytes in all, from several threads but never from two at once."""


def fetchers(threads: int) -> int:
    """How many shards are fetched at once where `threads` work: more, since a fetch mostly waits; but with one thread
    everything runs in the caller's own, as a simulator needs it."""
    return 1 if threads == 1 else max(threads, 4)


class Spool:
    """Shards under one folder, `<version>/<shard>`. Thread-safe. `downloaded_bytes` counts what really travelled."""

    def __init__(self, folder: Path, lineage: Lineage, *, disk: Disk, clock: Clock, threads: int) -> None:
        self._folder, self._lineage, self._disk, self._clock = folder, lineage, disk, clock
        self._threads = threads
        self._lock = threading.Lock()
        self._busy: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
        self._proven: set[Path] = set()
        self.downloaded_bytes = 0
        self.damaged: list[Manifest] = []
        """Whose shards were fetched and are not right in the store."""

    def place(self, manifest: Manifest, shard: ShardInfo) -> Path:
        """Where a shard lies, or would lie."""
        return self._folder / f"{manifest.version:012d}" / shard.name

    def path_of(self, manifest: Manifest, shard: ShardInfo) -> Path:
        """A shard's file, fetched if it is not at hand. Once proven it is not digested again by this object.

        Raises VersionRetired, ObjectMissing, ShardCorrupt, StoreError, DiskFull.
        """
        self._fetch(manifest, shard, lambda _: None)
        return self.place(manifest, shard)

    def missing_bytes(self, manifests: Sequence[Manifest]) -> int:
        """Bytes of the manifests' shards that are not at hand."""
        shards = ((manifest, shard) for manifest in manifests for shard in manifest.shards)
        return sum(shard.nbytes for manifest, shard in shards if not self.place(manifest, shard).exists())

    def missing_bytes_of(self, manifest: Manifest) -> int:
        """Bytes of one manifest's shards that are not at hand: what it weighs on a way."""
        return self.missing_bytes((manifest,))

    def fetch(self, manifests: Sequence[Manifest], on_progress: OnProgress | None = None) -> None:
        """Fetches all shards of the manifests that are not at hand, several at a time. Raises like `path_of`."""
        jobs = [(manifest, shard) for manifest in manifests for shard in manifest.shards]
        total = sum(shard.nbytes for _, shard in jobs)
        at_hand = 0
        lock = threading.Lock()

        def report(nbytes: int) -> None:
            nonlocal at_hand
            with lock:
                at_hand += nbytes
                if on_progress is not None:
                    on_progress(at_hand, total)

        for _ in in_parallel(lambda job: self._fetch(*job, report), jobs, threads=self._threads):
            pass

    def distrust(self, manifest: Manifest, shard: ShardInfo) -> None:
        """Digests a shard's file again at its next use, and fetches it anew if it rotted."""
        self._proven.discard(self.place(manifest, shard))

    def small_files(self) -> dict[str, bytes]:
        """The small files of version 0 by relative name, from its shard. Raises like `path_of`, and ShardCorrupt."""
        base = self._lineage.manifest(0)
        shard = _files_shard(base)
        return {} if shard is None else _parse_small(self.path_of(base, shard).read_bytes(), shard.name)

    def prune(self, upto: int) -> None:
        """Removes the shards of versions up to `upto`, which no copy will need again. Version 0's small files stay."""
        for folder in self._versions():
            if 0 < int(folder.name) <= upto:
                self._disk.remove_tree(folder)
        self._proven = {path for path in self._proven if path.exists()}

    def drop(self, manifest: Manifest) -> None:
        """Removes the shards of one manifest: an anchor's, which weigh as much as the model and served their turn."""
        for shard in manifest.shards:
            self._disk.unlink(self.place(manifest, shard))
        self._proven -= {self.place(manifest, shard) for shard in manifest.shards}

    def empty(self) -> None:
        """Removes everything: another run's."""
        self._disk.remove_tree(self._folder)
        self._proven.clear()

    def _versions(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if path.name.isascii() and path.name.isdigit())

    def _fetch(self, manifest: Manifest, shard: ShardInfo, report: Callable[[int], None]) -> None:
        path = self.place(manifest, shard)
        with self._lock:
            busy = self._busy[path]
        with busy:
            if path in self._proven and path.exists():
                report(shard.nbytes)
                return
            there = path.exists()
            self._disk.make_folder(path.parent, mode=PRIVATE_FOLDER)
            try:
                fetch_object(
                    self._lineage.store,
                    shard_key(manifest.version, shard),
                    path,
                    info=shard,
                    digest_kind=manifest.digest_kind,
                    clock=self._clock,
                    progress=report,
                    disk=self._disk,
                )
            except ShardCorrupt:
                with self._lock:
                    self.damaged.append(manifest)
                raise
            except ObjectMissing as error:
                raise explain_missing(self._lineage, manifest, error) from error
            with self._lock:
                self._proven.add(path)
                if not there:
                    self.downloaded_bytes += shard.nbytes


def around_gaps(
    spool: Spool,
    lineage: Lineage,
    clock: Clock,
    *,
    find: Callable[[], Plan],
    way_of: Callable[[Plan], Way | None],
    go: Callable[[Plan], Result],
) -> Result:
    """Finds a way and fetches it (`go`); does so again, PLANS times in all, around shards that were collected meanwhile
    and what is damaged in the store. Raises what `find` raises, and what `go` raises when there is no other way."""
    waits = Backoff().waits()
    trouble: Exception | None = None
    try:
        for attempt in range(1, PLANS + 1):
            try:
                plan = find()
            except (VersionRetired, ReplicaError) as error:
                raise (error if trouble is None or isinstance(trouble, VersionRetired) else trouble) from None
            try:
                return go(plan)
            except (ObjectMissing, VersionRetired, ShardCorrupt) as error:
                way = way_of(plan)
                if attempt == PLANS or way is None:
                    raise
                trouble = error
                learn_gaps(lineage, way, damaged=spool.damaged)
                _log.warning("a way is closed, planning again", target=way.target, error=str(error))
                clock.sleep(next(waits))
        raise AssertionError("the loop ends by returning or raising")
    finally:
        while spool.damaged:  # somebody may restore it
            lineage.recall_shards(spool.damaged.pop())


def fetch_way(
    spool: Spool,
    lineage: Lineage,
    target: int,
    *,
    held: Mapping[int, int],
    clock: Clock,
    on_progress: OnProgress | None = None,
) -> Way:
    """The shortest way to a version, with all its shards in the spool. Raises like `find_way` and `Spool.fetch`."""

    def go(way: Way) -> Way:
        spool.fetch(way.manifests, on_progress)
        return way

    return around_gaps(
        spool,
        lineage,
        clock,
        find=lambda: find_way(lineage, target, held=held, weigh=spool.missing_bytes_of),
        way_of=lambda way: way,
        go=go,
    )


def need_room(disk: Disk, folder: Path, nbytes: int, what: str) -> None:
    """Raises DiskFull, before anything is written, unless `nbytes` fit on the file system of `folder`."""
    free = disk.free_bytes(folder)
    if free < nbytes:
        raise DiskFull(
            f"{folder}: {what} needs {nbytes:,} bytes and {free:,} are free. Nothing was written, and the last good "
            "version stays loadable; make room and run the same again."
        )


def read_small_files(lineage: Lineage) -> dict[str, bytes]:
    """The small files of version 0 straight from the store, for those who must not write. Raises ShardCorrupt."""
    base = lineage.manifest(0)
    shard = _files_shard(base)
    if shard is None:
        return {}
    data = lineage.store.get(shard_key(0, shard))
    if digest_bytes(base.digest_kind, data) != shard.digest:
        raise ShardCorrupt(f"{shard.name} does not have the digest that version 0's manifest names; nothing was read.")
    return _parse_small(data, shard.name)


def _files_shard(base: Manifest) -> ShardInfo | None:
    found = next((shard for shard in base.shards if shard.name == base.files), None)
    if found is not None and found.nbytes > MOST_SMALL_BYTES:
        raise ShardCorrupt(f"{found.name} has {found.nbytes:,} bytes: these are no small files. Nothing was fetched.")
    return found


def _parse_small(data: bytes, name: str) -> dict[str, bytes]:
    try:
        header = parse_header(data, len(data))
    except CheckpointError as error:
        raise ShardCorrupt(f"{name}: {error}. Nothing was written from it.") from error
    for file in header.tensors:
        if not is_small_file(file):
            raise ShardCorrupt(f"{name} holds a file named {file!r}, which may not lie in a model's folder.")
    return {file: data[place.start : place.start + place.spec.nbytes] for file, place in header.tensors.items()}
