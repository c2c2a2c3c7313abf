"""Run as a module: carries one file over a store and back, and prints by how many bytes the process grew."""

import resource
import sys
from pathlib import Path

from weighbridge.storage.clock import SystemClock
from weighbridge.storage.digests import new_hasher
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.stores import open_store
from weighbridge.storage.transfer import fetch_object, upload_file
from weighbridge.values import ShardInfo


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """`carrier URL FILE`."""
    url, path = sys.argv[1], Path(sys.argv[2])
    store, clock = open_store(url), SystemClock()
    hasher = new_hasher("xxh3-128")
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            hasher.update(piece)
    info = ShardInfo("big", path.stat().st_size, hasher.digest())
    store.put("small", b"x")
    store.get("small")
    before = peak_bytes()
    upload_file(store, "big", path, clock=clock)
    uploaded = peak_bytes()
    target = path.with_name("fetched")
    fetch_object(store, "big", target, info=info, digest_kind="xxh3-128", clock=clock, disk=LocalDisk("process"))
    target.unlink()
    sys.stdout.write(f"{uploaded - before} {peak_bytes() - before}\n")


if __name__ == "__main__":
    main()
