"""A small run in a directory store, published by a writer of its own (so that a fault of the publisher does not hide
one of the replica), with every version's bytes kept to compare with."""

import json
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash

from weighbridge.storage import parts as part_sizes
from weighbridge.storage.checkpoint import open_checkpoint
from weighbridge.storage.claim import claim
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.codecs import PartInput, encode_shard
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import manifest_key, shard_key, to_bytes
from weighbridge.storage.safetensors_header import build_header
from weighbridge.storage.state import advance, base_digests, state_digest
from weighbridge.storage.stores import open_store
from weighbridge.storage.stores.contract import Store
from weighbridge.values import Manifest, PartKey, PartRow, ShardInfo, TensorSpec

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]

SHAPES: Shapes = {
    "embed.weight": ("BF16", (96, 32)),
    "layers.0.attn.weight": ("BF16", (64, 64)),
    "layers.0.norm.weight": ("F32", (64,)),
    "layers.1.attn.weight": ("BF16", (64, 64)),
    "layers.1.scale": ("F32", ()),
    "layers.1.nothing": ("F16", (0, 8)),
    "mask": ("BOOL", (33,)),
    "norm.weight": ("F16", (64,)),
}
WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "BOOL": 1}
WEIGHT_FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def spec(name: str, shapes: Shapes = SHAPES) -> TensorSpec:
    """A tensor of the small model."""
    dtype, shape = shapes[name]
    return TensorSpec(name, dtype, shape, int(np.prod(shape)) * WIDTHS[dtype])


def write_base(folder: Path, seed: int = 0, shapes: Shapes = SHAPES) -> dict[str, Bytes]:
    """An HF folder of two weight files, an index, config and tokenizer; returns the bytes of its tensors."""
    rng = np.random.default_rng(seed)
    tensors = {name: rng.integers(0, 255, spec(name, shapes).nbytes, np.uint8) for name in shapes}
    folder.mkdir(parents=True)
    names = sorted(shapes)
    cut = len(names) * 3 // 8
    halves = dict(zip(WEIGHT_FILES, (names[:cut], names[cut:]), strict=True))
    for file, inside in halves.items():
        data = build_header([spec(name, shapes) for name in inside], {"format": "pt"})
        (folder / file).write_bytes(data + b"".join(tensors[name].tobytes() for name in inside))
    weight_map = {name: file for file, inside in halves.items() for name in inside}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("a b c")
    return tensors


