"""Makes the parts of a version one by one, from what a way begins with and its deltas, each proven by its digest; and
writes whole folders of them. Must not know where a way came from, nor whose the folder is."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from weighbridge.errors import DigestMismatch, ForeignRun
from weighbridge.storage.checkpoint import Checkpoint, open_checkpoint
from weighbridge.storage.checkpoint_writer import copy_checkpoint, write_checkpoint
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import SHARED_FILE, Disk
from weighbridge.storage.replica.image import FolderImage
from weighbridge.storage.replica.parallel import in_parallel
from weighbridge.storage.replica.patching import Deltas, PathOf, lead, prove_part
from weighbridge.storage.replica.scratch import Scratch
from weighbridge.storage.state import advance, base_digests, state_digest
from weighbridge.storage.ways import Way
from weighbridge.values import Manifest, PartKey, TensorSpec


def specs_of(base: Manifest) -> tuple[TensorSpec, ...]:
    """What every tensor of the model is, from the manifest of version 0 (or an anchor)."""
    nbytes: dict[str, int] = {}
    for row in base.rows:
        nbytes[row.key.tensor] = nbytes.get(row.key.tensor, 0) + row.nbytes
    whole = {row.key.tensor: row for row in base.rows if row.key.offset == 0}
    return tuple(TensorSpec(name, row.dtype, row.shape, nbytes[name]) for name, row in sorted(whole.items()))


def digests_after(way: Way, start: Mapping[PartKey, bytes], state: str) -> dict[PartKey, bytes]:
    """The digests by part where a way ends. `start` are those of the state that it begins with (an anchor brings its
    own), `state` is what the target's manifest claims. Raises DigestMismatch when the way leads elsewhere."""
    digests: Mapping[PartKey, bytes] = start if way.anchor is None else base_digests(way.anchor)
    strange = ""
    for manifest in way.deltas:
        strange = strange or next((r.key.tensor for r in manifest.rows if digests.get(r.key) != r.before), "")
        digests = advance(digests, manifest.rows)
    if strange or state_digest(digests) != state:
        raise DigestMismatch(
            f"the way from version {way.start} does not lead to version {way.target} as it was published"
            f"{': ' + strange if strange else ''}. Nothing was written; audit the store."
        )
    return dict(digests)


class Rebuild:
    """The parts of a way's target. Thread-safe; memory holds the parts in hand and the shards in use.

    `source` is a folder that holds the state with which a way without an anchor begins. `digests` are the target's.
    Raises DigestMismatch when the manifests of the way do not lead to the target's state.
    """

    def __init__(
        self,
        lineage: Lineage,
        way: Way,
        *,
        source: Checkpoint | None,
        start: Mapping[PartKey, bytes],
        path_of: PathOf,
        disk: Disk,
    ) -> None:
        target, base = lineage.manifest(way.target), lineage.manifest(0)
        self.way = way
        self.kind = target.digest_kind
        self.specs = specs_of(base)
        self.digests = digests_after(way, start, target.state_digest)
        self._nbytes = {row.key: row.nbytes for row in base.rows}
        self._image = None if source is None or way.anchor is not None else FolderImage(source, disk)
        self._deltas = Deltas(way.manifests, path_of)
        self._touched = frozenset(self._deltas.keys)
        if self._image is not None and self._image.parts.keys() != self._nbytes.keys():
            raise ForeignRun(
                f"{self._image.checkpoint.folder} has other tensors than this run's base. Nothing was replaced; give "
                "the folder of the checkpoint on which the run is based."
            )

    @property
    def keys(self) -> tuple[PartKey, ...]:
        """Every part, in an order that keeps the shards in use few."""
        return (*self._deltas.keys, *(key for key in self.digests if key not in self._touched))

    @property
    def touched(self) -> tuple[PartKey, ...]:
        """Those parts that something on the way writes."""
        return self._deltas.keys

    def part(self, key: PartKey) -> Bytes:
        """A part's bytes at the target, in an array of their own, proven. Raises DigestMismatch, PayloadCorrupt,
        ShardCorrupt, CheckpointError, and what a fetch raises."""
        data = np.empty(self._nbytes[key], np.uint8)
        if self._image is not None:
            self._image.read(key, data)
        if key in self._touched:
            with self._deltas.steps(key) as steps:
                lead(data, steps, digest_kind=self.kind)
        elif digest_bytes(self.kind, data.data) != self.digests[key]:
            raise DigestMismatch(
                f"{key.tensor} at byte {key.offset} is not the run's where version {self.way.target} is made from. "
                "Nothing was published or replaced."
            )
        return data

    def close(self) -> None:
        """Closes shards that a failure left open. No part may be in the making."""
        self._deltas.close()


