"""Weighs the codecs: bytes on the wire and time, against the peers' codec (XOR of each tensor, zstd level 1) and a
plain copy, in the same run on the same bytes.

    python benchmarks/codec.py                                 # data made here, a model really trained among it
    python benchmarks/codec.py --pair OLD NEW --threads 1 --repeat 5 --json

Each pair gives one JSON line on stdout. Times are medians over --repeat; "cpu" counts the seconds of all threads.
Encoding and applying include an xxh3-128 of the new bytes, the peers' too; their apply without it stands beside.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from pairs import Pair, TensorPair, from_folders, synthetic, trained

from weighbridge.storage import codecs
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.codecs.elements import element
from weighbridge.storage.parts import cut
from weighbridge.values import PartKey, TensorSpec

DIGEST = "xxh3-128"
Job = tuple[Callable[[], object], Callable[[], None] | None]
"""What is timed, and what is done afterwards without the clock."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds on the wall and of all processors."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Shard:
    """Parts that are encoded together, and a writable image of their old bytes."""

    parts: tuple[codecs.PartInput, ...]
    images: dict[PartKey, Bytes]


def main() -> None:
    options = _options()
    codecs.warm()
    for pair in _pairs(options):
        report = weigh(pair, options)
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
        if not options.json:
            sys.stderr.write(_line(report) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pair", nargs=2, type=Path, metavar=("OLD", "NEW"), action="append", help="checkpoint folders"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="JSON lines alone")
    parser.add_argument("--params", type=float, default=580e6, help="parameters of the synthetic model")
    parser.add_argument("--density", type=float, nargs="*", default=[0.0005, 0.004, 0.015, 0.12])
    parser.add_argument("--steps", type=int, default=6, help="steps of the trained model; 0 leaves it out")
    parser.add_argument("--pretrain-seconds", type=float, default=30.0)
    parser.add_argument("--codec", choices=list(codecs.CODECS), help="one codec instead of the measured choice")
    parser.add_argument("--shard-mib", type=int, default=128)
    return parser.parse_args()


def _pairs(options: argparse.Namespace) -> Iterator[Pair]:
    if options.pair:
        return (from_folders(old, new) for old, new in options.pair)
    real = trained(options.steps, 1e-6, options.pretrain_seconds) if options.steps else iter(())
    return chain(synthetic(options.params, options.density), real)


def weigh(pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one pair."""
    for tensor in pair.tensors:  # faults every page in once, so that no repeat pays for it
        xxhash.xxh3_64(tensor.old.data), xxhash.xxh3_64(tensor.new.data)
    shards = _shards(pair, options.shard_mib << 20)
    pool = ThreadPoolExecutor(options.threads)

    def each(job: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return list(map(job, items) if options.threads == 1 else pool.map(job, items))

    def encode() -> list[codecs.EncodedShard]:
        return each(lambda shard: codecs.encode_shard(shard.parts, digest_kind=DIGEST, codec=options.codec), shards)

    encoded = encode()
    work = list(zip(shards, encoded, strict=True))
    _check(work)
    peer = [_xor_encode(tensor) for tensor in pair.tensors]
    targets = list(zip(pair.tensors, peer, strict=True))

    def restore() -> None:
        for shard in shards:
            for part in shard.parts:
                np.copyto(shard.images[part.key], part.old)

    timings = _interleaved(
        options.repeat,
        {
            "encode": (encode, None),
            "apply": (lambda: each(_apply, work), restore),
            "xor_encode": (lambda: each(_xor_encode, pair.tensors), None),
            "xor_apply": (lambda: each(lambda job: _xor_apply(*job, digest=True), targets), None),
            "xor_apply_undigested": (lambda: each(lambda job: _xor_apply(*job, digest=False), targets), None),
            "digest": (lambda: each(lambda tensor: xxhash.xxh3_128_digest(tensor.new.data), pair.tensors), None),
            "read_both": (lambda: each(_read_both, pair.tensors), None),
            "copy": (lambda: each(lambda shard: [s.copy() for s in shard.images.values()], shards), None),
        },
    )
    peak = _peak_extra(encode), _peak_extra(lambda: each(_apply, work))
    pool.shutdown()
    report = _sizes(pair, encoded, sum(map(len, peer)))
    report |= {"threads": options.threads, "repeat": options.repeat, "shards": len(shards)}
    for name, timing in timings.items():
        report |= {f"{name}_wall_seconds": round(timing.wall, 4), f"{name}_cpu_seconds": round(timing.cpu, 4)}
    for name in ("encode", "apply", "xor_encode", "xor_apply", "copy"):
        report[f"{name}_gb_per_core_second"] = round(pair.nbytes / max(1e-9, timings[name].cpu) / 1e9, 3)
    report["encode_times_faster"] = round(timings["xor_encode"].cpu / timings["encode"].cpu, 2)
    report["apply_times_faster"] = round(timings["xor_apply"].cpu / timings["apply"].cpu, 2)
    report["peak_extra_mib"] = round(max(peak), 1)
    return report


def _shards(pair: Pair, shard_bytes: int) -> list[Shard]:
    groups: list[list[codecs.PartInput]] = [[]]
    size = 0
    for tensor in pair.tensors:
        for part in cut(TensorSpec(tensor.name, tensor.dtype, (tensor.new.size,), tensor.new.size)):
            at = slice(part.key.offset, part.key.offset + part.nbytes)
            if groups[-1] and size + part.nbytes > shard_bytes:
                groups.append([])
                size = 0
            groups[-1].append(codecs.PartInput(part.key, tensor.dtype, tensor.old[at], tensor.new[at]))
            size += part.nbytes
    return [Shard(tuple(group), {part.key: part.old.copy() for part in group}) for group in groups]


def _open(shard: Shard, encoded: codecs.EncodedShard) -> codecs.ShardDecoder:
    dtypes = {part.key: part.dtype for part in shard.parts}
    rows = [(row.codec, codecs.PartShape(dtypes[row.key], shard.images[row.key].size)) for row in encoded.parts]
    return codecs.open_shard(encoded.payload, rows)


def _apply(job: tuple[Shard, codecs.EncodedShard]) -> None:
    """Every changed part: decoded and proven against its digest, then written."""
    shard, encoded = job
    decoder = _open(shard, encoded)
    for index, row in enumerate(encoded.parts):
        image = shard.images[row.key]
        patch, digest = decoder.decode_digested(index, image, digest_kind=DIGEST)
        if digest != row.after:
            raise SystemExit(f"{row.key}: the patch does not lead to the new bytes")
        codecs.scatter(image, patch)


def _check(work: Sequence[tuple[Shard, codecs.EncodedShard]]) -> None:
    """Applies everything once and compares bytes, then puts the old ones back."""
    for job in work:
        _apply(job)
        for part in job[0].parts:
            if not np.array_equal(job[0].images[part.key], part.new):
                raise SystemExit(f"{part.key}: not bit for bit")
            np.copyto(job[0].images[part.key], part.old)


def _xor_encode(tensor: TensorPair) -> bytes:
    """What most peers do: XOR the tensor, zstd level 1; and the digest that both sides check."""
    xxhash.xxh3_128_digest(tensor.new.data)
    return zstandard.ZstdCompressor(level=1).compress((_words(tensor.old) ^ _words(tensor.new)).data)


def _xor_apply(tensor: TensorPair, payload: bytes, *, digest: bool) -> None:
    difference = np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), np.uint8)
    new = _words(tensor.old) ^ _words(difference)
    if digest:
        xxhash.xxh3_128_digest(new.data)


def _read_both(tensor: TensorPair) -> None:
    for data in (tensor.old, tensor.new):
        int(_words(data).sum())


def _words(data: Bytes) -> Any:
    return data.view(np.uint64) if data.size % 8 == 0 else data


def _interleaved(repeat: int, jobs: dict[str, Job]) -> dict[str, Timing]:
    """Medians of `repeat` rounds through all jobs, so that a noisy minute hits all of them. Afterwards is not timed."""
    taken: dict[str, list[Timing]] = {name: [] for name in jobs}
    for _ in range(repeat):
        for name, (job, afterwards) in jobs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            job()
            taken[name].append(Timing(time.perf_counter() - wall, time.process_time() - cpu))
            if afterwards is not None:
                afterwards()
    return {
        name: Timing(statistics.median(t.wall for t in its), statistics.median(t.cpu for t in its))
        for name, its in taken.items()
    }


def _peak_extra(job: Callable[[], object]) -> float:
    """The most anonymous memory, in MiB, that a run of the job adds, by looking every other millisecond."""
    before, peak, done = _anonymous_kib(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, _anonymous_kib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    job()
    done.set()
    watcher.join()
    return max(0, peak - before) / 1024


def _anonymous_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0])


def _sizes(pair: Pair, encoded: Sequence[codecs.EncodedShard], xor_bytes: int) -> dict[str, Any]:
    changed = sum(row.changed for shard in encoded for row in shard.parts)
    elements = sum(tensor.new.size // element(tensor.dtype).width for tensor in pair.tensors)
    wire = sum(len(shard.payload) for shard in encoded)
    independent, given = entropy_bounds(pair)
    used = [row.codec for shard in encoded for row in shard.parts]
    return {
        "pair": pair.name,
        "codecs": {name: used.count(name) for name in sorted(set(used))},
        "model_bytes": pair.nbytes,
        "changed_elements": changed,
        "density": changed / max(1, elements),
        "wire_bytes": wire,
        "bytes_per_changed": round(wire / max(1, changed), 4),
        "bound_independent": round(independent, 4),
        "bound_given_exponent": round(given, 4),
        "xor_wire_bytes": xor_bytes,
        "xor_bytes_per_changed": round(xor_bytes / max(1, changed), 4),
        "times_smaller_than_xor": round(xor_bytes / max(1, wire), 3),
    }


def entropy_bounds(pair: Pair) -> tuple[float, float]:
    """Bytes per changed element that an ideal coder needs: positions independent, and given the old exponent.

    Each element is a coin with its share of changes, all alike or alike within an exponent, and the steps of changed
    elements (in a 16-bit float, clipped to a byte) are drawn from their histogram. 0 for other dtypes.
    """
    members, hits = np.zeros(256, np.int64), np.zeros(256, np.int64)
    steps = np.zeros((256, 256), np.int64)
    for tensor in pair.tensors:
        unit = element(tensor.dtype)
        if unit.width != 2 or not unit.exponent_bits:
            return 0.0, 0.0
        for start in range(0, tensor.new.size, 1 << 24):
            old, new = (data[start : start + (1 << 24)].view(np.uint16) for data in (tensor.old, tensor.new))
            fields = ((old >> unit.exponent_shift) & ((1 << unit.exponent_bits) - 1)).astype(np.uint8)
            at = np.flatnonzero(old != new)
            members += np.bincount(fields, minlength=256)
            hits += np.bincount(fields[at], minlength=256)
            step = np.clip(_ranks(new[at]) - _ranks(old[at]), -128, 127) + 128
            np.add.at(steps, (fields[at], step), 1)
    count = max(1, int(hits.sum()))
    independent = _coin(int(hits.sum()), int(members.sum())) + _entropy(steps.sum(axis=0))
    given = sum(_coin(int(h), int(m)) for h, m in zip(hits, members, strict=True)) + sum(map(_entropy, steps))
    return independent / count / 8, given / count / 8


def _ranks(words: Any) -> Any:
    return np.where(words & 0x8000, ~words, words ^ 0x8000).astype(np.int64)


def _coin(hits: int, members: int) -> float:
    return _entropy(np.array([hits, members - hits]))


def _entropy(counts: Any) -> float:
    """Bits for all draws together."""
    counts = counts[counts > 0]
    return float((counts * np.log2(counts.sum() / counts)).sum())


def _line(report: dict[str, Any]) -> str:
    """The report for a person."""
    r = {name: f"{value:.3f}" if isinstance(value, float) else value for name, value in report.items()}
    return (
        f"{r['pair']}: {report['density']:.3%} changed, {r['bytes_per_changed']} bytes each (bounds "
        f"{r['bound_independent']}, {r['bound_given_exponent']}; xor {r['xor_bytes_per_changed']}); "
        f"cpu s: encode {r['encode_cpu_seconds']} (xor {r['xor_encode_cpu_seconds']}, "
        f"{r['encode_times_faster']}x), apply {r['apply_cpu_seconds']} (xor {r['xor_apply_cpu_seconds']}, "
        f"{r['apply_times_faster']}x), copy {r['copy_cpu_seconds']}; {r['peak_extra_mib']} MiB extra"
    )


if __name__ == "__main__":
    main()
