"""Makes the right bytes of single parts again, from another copy or from the base and the deltas that touch them, and
writes them over what rotted. Must not know how the damage was found."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import structlog

from weighbridge.errors import CheckpointError, CorruptData, DigestMismatch, ReplicaError
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.replica.image import FolderImage
from weighbridge.storage.replica.parallel import in_parallel
from weighbridge.storage.replica.patching import Deltas, lead
from weighbridge.storage.replica.seclusion import secluded
from weighbridge.storage.replica.site import Site
from weighbridge.storage.replica.state import CopyState
from weighbridge.values import Manifest, PartKey

_BASE = "base"

_log = structlog.get_logger("weighbridge.replica")


class Rebuilder:
    """Makes parts from `others` (clean copies) or the base. Thread-safe. Everything it returns has been proven."""

    def __init__(self, site: Site, others: Sequence[CopyState]) -> None:
        self._site = site
        self._others = tuple(others)
        self._lock = threading.Lock()
        self._touching: dict[tuple[PartKey, int], list[int]] = {}
        self._images: dict[str, FolderImage] = {}

    def expect(self, keys: Iterable[PartKey], version: int) -> None:
        """Looks up, in one walk along the chain, which versions touch parts that will have to be rebuilt."""
        found: dict[PartKey, list[int]] = {key: [] for key in keys}
        for manifest in self._site.lineage.walk(0, version):
            for row in manifest.rows:
                if row.key in found:
                    found[row.key].append(manifest.version)
        with self._lock:
            self._touching.update({(key, version): versions for key, versions in found.items()})

    def rebuild(self, key: PartKey, version: int, wanted: bytes) -> Bytes:
        """A part's bytes at a version, whose digest is `wanted`, in an array of their own.

        Raises DigestMismatch when no source leads there, ReplicaError when there is no source at all, and what a
        fetch raises.
        """
        failures: list[str] = []
        for other in self._others:
            if other.version <= version or other.parts[key] == wanted:
                start = min(other.version, version)
                found = self._lead(other.copy, key, other.parts[key], start, version, wanted, failures)
                if found is not None:
                    return found
        if self._site.base is not None:
            first = next(row.after for row in self._site.lineage.manifest(0).rows if row.key == key)
            found = self._lead(_BASE, key, first, 0, version, wanted, failures)
            if found is not None:
                return found
        raise (DigestMismatch if failures else ReplicaError)(
            f"{key.tensor} at byte {key.offset}: its bytes at version {version} could not be made again "
            f"({'; '.join(failures) or 'there is no other copy and no base folder'}). Nothing was written; give the "
            "base folder, or seed this replica anew."
        )

    def _lead(
        self,
        source: str,
        key: PartKey,
        first: bytes,
        start: int,
        version: int,
        wanted: bytes,
        failures: list[str],
    ) -> Bytes | None:
        """A source's bytes led to the version, or None, with the reason added, when that does not end right."""
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
        if first == wanted:
            return data
        deltas = Deltas(self._manifests(key, start, version), self._site.spool.path_of)
        try:
            with deltas.steps(key) as steps:
                lead(data, steps, digest_kind=self._site.kind)
        except CorruptData as error:
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

    def _manifests(self, key: PartKey, start: int, version: int) -> list[Manifest]:
        if (key, version) not in self._touching:
            self.expect([key], version)
        lineage = self._site.lineage
        return [lineage.manifest(v) for v in self._touching[key, version] if v > start]


def repair_parts(site: Site, state: CopyState, bad: Sequence[PartKey], others: Sequence[CopyState]) -> CopyState:
    """Writes the right bytes over bad parts of a copy, which ends clean at `state.version`.

    Needs no journal: what it overwrites is of no use, and a crash leaves the copy dirty, to be digested and repaired
    again. The copy's other files must be right already. Raises like `Rebuilder.rebuild`.
    """
    _log.warning("repairing a copy", copy=state.copy, version=state.version, parts=len(bad))
    rebuilder = Rebuilder(site, others)
    rebuilder.expect(bad, state.version)
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
