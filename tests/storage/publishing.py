"""Publishers for tests: a tiny base, pushes in one call, and what must be true of a store whatever happened to it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.checkpoints import Weights, as_tensors, state_digest_of, tiny_weights, write_checkpoint
from tests.faults.virtual_clock import VirtualClock

from weighbridge.storage.attempt import Attempt
from weighbridge.storage.batching import batches
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.clock import Clock
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.feed import Feed
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import Disk, LocalDisk
from weighbridge.storage.manifest import shard_key
from weighbridge.storage.open_publisher import open_publisher
from weighbridge.storage.publication import Publication
from weighbridge.storage.publisher import Publisher
from weighbridge.storage.stores import Store, open_store
from weighbridge.values import Label, Manifest, TensorSpec

SHARD_BYTES = 1600
"""Small, so that the tiny model takes several shards."""


@dataclass
class Run:
    """A root and a base under one temporary folder; publishers are opened on it as a trainer would."""

    folder: Path
    base_weights: Weights = field(default_factory=tiny_weights)
    clock: Clock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        self.base = write_checkpoint(self.folder / "base", self.base_weights)
        self.store: Store = open_store(str(self.folder / "root"))
        self._spools = 0

    def open(self, store: Store | None = None, *, disk: Disk | None = None, **options: Any) -> Publisher:
        """A publisher with a spool of its own, unless it gets one."""
        self._spools += 1
        return open_publisher(
            store or self.store,
            open_checkpoint(options.pop("base", self.base)),
            run_id=options.pop("run_id", "run-1"),
            digest_kind=options.pop("digest_kind", "xxh3-128"),
            aliases=options.pop("aliases", {}),
            spool=options.pop("spool", self.folder / f"spool-{self._spools}"),
            disk=disk or LocalDisk("process"),
            clock=self.clock,
            threads=options.pop("threads", 1),
            replica=options.pop("replica", None),
            trainable=options.pop("trainable", ()),
            **options,
        )

    def spooled(self) -> list[Path]:
        """Files left in the spools of all publishers."""
        return [path for spool in self.folder.glob("spool-*") for path in spool.iterdir()]

    def objects(self) -> list[str]:
        """Every object in the root."""
        return [info.key for info in self.store.list("")]


def fill(
    publisher: Publisher, tensors: Iterator[tuple[TensorSpec, Bytes]], *, upload: bool = True, shard_bytes: int = 0
) -> Attempt:
    """An attempt with everything encoded and uploaded, ready to commit."""
    attempt = publisher.begin()
    for batch in batches(tensors, shard_bytes=shard_bytes or SHARD_BYTES):
        attempt.encode(batch)
        if upload:
            attempt.upload(batch.index)
    return attempt


def push(publisher: Publisher, weights: Weights, labels: Mapping[str, Label] | None = None) -> Manifest:
    """One whole push, in this thread, cleaned up as a push is when it fails."""
    return push_tensors(publisher, as_tensors(weights), labels)


def push_tensors(
    publisher: Publisher, tensors: Iterator[tuple[TensorSpec, Bytes]], labels: Mapping[str, Label] | None = None
) -> Manifest:
    publication = Publication(publisher, publisher.begin(), Feed(in_flight=1), labels or {}, threads=1)
    try:
        for batch in batches(tensors, shard_bytes=SHARD_BYTES):
            publication.attempt.encode(batch)
            publication.attempt.upload(batch.index)
        return publication.commit()
    finally:
        publication.give_up()


def bare_push(publisher: Publisher, weights: Weights) -> Manifest:
    """One whole push by a process that may be killed: nobody cleans up after it."""
    return publisher.commit(fill(publisher, as_tensors(weights)), {})


def snapshot_of(publisher: Publisher) -> dict[str, bytes]:
    """The bytes of a publisher's snapshot by tensor."""
    image = publisher._snapshot.image
    found: dict[str, bytes] = dict.fromkeys(image.specs, b"")
    for key in image.parts:
        found[key.tensor] += image.view(key).tobytes()
    return found


def bytes_of(weights: Weights) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in weights.items()}


def assert_sound(run: Run, states: Mapping[int, Weights]) -> None:
    """The root holds a whole chain, and rebuilding it gives exactly `states`, by version; 0 is the base's.

    A publisher opened anew rebuilds the head from the store alone, and proves every part of every version as it goes.
    """
    lineage = Lineage(run.store)
    head = max(states)
    assert lineage.head() == head
    parent = ""
    for version in range(head + 1):
        manifest = lineage.manifest(version)
        assert manifest.parent_digest == parent
        parent = manifest.digest
        if version in states:
            assert manifest.state_digest == state_digest_of(states[version])
        for shard in manifest.shards:
            assert run.store.size(shard_key(version, shard)) == shard.nbytes
    assert snapshot_of(run.open()) == bytes_of(states[head])


def orphans(run: Run) -> list[str]:
    """Keys in version folders that no manifest names."""
    lineage = Lineage(run.store)
    named = {"run.json"}
    for version in range(lineage.head() + 1):
        manifest = lineage.manifest(version)
        named |= {shard_key(version, shard) for shard in manifest.shards}
        named.add(f"versions/{version:012d}/manifest.arrow")
    return [key for key in run.objects() if key not in named]


def some_bytes(nbytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
