"""Whether the shards that a manifest names stand as it names them: by their sizes, or by their bytes, read in ranges.
Only reads; must not know what hangs on the answer."""

from collections.abc import Mapping

from weighbridge.errors import ObjectMissing
from weighbridge.storage.digests import new_hasher
from weighbridge.storage.manifest import shard_key
from weighbridge.storage.stores.contract import Store
from weighbridge.values import Manifest, ShardInfo

RANGE_BYTES = 16 << 20


def sizes_flaw(store: Store, manifest: Manifest, *, listed: Mapping[str, int] | None = None) -> str | None:
    """Which shard is missing or of another size, in words; None when all stand. `listed` are names with their bytes as
    a listing showed them: what it shows right is not asked for again. Raises StoreError."""
    for shard in manifest.shards:
        if listed is not None and listed.get(shard.name) == shard.nbytes:
            continue
        key = shard_key(manifest.version, shard)
        try:
            nbytes = store.size(key)
        except ObjectMissing:
            return f"{key} is missing"
        if nbytes != shard.nbytes:
            return f"{key} has {nbytes} bytes, and its manifest says {shard.nbytes}"
    return None


def bytes_flaw(store: Store, manifest: Manifest) -> str | None:
    """The same by every byte, until one shard has not the digest that its manifest names. Holds a range at a time.
    Raises StoreError."""
    found = sizes_flaw(store, manifest)
    if found is not None:
        return found
    for shard in manifest.shards:
        key = shard_key(manifest.version, shard)
        try:
            # A bit that flipped on the way is not in the store; one that is, is there the second time too.
            if not any(has_digest(store, key, shard, manifest.digest_kind) for _ in range(2)):
                return f"{key} does not have the bytes that its manifest names"
        except ObjectMissing:
            return f"{key} is missing"
    return None


def has_digest(store: Store, key: str, shard: ShardInfo, digest_kind: str) -> bool:
    """Whether an object of the right size has a shard's digest. Raises StoreError, ObjectMissing."""
    hasher = new_hasher(digest_kind)
    for start in range(0, shard.nbytes, RANGE_BYTES):
        hasher.update(store.get_range(key, start, min(RANGE_BYTES, shard.nbytes - start)))
    return hasher.digest() == shard.digest
