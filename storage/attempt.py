"""One attempt at one version: batches become spooled shards, shards are uploaded, and one object commits them. Encodes
against a snapshot that it never changes. Must not know where tensors come from, nor who asks for a retry."""

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from weighbridge.errors import GatherError, StoreError
from weighbridge.storage.alarm_labels import alarm_labels
from weighbridge.storage.batching import Batch
from weighbridge.storage.clock import Clock
from weighbridge.storage.codecs import PartInput, encode_shard
from weighbridge.storage.commit import put_if_absent
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.localdisk import Disk
from weighbridge.storage.manifest import manifest_key, shard_key, to_bytes
from weighbridge.storage.ranks import Alone, Ranks, Round
from weighbridge.storage.replica.image import Image
from weighbridge.storage.signing import Signer
from weighbridge.storage.state import advance, state_digest
from weighbridge.storage.stores.contract import Store
from weighbridge.storage.transfer import upload_file
from weighbridge.values import Label, Manifest, PartKey, PartRow, ShardInfo

log = structlog.get_logger("weighbridge.publisher")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The last committed state, which an attempt is encoded against: its manifest, its bytes, its parts' digests."""

    manifest: Manifest
    image: Image
    digests: Mapping[PartKey, bytes]


@dataclass(frozen=True, slots=True)
class SpooledShard:
    """What one batch came to: its shard on local disk (none when nothing changed), its rows, the seconds it took."""

    index: int
    info: ShardInfo | None
    rows: tuple[PartRow, ...]
    tensor_digests: Mapping[str, bytes]
    seconds: float
    nonfinite: Mapping[str, int]
    """By tensor, how many elements turned NaN or infinite; none that did not."""

    @property
    def nbytes(self) -> int:
        """Bytes that go over the wire."""
        return self.info.nbytes if self.info else 0


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank adds to a version: its uploaded shards, and the digests of parts that it has and another rank
    publishes."""

    rank: int
    shards: tuple[SpooledShard, ...]
    seen: Mapping[PartKey, bytes]


class Attempt:
    """Encoding and uploading may run in many threads; `commit` runs once, after all of them.

    In a writer of several ranks each has one, all of the same `commit_id`; the first takes the others' reports in.
    `hold` is told of the tensors whose old bytes are needed next.
    """

    def __init__(
        self,
        *,
        store: Store,
        snapshot: Snapshot,
        aliases: Mapping[str, str],
        writer: str,
        spool: Path,
        disk: Disk,
        clock: Clock,
        trainable: Sequence[str] = (),
        signer: Signer | None = None,
        ranks: Ranks | None = None,
        shared: Round | None = None,
        commit_id: str | None = None,
        hold: Callable[[Iterable[str]], None] = lambda _: None,
    ) -> None:
        self._signer = signer
        self._trainable = tuple(trainable)
        self._ranks: Ranks = ranks or Alone()
        self.round: Round = shared or self._ranks.round()
        self._hold = hold
        self._seen: dict[PartKey, bytes] = {}
        self._others: list[Report] = []
        self.version = snapshot.manifest.version + 1
        self.commit_id = commit_id or uuid.uuid4().hex
        self._store = store
        self._snapshot = snapshot
        self._aliases = aliases
        self._writer = writer
        self._spool = spool
        self._disk = disk
        self._clock = clock
        self._lock = threading.Lock()
        self._shards: dict[int, SpooledShard] = {}
        self._uploaded: set[int] = set()
        self._sealed: tuple[bytes, Manifest] | None = None
        self._stands = False

    @property
    def shards(self) -> tuple[SpooledShard, ...]:
        """What was encoded so far, in the batches' order."""
        with self._lock:
            return tuple(self._shards[i] for i in sorted(self._shards))

    @property
    def owners(self) -> dict[str, int]:
        """On the first rank, once all reported: which rank has a shard in its spool, by the shard's name."""
        reports = (Report(self._ranks.rank, self.shards, {}), *self._others)
        return {s.info.name: report.rank for report in reports for s in report.shards if s.info is not None}

    def path(self, shard: ShardInfo) -> Path:
        """Where a shard is spooled."""
        return self._spool / shard.name

    def encode(self, batch: Batch) -> SpooledShard:
        """Diffs, digests and encodes one batch, and spools its shard. Repeatable."""
        started = time.perf_counter()
        kind = self._snapshot.manifest.digest_kind
        image, before = self._snapshot.image, self._snapshot.digests
        self._hold(part.part.key.tensor for part in batch.parts)
        inputs = [PartInput(p.part.key, p.part.dtype, image.view(p.part.key), p.new) for p in batch.parts]
        encoded = encode_shard(inputs, digest_kind=kind)
        whole = {name: digest_bytes(kind, data.data) for name, data in batch.whole}
        info = None
        if encoded.parts:
            info = ShardInfo(
                f"{self.commit_id}-{batch.index * self._ranks.size + self._ranks.rank:05d}.safetensors",
                len(encoded.payload),
                digest_bytes(kind, encoded.payload),
            )
            self._disk.write_atomic(self.path(info), encoded.payload)
        rows = tuple(
            PartRow(
                key=part.key,
                dtype=image.specs[part.key.tensor].dtype,
                shape=image.specs[part.key.tensor].shape,
                nbytes=image.parts[part.key].nbytes,
                codec=part.codec,
                shard=batch.index,
                changed=part.changed,
                before=before[part.key],
                after=part.after,
                tensor_digest=part.after,
            )
            for part in encoded.parts
        )
        nonfinite: Counter[str] = Counter()
        for part in encoded.parts:
            if part.nonfinite:
                nonfinite[part.key.tensor] += part.nonfinite
        shard = SpooledShard(batch.index, info, rows, whole, time.perf_counter() - started, nonfinite)
        with self._lock:
            self._shards[batch.index] = shard
            self._uploaded.discard(batch.index)
        return shard

    def take_in(self, shard: SpooledShard) -> None:
        """Takes in a shard of this attempt's that was encoded, proven and uploaded on another machine."""
        with self._lock:
            self._shards[shard.index] = shard
            self._uploaded.add(shard.index)

    def upload(self, index: int) -> int:
        """Uploads one encoded shard and checks its size; safe to repeat, since its name is this attempt's own."""
        shard = self._shards[index]
        if shard.info is None:
            return 0
        upload_file(self._store, shard_key(self.version, shard.info), self.path(shard.info), clock=self._clock)
        with self._lock:
            self._uploaded.add(index)
        return shard.info.nbytes

    def saw(self, key: PartKey, digest: bytes) -> None:
        """Notes what a part is here that another rank publishes."""
        self._seen[key] = digest

    def report(self) -> Report:
        """What this rank adds. Raises RuntimeError when a shard was not uploaded."""
        self._demand_uploaded()
        return Report(self._ranks.rank, self.shards, dict(self._seen))

    def own(self) -> Manifest:
        """The snapshot's manifest with this rank's rows and shards in it: for their proof, and nothing else."""
        rows, shards = self._numbered([shard for shard in self.shards if shard.info is not None])
        return replace(self._snapshot.manifest, rows=rows, shards=shards, digest="")

    def adopt(self, report: Report) -> None:
        """Takes in what another rank adds."""
        self._others.append(report)

    def agree(self) -> None:
        """Whether every part is published once, and is the same on all ranks that have it. Raises GatherError."""
        published: dict[PartKey, tuple[bytes, int]] = {}
        reports = (self.report(), *self._others)
        for report in reports:
            for row in (row for shard in report.shards for row in shard.rows):
                if row.key in published:
                    raise RuntimeError(f"{row.key.tensor} is published by ranks {published[row.key][1]}, {report.rank}")
                published[row.key] = row.after, report.rank
        apart = []
        for report in reports:
            for key, digest in report.seen.items():
                after, rank = published.get(key, (self._snapshot.digests[key], None))
                if digest != after:
                    owner = "its owner, unchanged" if rank is None else f"rank {rank}"
                    apart.append(f"{key.tensor}: {after.hex()} on {owner}, {digest.hex()} on rank {report.rank}")
        if apart:
            raise GatherError(
                f"ranks have different bytes of the same tensor ({len(apart)}). Nothing was published; the trainer's "
                "replicas have run apart.\n" + "\n".join(f"  - {reason}" for reason in apart)
            )

    def seal(self, labels: Mapping[str, Label]) -> Manifest:
        """Builds the manifest from what was encoded; the commit's bytes are fixed from here on.

        Raises UsageError for labels that a manifest cannot carry, RuntimeError when a shard was not uploaded.
        """
        if self._sealed is None:
            self._demand_uploaded()
            self._sealed = to_bytes(self._manifest(labels), signer=self._signer)
        return self.manifest

    def _demand_uploaded(self) -> None:
        if waiting := [s.index for s in self.shards if s.info and s.index not in self._uploaded]:
            raise RuntimeError(f"version {self.version} is not committed: its shards {waiting} are not uploaded")

    @property
    def manifest(self) -> Manifest:
        """The sealed manifest. Raises RuntimeError before `seal`."""
        return self._fixed()[1]

    def _fixed(self) -> tuple[bytes, Manifest]:
        if self._sealed is None:
            raise RuntimeError("an attempt is sealed before it is committed")
        return self._sealed

    def commit(self) -> bool:
        """Creates the sealed manifest: True when it stands, False when another writer's does.

        Safe to repeat, since the bytes stay the same. Raises CommitStateUnknown.
        """
        self._stands = put_if_absent(self._store, manifest_key(self.version), self._fixed()[0], clock=self._clock)
        return self._stands

    def _manifest(self, labels: Mapping[str, Label]) -> Manifest:
        parent = self._snapshot.manifest
        rows, shards = self._numbered([shard for shard in self._all_shards() if shard.info is not None])
        return Manifest(
            run_id=parent.run_id,
            version=self.version,
            parent=parent.version,
            parent_digest=parent.digest,
            writer=self._writer,
            commit_id=self.commit_id,
            created_ns=self._clock.now_ns(),
            digest_kind=parent.digest_kind,
            state_digest=state_digest(advance(self._snapshot.digests, rows)),
            model_bytes=parent.model_bytes,
            model_elements=parent.model_elements,
            tensors=parent.tensors,
            shards=shards,
            rows=rows,
            labels={**labels, **self._alarms(rows)},
            aliases=self._aliases,
        )

    def _all_shards(self) -> tuple[SpooledShard, ...]:
        return (*self.shards, *(shard for report in self._others for shard in report.shards))

    def _numbered(self, carried: Sequence[SpooledShard]) -> tuple[tuple[PartRow, ...], tuple[ShardInfo, ...]]:
        """The rows and shards as a manifest has them, in an order that does not depend on who made which."""
        ordered = sorted(carried, key=lambda shard: shard.rows[0].key)
        fresh = {name: digest for s in self._all_shards() for name, digest in s.tensor_digests.items()}
        rows = tuple(
            replace(row, shard=number, tensor_digest=fresh.get(row.key.tensor, row.tensor_digest))
            for number, shard in enumerate(ordered)
            for row in shard.rows
        )
        return rows, tuple(shard.info for shard in ordered if shard.info is not None)

    def _alarms(self, rows: Sequence[PartRow]) -> dict[str, Label]:
        """What a person should know of this version, as labels and in the log. Alters nothing that is published."""
        turned: Counter[str] = Counter()
        for shard in self._all_shards():
            turned.update(shard.nonfinite)
        found = alarm_labels(turned, (row.key.tensor for row in rows), trainable=self._trainable)
        if found:
            log.warning("alarm", version=self.version, **found)
        return found

    def discard(self, *, uploaded: bool) -> None:
        """Removes the spooled shards and, with `uploaded`, what stands of them in the store.

        Only for an attempt whose commit was never sent or lost for certain; shards of one that stands are never taken
        back. What cannot be deleted now is an orphan, which no reader sees and garbage collection takes.
        """
        for shard in self._all_shards():
            if shard.info is None:
                continue
            self._disk.unlink(self.path(shard.info))  # another rank's is not here
            if uploaded and not self._stands:
                key = shard_key(self.version, shard.info)
                try:
                    self._store.delete(key)
                except StoreError as error:
                    log.warning("orphan shard left behind", key=key, error=str(error))
