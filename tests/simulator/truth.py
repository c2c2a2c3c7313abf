"""What was really published: the model that the real code is held against. Learns of a version as its manifest lands in
the store, by the commit id under which a trainer announced its weights; knows no digest, delta or chain."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from tests.replica.runs import WEIGHT_FILES, Shapes, write_base
from tests.simulator.baton import Broken
from tests.simulator.store import Objects

from weighbridge.storage.codecs.contract import Bytes

Weights = Mapping[str, Bytes]

SHAPES: Shapes = {
    "embed.weight": ("BF16", (32, 16)),
    "layers.0.weight": ("BF16", (24, 16)),
    "layers.1.scale": ("F32", ()),
    "norm.weight": ("F32", (40,)),
    "nothing": ("F16", (0, 8)),
    "mask": ("BOOL", (33,)),
}
"""As small as it gets: what is simulated is the order of things, not their size."""

MANIFEST = re.compile(r"versions/(\d{12})/manifest\.arrow")
FOREIGN = ("NOTES.txt", "versions/README.txt", "versions/000000000001/mine.bin", "history/sketch.txt")
"""Objects that somebody else keeps under the same root."""


class Truth:
    """Watches every write of the store. `versions` are the true weights, by version; `head` is the newest."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.versions: list[Weights] = []
        self.writers: list[str] = []
        self.objects: Objects  # set by whoever makes both
        self._announced: dict[str, Weights] = {}
        self._base_weights: Weights = write_base(base, shapes=SHAPES)
        self._small = {name: (base / name).read_bytes() for name in ("config.json", "tokenizer/vocab.txt")}
        self._heads: dict[str, tuple[bytes, list[str]]] = {}
        for file in WEIGHT_FILES:
            data = (base / file).read_bytes()
            size = 8 + int.from_bytes(data[:8], "little")
            names = [name for name in json.loads(data[8:size]) if name != "__metadata__"]
            self._heads[file] = (data[:size], names)
        self._by_files: dict[str, dict[bytes, set[int]]] = {file: {} for file in WEIGHT_FILES}

    @property
    def head(self) -> int:
        """The newest version; -1 before the base's."""
        return len(self.versions) - 1

    def announce(self, commit_id: str, weights: Weights) -> None:
        """What a trainer will have published if a commit of this id ever stands."""
        self._announced[commit_id] = weights

    def held_by(self, folder: Path) -> set[int] | None:
        """The versions whose every byte a folder holds, small files included; None when there is no such folder."""
        if not folder.is_dir():
            return None
        found = set(range(len(self.versions)))
        try:
            for file, known in self._by_files.items():
                found &= known.get(xxhash.xxh3_128_digest((folder / file).read_bytes()), set())
            whole = all((folder / name).read_bytes() == data for name, data in self._small.items())
        except OSError:
            return set()
        return found if whole else set()

    def describe(self, folder: Path) -> str:
        """What each file of a folder is, for a failure's message."""
        lines = []
        for file, known in self._by_files.items():
            data = (folder / file).read_bytes() if (folder / file).is_file() else None
            digest = None if data is None else xxhash.xxh3_128_digest(data)
            lines.append(f"{file}: {'missing' if digest is None else known.get(digest, 'of no version')}")
        for name, data in self._small.items():
            path = folder / name
            lines.append(
                f"{name}: {'missing' if not path.is_file() else 'right' if path.read_bytes() == data else 'wrong'}"
            )
        return ", ".join(lines)

    def alike(self, version: int) -> set[int]:
        """A committed version, and those that have the same bytes."""
        return set.intersection(*(next(v for v in k.values() if version in v) for k in self._by_files.values()))

    def writing(self, key: str, old: bytes | None, new: bytes) -> None:
        """See Watcher."""
        if old is not None and old != new:
            raise Broken(f"{key} was overwritten")
        if old is None and (match := MANIFEST.fullmatch(key)):
            self._committed(int(match[1]), new)

    def deleting(self, key: str) -> None:
        """See Watcher."""
        if key in FOREIGN or key == "run.json" or MANIFEST.fullmatch(key):
            raise Broken(f"{key} was deleted")
        version = int(key.split("/")[1]) if key.startswith("versions/") else -1
        if 0 <= version <= self.head and key.rpartition("/")[2] in shards_of(self.metadata(version)):
            self.deleting_shard(key, version)

    def deleting_shard(self, key: str, version: int) -> None:
        """A shard of a committed version goes."""
        raise Broken(f"{key} was deleted, and version {version} needs it")

    def metadata(self, version: int) -> dict[str, str]:
        """A committed manifest's metadata."""
        return metadata_of(self.objects.get(f"versions/{version:012d}/manifest.arrow"))

    def _committed(self, version: int, data: bytes) -> None:
        if version != self.head + 1:
            raise Broken(f"version {version} was committed above version {self.head}")
        metadata = metadata_of(data)
        for name, (nbytes, digest) in shards_of(metadata).items():
            stored = self.objects.data.get(f"versions/{version:012d}/{name}", (b"", 0))[0]
            if len(stored) != nbytes or xxhash.xxh3_128_hexdigest(stored) != digest:
                raise Broken(f"version {version} was committed and its shard {name} is not there")
        if metadata["kind"] == "base":
            weights = self._base_weights
        elif metadata["commit_id"] in self._announced:
            weights = self._announced[metadata["commit_id"]]
        elif json.loads(metadata["labels"]) == {"took_over": True}:
            weights = self.versions[-1]
        else:
            raise Broken(f"version {version} was committed by nobody")
        self.versions.append(weights)
        self.writers.append(metadata["writer"])
        for file, (head, names) in self._heads.items():
            digest = xxhash.xxh3_128_digest(head + b"".join(weights[name].tobytes() for name in names))
            self._by_files[file].setdefault(digest, set()).add(version)


def metadata_of(manifest: bytes) -> dict[str, str]:
    """A manifest's metadata, by docs/FORMAT.md rather than by the code under test."""
    metadata: dict[bytes, bytes] = pa.ipc.open_file(pa.BufferReader(manifest)).schema.metadata
    return {key.decode(): value.decode() for key, value in metadata.items()}


def shards_of(metadata: Mapping[str, str]) -> dict[str, tuple[int, str]]:
    """Each shard's size and digest, by name."""
    shards: list[list[Any]] = json.loads(metadata["shards"])
    return {name: (nbytes, digest) for name, nbytes, digest in shards}


def after_a_step(weights: Weights, rng: "np.random.Generator") -> Weights:
    """The weights after some optimizer step: few elements changed, many, all of one tensor, or none."""
    way = rng.integers(6)
    after = {name: data.copy() for name, data in weights.items()}
    if way == 0:
        return after
    share = (0.02, 0.02, 0.02, 0.3, 0.95)[int(way) - 1]
    names = [str(rng.choice(sorted(after)))] if way == 2 else sorted(after)
    for name in names:
        raw = after[name]
        if raw.size:
            hit = rng.choice(raw.size, max(1, int(raw.size * share)), replace=False)
            raw[hit] ^= np.uint8(1) if SHAPES[name][0] == "BOOL" else rng.integers(1, 256, hit.size, np.uint8)
    return after
