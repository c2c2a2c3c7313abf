"""Coverage-guided fuzzing of parsers by atheris: `python -m tests.fuzz FOLDER SECONDS` gives each target so many
seconds in a process of its own, and ends at the first that raises anything but its typed errors."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tests.checkpoints import write_checkpoint
from tests.peers import handmade
from tests.property.hostile import refused
from tests.property.test_codecs_corruption import outcome, small_shard
from tests.property.test_hostile import MANIFEST, read_all, resealed
from tests.property.test_hostile import NEW as NEW_WEIGHTS
from tests.property.test_hostile import OLD as OLD_WEIGHTS
from tests.storage.long_runs import LongRun
from tests.storage.test_records import record

from weighbridge.errors import CorruptData, HeaderError, LineageError, UsageError
from weighbridge.storage import strict_json
from weighbridge.storage.arrow_bounds import check_plain
from weighbridge.storage.codecs import CODECS, open_shard
from weighbridge.storage.codecs.contract import Patch
from weighbridge.storage.history import segments
from weighbridge.storage.history.compact import compact
from weighbridge.storage.history.parquet_bounds import check_footer, page_bytes
from weighbridge.storage.history.segment_file import segment_of
from weighbridge.storage.history.segments import Kind, list_segments
from weighbridge.storage.lineage import RunInfo, parse_run
from weighbridge.storage.localdisk import LocalDisk
from weighbridge.storage.manifest import from_bytes
from weighbridge.storage.peers.frames import FRAMES, apply_frame
from weighbridge.storage.records import parse_record, record_key
from weighbridge.storage.replica.journal import JournalHead, JournalWriter, read_journal
from weighbridge.storage.replica.layout import read_identity
from weighbridge.storage.replica.patching import Proven
from weighbridge.storage.replica.sealed import seal as seal_file
from weighbridge.storage.replica.state import read_state
from weighbridge.storage.safetensors_header import build_header, parse_header
from weighbridge.storage.sealed_json import seal
from weighbridge.storage.signing import make_key, read_signer, read_trust
from weighbridge.storage.stores import open_store
from weighbridge.tasks.collective.desk import Roster
from weighbridge.values import PartKey, TensorSpec

Target = tuple[Callable[[bytes], object], bytes]
"""What is fuzzed, and a right input."""

OLD = np.arange(256, dtype=np.uint8)
NEW = np.where(OLD % 7 == 0, OLD ^ 5, OLD).astype(np.uint8)
RUN = RunInfo("run-1", "blake3", "ab" * 32, 7).to_bytes()
RECORD = record(version=3, ended=4)


def sealed(data: bytes) -> bytes:
    """A document with the seal that an enemy would give it; bytes that are none stay as they are."""
    try:
        document: Any = strict_json.parse(data)
        return seal(document) if isinstance(document, dict) else data
    except ValueError:
        return data


def frame(encoding: str, data: bytes) -> None:
    assert apply_frame(encoding, memoryview(data), OLD).size == OLD.size


def shard(codec: str) -> Target:
    payload, rows, parts, afters = small_shard(codec)
    olds = [part.old for part in parts]
    return lambda data: outcome(data, rows, olds, afters), payload


def segment(kind: Kind) -> Target:
    """A segment of the history, under whatever name its bytes have."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(segments, "BLOCK", 4):
        run = LongRun(open_store(folder), tensors=2, hosts=("a",)).grow(80)
        compact(run.store)
        found = list_segments(run.store, kind)[0]
        return lambda data: segment_of(found, data).read(), run.store.get(found.key)


def in_file(read: Callable[[Path], object], seed: bytes) -> Target:
    """A reader of a file of this machine."""
    path = Path(tempfile.mkdtemp()) / "file"
    path.touch(mode=0o600)

    def target(data: bytes) -> None:
        path.write_bytes(data)
        read(path)

    return target, seed


def resealed_file(read: Callable[[Path], object], fields: dict[str, Any]) -> Target:
    """The same of a sealed file, with the seal that an enemy would give it."""

    def again(data: bytes) -> bytes:
        try:
            document = strict_json.parse(data.partition(b"\n")[2])
            return seal_file(document) if isinstance(document, dict) else data
        except ValueError:
            return data

    target, seed = in_file(read, seal_file(fields))
    return lambda data: target(again(data)), seed


def state() -> Target:
    fields = {
        "format": 1, "replica_id": "r", "copy": "a", "version": 1, "manifest": "ab" * 32, "dirty_to": None,
        "durability": "power", "boot_id": "b", "files": {"m": [1, 2, 3, "ff"]}, "parts": [["t", 0, "AAAA"]],
    }  # fmt: skip
    return resealed_file(lambda path: read_state(path, replica_id="r", copy="a"), fields)


def identity() -> Target:
    fields = {"format": 1, "replica_id": "r", "run_id": "x", "base_digest": "b", "digest_kind": "blake3", "copies": 2}
    return resealed_file(read_identity, fields)


