"""What each rank of a trainer holds: memory of four ranks that push a model which all of them bring, and of one alone.
`python benchmarks/ranks.py [MIB]`; no Prefect, gloo, a store in a temporary folder."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

TENSORS = 32


def tensors(nbytes: int, step: int) -> Iterator[tuple[str, "np.ndarray[tuple[int], np.dtype[np.float32]]"]]:
    """One tensor at a time, as an exporter yields them; a step changes one element in fifty."""
    size = nbytes // TENSORS // 4
    for number in range(TENSORS):
        tensor = np.random.default_rng(number).random(size, np.float32)
        tensor[::50] += np.float32(step)
        yield f"layers.{number}.weight", tensor


def rank(folder: Path, nbytes: int, snapshot: str) -> None:
    """One rank: opens, pushes twice, and says by how much it grew."""
    from torch import distributed

    from weighbridge.storage.batching import batches
    from weighbridge.storage.checkpoint import open_checkpoint
    from weighbridge.storage.clock import SystemClock
    from weighbridge.storage.codecs import warm
    from weighbridge.storage.expectation import Expectation
    from weighbridge.storage.feed import Feed
    from weighbridge.storage.localdisk import LocalDisk
    from weighbridge.storage.open_publisher import open_publisher
    from weighbridge.storage.publication import Publication
    from weighbridge.storage.stores import open_store
    from weighbridge.tasks.gather import gather
    from weighbridge.tasks.publish_here import publish_here
    from weighbridge.tasks.sharing import Sharing
    from weighbridge.tasks.torch_ranks import ranks_of_process

    distributed.init_process_group("gloo")
    ranks = ranks_of_process(deadline_seconds=300, grace_seconds=5)
    process, shard_bytes = psutil.Process(), nbytes // TENSORS
    warm()
    before = private(process)

    def push(step: int) -> None:
        publication = Publication(publisher, publisher.begin(), Feed(in_flight=2), {}, threads=1)
        thread = threading.Thread(target=publish_here, args=(publication,))
        thread.start()
        sharing = Sharing(
            ranks, publication.attempt.round, publisher.specs, publisher.owners,
            saw=publication.attempt.saw, digest_kind=publisher.digest_kind, window_bytes=shard_bytes,
        )  # fmt: skip
        gathered = gather(tensors(nbytes, step), Expectation(publisher.specs), sharing)
        for batch in batches(((item.spec, item.lasting()) for item in gathered), shard_bytes=shard_bytes):
            publication.feed.put(batch)
        publication.feed.close()
        thread.join()

    name = f"spool-{os.environ['RANK']}"
    publisher = open_publisher(
        open_store(str(folder / f"store-{ranks.size}-{snapshot}")), open_checkpoint(folder / "base"), run_id="run",
        digest_kind="xxh3-128", aliases={}, spool=folder / f"{name}-{ranks.size}-{snapshot}", disk=LocalDisk("process"),
        clock=SystemClock(), threads=1, snapshot=snapshot, ranks=ranks,  # type: ignore[arg-type]
    )  # fmt: skip
    push(1)
    seen, over = [], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            seen.append(private(process))

    watcher = threading.Thread(target=watch)
    watcher.start()
    push(2)
    over.set()
    watcher.join()
    size = sum(publisher.specs[n].nbytes for n in publisher.specs if publisher._snapshot.image.holds(n))
    said = {"ranks": ranks.size, "snapshot": snapshot, "share_mib": size >> 20, "grew_mib": max(seen) - before >> 20}
    print(json.dumps({**said, "tensor_mib": shard_bytes >> 20}), flush=True)  # noqa: T201


def private(process: psutil.Process) -> int:
    """Resident bytes that are this process' own: neither libraries nor a mapped file."""
    said = process.memory_info()
    return int(said.rss - said.shared)


def main(mib: int) -> None:
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "base").mkdir()
        save_file(dict(tensors(mib << 20, 0)), folder / "base" / "model.safetensors")
        for ranks, snapshot in ((1, "memory"), (4, "memory"), (4, "mmap")):
            command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
            subprocess.run([sys.executable, *command, "rank", str(folder), str(mib << 20), snapshot], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 1024)
