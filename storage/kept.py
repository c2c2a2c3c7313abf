"""Versions that somebody named, to be kept: `kept/<name>`, created once, and removed by whoever releases the name. Must
not know what collecting does, only that it marks first and reads the names afterwards."""

import uuid
from dataclasses import dataclass

import structlog

from weighbridge.errors import CorruptData, LineageError, ObjectMissing, ObjectTooLarge, UsageError, VersionRetired
from weighbridge.storage.clock import Clock
from weighbridge.storage.commit import put_if_absent
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import check_name
from weighbridge.storage.sealed_json import MOST_SEALED_BYTES, seal, unseal
from weighbridge.storage.stores.contract import Store
from weighbridge.storage.ways import find_way

log = structlog.get_logger("weighbridge.retention")

KEPT_FOLDER = "kept"


@dataclass(frozen=True, slots=True)
class Kept:
    """A version that is kept under a name, until it is released."""

    name: str
    version: int
    created_ns: int


def keep(lineage: Lineage, version: int, name: str, *, clock: Clock) -> Kept:
    """Keeps a version under a name. Doing it again is safe.

    Raises VersionUnknown, VersionRetired when it is, or is just being, collected (it is then not kept), UsageError when
    the name is another version's.
    """
    key, identity = kept_key(name), uuid.uuid4().hex
    lineage.manifest(version)
    now = clock.now_ns()
    fields = {"name": name, "version": version, "id": identity, "created_ns": now}
    fresh = put_if_absent(lineage.store, key, seal(fields), clock=clock)
    if not fresh:
        standing = _read(lineage.store, key)
        if standing.version != version:
            raise UsageError(
                f"{name!r} keeps version {standing.version} already. Nothing was changed; release it, or give version "
                f"{version} another name."
            )
    if (gap := _gap(lineage, version)) is not None:
        if fresh:
            lineage.store.delete(key)
        raise VersionRetired(
            f"version {version} cannot be kept: the shards of version {gap} on its way are collected, or about to be. "
            "Nothing was kept."
        )
    log.info("kept", name=name, version=version)
    return Kept(name, version, now)


def release(store: Store, name: str) -> None:
    """Gives a name back: the next gc may collect its version. Raises LineageError when there is no such name."""
    key = kept_key(name)
    try:
        store.size(key)
    except ObjectMissing as error:
        raise LineageError(f"{store.url} keeps nothing under the name {name!r}. Nothing was changed.") from error
    store.delete(key)
    log.info("released", name=name)


def kept_names(store: Store) -> list[Kept]:
    """All kept versions, by name. Raises CorruptData for a name that cannot be read: then nothing may be collected."""
    found = []
    for info in store.list(KEPT_FOLDER):
        try:
            found.append(_read(store, info.key))
        except ObjectMissing:  # released since it was listed
            continue
    return found


def kept_key(name: str) -> str:
    """The key of a name. Raises UsageError for what cannot be one."""
    return f"{KEPT_FOLDER}/{check_name('name', name)}"


def _read(store: Store, key: str) -> Kept:
    try:
        fields = unseal(store.get(key, most=MOST_SEALED_BYTES))
        kept = Kept(fields["name"], fields["version"], fields["created_ns"])
        if kept_key(kept.name) != key or type(kept.version) is not int or type(kept.created_ns) is not int:
            raise ValueError("it is another name's")
    except (ValueError, KeyError, TypeError, ObjectTooLarge) as error:
        raise CorruptData(
            f"{key} does not say what it keeps: {error}. Nothing was collected; release the name, and keep it again."
        ) from error
    return kept


def _gap(lineage: Lineage, version: int) -> int | None:
    """A version on the way to this one whose mark stands, if any. Asked after the name stands."""
    try:
        way = find_way(lineage, version, held={0: 0})
    except VersionRetired:
        return version
    return next((manifest.version for manifest in way.manifests if lineage.is_marked(manifest)), None)
