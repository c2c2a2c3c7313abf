"""A run's writer: holds the snapshot of what was committed last, opens attempts against it, and advances it only when a
commit is settled, by the very patches that hosts apply, proven before the commit. Knows neither Prefect nor torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from weighbridge.errors import (
    CommitConflict,
    DigestMismatch,
    ManifestCorrupt,
    ObjectMissing,
    RankLost,
    StoreRefused,
    VersionRetired,
    WriterOvertaken,
)
from weighbridge.storage.attempt import Attempt, Snapshot
from weighbridge.storage.clock import Clock
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import Disk
from weighbridge.storage.manifest import manifest_key, shard_key
from weighbridge.storage.next_state import NextState
from weighbridge.storage.peers.export import Export
from weighbridge.storage.ranks import FIRST, Ranks, Round
from weighbridge.storage.replica.image import ShareImage
from weighbridge.storage.replica.patching import Deltas, Proven, prove
from weighbridge.storage.share import Share
from weighbridge.storage.signing import Signer
from weighbridge.storage.state import advance, state_digest
from weighbridge.storage.stores.contract import Store
from weighbridge.storage.transfer import fetch_object, part_path
from weighbridge.storage.ways import explain_missing
from weighbridge.values import Label, Manifest, PartKey, ShardInfo, TensorSpec

log = structlog.get_logger("weighbridge.publisher")

_TAKE_OVER_TRIES = 8
_LOST, _UNKNOWN = "lost", "unknown"


@dataclass(frozen=True, slots=True)
class _Begun:
    """What the first rank tells the others of an attempt."""

    commit_id: str
    parent: int
    parent_digest: str
    reigns: bool


class Publisher:
    """Not thread-safe: one push at a time. An attempt's `encode` and `upload` may run in many threads.

    `version` is the newest version that this writer knows and holds in its snapshot. With several ranks each has one of
    these and its share of the snapshot; `begin` and `commit` are called by all of them, and the first one commits.
    `owners` says which rank publishes which tensor, once a push has settled that. `hand_over` is told of each version
    that stands, on every rank, while this rank's shards are still in the spool; it may take them, and must not raise.
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
        ranks: Ranks,
        share: Share,
        hand_over: Callable[[Manifest, Attempt], None] | None = None,
    ) -> None:
        self._signer = signer
        self._exports = tuple(exports)
        self._trainable = tuple(trainable)
        self.ranks = ranks
        self.owners: dict[str, int] = {}
        self._share = share
        self._hand_over = hand_over or (lambda *_: None)
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
        self._reported: Attempt | None = None  # whose shards the first rank may commit, or has
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
    def parent_digest(self) -> str:
        """The digest of that version's manifest: what the next one names as its parent's."""
        return self._snapshot.manifest.digest

    @property
    def digest_kind(self) -> str:
        """How parts are digested in this run."""
        return self._snapshot.manifest.digest_kind

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The base's tensors by name: what every push must match."""
        return self._snapshot.image.specs

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied tensors, as the newest version records them, and those given since."""
        return {**self._snapshot.manifest.aliases, **self._aliases}

    def hold_nothing(self) -> None:
        """Lets go of the snapshot's bytes, where it holds them as they are needed: whoever encodes has their own."""
        if isinstance(image := self._snapshot.image, ShareImage):
            image.keep_only(())

    def begin(self) -> Attempt:
        """Opens an attempt at the next version, once nothing of an earlier one is in doubt.

        Raises WriterOvertaken for ever after another writer took over, CommitStateUnknown while an earlier commit
        cannot be settled; on every rank what any of them raises.
        """
        shared = self.ranks.round()
        try:
            # Nobody goes on before all have left the push before this one: who failed in it early must not end, for the
            # others, a round that they have not begun.
            shared.exchange("here", None)
            if self.ranks.rank == FIRST:
                self._come_to_rest()
                attempt = self._attempt(shared)
                parent = self._snapshot.manifest
                shared.post("begun", _Begun(attempt.commit_id, parent.version, parent.digest, self._reigns))
                return attempt
            begun: _Begun = shared.take("begun", FIRST)
            if self._snapshot.manifest.digest != begun.parent_digest:
                self.follow(upto=begun.parent)  # an earlier commit that was in doubt, or another writer's
            if self._snapshot.manifest.digest != begun.parent_digest:
                raise ManifestCorrupt(
                    f"rank {self.ranks.rank} is at version {self.version} of another history than rank {FIRST}. "
                    "Nothing was published; start the trainer again."
                )
            self._reigns = begun.reigns
            return self._attempt(shared, begun.commit_id)
        except BaseException as failure:
            shared.fail(failure)
            raise

    def _come_to_rest(self) -> None:
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

    def _attempt(self, shared: Round, commit_id: str | None = None) -> Attempt:
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
            ranks=self.ranks,
            shared=shared,
            commit_id=commit_id,
            hold=lambda names: self._share.hold(self._snapshot, names),
        )

    def commit(self, attempt: Attempt, labels: Mapping[str, Label]) -> Manifest:
        """Proves the attempt's shards, commits it, and advances the snapshot. Labels are the first rank's.

        Raises CommitConflict when another writer committed this version first (nothing of ours is visible; a later
        push follows it), WriterOvertaken when that writer took the run over, CommitStateUnknown when no answer came;
        GatherError when ranks have different bytes of one tensor.
        """
        # What hosts will decode is decoded here before anybody can see it: a wrong delta is never committed.
        for _ in self._prove(attempt.own(), attempt.path):
            pass
        if self.ranks.rank != FIRST:
            return self._commit_with_first(attempt)
        for rank in range(1, self.ranks.size):
            attempt.adopt(attempt.round.take("report", rank))
        attempt.agree()
        attempt.seal(labels)
        manifest = self._settle(attempt)
        attempt.round.post("outcome", manifest)
        return manifest

    def _commit_with_first(self, attempt: Attempt) -> Manifest:
        report = attempt.report()
        attempt.round.check()
        self._reported = attempt  # from here on the first rank decides what becomes of its shards
        attempt.round.post("report", report)
        outcome: Manifest | str = attempt.round.take("outcome", FIRST, heed=False)
        if isinstance(outcome, str):
            self._reported = attempt if outcome == _UNKNOWN else None
            attempt.round.check()
            raise RankLost(f"rank {FIRST} did not commit version {attempt.version}, and did not say why.")
        self._reigns = True
        self._advance(outcome, attempt.path)
        self._hand_over(outcome, attempt)
        attempt.discard(uploaded=False)
        return outcome

    def discard(self, attempt: Attempt) -> None:
        """Gives an attempt up: the store is as it was before it. One whose commit is in doubt is kept for settling."""
        in_doubt = attempt is self._unsettled
        if self.ranks.rank == FIRST:
            attempt.round.post("outcome", _UNKNOWN if in_doubt else _LOST)
        if not in_doubt:
            attempt.discard(uploaded=attempt is not self._reported)

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
        self._hand_over(manifest, attempt)
        attempt.discard(uploaded=False)
        log.info("committed", run=self.run_id, version=manifest.version, wire_bytes=manifest.wire_bytes)
        return manifest

    def follow(self, *, upto: int | None = None) -> None:
        """Brings the snapshot up to the store's head (or a version), over what other writers committed."""
        for manifest in self.lineage.walk(self.version, self.lineage.head() if upto is None else upto):
            needed = {row.shard for row in manifest.rows if self._snapshot.image.holds(row.key.tensor)}
            paths = {shard: self._spool / shard.name for n, shard in enumerate(manifest.shards) if n in needed}
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
                    for begun in paths.values():  # nobody will go on with them
                        self._disk.unlink(begun)
                        self._disk.unlink(part_path(begun))
                    raise told from error
            self._advance(manifest, paths.__getitem__)
            for path in paths.values():
                self._disk.unlink(path)

    def _prove(self, manifest: Manifest, path_of: Callable[[ShardInfo], Path]) -> Iterator[Proven]:
        deltas = Deltas([manifest], lambda _, shard: path_of(shard))
        image = self._snapshot.image
        due = [k for k in deltas.keys if image.holds(k.tensor) and self._advanced.get(k) != manifest.digest]
        return prove(image, deltas, digest_kind=manifest.digest_kind, threads=self._threads, keys=due)

    def _advance(self, manifest: Manifest, path_of: Callable[[ShardInfo], Path]) -> None:
        self._check(manifest)
        digests = advance(self._snapshot.digests, manifest.rows)
        if state_digest(digests) != manifest.state_digest:
            raise DigestMismatch(
                f"version {manifest.version} claims another state than its rows lead to. The snapshot stays at version "
                f"{self.version}; audit the store."
            )
        if self.owners and isinstance(image := self._snapshot.image, ShareImage):
            # What moved to another rank is in that one's shards, and its snapshot's to keep.
            image.keep_only({name for name, owner in self.owners.items() if owner == self.ranks.rank})
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
        self._share.rest()

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
