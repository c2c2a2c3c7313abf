"""Neighbours' versions made by hand from docs/PEERS.md, with zstandard and the safetensors library and none of the code
under test; and receivers as plain as the documents, which read what our writers wrote."""

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import xxhash
import zstandard
from safetensors import safe_open
from safetensors.numpy import save_file
from tests.checkpoints import Weights

SUMS: Mapping[str, Callable[[bytes], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def frame(old: bytes, new: bytes, encoding: str = "xor") -> bytes:
    a, b = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    if encoding == "xor":
        return zstandard.ZstdCompressor(level=1).compress((a ^ b).tobytes())
    hit = [int(i) for i in range(a.size) if a[i] != b[i]]
    content = len(hit).to_bytes(4, "little") + b"".join(i.to_bytes(4, "little") for i in hit)
    return zstandard.ZstdCompressor(level=1).compress(content + bytes(int(b[i]) for i in hit))


def changed_of(old: Weights, new: Weights) -> list[str]:
    return [name for name in old if old[name].tobytes() != new[name].tobytes()]


def pull_weights(
    root: Path, version: int, old: Weights, new: Weights, encoding: str = "xor", sums: str = "xxh3-128"
) -> Path:
    """Two files, so that a reader that looks into the first alone is found out."""
    folder = root / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    names = changed_of(old, new)
    weight_map = {}
    for number, group in enumerate((names[::2], names[1::2])):
        file = f"model-{number:05d}-of-00002.safetensors"
        tensors = {n: np.frombuffer(frame(old[n].tobytes(), new[n].tobytes(), encoding), np.uint8) for n in group}
        save_file(tensors, folder / file, metadata={n: SUMS[sums](new[n].tobytes()) for n in group})
        weight_map.update(dict.fromkeys(group, file))
    meta = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": sums,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": meta, "weight_map": weight_map}))
    return folder


_TORCH = {"float16": "float16", "float32": "float32", "int64": "int64", "bool": "bool", "uint8": "uint8"}


