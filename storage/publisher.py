"""A run's writer: holds the snapshot of what was committed last, opens attempts against it, and advances it only when a
commit is settled, by the very patches that hosts apply, proven before the commit. Knows neither Prefect nor torch."""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import structlog

from weighbridge.errors import (
    CommitConflict,
    DigestMismatch,
    ManifestCorrupt,
    ObjectMissing,
    StoreRefused,
    UsageError,
    VersionRetired,
    WriterOvertaken,
)
from weighbridge.storage.attempt import Attempt, Snapshot
from weighbridge.storage.checkpoint import Checkpoint
from weighbridge.storage.claim import claim
from weighbridge.storage.clock import Clock
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import PRIVATE_FOLDER, Disk
from weighbridge.storage.manifest import manifest_key, shard_key
from weighbridge.storage.next_state import NextState
from weighbridge.storage.peers.export import Export
from weighbridge.storage.replica.patching import Deltas, Proven, prove
from weighbridge.storage.resume import first_snapshot
from weighbridge.storage.signing import SIGNED_DIGEST, Signer, Trust
from weighbridge.storage.state import advance, state_digest
from weighbridge.storage.stores.contract import Store
from weighbridge.storage.stores.probe import probe
from weighbridge.storage.transfer import fetch_object
from weighbridge.storage.ways import explain_missing
from weighbridge.values import Label, Manifest, PartKey, ShardInfo, TensorSpec

log = structlog.get_logger("weighbridge.publisher")

_TAKE_OVER_TRIES = 8
_OPEN_TRIES = 4


