"""A run of our own, on a host's disk, that says again what a neighbour published: each version of it has digests of
every part before and after, so that a replica applies it like any other. Must not know replicas' states or engines."""

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import structlog

from weighbridge.errors import DigestMismatch, UsageError
from weighbridge.storage.anchor import is_due, state_at
from weighbridge.storage.anchor_sources import anchor_from_folder
from weighbridge.storage.attempt import Attempt, Snapshot
from weighbridge.storage.batching import batches
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.claim import claim
from weighbridge.storage.clock import Clock
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.gc import run_gc
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import PRIVATE_FOLDER, Disk
from weighbridge.storage.parts import cut
from weighbridge.storage.peers.chain import chain, fold, touched
from weighbridge.storage.peers.contract import ForeignVersion, Layout
from weighbridge.storage.replica.image import FolderImage
from weighbridge.storage.stores import open_store
from weighbridge.storage.stores.contract import Store
from weighbridge.values import Manifest, PartKey, TensorSpec

log = structlog.get_logger("weighbridge.peers")

LAYOUT_LABEL, VERSION_LABEL = "peer.layout", "peer.version"
DIGEST_KIND = "blake3"
_SHARD_BYTES = 128 << 20
_KEPT = 2


class Mirror:
    """Opens, or begins, the mirror in a folder. One thread at a time."""

    def __init__(self, folder: Path, *, layout: Layout, foreign: Store, base: Path, disk: Disk, clock: Clock) -> None:
        """Raises ForeignRun when the mirror is of another base, UsageError when it is of another layout."""
        self._folder, self._layout, self._foreign, self._disk, self._clock = folder, layout, foreign, disk, clock
        disk.make_folder(folder, mode=PRIVATE_FOLDER)
        self.store: Store = open_store(str(folder / "store"))
        self._spool = folder / "spool"
        run = f"mirror-{layout.name}"
        checkpoint = open_checkpoint(base)
        claim(
            self.store,
            checkpoint,
            run_id=run,
            digest_kind=DIGEST_KIND,
            writer=uuid.uuid4().hex,
            aliases={},
            clock=clock,
        )
        self.lineage = Lineage(self.store)
        self._specs = checkpoint.specs()

    @property
    def version(self) -> int:
        """The mirror's newest version."""
        return max(self.lineage.head(), 0)

    @property
    def foreign_version(self) -> int:
        """The neighbour's version that it is."""
        return foreign_version(self.lineage.manifest(self.version))

    def advance(self, folder: Path, *, upto: int | None = None) -> bool:
        """Says the neighbour's newest version (or `upto`) again, as one version of the mirror; whether there was any.

        `folder` holds the mirror's newest version. Nothing is visible before every changed tensor was checked, by the
        digests of what is here and by the neighbour's own checksums. Raises VersionUnknown, ManifestCorrupt,
        ShardCorrupt, PayloadCorrupt, DigestMismatch, StoreError, DiskFull.
        """
        newest = self._layout.newest(self._foreign) if upto is None else upto
        held = self.foreign_version
        if newest <= held:
            return False
        versions = chain(self._layout, self._foreign, after=held, upto=newest, specs=self._specs)
        manifest = self._say(versions, folder, newest)
        log.info(
            "mirrored", layout=self._layout.name, version=newest, mirror=manifest.version, parts=len(manifest.rows)
        )
        return True

    def tidy(self, folder: Path) -> None:
        """Makes an anchor of the newest version, which `folder` holds, where that pays, and drops what it makes
        superfluous."""
        if is_due(self.lineage, self.version):
            anchor_from_folder(self.lineage, self.version, folder, spool=self._spool)
            run_gc(self.lineage, keep=_KEPT, clock=self._clock, grace_seconds=0)

    def _say(self, versions: tuple[ForeignVersion, ...], folder: Path, newest: int) -> Manifest:
        state = state_at(self.lineage, self.version)
        digests = {key: row.after for key, row in state.rows.items()}
        image = FolderImage(open_checkpoint(folder), self._disk)
        self._disk.remove_tree(self._spool)
        self._disk.make_folder(self._spool, mode=PRIVATE_FOLDER)
        attempt = Attempt(
            store=self.store,
            snapshot=Snapshot(self.lineage.manifest(self.version), image, digests),
            aliases=self.lineage.manifest(self.version).aliases,
            writer=uuid.uuid4().hex,
            spool=self._spool,
            disk=self._disk,
            clock=self._clock,
        )
        try:
            for batch in batches(self._changed(versions, image, digests), shard_bytes=_SHARD_BYTES):
                attempt.encode(batch)
                attempt.upload(batch.index)
            attempt.seal({LAYOUT_LABEL: self._layout.name, VERSION_LABEL: newest})
            if not attempt.commit():
                raise UsageError(f"{self._folder} is written by two processes at once. Nothing was changed; end one.")
        except BaseException:
            attempt.discard(uploaded=True)
            raise
        attempt.discard(uploaded=False)
        return attempt.manifest

    def _changed(
        self, versions: tuple[ForeignVersion, ...], image: FolderImage, digests: Mapping[PartKey, bytes]
    ) -> Iterator[tuple[TensorSpec, Bytes]]:
        for name in touched(versions):
            spec = self._specs[name]
            old = image.checkpoint.read(name)
            for part in cut(spec):
                stretch = old[part.key.offset : part.key.offset + part.nbytes]
                if digest_bytes(DIGEST_KIND, stretch.data) != digests[part.key]:
                    raise DigestMismatch(
                        f"{image.checkpoint.folder}: {name} is not that of version {self.version} of the mirror, so no "
                        "delta was applied to it. Nothing was written; scrub the replica."
                    )
            yield spec, fold(versions, name, old)


def foreign_version(manifest: Manifest) -> int:
    """The neighbour's version that a version of a mirror is; the base is 0."""
    label = manifest.labels.get(VERSION_LABEL, 0)
    return label if isinstance(label, int) else 0