def journal() -> Target:
    path = Path(tempfile.mkdtemp()) / "journal"
    writer = JournalWriter(path, JournalHead("r", "a", "b", 0, 1, "ab"), disk=LocalDisk("process"))
    values = np.arange(8, dtype=np.uint8)
    writer.add(Proven(PartKey("t", 0), b"before", b"after", (Patch(2, values[:4].astype(np.uint32), values),)))
    writer.seal()
    return in_file(read_journal, path.read_bytes())


def key(*, private: bool) -> Target:
    path = Path(tempfile.mkdtemp()) / "KEY"
    make_key(path, disk=LocalDisk("process"))
    read = read_signer if private else (lambda found: read_trust([found]))
    return in_file(read, path.read_bytes() if private else path.with_name("KEY.pub").read_bytes())


def neighbour(layout: str, document: str) -> Target:
    """A neighbour's document, or file, in its place."""
    root = Path(tempfile.mkdtemp())
    base = write_checkpoint(root / "base", OLD_WEIGHTS)
    {"pull-weights": handmade.pull_weights, "skyrl": handmade.skyrl, "trl": handmade.trl}[layout](
        root / layout, 1, OLD_WEIGHTS, NEW_WEIGHTS
    )
    path = min((root / layout).rglob(document))

    def target(data: bytes) -> None:
        path.write_bytes(data)
        read_all(layout, root / layout, base)

    return target, path.read_bytes()


def record_target() -> Target:
    told = seal({name: getattr(RECORD, name) for name in RECORD.__slots__} | {"seconds": dict(RECORD.seconds)})
    return lambda data: parse_record(sealed(data), record_key(RECORD)), told


REFUSED = (CorruptData, LineageError, HeaderError)
HEADER = build_header([TensorSpec("a", "U8", (0,), 0)], {"k": "v"})
TARGETS: dict[str, tuple[Callable[[], Target], tuple[type[Exception], ...]]] = {
    "manifest": (lambda: (lambda data: from_bytes(resealed(data)), MANIFEST), REFUSED),
    "arrow": (lambda: (check_plain, MANIFEST), (ValueError,)),
    "run": (lambda: (lambda data: parse_run(sealed(data), "root"), RUN), REFUSED),
    "record": (record_target, REFUSED),
    "header": (lambda: (lambda data: parse_header(data, len(data)), HEADER), REFUSED),
    "json": (lambda: (strict_json.parse, json.dumps({"a": [1, {"b": None}]}).encode()), (ValueError,)),
    "frame-xor": (lambda: (lambda data: frame("xor", data), FRAMES["xor"](OLD, NEW)), REFUSED),
    "frame-overwrite": (lambda: (lambda data: frame("overwrite", data), FRAMES["overwrite"](OLD, NEW)), REFUSED),
    **{f"shard-{name}": (partial(shard, name), REFUSED) for name in CODECS},
    "segment-versions": (partial(segment, "versions"), REFUSED),
    "segment-parts": (partial(segment, "parts"), REFUSED),
    "segment-records": (partial(segment, "records"), REFUSED),
    "state": (state, ()),
    "identity": (identity, ()),
    "journal": (journal, ()),
    "private-key": (partial(key, private=True), (UsageError,)),
    "public-key": (partial(key, private=False), (UsageError,)),
    "skyrl": (partial(neighbour, "skyrl", "manifest.json"), REFUSED),
    "pull-weights": (partial(neighbour, "pull-weights", "*.index.json"), REFUSED),
    "trl": (partial(neighbour, "trl", "*.safetensors"), REFUSED),
    "roster": (lambda: (Roster.parse, Roster("digest", 2, 40001, (1, 3), (0, 1, 1)).to_text().encode()), (ValueError,)),
}
INSTRUMENTED: tuple[Callable[..., Any], ...] = (
    from_bytes, check_plain, parse_run, parse_record, parse_header, apply_frame, strict_json.parse, check_footer,
    page_bytes, read_state, read_identity, read_journal, read_all, open_shard,
)  # fmt: skip


def fuzz(name: str, corpus: Path, seconds: int) -> None:
    """Fuzzes one target in this process, and ends it."""
    import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]

    make, allowed = TARGETS[name]
    target, seed = make()
    corpus.mkdir(parents=True, exist_ok=True)
    (corpus / "seed").write_bytes(seed)
    for function in INSTRUMENTED:
        atheris.instrument_func(function)
    limits = [f"-max_total_time={seconds}", "-rss_limit_mb=2048", "-timeout=20", "-max_len=65536"]
    atheris.Setup([name, *limits, str(corpus)], lambda data: refused(lambda: target(data), *allowed))
    atheris.Fuzz()


def main(folder: Path, seconds: int) -> None:
    """Every target in turn. Exits with 1 at the first that fails."""
    for name in TARGETS:
        command = [sys.executable, "-m", "tests.fuzz", str(folder), str(seconds), name]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 300)
        runs = [line for line in ended.stderr.splitlines() if line.startswith("Done")]
        sys.stdout.write(f"{name}: {runs[-1] if runs else ended.stderr[-3000:]}\n")
        if ended.returncode:
            sys.exit(1)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        fuzz(sys.argv[3], Path(sys.argv[1]) / sys.argv[3], int(sys.argv[2]))
    main(Path(sys.argv[1]), int(sys.argv[2]))
