"""The layout of slime, miles and SGLang's `/pull_weights`: `weight_v000012/`, frames under HF names, an index last.
docs/PEERS.md gives its bytes."""

import json
import re
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from weighbridge.errors import ManifestCorrupt, ObjectMissing, UsageError, VersionUnknown
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.peers.contract import Changed, ForeignVersion, Layout, Specs, Writing
from weighbridge.storage.peers.frames import (
    CHECKSUMS,
    FRAMES,
    OVERWRITE,
    OVERWRITE_BYTES,
    apply_frame,
    check,
    most_frame_bytes,
)
from weighbridge.storage.peers.packing import PackedFile, files_by_tensor, packed, upload
from weighbridge.storage.peers.payload import Payload, clear, create_once, file_name, read_json, there
from weighbridge.storage.stores.contract import Store

_FOLDER = re.compile(r"weight_v([0-9]{6,12})")
_VERSION = re.compile(r"[0-9]{6,12}")
_CHECKSUMS = tuple(kind for kind in CHECKSUMS if kind != "sha256")
"""What receivers of this layout know."""
_SINGLE = "model.safetensors"
"""A whole checkpoint of one file has no index. A delta's files are never called so."""


def _folder(version: int) -> str:
    return f"weight_v{version:06d}"


def _index(version: int) -> str:
    return f"{_folder(version)}/model.safetensors.index.json"


class _Files(ForeignVersion):
    """What an index names: tensors by file. Where it is `exact`, the files have no others."""

    exact: ClassVar[bool] = False

    def __init__(self, store: Store, version: int, document: dict[str, Any], specs: Specs) -> None:
        self._store, self.version, self._specs, self._where = store, version, specs, _index(version)
        weight_map = document.get("weight_map")
        if not isinstance(weight_map, dict):
            raise self._wrong("it has no weight_map")
        self._files = {name: file_name(file, self._where) for name, file in weight_map.items()}
        if strangers := sorted(self._files.keys() - specs.keys()):
            raise self._wrong(f"it has tensors that the base has not: {', '.join(map(repr, strangers[:3]))}")
        self.names = tuple(sorted(self._files))
        self._named: dict[str, set[str]] = {}
        for name, file in self._files.items():
            self._named.setdefault(file, set()).add(name)
        self._open: dict[str, Payload] = {}

    def _payload(self, name: str) -> Payload:
        file = self._files[name]
        if file not in self._open:
            try:
                self._open[file] = Payload(self._store, f"{_folder(self.version)}/{file}")
            except ObjectMissing as error:
                raise self._wrong(f"its file {file} is missing") from error
            if self.exact and self._open[file].header.tensors.keys() != self._named[file]:
                raise self._wrong(f"its file {file} has other tensors than it says")
        return self._open[file]

    def _wrong(self, why: str) -> ManifestCorrupt:
        return ManifestCorrupt(f"{self._where} in {self._store.url}: {why}. Nothing was written from it.")


class _Delta(_Files):
    exact = True  # receivers differ in whether they apply what the index leaves out

    def __init__(self, store: Store, version: int, document: dict[str, Any], specs: Specs) -> None:
        super().__init__(store, version, document, specs)
        meta = document["metadata"]
        self.base = self._version(meta, "base_version")
        self._encoding = self._one_of(meta, "delta_encoding", FRAMES)
        self._checksum = self._one_of(meta, "checksum_format", _CHECKSUMS)
        self._one_of(meta, "compression_format", ("zstd",))
        if self._version(meta, "version") != version or self.base >= version:
            raise self._wrong(f"it is of version {meta.get('version')} on {meta.get('base_version')}")

    def new_bytes(self, name: str, old: Bytes) -> Bytes:
        """See ForeignVersion."""
        payload = self._payload(name)
        frame = payload.frame(name, most=most_frame_bytes(self._encoding, old.size))
        new = apply_frame(self._encoding, frame, old)
        return check(self._checksum, new, payload.header.metadata.get(name), name)

    def _version(self, meta: dict[str, Any], field: str) -> int:
        text = meta.get(field)
        if not isinstance(text, str) or not _VERSION.fullmatch(text):
            raise self._wrong(f"its {field} is {str(text)[:40]!r}, not six digits")
        return int(text)

    def _one_of(self, meta: dict[str, Any], field: str, known: Iterable[str]) -> str:
        value = meta.get(field)
        if not isinstance(value, str) or value not in set(known):
            raise self._wrong(f"its {field} is {str(value)[:40]!r}, and {', '.join(known)} are known here")
        return value


