"""Makes the right bytes of single parts again, from another copy or from what the store has of them, and writes them
over what rotted. Must not know how the damage was found."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import structlog

from weighbridge.errors import CheckpointError, CorruptData, DigestMismatch, ObjectMissing, ReplicaError, VersionRetired
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.replica.fetch import PLANS
from weighbridge.storage.replica.image import FolderImage
from weighbridge.storage.replica.parallel import in_parallel
from weighbridge.storage.replica.patching import Deltas, lead
from weighbridge.storage.replica.seclusion import secluded
from weighbridge.storage.replica.site import Site
from weighbridge.storage.replica.state import CopyState
from weighbridge.storage.ways import Way, find_way, learn_gaps
from weighbridge.values import Manifest, PartKey

_BASE = "base"

_log = structlog.get_logger("weighbridge.replica")


class Rebuilder:
    """Makes parts from `others` (clean copies), or from the base or an anchor and the deltas that touch them, whichever
    has fewer bytes to travel. Thread-safe. Everything it returns has been proven."""

    def __init__(self, site: Site, others: Sequence[CopyState]) -> None:
        self._site = site
        self._others = tuple(others)
        self._lock = threading.RLock()
        self._wanted: set[PartKey] = set()
        self._ways: dict[int, Way] = {}
        self._images: dict[str, FolderImage] = {}
        self._damaged: list[Manifest] = []

    def expect(self, keys: Iterable[PartKey]) -> None:
        """Says which parts will have to be made, so that the way chosen is the shortest for all of them together."""
        with self._lock:
            self._wanted.update(keys)
            self._ways.clear()

    def rebuild(self, key: PartKey, version: int, wanted: bytes) -> Bytes:
        """A part's bytes at a version, whose digest is `wanted`, in an array of their own. Where shards were collected,
        are gone or are damaged, the next way is tried.

        Raises DigestMismatch when no source leads there, ReplicaError or VersionRetired when there is no source at
        all, and what a fetch raises otherwise.
        """
        failures: list[str] = []
        for other in self._others:
            if other.version <= version or other.parts[key] == wanted:
                start = min(other.version, version)
                deltas = () if other.parts[key] == wanted else self._site.lineage.chain(start, version)
                found = self._lead(other.copy, key, other.parts[key], deltas, wanted, failures)
                if found is not None:
                    return found
        for _ in range(PLANS):
            try:
                way = self._way(key, version)
            except (ReplicaError, VersionRetired) as error:
                if not failures:
                    raise
                failures.append(str(error))
                break
            found = self._by_way(way, key, wanted, failures)
            if found is not None:
                return found
            if not self._is_closed(way):
                break
        raise DigestMismatch(
            f"{key.tensor} at byte {key.offset}: its bytes at version {version} could not be made again "
            f"({'; '.join(failures)}). Nothing was written; give the base folder, or seed this replica anew."
        )

    def _by_way(self, way: Way, key: PartKey, wanted: bytes, failures: list[str]) -> Bytes | None:
        if way.anchor is None:
            first = next(row.after for row in self._site.lineage.manifest(0).rows if row.key == key)
            return self._lead(_BASE, key, first, way.deltas, wanted, failures)
        data = np.empty(self._site.parts[key].nbytes, np.uint8)
        return self._over(way.manifests, key, data, wanted, failures)

    def _way(self, key: PartKey, version: int) -> Way:
        """The way by which the wanted parts are made; other shards than theirs are not read."""
        with self._lock:
            if key not in self._wanted:
                self.expect([key])
            if version not in self._ways:
                held = {} if self._site.base is None else {0: 0}
                try:
                    for manifest in self._damaged:
                        self._site.lineage.forget_shards(manifest)
                    self._ways[version] = find_way(self._site.lineage, version, held=held, weigh=self._weigh)
                finally:
                    for manifest in self._damaged:
                        self._site.lineage.recall_shards(manifest)
            return self._ways[version]

    def _is_closed(self, way: Way) -> bool:
        """Whether shards of a way are gone or damaged; then the next way does not count on them."""
        lineage = self._site.lineage
        with self._lock:
            damaged = [manifest for manifest in self._site.spool.damaged if manifest in way.manifests]
            learn_gaps(lineage, way, damaged=damaged)
            self._damaged += damaged
            closed = any(map(lineage.are_shards_gone, way.manifests))
            for manifest in damaged:  # somebody may restore it: only this object goes around it
                lineage.recall_shards(manifest)
            if closed and self._ways.get(way.target) is way:
                del self._ways[way.target]
            return closed

    def _weigh(self, manifest: Manifest) -> int:
        shards = {row.shard for row in manifest.rows if row.key in self._wanted}
        here = self._site.spool.place
        return sum(s.nbytes for s in map(manifest.shards.__getitem__, shards) if not here(manifest, s).exists())

    def _lead(
        self,
        source: str,
        key: PartKey,
        first: bytes,
        deltas: Sequence[Manifest],
        wanted: bytes,
        failures: list[str],
    ) -> Bytes | None:
        """A folder's bytes led to the version, or None, with the reason added, when that does not end right."""
        try:
            image = self._image(source)
            data = np.empty(self._site.parts[key].nbytes, np.uint8)
            image.read(key, data)
        except CheckpointError as error:
            failures.append(str(error))
            return None
        if digest_bytes(self._site.kind, data.data) != first:
            failures.append(f"{image.checkpoint.folder} is not right either")
            return None
        return data if first == wanted else self._over(deltas, key, data, wanted, failures)

    def _over(
        self, manifests: Sequence[Manifest], key: PartKey, data: Bytes, wanted: bytes, failures: list[str]
    ) -> Bytes | None:
        touching = [manifest for manifest in manifests if any(row.key == key for row in manifest.rows)]
        deltas = Deltas(touching, self._site.spool.path_of)
        try:
            with deltas.steps(key) as steps:
                lead(data, steps, digest_kind=self._site.kind)
        except (CorruptData, ObjectMissing, VersionRetired) as error:
            failures.append(str(error))
            return None
        finally:
            deltas.close()
        if digest_bytes(self._site.kind, data.data) != wanted:
            failures.append("the deltas lead to another digest than the state's")
            return None
        return data

    def _image(self, source: str) -> FolderImage:
        with self._lock:
            if source not in self._images:
                site = self._site
                folder = site.base if source == _BASE and site.base is not None else site.folder(source)
                self._images[source] = FolderImage(site.open_folder(folder), site.disk)
            return self._images[source]


