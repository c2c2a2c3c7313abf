"""Weighs neighbours' layouts against our own format, in one run on the same bytes: what travels, and the seconds to
write a version and to read it back, digests and checksums included.

    python benchmarks/peers.py --params 100e6 --repeat 3

One JSON line per density and layout. Reading is from the page cache; nothing is committed, journalled or synced.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pairs import Pair, synthetic

from weighbridge.storage import codecs
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.parts import cut
from weighbridge.storage.peers.contract import Changed, Writing
from weighbridge.storage.peers.registry import get_layout
from weighbridge.storage.stores import open_store
from weighbridge.values import TensorSpec, item_bytes

CASES = (
    ("pull-weights", "xor", "xxh3-128"),
    ("pull-weights", "overwrite", "xxh3-128"),
    ("pull-weights", "xor", "adler32"),
    ("skyrl", "xor", "xxh3-128"),
    ("trl", "xor", "xxh3-128"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=100e6)
    parser.add_argument("--density", type=float, nargs="*", default=[0.004, 0.015])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    codecs.warm()
    for pair in synthetic(options.params, options.density):
        for report in weigh(pair, options.repeat):
            sys.stdout.write(json.dumps({"pair": pair.name, **report}) + "\n")
            sys.stdout.flush()


def weigh(pair: Pair, repeat: int) -> Iterator[dict[str, Any]]:
    """Ours first, then each layout. Times are medians of CPU seconds over `repeat`."""
    tensors = (t for t in pair.tensors if (t.old != t.new).any())
    changed = [Changed(_spec(t.name, t.dtype, t.new.size), t.old, t.new) for t in tensors]
    elements = sum(one.spec.elements for one in changed)
    hits = sum(int(codecs.kernels.count_changed(one.old, one.new, item_bytes(one.spec.dtype))) for one in changed)
    parts = [
        codecs.PartInput(part.key, part.dtype, one.old[a : a + part.nbytes], one.new[a : a + part.nbytes])
        for one in changed
        for part in cut(one.spec)
        for a in (part.key.offset,)
    ]
    shard = codecs.encode_shard(parts, digest_kind="xxh3-128")

    by_key = {part.key: part for part in parts}
    moved = [by_key[row.key] for row in shard.parts]

    def decode() -> None:
        shapes = [codecs.PartShape(part.dtype, part.new.size) for part in moved]
        rows = list(zip((row.codec for row in shard.parts), shapes, strict=True))
        decoder = codecs.open_shard(shard.payload, rows)
        for index, part in enumerate(moved):
            decoder.decode_digested(index, part.old, digest_kind="xxh3-128")

    yield {
        "layout": "ours",
        "bytes_each": round(len(shard.payload) / hits, 3),
        "write": _cpu(repeat, lambda: codecs.encode_shard(parts, digest_kind="xxh3-128")),
        "read": _cpu(repeat, decode),
    }
    specs = {one.spec.name: one.spec for one in changed}
    for name, encoding, checksum in CASES:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield _one(name, encoding, checksum, Path(folder), changed, specs, elements, hits, repeat)


def _one(
    name: str, encoding: str, checksum: str, folder: Path, changed: list[Changed], specs: dict[str, TensorSpec],
    elements: int, hits: int, repeat: int,
) -> dict[str, Any]:  # fmt: skip
    layout, disk = get_layout(name), LocalDisk("process")
    (folder / "spool").mkdir()
    writing = Writing(folder / "spool", disk, SystemClock(), encoding, checksum)
    numbers = iter(range(1, repeat + 1))

    def write() -> None:
        layout.write(open_store(str(folder / "root")), next(numbers), changed, writing, elements=elements)

    def read() -> None:
        version = layout.open(open_store(str(folder / "root")), 1, specs)
        for one in changed:
            version.new_bytes(one.spec.name, one.old)

    written = _cpu(repeat, write)
    nbytes = sum(info.nbytes for info in open_store(str(folder / "root")).list("")) // repeat
    label = f"{name} {encoding} {checksum}" if name == "pull-weights" else name
    return {"layout": label, "bytes_each": round(nbytes / hits, 3), "write": written, "read": _cpu(repeat, read)}


def _spec(name: str, dtype: str, nbytes: int) -> TensorSpec:
    return TensorSpec(name, dtype, (nbytes // item_bytes(dtype),), nbytes)


def _cpu(repeat: int, job: Callable[[], object]) -> float:
    times = []
    for _ in range(repeat):
        started = time.process_time()
        job()
        times.append(time.process_time() - started)
    return round(statistics.median(times), 3)


if __name__ == "__main__":
    main()
