"""Long histories made fast: real manifests and records through the real code, chained and with true state digests, but
of a model whose tensors' bytes nobody has, and without shards unless asked for."""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.lineage import RUN_KEY, RunInfo
from weighbridge.storage.manifest import manifest_key, shard_key, to_bytes
from weighbridge.storage.records import write_record
from weighbridge.storage.state import RollingState
from weighbridge.storage.stores import Store
from weighbridge.values import HostRecord, Manifest, PartKey, PartRow, ShardInfo

ELEMENTS = 4096
MOMENT_NS = 1_700_000_000_000_000_000
STEP_NS = 30_000_000_000


@dataclass
class LongRun:
    """A run that grows by `grow`. Each version changes `share` of the tensors; each host serves each version."""

    store: Store
    tensors: int = 12
    share: float = 1.0
    hosts: Sequence[str] = ()
    run_id: str = "long-run"
    shards: bool = False
    head: int = 0
    manifests: dict[int, Manifest] = field(default_factory=dict)
    """Those made last, without their rows."""

    def __post_init__(self) -> None:
        self.random = random.Random(7)
        self.names = sorted(f"model.layers.{n // 9}.block.{n % 9}.weight" for n in range(self.tensors))
        self.keys = [PartKey(name, 0) for name in self.names]
        self.digests = [self.random.randbytes(16) for _ in self.names]
        self.state = RollingState(self.keys, self._rows(self.digests))
        rows = tuple(self._row(n, "base", b"", -1, 0) for n in range(self.tensors))
        self._commit(rows, self._shards("files"), "base")
        run = RunInfo(self.run_id, "xxh3-128", self.state.hexdigest(), MOMENT_NS)
        self.store.create(RUN_KEY, run.to_bytes())

    def grow(self, versions: int) -> "LongRun":
        """Publishes so many versions, and writes the hosts' records of each."""
        for _ in range(versions):
            self.publish(sorted(self.random.sample(range(self.tensors), max(1, round(self.tensors * self.share)))))
            for host in self.hosts:
                write_record(self.store, self.record(host))
        return self

    def on(self, store: Store) -> "LongRun":
        """A run of its own that goes on from here, on a copy of this one's root."""
        other = copy.copy(self)
        other.store = store
        for name in ("random", "digests", "state", "manifests"):
            setattr(other, name, copy.deepcopy(getattr(self, name)))
        return other

    def publish(self, changed: Sequence[int]) -> Manifest:
        """One version that changes the tensors of these numbers."""
        self.head += 1
        before = [self.digests[n] for n in changed]
        for n in changed:
            self.digests[n] = self.random.randbytes(16)
        rows = tuple(
            self._row(n, "expgap", old, 0, self.random.randrange(1, 200))
            for n, old in zip(changed, before, strict=True)
        )
        if changed:
            self.state.replace(np.array(changed, np.int32), self._rows([self.digests[n] for n in changed]))
        return self._commit(rows, self._shards("00000") if changed else (), "delta")

    def record(self, host: str, *, version: int | None = None, outcome: str = "served", head: int = -1) -> HostRecord:
        """A host's record of a version, by default that it serves the newest."""
        reached = self.head if version is None else version
        ended = MOMENT_NS + max(self.head, head) * STEP_NS + self.random.randrange(1, 10**9)
        return HostRecord(
            run_id=self.run_id,
            host=host,
            version=reached,
            attempt=self.random.randbytes(16).hex(),
            outcome=outcome,
            stage="canary",
            from_version=reached - 1,
            state_digest=self.manifests[reached].state_digest if reached in self.manifests else "",
            started_ns=ended - 10**9,
            ended_ns=ended,
            fetched_bytes=1000,
            repaired=0,
            seconds={"fetch": 0.2, "apply": 0.3, "pause": self.random.random() / 10},
            head=head,
        )

    def _row(self, number: int, codec: str, before: bytes, shard: int, changed: int) -> PartRow:
        after = self.digests[number]
        return PartRow(self.keys[number], "BF16", (64, 64), 2 * ELEMENTS, codec, shard, changed, before, after, after)

    def _shards(self, name: str) -> tuple[ShardInfo, ...]:
        commit_id = f"{self.head:032x}"
        data = self.random.randbytes(100) if self.shards else b""
        shard = ShardInfo(f"{commit_id}-{name}.safetensors", len(data) or 100, digest_bytes("xxh3-128", data))
        if data:
            self.store.put(shard_key(self.head, shard), data)
        return (shard,)

    def _commit(self, rows: tuple[PartRow, ...], shards: tuple[ShardInfo, ...], kind: str) -> Manifest:
        version = self.head
        data, sealed = to_bytes(
            Manifest(
                run_id=self.run_id,
                version=version,
                parent=version - 1,
                parent_digest=self.manifests[version - 1].digest if version else "",
                writer="w" * 32,
                commit_id=f"{version:032x}",
                created_ns=MOMENT_NS + version * STEP_NS,
                digest_kind="xxh3-128",
                state_digest=self.state.hexdigest(),
                model_bytes=2 * ELEMENTS * self.tensors,
                model_elements=ELEMENTS * self.tensors,
                tensors=self.tensors,
                shards=shards,
                rows=rows,
                labels={"step": version} if version else {},
                files=shards[0].name if kind == "base" else "",
                kind=kind,
            )
        )
        self.store.put(manifest_key(version), data)
        self.manifests[version] = Manifest(**{**{f: getattr(sealed, f) for f in _FIELDS}, "rows": ()})
        return sealed

    @staticmethod
    def _rows(digests: Sequence[bytes]) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
        return np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), 16)


_FIELDS = tuple(Manifest.__dataclass_fields__)
