"""Encode elsewhere: one shard of a checkpoint folder, on a worker of a cluster. Reads old and new bytes from the shared
file system and the store, uploads the shard, proves it, and answers with what it came to. Repeatable."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prefect import task
from prefect.cache_policies import NO_CACHE

from weighbridge.errors import ManifestCorrupt
from weighbridge.storage.attempt import Attempt, Snapshot, SpooledShard
from weighbridge.storage.batching import Batch, NewPart
from weighbridge.storage.checkpoint import Checkpoint, open_checkpoint
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.errand import Errand, ErrandSite
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.replica.image import ShareImage
from weighbridge.storage.replica.patching import Deltas, prove
from weighbridge.storage.replica.room import Memory
from weighbridge.storage.share import Share, empty_snapshot
from weighbridge.storage.spools import spool_folder
from weighbridge.storage.stores import open_store
from weighbridge.tasks.gather import read_tensor
from weighbridge.tasks.host_bytes import HostBytes


@task(
    name="encode",
    task_run_name="encode-{errand.index:05d}",
    retries=2,
    retry_delay_seconds=[1, 5],
    retry_jitter_factor=0.5,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def encode_elsewhere(errand: Errand) -> SpooledShard:
    """Encodes, proves and uploads one shard; returns its rows and digests. Raises as encoding and uploading here do."""
    with _bench(errand.site) as bench:
        return bench.encode(errand)


class _Bench:
    """What the errands of one push share in one process: the parent's state, and the shards that its bytes come from.
    Thread-safe."""

    def __init__(self, site: ErrandSite, kept: ExitStack) -> None:
        self.site, self.users = site, 0
        self._disk, self._clock = LocalDisk("process"), SystemClock()
        self._spool = kept.enter_context(spool_folder(site.spool, disk=self._disk))
        self._store = open_store(site.store, profile=site.profile)
        self._folder = open_checkpoint(site.folder)
        lineage, base = Lineage(self._store, trust=site.trust), open_checkpoint(site.base)
        self._parent = empty_snapshot(lineage, base, version=site.parent)
        if self._parent.manifest.digest != site.parent_digest:
            raise ManifestCorrupt(
                f"version {site.parent} in {site.store} is another here than where the push began. Nothing was "
                "published; have every worker see the same store."
            )
        self._share = Share(
            lineage,
            base,
            room=Memory(),
            spool=self._spool / "share",
            disk=self._disk,
            clock=self._clock,
            threads=1,
        )
        self._kept = kept.pop_all()

    def close(self) -> None:
        """Removes what was spooled."""
        self._share.rest()
        self._kept.close()

    def encode(self, errand: Errand) -> SpooledShard:
        image = ShareImage(self._parent.image.specs.values())  # its own, so that its bytes go when it is done
        snapshot = Snapshot(self._parent.manifest, image, self._parent.digests)
        attempt = Attempt(
            store=self._store,
            snapshot=snapshot,
            aliases={},
            writer="",
            spool=self._spool,
            disk=self._disk,
            clock=self._clock,
            commit_id=self.site.commit_id,
            hold=lambda names: self._share.hold(snapshot, names),
        )
        shard = attempt.encode(_batch(self._folder, errand, image))
        try:
            # What hosts will decode is decoded before anybody can see it, as it is where a push encodes by itself.
            deltas = Deltas([attempt.own()], lambda _, info: attempt.path(info))
            for _ in prove(image, deltas, digest_kind=snapshot.manifest.digest_kind):
                pass
            attempt.upload(shard.index)
        finally:
            if shard.info is not None:
                self._disk.unlink(attempt.path(shard.info))
        return shard


_turn = threading.Lock()
_benches: dict[str, _Bench] = {}


@contextmanager
def _bench(site: ErrandSite) -> Iterator[_Bench]:
    """The bench of a push, opened by its first errand here; those of pushes before it that nobody uses are closed."""
    with _turn:
        if site.commit_id not in _benches:
            for old in [bench for bench in _benches.values() if not bench.users]:
                _benches.pop(old.site.commit_id).close()
            with ExitStack() as opened:
                _benches[site.commit_id] = _Bench(site, opened)
        bench = _benches[site.commit_id]
        bench.users += 1
    try:
        yield bench
    finally:
        with _turn:
            bench.users -= 1


def _batch(folder: Checkpoint, errand: Errand, image: ShareImage) -> Batch:
    reader = HostBytes()
    tensors: dict[str, Bytes] = {}
    for name in dict.fromkeys(key.tensor for key in errand.parts):
        tensors[name] = read_tensor(folder, reader, name, image.specs[name])
    parts = [image.parts[key] for key in errand.parts]
    new = (NewPart(part, tensors[part.key.tensor][part.key.offset : part.key.offset + part.nbytes]) for part in parts)
    return Batch(errand.index, tuple(new), tuple((name, tensors[name]) for name in errand.whole))