def write_folder(
    lineage: Lineage,
    way: Way,
    target: Path,
    *,
    source: Checkpoint | None,
    start: Mapping[PartKey, bytes],
    path_of: PathOf,
    files: Mapping[str, bytes],
    disk: Disk,
    threads: int,
) -> tuple[Checkpoint, dict[PartKey, bytes]]:
    """Writes a way's target into a new folder, reads all of it back, and returns it with its proven digests by part.

    From a folder its layout of files is kept; from an anchor the files are laid out anew. Not synced but for new files.
    Raises like `Rebuild` and `copy_proven`; DigestMismatch when what was read back is not what was published.
    """
    rebuild = Rebuild(lineage, way, source=source, start=start, path_of=path_of, disk=disk)
    try:
        if source is None or way.anchor is not None:
            parts = in_parallel(lambda key: (key, rebuild.part(key).data), rebuild.keys, threads=threads)
            written = write_checkpoint(target, rebuild.specs, parts, files, disk=disk)
        else:
            written = copy_proven(source, target, start, kind=rebuild.kind, files=files, disk=disk, threads=threads)
            _patch(FolderImage(written, disk), Deltas(way.deltas, path_of), rebuild.kind, threads)
    finally:
        rebuild.close()
    if way.manifests:
        found, _ = written.digests(rebuild.kind, threads=threads)
        if found != rebuild.digests:
            raise DigestMismatch(
                f"version {way.target} was rebuilt with other bytes than it was published with. Nothing was kept; "
                "audit the store, and this machine's disk."
            )
    return written, rebuild.digests


def copy_proven(
    source: Checkpoint,
    target: Path,
    parts: Mapping[PartKey, bytes],
    *,
    kind: str,
    files: Mapping[str, bytes],
    disk: Disk,
    threads: int,
) -> Checkpoint:
    """Copies a checkpoint into a new folder with `files` as its small files, and proves every part of the copy.

    Raises ForeignRun when the source holds other tensors, DigestMismatch when it holds other bytes.
    """
    copied = copy_checkpoint(source, target, disk=disk)
    for name in set(copied.files) - set(files):
        disk.unlink(target / name)
    for name, data in files.items():
        if name not in copied.files or (target / name).read_bytes() != data:
            disk.make_folder((target / name).parent)
            disk.write_atomic(target / name, data, mode=SHARED_FILE)
    found, _ = copied.digests(kind, threads=threads)
    if set(found) != set(parts):
        raise ForeignRun(
            f"{source.folder} has other tensors than this run's base. Nothing was replaced; give the folder of the "
            "checkpoint on which the run is based."
        )
    wrong = sorted({key.tensor for key, digest in found.items() if digest != parts[key]})
    if wrong:
        raise DigestMismatch(
            f"{source.folder}: {len(wrong)} of {len(source.tensors)} tensors do not have the run's bytes "
            f"({', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''}). Nothing was replaced; give the folder of "
            "the checkpoint on which the run is based, unharmed."
        )
    return open_checkpoint(target)


def _patch(image: FolderImage, deltas: Deltas, kind: str, threads: int) -> None:
    scratch = Scratch()

    def one(key: PartKey) -> None:
        image.scatter(key, prove_part(image, deltas, key, digest_kind=kind, scratch=scratch).patches)

    try:
        for _ in in_parallel(one, deltas.keys, threads=threads):
            pass
    finally:
        deltas.close()
