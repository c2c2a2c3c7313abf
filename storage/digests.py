"""The digests a run may use, registered by name: xxh3-128 (fast) and blake3 (against an enemy). A name that is not
registered is a typed error, never a guess. Chain and manifest digests are always blake3."""

from collections.abc import Callable, Mapping
from typing import Protocol

import blake3
import xxhash

from weighbridge.errors import UsageError

Buffer = bytes | bytearray | memoryview


class Hasher(Protocol):
    """A running digest over bytes."""

    def update(self, data: Buffer, /) -> object:
        """Adds bytes. Releases the GIL for large inputs."""
        ...

    def digest(self) -> bytes:
        """The raw digest of everything added so far."""
        ...


DIGESTS: Mapping[str, Callable[[], Hasher]] = {"xxh3-128": xxhash.xxh3_128, "blake3": blake3.blake3}


def new_hasher(kind: str) -> Hasher:
    """A fresh hasher of a registered kind. Raises UsageError for an unknown one."""
    try:
        return DIGESTS[kind]()
    except KeyError:
        known = ", ".join(DIGESTS)
        raise UsageError(f"digest kind {kind!r} is not known here; known: {known}. Upgrade weighbridge.") from None


def digest_bytes(kind: str, data: Buffer) -> bytes:
    """Raw digest of one buffer."""
    hasher = new_hasher(kind)
    hasher.update(data)
    return hasher.digest()


def chain_digest(data: Buffer) -> str:
    """Hex blake3, the digest of manifests and of the hash chain."""
    return blake3.blake3(data).hexdigest()
