"""Run as a module: carries one file over a store and back, and prints by how many bytes the process grew."""

import sys
from pathlib import Path

from weighbridge.storage.clock import SystemClock
from weighbridge.storage.digests import new_hasher
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.stores import open_store
from weighbridge.storage.transfer import fetch_object, upload_file
from weighbridge.values import ShardInfo


def memory_bytes(field: str) -> int:
    """VmRSS or VmHWM; getrusage would tell the peak of the process that started this one too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


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
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    upload_file(store, "big", path, clock=clock)
    uploaded = memory_bytes("VmHWM")
    target = path.with_name("fetched")
    fetch_object(store, "big", target, info=info, digest_kind="xxh3-128", clock=clock, disk=LocalDisk("process"))
    target.unlink()
    sys.stdout.write(f"{uploaded - before} {memory_bytes('VmHWM') - before}\n")


if __name__ == "__main__":
    main()
