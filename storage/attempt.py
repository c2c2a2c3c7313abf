"""One attempt at one version: batches become spooled shards, shards are uploaded, and one object commits them. Encodes
against a snapshot that it never changes. Must not know where tensors come from, nor who asks for a retry."""

import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from weighbridge.errors import StoreError
from weighbridge.storage.alarm_labels import alarm_labels
from weighbridge.storage.batching import Batch
from weighbridge.storage.clock import Clock
from weighbridge.storage.codecs import PartInput, encode_shard
from weighbridge.storage.commit import put_if_absent
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.localdisk import Disk
from weighbridge.storage.manifest import manifest_key, shard_key, to_bytes
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


class Attempt:
    """Encoding and uploading may run in many threads; `commit` runs once, after all of them."""

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
    ) -> None:
        self._signer = signer
        self._trainable = tuple(trainable)
        self.version = snapshot.manifest.version + 1
        self.commit_id = uuid.uuid4().hex
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

    def path(self, shard: ShardInfo) -> Path:
        """Where a shard is spooled."""
        return self._spool / shard.name

    def encode(self, batch: Batch) -> SpooledShard:
        """Diffs, digests and encodes one batch, and spools its shard. Repeatable."""
        started = time.perf_counter()
        kind = self._snapshot.manifest.digest_kind
        image, before = self._snapshot.image, self._snapshot.digests
        inputs = [PartInput(p.part.key, p.part.dtype, image.view(p.part.key), p.new) for p in batch.parts]
        encoded = encode_shard(inputs, digest_kind=kind)
        whole = {name: digest_bytes(kind, data.data) for name, data in batch.whole}
        info = None
        if encoded.parts:
            info = ShardInfo(
                f"{self.commit_id}-{batch.index:05d}.safetensors",
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

    def upload(self, index: int) -> int:
        """Uploads one encoded shard and checks its size; safe to repeat, since its name is this attempt's own."""
        shard = self._shards[index]
        if shard.info is None:
            return 0
        upload_file(self._store, shard_key(self.version, shard.info), self.path(shard.info), clock=self._clock)
        with self._lock:
            self._uploaded.add(index)
        return shard.info.nbytes

    def seal(self, labels: Mapping[str, Label]) -> Manifest:
        """Builds the manifest from what was encoded; the commit's bytes are fixed from here on.

        Raises UsageError for labels that a manifest cannot carry, RuntimeError when a shard was not uploaded.
        """
        if self._sealed is None:
            if waiting := [s.index for s in self.shards if s.info and s.index not in self._uploaded]:
                raise RuntimeError(f"version {self.version} is not committed: its shards {waiting} are not uploaded")
            self._sealed = to_bytes(self._manifest(labels), signer=self._signer)
        return self.manifest

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
        carried = [s for s in self.shards if s.info is not None]
        fresh = {name: digest for s in self.shards for name, digest in s.tensor_digests.items()}
        rows = tuple(
            replace(row, shard=number, tensor_digest=fresh.get(row.key.tensor, row.tensor_digest))
            for number, shard in enumerate(carried)
            for row in shard.rows
        )
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
            shards=tuple(s.info for s in carried if s.info is not None),
            rows=rows,
            labels={**labels, **self._alarms(rows)},
            aliases=self._aliases,
        )

    def _alarms(self, rows: Sequence[PartRow]) -> dict[str, Label]:
        """What a person should know of this version, as labels and in the log. Alters nothing that is published."""
        turned: Counter[str] = Counter()
        for shard in self.shards:
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
        for shard in self.shards:
            if shard.info is None:
                continue
            self._disk.unlink(self.path(shard.info))
            if uploaded and not self._stands:
                key = shard_key(self.version, shard.info)
                try:
                    self._store.delete(key)
                except StoreError as error:
                    log.warning("orphan shard left behind", key=key, error=str(error))