class Publisher:
    """Not thread-safe: one push at a time. An attempt's `encode` and `upload` may run in many threads.

    `version` is the newest version that this writer knows and holds in its snapshot.
    """

    def __init__(
        self,
        *,
        store: Store,
        lineage: Lineage,
        snapshot: Snapshot,
        aliases: Mapping[str, str],
        writer: str,
        spool: Path,
        disk: Disk,
        clock: Clock,
        threads: int,
        trainable: Sequence[str] = (),
        signer: Signer | None = None,
        exports: Sequence[Export] = (),
    ) -> None:
        self._signer = signer
        self._exports = tuple(exports)
        self._trainable = tuple(trainable)
        self.store = store
        self.lineage = lineage
        self.writer = writer
        self._snapshot = snapshot
        self._aliases = aliases
        self._spool = spool
        self._disk = disk
        self._clock = clock
        self._threads = threads
        self._unsettled: Attempt | None = None
        self._advanced: dict[PartKey, str] = {}  # by which manifest; an advance that was cut short goes on
        self._overtaken: WriterOvertaken | None = None
        self._reigns = False  # whether the newest version is this writer's own, so that another's above it overtakes us

    @property
    def version(self) -> int:
        """The newest version in the snapshot."""
        return self._snapshot.manifest.version

    @property
    def run_id(self) -> str:
        """The run that this writer publishes to."""
        return self._snapshot.manifest.run_id

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The base's tensors by name: what every push must match."""
        return self._snapshot.image.specs

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied tensors, as the newest version records them, and those given since."""
        return {**self._snapshot.manifest.aliases, **self._aliases}

    def begin(self) -> Attempt:
        """Opens an attempt at the next version, once nothing of an earlier one is in doubt.

        Raises WriterOvertaken for ever after another writer took over, CommitStateUnknown while an earlier commit
        cannot be settled.
        """
        if self._overtaken is not None:
            raise self._overtaken
        if self._unsettled is not None:
            attempt = self._unsettled
            log.info("settling an earlier commit", version=attempt.version)
            try:
                self._settle(attempt)
            except WriterOvertaken:
                raise
            except CommitConflict as conflict:  # its push was told that the outcome is unknown; this one goes on
                log.warning("an earlier commit lost", reason=str(conflict))
        if self.lineage.is_committed(self.version + 1):
            if self._reigns:
                raise self._stop(self.version + 1)
            self.follow()
        return Attempt(
            store=self.store,
            snapshot=self._snapshot,
            aliases=self.aliases,
            writer=self.writer,
            spool=self._spool,
            disk=self._disk,
            clock=self._clock,
            trainable=self._trainable,
            signer=self._signer,
        )

    def commit(self, attempt: Attempt, labels: Mapping[str, Label]) -> Manifest:
        """Proves the attempt's shards, commits it, and advances the snapshot.

        Raises CommitConflict when another writer committed this version first (nothing of ours is visible; a later
        push follows it), WriterOvertaken when that writer took the run over, CommitStateUnknown when no answer came.
        """
        manifest = attempt.seal(labels)
        # What hosts will decode is decoded here before anybody can see it: a wrong delta is never committed.
        for _ in self._prove(manifest, attempt.path):
            pass
        return self._settle(attempt)

    def discard(self, attempt: Attempt) -> None:
        """Gives an attempt up: the store is as it was before it. One whose commit is in doubt is kept for settling."""
        if attempt is not self._unsettled:
            attempt.discard(uploaded=True)

    def take_over(self) -> Manifest | None:
        """Commits an empty version when another writer's is the newest: from then on that writer is overtaken.

        Returns it, or None when the newest version is this writer's own, or is the base, which nobody writes above.
        """
        for _ in range(_TAKE_OVER_TRIES):
            attempt = self.begin()
            if self._reigns or self.version == 0:
                return None
            try:
                return self.commit(attempt, {"took_over": True})
            except CommitConflict as conflict:
                log.info("taking over again, above a newer version", reason=str(conflict))
        raise CommitConflict(
            f"other writers of run {self.run_id} kept committing while this one took over, {_TAKE_OVER_TRIES} times: "
            "stop the other trainer. Nothing was published."
        )

    def _settle(self, attempt: Attempt) -> Manifest:
        """Sends a sealed attempt's commit (again), finds out whose stands, and advances when it is ours.

        Until that is done the attempt is unsettled, whatever cuts this short: the next push goes on from here.
        """
        was_in_doubt, self._unsettled = self._unsettled is attempt, attempt
        try:
            ours = attempt.commit()
        except StoreRefused:
            if not was_in_doubt:
                self._unsettled = None
            raise
        if not ours:
            self._unsettled = None
            attempt.discard(uploaded=True)
            if self._reigns:
                raise self._stop(attempt.version)
            other = self.lineage.manifest(attempt.version)
            raise CommitConflict(
                f"version {attempt.version} was committed by writer {other.writer} first. Nothing of this push is "
                "visible and nothing was lost: push again, and it becomes a version after that one."
            )
        self._reigns = True
        manifest = attempt.manifest
        self._advance(manifest, attempt.path)
        self._unsettled = None
        attempt.discard(uploaded=False)
        log.info("committed", run=self.run_id, version=manifest.version, wire_bytes=manifest.wire_bytes)
        return manifest

    def follow(self) -> None:
        """Brings the snapshot up to the store's head, over the versions that other writers committed."""
        for manifest in self.lineage.walk(self.version, self.lineage.head()):
            paths = {shard: self._spool / shard.name for shard in manifest.shards}
            for shard, path in paths.items():
                try:
                    fetch_object(
                        self.store,
                        shard_key(manifest.version, shard),
                        path,
                        info=shard,
                        digest_kind=manifest.digest_kind,
                        clock=self._clock,
                        disk=self._disk,
                    )
                except ObjectMissing as error:
                    told = explain_missing(self.lineage, manifest, error)
                    if isinstance(told, VersionRetired):
                        self.lineage.forget_shards(manifest)
                    raise told from error
            self._advance(manifest, paths.__getitem__)
            for path in paths.values():
                self._disk.unlink(path)

    def _prove(self, manifest: Manifest, path_of: Callable[[ShardInfo], Path]) -> Iterator[Proven]:
        deltas = Deltas([manifest], lambda _, shard: path_of(shard))
        due = [key for key in deltas.keys if self._advanced.get(key) != manifest.digest]
        return prove(self._snapshot.image, deltas, digest_kind=manifest.digest_kind, threads=self._threads, keys=due)

    def _advance(self, manifest: Manifest, path_of: Callable[[ShardInfo], Path]) -> None:
        self._check(manifest)
        digests = advance(self._snapshot.digests, manifest.rows)
        if state_digest(digests) != manifest.state_digest:
            raise DigestMismatch(
                f"version {manifest.version} claims another state than its rows lead to. The snapshot stays at version "
                f"{self.version}; audit the store."
            )
        for export in self._exports:  # before the bytes that they start from are written over
            next_state = NextState(self._snapshot.image, manifest, path_of)
            export.write(
                manifest.version,
                changed=next_state.changed,
                state=next_state.whole,
                elements=manifest.model_elements,
            )
        for proven in self._prove(manifest, path_of):
            self._snapshot.image.scatter(proven.key, proven.patches)
            self._advanced[proven.key] = manifest.digest
        self._snapshot = Snapshot(manifest, self._snapshot.image, digests)

    def _check(self, manifest: Manifest) -> None:
        """Whether a manifest goes on from the snapshot: its parent, and every part as it is here."""
        snapshot = self._snapshot
        strange = [
            row.key
            for row in manifest.rows
            if (part := snapshot.image.parts.get(row.key)) is None
            or (part.dtype, part.nbytes, snapshot.digests[row.key]) != (row.dtype, row.nbytes, row.before)
        ]
        if strange or manifest.parent_digest != snapshot.manifest.digest:
            raise ManifestCorrupt(
                f"{manifest_key(manifest.version)} does not go on from version {self.version} of run {self.run_id}"
                f"{f' ({strange[0].tensor} is another there)' if strange else ''}. The snapshot stays at version "
                f"{self.version}; audit the store."
            )

    def _stop(self, version: int) -> WriterOvertaken:
        other = self.lineage.manifest(version)
        self._overtaken = WriterOvertaken(
            f"writer {other.writer} took run {self.run_id} over with version {version}; this writer ({self.writer}) "
            f"stops for good at version {self.version}. Its last weights were not published. If this trainer is the "
            "one that should go on, start it again: it takes over by itself."
        )
        return self._overtaken