def skyrl(
    root: Path, version: int, old: Weights, new: Weights, folder_name: str = "delta-{:08d}", older: bool = False
) -> Path:
    """`older`: as SkyRL wrote manifests first, with a sha256 in a field of that name."""
    folder = root / folder_name.format(version)
    folder.mkdir(parents=True)
    file = "delta-rank00000-file000000.safetensors"
    names = changed_of(old, new)
    frames = {name: frame(old[name].tobytes(), new[name].tobytes()) for name in names}
    save_file({name: np.frombuffer(data, np.uint8) for name, data in frames.items()}, folder / file)
    tensors: list[dict[str, Any]] = [
        {
            "name": name,
            "dtype": _TORCH[new[name].dtype.name],
            "shape": list(new[name].shape),
            "uncompressed_num_bytes": new[name].nbytes,
            "compressed_num_bytes": len(frames[name]),
            "payload_file": file,
            "payload_key": name,
            "checksum": SUMS["xxh3-128"](new[name].tobytes()),
            "checksum_algorithm": "xxh3-128",
        }
        for name in names
    ]
    if older:
        for one in tensors:
            del one["checksum"], one["checksum_algorithm"]
            one["sha256"] = hashlib.sha256(new[str(one["name"])].tobytes()).hexdigest()
    manifest = {
        "version": version,
        "base_version": version - 1,
        "total_uncompressed_num_bytes": sum(new[name].nbytes for name in names),
        "total_compressed_num_bytes": sum(map(len, frames.values())),
        "payload_files": [file],
        "tensors": tensors,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def _trl_meta(version: int, sparse: bool, encoding: str, before: bool) -> dict[str, str]:
    meta = {
        "format": "sparse_weight_patch",
        "version": "1",
        "sparse": str(sparse),
        "model_version": str(version),
        "encoding": encoding,
    }
    return meta | {"prev_model_version": str(version - 1)} if before else meta


def trl(
    root: Path, version: int, old: Weights, new: Weights, encoding: str = "gap_delta", before: bool = False
) -> Path:
    """`before`: with the field by which no number is left out."""
    tensors: dict[str, Any] = {}
    for name in changed_of(old, new):
        a, b = old[name].reshape(-1), new[name].reshape(-1)
        raw = a.view(f"V{a.itemsize}"), b.view(f"V{b.itemsize}")
        hit = [i for i in range(a.size) if raw[0][i] != raw[1][i]]
        tensors[f"{name}.val"] = np.array(b[hit])
        if encoding == "raw":
            tensors[f"{name}.idx"] = np.array(hit, np.int32)
        else:
            gaps = [at - before - 1 for before, at in zip([-1, *hit], hit, strict=False)]
            tensors[f"{name}.idx"] = np.array(gaps, np.uint16 if max(gaps) < 65536 else np.uint32)
    path = root / "deltas" / f"step_{version:06d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=_trl_meta(version, True, encoding, before))
    return path


def trl_anchor(root: Path, version: int, new: Weights, before: bool = False) -> Path:
    path = root / "anchors" / f"step_{version:06d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(new), path, metadata=_trl_meta(version, False, "gap_delta", before))
    return path


def receive_pull_weights(root: Path, version: int, old: Mapping[str, bytes]) -> dict[str, bytes]:
    """What a receiver of that layout makes of a version: every safetensors file of the folder, every sum checked."""
    folder, new = root / f"weight_v{version:06d}", dict(old)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    meta = index["metadata"]
    assert (meta["version"], meta["base_version"]) == (f"{version:06d}", f"{version - 1:06d}")
    assert meta["compression_format"] == "zstd"
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            sums = file.metadata()
            for name in file.keys():  # noqa: SIM118 - no mapping
                data = zstandard.ZstdDecompressor().decompress(file.get_tensor(name).tobytes())
                if meta["delta_encoding"] == "xor":
                    made = bytes(a ^ b for a, b in zip(old[name], data, strict=True))
                else:
                    raw, count = bytearray(old[name]), int.from_bytes(data[:4], "little")
                    for k in range(count):
                        raw[int.from_bytes(data[4 + 4 * k : 8 + 4 * k], "little")] = data[4 + 4 * count + k]
                    made = bytes(raw)
                assert SUMS[meta["checksum_format"]](made) == sums[name]
                new[name], found[name] = made, path.name
    assert found == index["weight_map"]
    return new


def receive_skyrl(root: Path, version: int, old: Mapping[str, bytes]) -> dict[str, bytes]:
    folder, new = root / f"delta-{version:08d}", dict(old)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["version"], manifest["base_version"]) == (version, version - 1)
    assert sorted(manifest["payload_files"]) == sorted(path.name for path in folder.glob("*.safetensors"))
    for record in manifest["tensors"]:
        with safe_open(folder / record["payload_file"], "np") as file:
            data = file.get_tensor(record["payload_key"]).tobytes()
        assert len(data) == record["compressed_num_bytes"]
        patch = zstandard.ZstdDecompressor().decompress(data)
        assert len(patch) == record["uncompressed_num_bytes"]
        made = bytes(a ^ b for a, b in zip(old[record["name"]], patch, strict=True))
        assert record["checksum_algorithm"] == "xxh3-128", "SkyRL knows no other that we write"
        assert SUMS["xxh3-128"](made) == record["checksum"]
        new[record["name"]] = made
    return new


def receive_trl(root: Path, version: int, old: Mapping[str, bytes]) -> dict[str, bytes]:
    new = {name: bytearray(data) for name, data in old.items()}
    with safe_open(root / "deltas" / f"step_{version:06d}.safetensors", "np") as file:
        meta = file.metadata()
        assert (meta["format"], meta["version"], meta["sparse"]) == ("sparse_weight_patch", "1", "True")
        assert (meta["model_version"], meta["prev_model_version"]) == (str(version), str(version - 1))
        for key in (key for key in file.keys() if key.endswith(".val")):  # noqa: SIM118
            values, at = file.get_tensor(key), -1
            for k, gap in enumerate(file.get_tensor(key.removesuffix(".val") + ".idx").tolist()):
                at += gap + 1
                width = values.itemsize
                new[key.removesuffix(".val")][at * width : (at + 1) * width] = values[k : k + 1].tobytes()
    return {name: bytes(data) for name, data in new.items()}
