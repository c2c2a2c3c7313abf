"""Takes one clean copy from its version to a later one: proves every part, journals, marks dirty, writes, syncs, marks
clean. Must not know which copy `current` points to, nor plan a path."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

import structlog

from weighbridge.errors import DigestMismatch, PayloadCorrupt, ReplicaError, ShardCorrupt
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.replica.fetch import need_room
from weighbridge.storage.replica.image import FolderImage
from weighbridge.storage.replica.journal import JournalHead, JournalWriter, drop_journal, read_journal
from weighbridge.storage.replica.parallel import in_parallel
from weighbridge.storage.replica.patching import Deltas, Proven, lead, prove_part, whole
from weighbridge.storage.replica.repair import Rebuilder
from weighbridge.storage.replica.scratch import Scratch
from weighbridge.storage.replica.seclusion import secluded
from weighbridge.storage.replica.site import Site
from weighbridge.storage.replica.state import CopyState
from weighbridge.storage.state import advance
from weighbridge.values import Manifest, PartKey, item_bytes

_log = structlog.get_logger("weighbridge.replica")


@dataclass(frozen=True, slots=True)
class Advanced:
    """A copy's new state, how many parts were written, and how many old parts had rotted and were made again."""

    state: CopyState
    parts: int
    repaired: int


def journal_bytes(manifests: Sequence[Manifest]) -> int:
    """At most what the journal of an apply takes on disk."""
    needed: dict[PartKey, tuple[int, int]] = {}
    for manifest in manifests:
        for row in manifest.rows:
            patch = row.changed * (4 + item_bytes(row.dtype))
            needed[row.key] = (needed.get(row.key, (0, 0))[0] + patch, row.nbytes)
    return sum(min(patches, nbytes) + 1024 for patches, nbytes in needed.values())


def apply_deltas(site: Site, state: CopyState, manifests: Sequence[Manifest], others: Sequence[CopyState]) -> Advanced:
    """Applies successive deltas, whose shards are in the spool, to a clean copy at the version before the first.

    Until everything is proven nothing is written. A part whose old bytes rotted is made again from `others` or the
    base. Raises DigestMismatch, PayloadCorrupt or ShardCorrupt when a published delta is wrong, DiskFull before the
    copy is touched.
    """
    target = manifests[-1]
    if not any(manifest.rows for manifest in manifests):
        moved = replace(state, version=target.version, manifest=target.digest)
        return Advanced(site.save(moved), 0, 0)
    need_room(site.disk, site.layout.folder, journal_bytes(manifests), "the journal of an apply")
    repaired = _journal(site, state, manifests, others)
    dirty = replace(state, dirty_to=target.version)
    with secluded(site, state.copy):
        site.save(dirty)
        done, parts = write_journalled(site, dirty, target, manifests)
    drop_journal(site.layout.journal, disk=site.disk)
    return Advanced(done, parts, repaired)


def write_journalled(
    site: Site, dirty: CopyState, target: Manifest, manifests: Sequence[Manifest]
) -> tuple[CopyState, int]:
    """Writes the whole journal that is there into a dirty copy and marks it clean. Returns how many parts that were."""
    journal = read_journal(site.layout.journal)
    if journal is None:
        raise ReplicaError(
            f"{site.layout.journal} was damaged between being written and being read. The copy that is loaded was not "
            "touched; open the replica again, and it is mended."
        )
    image = FolderImage(site.open(dirty.copy), site.disk)
    for _ in in_parallel(partial(_scatter, image), journal.parts, threads=site.threads):
        pass
    files = {image.checkpoint.tensors[part.key.tensor].file for part in journal.parts}
    return finish(site, dirty, target, manifests, image, files), len(journal.parts)


def finish(
    site: Site,
    dirty: CopyState,
    target: Manifest,
    manifests: Sequence[Manifest],
    image: FolderImage,
    files: set[str],
) -> CopyState:
    """Syncs the written files of a copy and marks it clean at the target."""
    marks = site.stamp(image.checkpoint, files)
    return site.save(
        replace(
            dirty,
            version=target.version,
            manifest=target.digest,
            dirty_to=None,
            durability=site.disk.durability,
            boot_id=site.disk.boot_id(),
            files={**dirty.files, **marks},
            parts=advance(dirty.parts, (row for manifest in manifests for row in manifest.rows)),
        )
    )