def open_publisher(
    store: Store,
    checkpoint: Checkpoint,
    *,
    run_id: str | None,
    digest_kind: str,
    aliases: Mapping[str, str],
    spool: Path,
    disk: Disk,
    clock: Clock,
    threads: int,
    replica: Path | None = None,
    trainable: Sequence[str] = (),
    signer: Signer | None = None,
    trust: Trust | None = None,
    exports: Sequence[Export] = (),
) -> Publisher:
    """Opens a run for writing: probes the store, claims the root (or goes on with it), and rebuilds the snapshot, by
    the shortest way from the base, an anchor, or a `replica` on this machine that proves equal.

    `trainable` are patterns of the tensors that may change; another that does is told, and published all the same.
    `exports` are neighbours' layouts, written after each commit. With a `signer` every version is signed, and only
    versions signed by its key (or those of `trust`) are gone on from.
    Holds one copy of the model in memory from then on. Raises StoreUnfit, ForeignRun, CheckpointError, VersionRetired,
    NotTrusted, StoreError, UsageError for a run that cannot be signed.
    """
    if signer is not None and trust is None:
        trust = Trust((signer.public,))
    probe(store, clock=clock)
    writer = uuid.uuid4().hex
    run, base = claim(
        store,
        checkpoint,
        run_id=run_id,
        digest_kind=digest_kind,
        writer=writer,
        aliases=aliases,
        clock=clock,
        signer=signer,
    )
    if signer is not None and run.digest_kind != SIGNED_DIGEST:
        raise UsageError(
            f"run {run.run_id} has {run.digest_kind} digests, which an enemy can forge: signing needs {SIGNED_DIGEST}. "
            "Nothing was published; sign a fresh root from its first version on."
        )
    lineage = Lineage(store, trust=trust)
    disk.make_folder(spool, mode=PRIVATE_FOLDER)
    for attempt in range(1, _OPEN_TRIES + 1):
        publisher = Publisher(
            store=store,
            lineage=lineage,
            snapshot=first_snapshot(
                lineage, base, replica=replica, spool=spool, disk=disk, clock=clock, threads=threads
            ),
            aliases=aliases,
            writer=writer,
            spool=spool,
            disk=disk,
            clock=clock,
            threads=threads,
            trainable=trainable,
            signer=signer,
            exports=exports,
        )
        for export in exports:
            export.begin(publisher.version, publisher.specs)
        try:
            publisher.follow()
        except VersionRetired as error:
            if attempt == _OPEN_TRIES:
                raise
            log.warning("a way to the head was closed, opening again", error=str(error))
        else:
            log.info("opened", run=run.run_id, version=publisher.version, writer=writer, store=store.url)
            return publisher
    raise AssertionError("the loop ends by returning or raising")