class SmallRun:
    """One run: its store, its base folder, and the tensors' bytes of each version."""

    def __init__(self, root: Path, *, seed: int = 0, run_id: str = "run-1", digest_kind: str = "xxh3-128") -> None:
        self.base = root / "base"
        self.versions: list[dict[str, Bytes]] = [write_base(self.base, seed)]
        self.store: Store = open_store(str(root / "store"))
        self.rng = np.random.default_rng(seed + 1)
        claim(
            self.store,
            open_checkpoint(self.base),
            run_id=run_id,
            digest_kind=digest_kind,
            writer="tests",
            aliases={},
            clock=SystemClock(),
        )
        self.lineage = Lineage(self.store)
        self._digests = base_digests(self.lineage.manifest(0))

    @classmethod
    def going_on(cls, run: "SmallRun", store: Store, *, version: int) -> "SmallRun":
        """Another writer of a run, on a copy of its store that ends with a version."""
        other = cls.__new__(cls)
        other.base, other.versions, other.store = run.base, run.versions[: version + 1], store
        other.rng = np.random.default_rng(version + 99)
        other.lineage = Lineage(store)
        other._digests = base_digests(other.lineage.manifest(0))
        for manifest in other.lineage.chain(0, version):
            other._digests = advance(other._digests, manifest.rows)
        return other

    @property
    def head(self) -> int:
        """The newest version."""
        return len(self.versions) - 1

    def push(self, *tensors: str, changed: int = 20) -> int:
        """Publishes a version in which some bytes of the named tensors (default: all that have any) differ."""
        new = {name: data.copy() for name, data in self.versions[-1].items()}
        for name in tensors or tuple(n for n in SHAPES if spec(n).nbytes):
            where = self.rng.choice(new[name].size, min(changed, new[name].size), replace=False)
            new[name][where] ^= self.rng.integers(1, 255, where.size, np.uint8)
        return self.commit(new)

    def push_nothing(self) -> int:
        """Publishes an empty version."""
        return self.commit({name: data.copy() for name, data in self.versions[-1].items()})

    def commit(self, new: Mapping[str, Bytes], *, lie: str = "") -> int:
        """Publishes these bytes as the next version, in two shards. `lie` names a tensor with a wrong digest."""
        old, parent, kind = self.versions[-1], self.lineage.manifest(self.head), self.lineage.run.digest_kind
        version, commit_id = self.head + 1, uuid.uuid4().hex
        inputs = [
            PartInput(part.key, part.dtype, old[name][sl], new[name][sl])
            for name in sorted(SHAPES)
            for part in part_sizes.cut(spec(name))
            for sl in [slice(part.key.offset, part.key.offset + part.nbytes)]
        ]
        rows: list[PartRow] = []
        shards: list[ShardInfo] = []
        for half in (inputs[::2], inputs[1::2]):
            encoded = encode_shard(half, digest_kind=kind)
            if not encoded.parts:
                continue
            by_key = {part.key: part for part in half}
            info = ShardInfo(
                f"{commit_id}-{len(shards):05d}.safetensors", len(encoded.payload), digest_bytes(kind, encoded.payload)
            )
            self.store.put(shard_key(version, info), encoded.payload)
            for part in encoded.parts:
                tensor, given = spec(part.key.tensor), by_key[part.key]
                after = part.after if part.key.tensor != lie else bytes(len(part.after))
                rows.append(
                    PartRow(
                        part.key, tensor.dtype, tensor.shape, given.new.size, part.codec, len(shards), part.changed,
                        self._digests[part.key], after, digest_bytes(kind, new[part.key.tensor].data),
                    )
                )  # fmt: skip
            shards.append(info)
        self._digests = advance(self._digests, rows)
        data, _ = to_bytes(
            Manifest(
                run_id=parent.run_id,
                version=version,
                parent=version - 1,
                parent_digest=parent.digest,
                writer="tests",
                commit_id=commit_id,
                created_ns=version,
                digest_kind=kind,
                state_digest=state_digest(self._digests),
                model_bytes=parent.model_bytes,
                model_elements=parent.model_elements,
                tensors=parent.tensors,
                shards=tuple(shards),
                rows=tuple(rows),
            )
        )
        self.store.create(manifest_key(version), data)
        self.versions.append(dict(new))
        return version

    def shard_path(self, version: int, index: int = 0) -> Path:
        """The file of a version's shard in the store."""
        manifest = self.lineage.manifest(version)
        return Path(self.store.url.removeprefix("file://")) / shard_key(version, manifest.shards[index])

    def holder(self, tensor: str) -> int:
        """The index of the shard of the head that holds a tensor."""
        rows = self.lineage.manifest(self.head).rows
        return next(row.shard for row in rows if row.key == PartKey(tensor, 0))


def tensors_of(folder: Path) -> dict[str, bytes]:
    """The bytes of all tensors of an HF folder, read without the code under test's own images."""
    found = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        header.pop("__metadata__", None)
        for name, info in header.items():
            start, end = info["data_offsets"]
            found[name] = data[8 + size + start : 8 + size + end]
    return found


def versions_in(run: SmallRun, folder: Path) -> set[int]:
    """The versions whose every byte a folder holds: several when versions are alike, none for a mix."""
    found = tensors_of(folder)
    return {v for v, state in enumerate(run.versions) if {n: d.tobytes() for n, d in state.items()} == found}


def flip(path: Path, offset: int) -> None:
    """Changes one byte of a file, and its time of change as a write would."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x40]))


def digest_tree(folder: Path) -> str:
    """A digest over names and bytes of everything in a folder, links as links."""
    hasher = xxhash.xxh3_128()
    for path in sorted(folder.rglob("*")):
        hasher.update(str(path.relative_to(folder)).encode())
        if path.is_symlink():
            hasher.update(str(path.readlink()).encode())
        elif path.is_file():
            hasher.update(path.read_bytes())
    return hasher.hexdigest()
