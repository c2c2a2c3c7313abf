"""A version's way over a store, made of the house's own steps: what every store must bring across whatever its network
does. Small enough that a fault in each request of it takes a second or so."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weighbridge.storage.clock import SystemClock
from weighbridge.storage.commit import put_if_absent
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.stores import Store
from weighbridge.storage.transfer import fetch_object, upload_file
from weighbridge.values import ShardInfo

SMALL = 40_000
LARGE = (5 << 20) + 5  # two parts of an upload


def shards() -> dict[str, bytes]:
    draw = np.random.default_rng(7)
    return {name: draw.bytes(n) for name, n in (("abc-00000.safetensors", SMALL), ("abc-00001.safetensors", LARGE))}


SHARDS = shards()


@dataclass(frozen=True, slots=True)
class Bridge:
    """A writer's and a host's folder beside a store, in which `root` is a folder of its own."""

    store: Store
    root: str
    folder: Path
    deadline_seconds: float = 60.0

    @property
    def manifest_key(self) -> str:
        return f"{self.root}/versions/000000000001/manifest.arrow"

    def shard_key(self, name: str) -> str:
        return f"{self.root}/versions/000000000001/{name}"

    def publish(self) -> bool:
        """Uploads the shards, then commits; True when this writer's manifest stands."""
        for name, data in SHARDS.items():
            path = self.folder / name
            path.write_bytes(data)
            upload_file(
                self.store,
                self.shard_key(name),
                path,
                clock=SystemClock(),
                deadline_seconds=self.deadline_seconds,
            )
        return self.commit(b"writer abc, version 1")

    def commit(self, manifest: bytes) -> bool:
        return put_if_absent(
            self.store, self.manifest_key, manifest, clock=SystemClock(), deadline_seconds=self.deadline_seconds
        )

    def fetch(self, host: str) -> dict[str, bytes]:
        """Fetches the shards as a host does, and returns what it would apply and whatever else lies there."""
        for name, data in SHARDS.items():
            fetch_object(
                self.store,
                self.shard_key(name),
                self.folder / host / name,
                info=ShardInfo(name, len(data), digest_bytes("xxh3-128", data)),
                digest_kind="xxh3-128",
                clock=SystemClock(),
                deadline_seconds=self.deadline_seconds,
            )
        return {path.name: path.read_bytes() for path in sorted((self.folder / host).iterdir())}
