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
from tests.replica.runs import Shapes, write_base
from tests.simulator.baton import Broken
from tests.simulator.store import Objects

from weighbridge.storage.checkpoint import SINGLE_FILE
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
ANCHOR = re.compile(r"versions/(\d{12})/anchor\.arrow")
FOREIGN = ("NOTES.txt", "versions/README.txt", "versions/000000000001/mine.bin", "history/sketch.txt")
"""Objects that somebody else keeps under the same root."""


class Truth:
    """Watches every write of the store. `versions` are the true weights, by version; `head` is the newest."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.versions: list[Weights] = []
        self.writers: list[str] = []
        self.keep = 1
        self.named: set[int] = set()
        self.objects: Objects  # set by whoever makes both
        self._announced: dict[str, Weights] = {}
        self._base_weights: Weights = write_base(base, shapes=SHAPES)
        self._small = {name: (base / name).read_bytes() for name in ("config.json", "tokenizer/vocab.txt")}
        self._digests: list[dict[str, bytes]] = []
        self._parsed: dict[bytes, dict[str, bytes]] = {}

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
        try:
            whole = all((folder / name).read_bytes() == data for name, data in self._small.items())
            found = self._tensors_of(folder)
        except (OSError, ValueError):
            return set()
        return {version for version, digests in enumerate(self._digests) if digests == found} if whole else set()

    def describe(self, folder: Path) -> str:
        """What each file of a folder is, for a failure's message."""
        lines = []
        for path in sorted(folder.glob("*.safetensors")):
            inside = self._parse(path.read_bytes())
            of = [v for v, digests in enumerate(self._digests) if inside.items() <= digests.items()]
            lines.append(f"{path.name} is of {of if inside else 'no version, and garbage'}")
        for name, data in self._small.items():
            path = folder / name
            kind = "missing" if not path.is_file() else "right" if path.read_bytes() == data else "wrong"
            lines.append(f"{name} is {kind}")
        return ", ".join(lines)

    def alike(self, version: int) -> set[int]:
        """A committed version, and those that have the same bytes."""
        return {other for other, digests in enumerate(self._digests) if digests == self._digests[version]}

    def _tensors_of(self, folder: Path) -> dict[str, bytes]:
        """Each tensor's digest, as an engine would find it: in the files that the index names, if there is one."""
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        index = folder / "model.safetensors.index.json"
        named = sorted(set(json.loads(index.read_bytes())["weight_map"].values())) if index.exists() else [SINGLE_FILE]
        if files != named:
            raise ValueError(f"{files} are there, and the index names {named}")
        found: dict[str, bytes] = {}
        for file in files:
            found |= self._parse((folder / file).read_bytes())
        return found

    def _parse(self, data: bytes) -> dict[str, bytes]:
        """The digest of each tensor in a weight file; none for garbage."""
        digest = xxhash.xxh3_128_digest(data)
        if digest not in self._parsed:
            found = {}
            try:
                start = 8 + int.from_bytes(data[:8], "little")
                for name, info in json.loads(data[8:start]).items():
                    if name != "__metadata__":
                        first, end = info["data_offsets"]
                        found[name] = xxhash.xxh3_128_digest(data[start + first : start + end])
            except (ValueError, KeyError, TypeError):
                found = {}
            self._parsed[digest] = found
        return self._parsed[digest]

    def writing(self, key: str, old: bytes | None, new: bytes) -> None:
        """See Watcher."""
        if old is not None and old != new:
            raise Broken(f"{key} was overwritten")
        if old is None and (match := MANIFEST.fullmatch(key)):
            self._committed(int(match[1]), new)
        elif old is None and (match := ANCHOR.fullmatch(key)):
            self._demand_shards(int(match[1]), metadata_of(new), "an anchor of ")

    def deleting(self, key: str) -> None:
        """See Watcher."""
        if key in FOREIGN or key == "run.json" or MANIFEST.fullmatch(key) or ANCHOR.fullmatch(key):
            raise Broken(f"{key} was deleted")
        if key.endswith("retired"):
            raise Broken(f"{key}, which explains what is gone, was deleted")
        folder, _, name = key.rpartition("/")
        for manifest, mark in (("manifest.arrow", "retired"), ("anchor.arrow", "anchor-retired")):
            if name in shards_of(self._metadata(f"{folder}/{manifest}")):
                if f"{folder}/{mark}" not in self.objects.data:
                    raise Broken(f"{key} was deleted, and nothing says why")
                self.demand_kept(f"{key} was deleted", without=key)

    def demand_kept(self, why: str, *, without: str = "") -> None:
        """Raises Broken unless the last versions and all named ones can be rebuilt from what stands without a key."""
        for version in {*range(max(0, self.head - self.keep + 1), self.head + 1), *self.named}:
            if not self.is_rebuildable(version, without=without):
                raise Broken(f"{why}, and version {version}, which is kept, cannot be rebuilt without it")

    def is_rebuildable(self, version: int, *, without: str = "") -> bool:
        """Whether every shard stands of the deltas from the base, or from an anchor, to a version."""
        for number in range(version, 0, -1):
            if self._stands(number, "anchor.arrow", without):
                return True
            if not self._stands(number, "manifest.arrow", without):
                return False
        return True

    def anchors(self) -> list[int]:
        """The versions whose anchor stands with all its shards."""
        return [version for version in range(self.head + 1) if self._stands(version, "anchor.arrow", "")]

    def shards(self, version: int) -> set[str]:
        """The keys of all shards that a version's manifest and its anchor name."""
        folder = f"versions/{version:012d}"
        forms = (self._metadata(f"{folder}/{manifest}") for manifest in ("manifest.arrow", "anchor.arrow"))
        return {f"{folder}/{name}" for form in forms for name in shards_of(form)}

    def _stands(self, version: int, manifest: str, without: str) -> bool:
        folder = f"versions/{version:012d}"
        metadata = self._metadata(f"{folder}/{manifest}")
        keys = [f"{folder}/{name}" for name in shards_of(metadata)]
        return bool(metadata) and all(key in self.objects.data and key != without for key in keys)

    def _metadata(self, key: str) -> dict[str, str]:
        """A manifest's metadata; none when it does not stand."""
        return metadata_of(self.objects.get(key)) if key in self.objects.data else {}

    def _demand_shards(self, version: int, metadata: Mapping[str, str], what: str) -> None:
        for name, (nbytes, digest) in shards_of(metadata).items():
            stored = self.objects.data.get(f"versions/{version:012d}/{name}", (b"", 0))[0]
            if len(stored) != nbytes or xxhash.xxh3_128_hexdigest(stored) != digest:
                raise Broken(f"{what}version {version} was committed and its shard {name} is not there")

    def _committed(self, version: int, data: bytes) -> None:
        if version != self.head + 1:
            raise Broken(f"version {version} was committed above version {self.head}")
        metadata = metadata_of(data)
        self._demand_shards(version, metadata, "")
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
        self._digests.append({name: xxhash.xxh3_128_digest(data.tobytes()) for name, data in weights.items()})


def metadata_of(manifest: bytes) -> dict[str, str]:
    """A manifest's metadata, by docs/FORMAT.md rather than by the code under test."""
    metadata: dict[bytes, bytes] = pa.ipc.open_file(pa.BufferReader(manifest)).schema.metadata
    return {key.decode(): value.decode() for key, value in metadata.items()}


def shards_of(metadata: Mapping[str, str]) -> dict[str, tuple[int, str]]:
    """Each shard's size and digest, by name."""
    shards: list[list[Any]] = json.loads(metadata.get("shards", "[]"))
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