def _scatter(image: FolderImage, part: Proven) -> None:
    image.scatter(part.key, part.patches)


def _journal(site: Site, state: CopyState, manifests: Sequence[Manifest], others: Sequence[CopyState]) -> int:
    """Proves all parts, and that together they make the target's state; ends with a whole journal."""
    target = manifests[-1]
    deltas = Deltas(manifests, site.spool.path_of)
    _check_chain(state, deltas, manifests)
    prover = _Prover(site, state, deltas, Rebuilder(site, others))
    head = JournalHead(state.replica_id, state.copy, site.disk.boot_id(), state.version, target.version, target.digest)
    writer = JournalWriter(site.layout.journal, head, disk=site.disk)
    with closing(deltas), ExitStack() as undo:
        undo.callback(writer.discard)
        for proven in in_parallel(prover.prove, deltas.keys, threads=site.threads):
            writer.add(proven)
        writer.seal()
        undo.pop_all()
    return prover.repaired


def _check_chain(state: CopyState, deltas: Deltas, manifests: Sequence[Manifest]) -> None:
    """Raises DigestMismatch unless digests by part lead from the state here to the one that was published."""
    strange = [key for key in deltas.keys if state.parts.get(key) != deltas.rows(key)[0].before]
    after = replace(state, parts=advance(state.parts, (row for manifest in manifests for row in manifest.rows)))
    if strange or after.state_digest != manifests[-1].state_digest:
        raise DigestMismatch(
            f"versions {manifests[0].version} to {manifests[-1].version} do not follow from version {state.version} as "
            f"it is here{': ' + strange[0].tensor if strange else ''}. Nothing was written; audit the store."
        )


class _Prover:
    """Proves parts against a copy, and tells a rotten old part, which it makes again, from a wrong delta.

    Thread-safe.
    """

    def __init__(self, site: Site, state: CopyState, deltas: Deltas, rebuilder: Rebuilder) -> None:
        self._site, self._state, self._deltas, self._rebuilder = site, state, deltas, rebuilder
        self._image = FolderImage(site.open(state.copy), site.disk)
        self._scratch = Scratch()
        self._lock = threading.Lock()
        self.repaired = 0

    def prove(self, key: PartKey) -> Proven:
        try:
            return self._prove(key)
        except (DigestMismatch, PayloadCorrupt):
            before = self._state.parts[key]
            old = self._image.read(key, self._scratch.take(self._image.parts[key].nbytes))
            if digest_bytes(self._site.kind, old.data) == before:
                return self._again(key)
        return self._mended(key, before)

    def _prove(self, key: PartKey) -> Proven:
        return prove_part(self._image, self._deltas, key, digest_kind=self._site.kind, scratch=self._scratch)

    def _again(self, key: PartKey) -> Proven:
        """The old bytes are right, so a shard rotted in the spool, which a fresh one shows, or the delta is wrong."""
        spool = self._site.spool
        fresh = Deltas(self._deltas.manifests, spool.path_of)
        for manifest in fresh.manifests:
            for row in manifest.rows:
                if row.key == key:
                    spool.distrust(manifest, manifest.shards[row.shard])
        try:
            return prove_part(self._image, fresh, key, digest_kind=self._site.kind, scratch=self._scratch)
        except (PayloadCorrupt, ShardCorrupt) as error:
            raise type(error)(f"{key.tensor} at byte {key.offset}: {error}") from error
        finally:
            fresh.close()

    def _mended(self, key: PartKey, before: bytes) -> Proven:
        data = self._rebuilder.rebuild(key, self._state.version, before)
        with self._deltas.steps(key) as steps:
            width = lead(data, steps, digest_kind=self._site.kind)[-1].width
            after = steps[-1].row.after
        with self._lock:
            self.repaired += 1
        _log.warning("a rotten part was made again", copy=self._state.copy, tensor=key.tensor, offset=key.offset)
        return Proven(key, before, after, (whole(data, width=width),))
