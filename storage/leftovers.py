"""What dead attempts leave in a store: unfinished writes, shards that no manifest names, probes. Finds them and removes
them, and never anything live: no folder above the head is touched, and every age is the store's own time."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import structlog

from weighbridge.errors import ManifestCorrupt, ObjectMissing
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import Disk
from weighbridge.storage.manifest import SHARD_NAME, anchor_key, from_bytes, version_folder
from weighbridge.storage.store_time import store_now_ns
from weighbridge.storage.stores.contract import ObjectInfo, Store, Unfinished
from weighbridge.storage.stores.probe import PROBE_FOLDER
from weighbridge.storage.transfer import PART_SUFFIX

log = structlog.get_logger("weighbridge.leftovers")

Kind = Literal["unfinished write", "orphan shard", "probe"]


@dataclass(frozen=True, slots=True)
class Leftover:
    """One thing that nobody will ask for again. `age_seconds` is by the store's own time."""

    kind: Kind
    key: str
    nbytes: int
    age_seconds: float
    unfinished: Unfinished | None = None


def find_leftovers(
    store: Store, lineage: Lineage, *, grace_seconds: float = 86_400.0, listed: Iterable[ObjectInfo] | None = None
) -> Iterator[Leftover]:
    """Everything that dead attempts left in the store and that may go; `listed` are the objects under its versions, as
    they were a while ago.

    A shard under a committed version is an orphan at once when its commit id is not the one that the version's manifest
    names: an attempt at a version that is taken cannot win any more. Where a writer may still be at work (unfinished
    writes, probes, shards of an anchor not committed yet) only what is older than `grace_seconds` counts; that must be
    longer than any upload takes.
    """
    now_ns = store_now_ns(store)

    def old(when_ns: int) -> float:
        return max(0.0, (now_ns - when_ns) / 1e9)

    for unfinished in store.unfinished():
        if old(unfinished.began_ns) > grace_seconds:
            yield Leftover("unfinished write", unfinished.key, unfinished.nbytes, old(unfinished.began_ns), unfinished)
    for probe in store.list(PROBE_FOLDER):
        if old(probe.modified_ns) > grace_seconds:
            yield Leftover("probe", probe.key, probe.nbytes, old(probe.modified_ns))
    head = lineage.head()
    objects = store.list("versions") if listed is None else listed
    for folder, found in groupby(objects, key=lambda info: info.key.rpartition("/")[0]):
        name = folder.rpartition("/")[2]
        if name.isascii() and name.isdigit() and int(name) <= head and folder == version_folder(int(name)):
            for info, anchor in _orphans(lineage, int(name), list(found)):
                if not anchor or old(info.modified_ns) > grace_seconds:
                    yield Leftover("orphan shard", info.key, info.nbytes, old(info.modified_ns))


def collect(store: Store, leftover: Leftover) -> None:
    """Removes one of `find_leftovers`; none there is no error."""
    if leftover.unfinished is not None:
        store.discard(leftover.unfinished)
    else:
        store.delete(leftover.key)
    log.info("collected a leftover", kind=leftover.kind, key=leftover.key, nbytes=leftover.nbytes)


def collect_parts(folder: Path, *, disk: Disk) -> int:
    """Removes part files of fetches that were given up, under a folder of this host's own, and returns their bytes.

    Only for whoever owns the folder, and while it fetches nothing: a fetch that goes on resumes its part file.
    """
    freed = 0
    for part in sorted(folder.rglob(f"*{PART_SUFFIX}")):
        freed += part.stat().st_size
        disk.unlink(part)
    return freed


def _orphans(lineage: Lineage, version: int, found: list[ObjectInfo]) -> Iterator[tuple[ObjectInfo, bool]]:
    """Shards under a committed version that neither its manifest nor its anchor names; and whether they are an
    anchor's. What is not named like a shard is somebody else's, and stays."""
    shards = [(info, match) for info in found if (match := SHARD_NAME.fullmatch(info.key.rpartition("/")[2]))]
    if not shards:
        return
    try:
        live = {lineage.manifest(version).commit_id, *_anchor_ids(lineage.store, version)}
        named = {shard.name for shard in lineage.manifest(version).shards}
    except ManifestCorrupt as error:
        log.warning("left all shards of a version alone, since its manifest cannot be read", key=str(error))
        return
    for info, match in shards:
        if match["commit_id"] not in live and info.key.rpartition("/")[2] not in named:
            yield info, match["anchor"] is not None


def _anchor_ids(store: Store, version: int) -> Iterator[str]:
    key = anchor_key(version)
    with contextlib.suppress(ObjectMissing):
        yield from_bytes(store.get(key), where=key).commit_id
