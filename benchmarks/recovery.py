"""What the recovery of one bad tensor reads: a replica of one copy, some versions on, in which a byte is flipped; with
the base folder, and without one from an anchor. python -m benchmarks.recovery [--mib N] [--versions N] [--folder DIR]
[--json]"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tests.checkpoints import write_checkpoint
from tests.faults.faulty_store import FaultyStore

from weighbridge.storage.anchor_sources import anchor_from_store
from weighbridge.storage.batching import batches
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.feed import Feed
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.publication import Publication
from weighbridge.storage.publisher import open_publisher
from weighbridge.storage.replica import bring_up
from weighbridge.storage.stores import Store, open_store
from weighbridge.values import TensorSpec

TENSOR_BYTES = 16 << 20
SHARD_BYTES = 64 << 20


class Counting(FaultyStore):
    """A store that counts the bytes of shards that are read."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.read: dict[str, int] = {}

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See Store."""
        self.read[key] = self.read.get(key, 0) + length
        return super().get_range(key, start, length)


def publish(store: Store, base: Path, weights: dict[str, "np.ndarray"], *, versions: int, spool: Path) -> None:  # type: ignore[type-arg]
    """Versions in each of which 0.4 % of all elements change."""
    rng = np.random.default_rng(1)
    publisher = open_publisher(
        store,
        open_checkpoint(base),
        run_id=None,
        digest_kind="xxh3-128",
        aliases={},
        spool=spool,
        disk=LocalDisk("process"),
        clock=SystemClock(),
        threads=1,
    )
    for _ in range(versions):
        publication = Publication(publisher, publisher.begin(), Feed(in_flight=1), {}, threads=1)
        for data in weights.values():
            data[rng.integers(0, data.size, data.size // 250)] ^= np.uint16(1)
        tensors = ((TensorSpec(n, "F16", d.shape, d.nbytes), d.view(np.uint8)) for n, d in weights.items())
        for batch in batches(tensors, shard_bytes=SHARD_BYTES):
            publication.attempt.encode(batch)
            publication.attempt.upload(batch.index)
        publication.commit()


def recover(store: Store, replica: Path, base: Path | None, tensor: str) -> dict[str, float]:
    """Flips a byte of a tensor, brings the replica up, and says what that took."""
    place = open_checkpoint(replica / "current").tensors[tensor]
    with (replica / "current" / place.file).open("r+b") as file:
        file.seek(place.start + 12345)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    counting = Counting(store)
    started = time.perf_counter()
    result = bring_up(replica, store=counting, base=base, copies=1, durability="process")
    seconds = time.perf_counter() - started
    assert (result.recovery.how, result.repaired) == ("repaired", 1), result.recovery
    return {"shards": len(counting.read), "bytes": sum(counting.read.values()), "seconds": seconds}


def measure(folder: Path, *, mib: int, versions: int) -> dict[str, dict[str, float]]:
    """Both recoveries, and what all shards weigh."""
    rng = np.random.default_rng(0)
    names = [f"layers.{n}.weight" for n in range((mib << 20) // TENSOR_BYTES)]
    weights = {name: rng.integers(0, 1 << 16, TENSOR_BYTES // 2, np.uint16) for name in names}
    base = write_checkpoint(folder / "base", {name: data.view(np.float16) for name, data in weights.items()})
    store = open_store(str(folder / "store"))
    publish(store, base, weights, versions=versions, spool=folder / "spool")
    weights.clear()
    shards = [info for info in store.list("versions") if info.key.endswith(".safetensors")]
    figures = {"all deltas": {"shards": len(shards), "bytes": sum(info.nbytes for info in shards), "seconds": 0.0}}
    for name, base_folder in (("from the base", base), ("from an anchor", None)):
        if base_folder is None:
            anchor = anchor_from_store(Lineage(store), 1, base=base, spool=folder / "anchoring")
            figures["the anchor"] = {"shards": len(anchor.shards), "bytes": anchor.wire_bytes, "seconds": 0.0}
        replica = folder / name.replace(" ", "-")
        bring_up(replica, store=store, base=base_folder, copies=1, durability="process")
        figures[name] = recover(store, replica, base_folder, names[len(names) // 2])
    return figures


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = measure(Path(folder), mib=options.mib, versions=options.versions)
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    for name, figure in figures.items():
        sys.stdout.write(
            f"{name:16} {figure['shards']:6.0f} shards {figure['bytes'] / 1e6:10.2f} MB {figure['seconds']:8.2f} s\n"
        )


if __name__ == "__main__":
    main()