class _Whole(_Files):
    """An ordinary checkpoint that stands as a version."""

    def __init__(self, store: Store, version: int, document: dict[str, Any], specs: Specs) -> None:
        super().__init__(store, version, document, specs)
        self.base = None
        if missing := sorted(specs.keys() - self._files.keys()):
            raise self._wrong(f"it is a whole checkpoint, without {', '.join(map(repr, missing[:3]))}")

    def new_bytes(self, name: str, old: Bytes) -> Bytes:
        """See ForeignVersion."""
        payload, spec = self._payload(name), self._specs[name]
        found = payload.spec(name)
        if (found.dtype, found.shape) != (spec.dtype, spec.shape):
            raise self._wrong(f"{name!r} is {found.dtype} {list(found.shape)} there and another in the base")
        return np.frombuffer(payload.read(name, most=spec.nbytes), np.uint8)


class PullWeights(Layout):
    """See the module."""

    name = "pull-weights"

    def newest(self, store: Store) -> int:
        """See Layout."""
        found = sorted(
            (int(match[1]) for name in store.folders("") if (match := _FOLDER.fullmatch(name))), reverse=True
        )
        return next((version for version in found if self.stands(store, version)), 0)

    def open(self, store: Store, version: int, specs: Specs) -> ForeignVersion:
        """See Layout."""
        try:
            document = read_json(store, _index(version))
        except ObjectMissing as error:
            try:
                names = Payload(store, f"{_folder(version)}/{_SINGLE}").header.tensors
            except ObjectMissing:
                raise VersionUnknown(
                    f"{store.url} has no version {version} of layout {self.name}. Nothing was read."
                ) from error
            document = {"weight_map": dict.fromkeys(names, _SINGLE)}
        meta = document.get("metadata")
        kind = _Delta if isinstance(meta, dict) and "delta_encoding" in meta else _Whole
        return kind(store, version, document, specs)

    def demand(self, specs: Specs, writing: Writing) -> None:
        """See Layout."""
        large = sorted(spec.name for spec in specs.values() if spec.nbytes >= OVERWRITE_BYTES)
        if large and writing.encoding == OVERWRITE:
            raise UsageError(
                f"{', '.join(large[:3])} cannot be published as overwrite, whose positions end at 4 GiB. Nothing was "
                "published; set layout_encoding to xor."
            )

    def stands(self, store: Store, version: int) -> bool:
        """See Layout."""
        return there(store, _index(version)) or there(store, f"{_folder(version)}/{_SINGLE}")

    def write(self, store: Store, version: int, changed: Iterable[Changed], writing: Writing, *, elements: int) -> None:
        """See Layout."""
        with packed(changed, writing, encoding=writing.encoding, sums_in_header=True) as files:

            def name_of(file: PackedFile) -> str:
                return f"model-{file.number:05d}-of-{len(files):05d}.safetensors"

            clear(store, _folder(version))
            upload(store, files, writing, lambda file: f"{_folder(version)}/{name_of(file)}")
            weight_map = files_by_tensor(files, name_of)
        index = {
            "metadata": {
                "version": f"{version:06d}",
                "base_version": f"{version - 1:06d}",
                "delta_encoding": writing.encoding,
                "compression_format": "zstd",
                "checksum_format": writing.checksum,
            },
            "weight_map": dict(sorted(weight_map.items())),
        }
        create_once(store, _index(version), json.dumps(index, indent=2, ensure_ascii=False).encode())