def repair_parts(site: Site, state: CopyState, bad: Sequence[PartKey], others: Sequence[CopyState]) -> CopyState:
    """Writes the right bytes over bad parts of a copy, which ends clean at `state.version`.

    Needs no journal: what it overwrites is of no use, and a crash leaves the copy dirty, to be digested and repaired
    again. The copy's other files must be right already. Raises like `Rebuilder.rebuild`.
    """
    _log.warning("repairing a copy", copy=state.copy, version=state.version, parts=len(bad))
    rebuilder = Rebuilder(site, others)
    rebuilder.expect(bad)
    with secluded(site, state.copy):
        site.save(replace(state, dirty_to=state.version))
        image = FolderImage(site.open(state.copy), site.disk)
        write = partial(_rewrite, image, rebuilder, state.version, state.parts)
        for _ in in_parallel(write, bad, threads=site.threads):
            pass
        files = {image.checkpoint.tensors[key.tensor].file for key in bad}
        marks = site.stamp(image.checkpoint, files)
        return site.save(
            replace(
                state,
                dirty_to=None,
                durability=site.disk.durability,
                boot_id=site.disk.boot_id(),
                files={**state.files, **marks},
            )
        )


def _rewrite(
    image: FolderImage, rebuilder: Rebuilder, version: int, parts: Mapping[PartKey, bytes], key: PartKey
) -> None:
    image.write(key, rebuilder.rebuild(key, version, parts[key]))
