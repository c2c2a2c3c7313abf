"""Shards to and from an S3 server on this machine, against plain boto3 with the same concurrency and part size in the
same run. Needs the dependency group `stores`: python -m benchmarks.stores [--mib N] [--rounds N] [--json]"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import boto3
from boto3.s3.transfer import TransferConfig
from tests.stores.servers import seaweedfs

from weighbridge.storage import transfer
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.stores import Profile, open_store
from weighbridge.storage.transfer import fetch_object, upload_file
from weighbridge.values import ShardInfo

BUCKET = "weighbridge-bench"


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of this process's processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(folder: Path, *, mib: int, rounds: int) -> dict[str, float]:
    """Medians over rounds in which the four ways take turns."""
    nbytes = mib << 20
    data = os.urandom(nbytes)
    shard, target = folder / "shard", folder / "target"
    shard.write_bytes(data)
    info = ShardInfo("shard", nbytes, digest_bytes("xxh3-128", data))
    del data
    profile, clock, disk = Profile(), SystemClock(), LocalDisk("process")
    store = open_store(f"s3://{BUCKET}/ours", profile=profile)
    plain = boto3.client("s3")
    plain.create_bucket(Bucket=BUCKET)
    config = TransferConfig(
        multipart_threshold=profile.part_bytes,
        multipart_chunksize=profile.part_bytes,
        max_concurrency=profile.parts,
    )

    def fetch(number: int) -> None:
        fetch_object(store, f"{number}", target, info=info, digest_kind="xxh3-128", clock=clock, disk=disk)

    ways: dict[str, Callable[[int], object]] = {
        "put": lambda n: upload_file(store, f"{n}", shard, clock=clock),
        "put boto3": lambda n: plain.upload_file(str(shard), BUCKET, f"plain/{n}", Config=config),
        "get": fetch,
        "get boto3": lambda n: plain.download_file(BUCKET, f"plain/{n}", str(target), Config=config),
    }
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    # Puts first: a server that still settles what was written last would slow down whoever gets next. Within a round
    # the ways take turns at going first.
    for pair in (("put", "put boto3"), ("get", "get boto3")):
        for number in range(rounds + 1):
            for way in pair if number % 2 else reversed(pair):
                target.unlink(missing_ok=True)
                taken = timed(lambda way=way, number=number: ways[way](number))  # type: ignore[misc]
                if number:  # the first round warms up
                    seconds[way].append(taken)
    figures = {f"{way} MiB/s": mib / statistics.median(w for w, _ in taken) for way, taken in seconds.items()}
    figures |= {f"{way} CPU s/GiB": statistics.median(c for _, c in t) * 1024 / mib for way, t in seconds.items()}
    for verb in ("put", "get"):
        figures[f"{verb} ratio"] = figures[f"{verb} MiB/s"] / figures[f"{verb} boto3 MiB/s"]
    return figures


def main() -> None:
    """Prints the figures; ratios above 1 mean that ours is faster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    memory = Path("/dev/shm")
    with seaweedfs() as server, tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        os.environ.update(server.environment)
        figures = measure(Path(folder), mib=options.mib, rounds=options.rounds)
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    sys.stdout.write(f"{transfer.RANGES_IN_FLIGHT} ranges of {transfer.RANGE_BYTES >> 20} MiB in flight\n")
    for name, value in figures.items():
        sys.stdout.write(f"{name:20} {value:8.2f}\n")


if __name__ == "__main__":
    main()
