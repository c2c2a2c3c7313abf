"""Proves a version as the store holds it: its chain from version 0, and every byte of its shards. Only reads."""

from dataclasses import dataclass

from weighbridge.errors import ObjectMissing, ShardCorrupt, VersionRetired
from weighbridge.storage.digests import new_hasher
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import shard_key
from weighbridge.storage.state import advance, base_digests, state_digest
from weighbridge.values import Manifest, ShardInfo

_RANGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class VersionProof:
    """What was read to prove a version: manifests of its chain, shards and bytes of its own, its state digest."""

    version: int
    manifests: int
    shards: int
    nbytes: int
    state_digest: str


def verify_version(lineage: Lineage, version: int) -> VersionProof:
    """Reads a version and all manifests before it. Raises ManifestCorrupt, ShardCorrupt, VersionUnknown, VersionRetired
    at the first thing that does not prove what it claims."""
    base = lineage.manifest(0)
    digests, last = base_digests(base), base
    for manifest in lineage.walk(0, version):
        for row in manifest.rows:
            if digests.get(row.key) != row.before:
                raise ShardCorrupt(
                    f"version {manifest.version}: {row.key.tensor} at byte {row.key.offset} starts from other bytes "
                    f"than version {manifest.parent} ends with. Nothing was changed; audit the store."
                )
        digests, last = advance(digests, manifest.rows), manifest
        if state_digest(digests) != manifest.state_digest:
            raise ShardCorrupt(
                f"version {manifest.version} claims another state than its rows lead to. Nothing was changed; audit "
                "the store."
            )
    for shard in last.shards:
        _read(lineage, last, shard)
    return VersionProof(version, version + 1, len(last.shards), last.wire_bytes, last.state_digest)


def _read(lineage: Lineage, manifest: Manifest, shard: ShardInfo) -> None:
    key, store = shard_key(manifest.version, shard), lineage.store
    try:
        found = store.size(key)
        hasher = new_hasher(manifest.digest_kind)
        if found == shard.nbytes:
            for start in range(0, found, _RANGE_BYTES):
                hasher.update(store.get_range(key, start, min(_RANGE_BYTES, found - start)))
    except ObjectMissing as error:
        if lineage.is_retired(manifest.version):
            raise VersionRetired(f"version {manifest.version} is retired: its shards were collected") from error
        raise ShardCorrupt(f"{key} is missing from {store.url}. Nothing was changed; restore it.") from error
    if found != shard.nbytes or hasher.digest() != shard.digest:
        raise ShardCorrupt(f"{key} in {store.url} is not what was published. Nothing was changed; restore it.")
