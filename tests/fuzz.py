"""Coverage-guided fuzzing of parsers by atheris: `python -m tests.fuzz FOLDER SECONDS` gives each target so many
seconds in a process of its own, and ends at the first that raises anything but its typed errors."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.property.hostile import refused
from tests.property.test_hostile import MANIFEST, resealed
from tests.storage.test_records import record

from weighbridge.errors import CorruptData, HeaderError, LineageError
from weighbridge.storage import strict_json
from weighbridge.storage.lineage import RunInfo, parse_run
from weighbridge.storage.manifest import from_bytes
from weighbridge.storage.peers.frames import FRAMES, apply_frame
from weighbridge.storage.records import parse_record, record_key
from weighbridge.storage.safetensors_header import build_header, parse_header
from weighbridge.storage.sealed_json import seal
from weighbridge.values import TensorSpec

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


TARGETS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "manifest": (lambda data: from_bytes(resealed(data)), MANIFEST),
    "run": (lambda data: parse_run(sealed(data), "root"), RUN),
    "record": (lambda data: parse_record(sealed(data), record_key(RECORD)), RUN),
    "header": (lambda data: parse_header(data, len(data)), build_header([TensorSpec("a", "U8", (0,), 0)], {"k": "v"})),
    "xor": (lambda data: frame("xor", data), FRAMES["xor"](OLD, NEW)),
    "overwrite": (lambda data: frame("overwrite", data), FRAMES["overwrite"](OLD, NEW)),
    "json": (strict_json.parse, json.dumps({"a": [1, {"b": None}]}).encode()),
}


def fuzz(name: str, corpus: Path, seconds: int) -> None:
    """Fuzzes one target in this process, and ends it."""
    import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]

    target, seed = TARGETS[name]
    corpus.mkdir(parents=True, exist_ok=True)
    (corpus / "seed").write_bytes(seed)
    for function in (from_bytes, parse_run, parse_record, parse_header, apply_frame, strict_json.parse):
        atheris.instrument_func(function)
    allowed = (CorruptData, LineageError, HeaderError, *((ValueError,) if name == "json" else ()))
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
