"""SkyRL's layout: `delta-00000012/`, XOR frames, a manifest last. docs/PEERS.md gives its bytes."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from weighbridge.errors import ManifestCorrupt, ObjectMissing, VersionUnknown
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.peers.contract import Changed, ForeignVersion, Layout, Specs, Writing
from weighbridge.storage.peers.frames import CHECKSUMS, XOR, apply_frame, check, most_frame_bytes
from weighbridge.storage.peers.packing import Packed, PackedFile, packed, upload
from weighbridge.storage.peers.payload import Payload, clear, create_once, file_name, read_json, there
from weighbridge.storage.stores.contract import Store

_FOLDER = re.compile(r"(?:delta-|v)([0-9]{8,12})")
_MANIFEST = "manifest.json"
_CHECKSUM, _OLDER_CHECKSUM = "xxh3-128", "sha256"
"""The two that SkyRL's receiver knows; we write the first. Manifests of older SkyRL have the second, in a field of its
name, and none for the algorithm."""
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def _folders(version: int) -> tuple[str, ...]:
    return f"delta-{version:08d}", f"v{version:08d}"


@dataclass(frozen=True, slots=True)
class _Record:
    """One tensor of a manifest."""

    file: str
    key: str
    frame_bytes: int
    checksum: str
    algorithm: str


class _Delta(ForeignVersion):
    def __init__(self, store: Store, version: int, folder: str, document: dict[str, Any], specs: Specs) -> None:
        self._store, self.version, self._folder = store, version, folder
        base = document.get("base_version")
        if document.get("version") != version or type(base) is not int or not 0 <= base < version:
            raise self._wrong(f"it is of version {document.get('version')!r} on {base!r}")
        self.base = base
        tensors = document.get("tensors")
        if not isinstance(tensors, list):
            raise self._wrong("it has no list of tensors")
        self._records: dict[str, _Record] = {}
        for item in tensors:
            name, record = self._record(item, specs)
            if name in self._records:
                raise self._wrong(f"{name!r} stands in it twice")
            self._records[name] = record
        self.names = tuple(sorted(self._records))
        self._open: dict[str, Payload] = {}

    def new_bytes(self, name: str, old: Bytes) -> Bytes:
        """See ForeignVersion."""
        record = self._records[name]
        if record.file not in self._open:
            try:
                self._open[record.file] = Payload(self._store, f"{self._folder}/{record.file}")
            except ObjectMissing as error:
                raise self._wrong(f"its file {record.file} is missing") from error
        frame = self._open[record.file].frame(record.key, most=most_frame_bytes(XOR, old.size))
        if len(frame) != record.frame_bytes:
            raise self._wrong(f"{name!r} has {len(frame)} bytes in {record.file}, not {record.frame_bytes}")
        return check(record.algorithm, apply_frame(XOR, frame, old), record.checksum, name)

    def _record(self, item: object, specs: Specs) -> tuple[str, _Record]:
        if not isinstance(item, dict):
            raise self._wrong("a tensor in it is no object")
        name = item.get("name")
        spec = specs.get(name) if isinstance(name, str) else None
        if not isinstance(name, str) or spec is None:
            raise self._wrong(f"it has a tensor {str(name)[:80]!r} that the base has not")
        said = (item.get("dtype"), item.get("shape"), item.get("uncompressed_num_bytes"))
        if said != (_DTYPES.get(spec.dtype, spec.dtype), list(spec.shape), spec.nbytes):
            raise self._wrong(f"{name!r} is {str(said)[:120]} there and another in the base")
        older = "checksum" not in item
        checksum = item.get(_OLDER_CHECKSUM if older else "checksum")
        algorithm = item.get("checksum_algorithm", _OLDER_CHECKSUM if older else _CHECKSUM)
        key, nbytes = item.get("payload_key"), item.get("compressed_num_bytes")
        if not isinstance(algorithm, str) or algorithm not in CHECKSUMS:
            raise self._wrong(f"checksum {str(algorithm)[:40]!r} is not known here ({', '.join(CHECKSUMS)})")
        if not isinstance(key, str) or type(nbytes) is not int or not isinstance(checksum, str):
            raise self._wrong(f"{name!r} does not say where its bytes are, or what they are")
        file = file_name(item.get("payload_file"), f"{self._folder}/{_MANIFEST}")
        return name, _Record(file, key, nbytes, checksum, algorithm)

    def _wrong(self, why: str) -> ManifestCorrupt:
        return ManifestCorrupt(f"{self._folder}/{_MANIFEST} in {self._store.url}: {why}. Nothing was written from it.")


class SkyRL(Layout):
    """See the module."""

    name = "skyrl"

    def newest(self, store: Store) -> int:
        """See Layout."""
        found = {int(match[1]) for name in store.folders("") if (match := _FOLDER.fullmatch(name))}
        return next((version for version in sorted(found, reverse=True) if self.stands(store, version)), 0)

    def open(self, store: Store, version: int, specs: Specs) -> ForeignVersion:
        """See Layout."""
        for folder in _folders(version):
            try:
                document = read_json(store, f"{folder}/{_MANIFEST}")
            except ObjectMissing:
                continue
            return _Delta(store, version, folder, document, specs)
        raise VersionUnknown(f"{store.url} has no version {version} of layout {self.name}. Nothing was read.")

    def stands(self, store: Store, version: int) -> bool:
        """See Layout."""
        return any(there(store, f"{folder}/{_MANIFEST}") for folder in _folders(version))

    def write(self, store: Store, version: int, changed: Iterable[Changed], writing: Writing, *, elements: int) -> None:
        """See Layout."""
        folder, writing = _folders(version)[0], replace(writing, checksum=_CHECKSUM)
        with packed(changed, writing, encoding=XOR, sums_in_header=False) as files:
            clear(store, folder)
            upload(store, files, writing, lambda file: f"{folder}/{_name_of(file)}")
            tensors = [_described(one, file, writing) for file in files for one in file.tensors]
        manifest = {
            "version": version,
            "base_version": version - 1,
            "tensors": tensors,
            "total_uncompressed_num_bytes": sum(one["uncompressed_num_bytes"] for one in tensors),
            "total_compressed_num_bytes": sum(one["compressed_num_bytes"] for one in tensors),
            "payload_files": [_name_of(file) for file in files],
        }
        create_once(store, f"{folder}/{_MANIFEST}", json.dumps(manifest, ensure_ascii=False).encode())


def _name_of(file: PackedFile) -> str:
    return f"delta-rank00000-file{file.number:06d}.safetensors"


def _described(one: Packed, file: PackedFile, writing: Writing) -> dict[str, Any]:
    return {
        "name": one.spec.name,
        "dtype": _DTYPES.get(one.spec.dtype, one.spec.dtype),
        "shape": list(one.spec.shape),
        "uncompressed_num_bytes": one.spec.nbytes,
        "compressed_num_bytes": one.frame_bytes,
        "payload_file": _name_of(file),
        "payload_key": one.spec.name,
        "checksum": one.checksum,
        "checksum_algorithm": writing.checksum,
    }
