"""The digest of a whole state: what a version proves and what every host must reach. docs/FORMAT.md, "Parts and
digests", gives its bytes. Knows digests by part and nothing else."""

import struct
from collections.abc import Iterable, Mapping

import blake3

from weighbridge.values import Manifest, PartKey, PartRow


def state_digest(digests: Mapping[PartKey, bytes]) -> str:
    """Hex blake3 over all parts, sorted by the name's UTF-8 bytes and the offset."""
    hasher = blake3.blake3()
    named = sorted((key.tensor.encode(), key.offset, digest) for key, digest in digests.items())
    for name, offset, digest in named:
        hasher.update(struct.pack("<I", len(name)) + name + struct.pack("<QB", offset, len(digest)) + digest)
    return hasher.hexdigest()


def advance(digests: Mapping[PartKey, bytes], rows: Iterable[PartRow]) -> dict[PartKey, bytes]:
    """The digests by part after the changes of one manifest's rows; `digests` itself stays as it is."""
    return {**digests, **{row.key: row.after for row in rows}}


def base_digests(base: Manifest) -> dict[PartKey, bytes]:
    """The digests by part of version 0, from its manifest."""
    return {row.key: row.after for row in base.rows}
