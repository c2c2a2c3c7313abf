"""Neighbours' safetensors files and JSON in a store: read in ranges within bounds, and made visible once. Must not
know what the tensors in them mean."""

import re
from contextlib import suppress
from typing import Any

from weighbridge.errors import HeaderError, ManifestCorrupt, ObjectExists, ObjectMissing, ObjectTooLarge, ShardCorrupt
from weighbridge.storage import strict_json
from weighbridge.storage.safetensors_header import MAX_HEADER_BYTES, Header, parse_header
from weighbridge.storage.stores.contract import Store
from weighbridge.values import TensorSpec

MOST_JSON_BYTES = 64 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")


class Payload:
    """One safetensors file in a store, by its header. Thread-safe."""

    def __init__(self, store: Store, key: str) -> None:
        """Raises ShardCorrupt for a file that its header does not describe exactly, ObjectMissing, StoreError."""
        self._store, self._key = store, key
        nbytes = store.size(key)
        try:
            if nbytes < 8:
                raise HeaderError(f"{nbytes} bytes are too few for a safetensors file")
            prefix = store.get_range(key, 0, 8)
            length = int.from_bytes(prefix, "little")
            if length > min(MAX_HEADER_BYTES, nbytes - 8):
                raise HeaderError(f"the header claims {length} bytes, the file has {nbytes}")
            self.header: Header = parse_header(prefix + store.get_range(key, 8, length) if length else prefix, nbytes)
        except HeaderError as error:
            raise ShardCorrupt(f"{key} in {store.url}: {error}. Nothing was read from it.") from error

    def spec(self, name: str) -> TensorSpec:
        """What the file says of a tensor. Raises ShardCorrupt when it has none of that name."""
        place = self.header.tensors.get(name)
        if place is None:
            raise ShardCorrupt(f"{self._key} in {self._store.url} has no tensor {name!r}. Nothing was read from it.")
        return place.spec

    def read(self, name: str, *, most: int) -> bytes:
        """A tensor's bytes, of which there may be at most `most`. Raises ShardCorrupt, StoreError."""
        spec = self.spec(name)
        if spec.nbytes > most:
            raise ShardCorrupt(
                f"{self._key} in {self._store.url}: {name!r} has {spec.nbytes} bytes, and no more than {most} are "
                "possible. Nothing was read from it."
            )
        if not spec.nbytes:
            return b""
        return self._store.get_range(self._key, self.header.tensors[name].start, spec.nbytes)

    def frame(self, name: str, *, most: int) -> memoryview:
        """The bytes of a tensor that must be one-dimensional U8. Raises ShardCorrupt, StoreError."""
        spec = self.spec(name)
        if spec.dtype != "U8" or spec.shape != (spec.nbytes,):
            raise ShardCorrupt(
                f"{self._key} in {self._store.url}: {name!r} is no row of bytes. Nothing was read from it."
            )
        return memoryview(self.read(name, most=most))


def read_json(store: Store, key: str) -> dict[str, Any]:
    """A JSON object of a bounded size. Raises ManifestCorrupt, ObjectMissing, StoreError."""
    try:
        document = strict_json.parse(store.get(key, most=MOST_JSON_BYTES))
    except ObjectTooLarge as error:
        raise ManifestCorrupt(str(error)) from error
    except ValueError as error:
        raise ManifestCorrupt(f"{key} in {store.url} is not JSON: {error}. Nothing was read from it.") from error
    if not isinstance(document, dict):
        raise ManifestCorrupt(f"{key} in {store.url} is no JSON object. Nothing was read from it.")
    return document


def there(store: Store, key: str) -> bool:
    """Whether an object stands."""
    try:
        store.size(key)
    except ObjectMissing:
        return False
    return True


def file_name(name: object, where: str) -> str:
    """`name`, if it is that of a payload file beside its manifest, and leads nowhere else. Raises ManifestCorrupt."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or ".." in name:
        raise ManifestCorrupt(f"{where} names a file {str(name)[:80]!r}, which no publisher writes. Nothing was read.")
    return name


def row_of_bytes(name: str, data: bytes) -> TensorSpec:
    """The spec of a one-dimensional U8 tensor."""
    return TensorSpec(name, "U8", (len(data),), len(data))


def clear(store: Store, folder: str) -> None:
    """Removes what an attempt that died left in a version's folder: receivers would read it as part of the version."""
    for info in list(store.list(folder)):
        store.delete(info.key)


def create_once(store: Store, key: str, data: bytes) -> None:
    """Makes a version visible. Another attempt at the same one may have done it already, with the same meaning."""
    with suppress(ObjectExists):
        store.create(key, data)
