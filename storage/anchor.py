"""Makes an anchor: a second form of a version that stands, its whole state, by anybody who can make its parts, while a
trainer runs or not. Holds a shard's worth of the model for each thread. Must not know where the parts come from."""

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from weighbridge.errors import (
    DigestMismatch,
    ManifestCorrupt,
    ShardCorrupt,
    StoreError,
    StoreRefused,
    VersionRetired,
    VersionUnknown,
    what_happened,
)
from weighbridge.storage.clock import Clock
from weighbridge.storage.codecs import encode_whole
from weighbridge.storage.codecs.contract import Bytes
from weighbridge.storage.commit import put_if_absent
from weighbridge.storage.digests import digest_bytes
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import PRIVATE_FOLDER, Disk
from weighbridge.storage.manifest import anchor_hint_key, anchor_key, shard_key, to_bytes
from weighbridge.storage.replica.parallel import in_parallel
from weighbridge.storage.shard_proof import bytes_flaw, sizes_flaw
from weighbridge.storage.state import state_digest
from weighbridge.storage.transfer import upload_file
from weighbridge.values import Manifest, PartKey, PartRow, ShardInfo

log = structlog.get_logger("weighbridge.anchor")

PartOf = Callable[[PartKey], Bytes]
"""A part's bytes at the version of the anchor."""


@dataclass(frozen=True, slots=True)
class State:
    """A version's whole state as manifests tell it: for each part the newest row that changed it, for each tensor its
    digest."""

    manifest: Manifest
    rows: dict[PartKey, PartRow]
    tensors: dict[str, bytes]


def state_at(lineage: Lineage, version: int) -> State:
    """A version's state, from the manifests alone: those after the newest anchor before it, or after the base.

    Raises ManifestCorrupt when they do not add up to the state digest, VersionUnknown.
    """
    first = _newest_anchor(lineage, version) or lineage.manifest(0)
    rows = {row.key: row for row in first.rows}
    tensors = {row.key.tensor: row.tensor_digest for row in first.rows}
    for manifest in lineage.walk(first.version, version):
        rows.update((row.key, row) for row in manifest.rows)
        tensors.update((row.key.tensor, row.tensor_digest) for row in manifest.rows)
    target = lineage.manifest(version)
    if state_digest({key: row.after for key, row in rows.items()}) != target.state_digest:
        raise ManifestCorrupt(
            f"version {version} claims another state than its rows lead to. Nothing was read from it; audit the store."
        )
    return State(target, rows, tensors)


def _newest_anchor(lineage: Lineage, version: int, *, with_shards: bool = False) -> Manifest | None:
    for number in reversed(lineage.anchors()):
        if number <= version:
            try:
                anchor = lineage.anchor(number)
            except (VersionUnknown, ManifestCorrupt) as error:
                log.warning("an anchor is of no use", version=number, error=str(error))
                continue
            flaw = sizes_flaw(lineage.store, anchor) if with_shards else None
            if flaw is None:
                return anchor
            log.warning("an anchor is of no use", version=number, error=flaw)
    return None


def is_due(lineage: Lineage, version: int, *, every_versions: int | None = None) -> bool:
    """Whether an anchor of a version pays: the deltas since the last one weigh more than it would, which is taken from
    that last one, or from the model when there is none; or they are `every_versions` in number.

    An anchor that does not open, or whose shards are not there with their sizes, counts as none. Reads manifests back
    until it knows.
    """
    newest = _newest_anchor(lineage, version, with_shards=True)
    total, weight = 0, lineage.manifest(version).model_bytes if newest is None else newest.wire_bytes
    for passed, manifest in enumerate(lineage.back(version)):
        if (newest is not None and manifest.version == newest.version) or manifest.kind == "base":
            return False
        if every_versions is not None and passed + 1 >= every_versions:
            return True
        total += manifest.wire_bytes
        if total > weight:
            return True
    return False


def make_anchor(
    lineage: Lineage,
    version: int,
    part_of: PartOf,
    *,
    keys: Sequence[PartKey] | None = None,
    spool: Path,
    disk: Disk,
    clock: Clock,
    shard_bytes: int = 64 << 20,
    threads: int = 1,
) -> Manifest:
    """Writes the anchor of a version, or finds that it stands whole; returns it. `keys` says in which order parts
    come best.

    Every part is proven by its digest as it is encoded, so `part_of` is trusted for nothing. Raises DigestMismatch when
    it gives other bytes (nothing is then visible), VersionUnknown, StoreError, CommitStateUnknown (do the same again),
    and like `standing_anchor`.
    """
    state = state_at(lineage, version)
    standing = standing_anchor(lineage, version, clock=clock)
    if standing is not None:
        return standing
    disk.make_folder(spool, mode=PRIVATE_FOLDER)
    writer = _Writer(lineage, state, part_of, uuid.uuid4().hex, spool, disk, clock)
    batches = _batches(state, keys or tuple(sorted(state.rows)), shard_bytes)
    try:
        shards = dict(in_parallel(writer.write, enumerate(batches), threads=threads))
        anchor = writer.commit(tuple(shards[index] for index in sorted(shards)))
    except BaseException:
        writer.discard()
        raise
    log.info("anchor stands", version=version, wire_bytes=anchor.wire_bytes, commit_id=anchor.commit_id)
    return anchor


def standing_anchor(lineage: Lineage, version: int, *, clock: Clock) -> Manifest | None:
    """The anchor that a version has already, read to its last byte, and listed; None when it has none.

    Raises VersionRetired when it was collected, ManifestCorrupt or ShardCorrupt when it is damaged: a version is
    anchored once, so a newer one has to be. VersionUnknown, StoreError.
    """
    lineage.manifest(version)
    try:
        standing = lineage.anchor(version)
    except VersionUnknown:
        return None
    except ManifestCorrupt as error:
        raise ManifestCorrupt(
            _damaged(version, f"{anchor_key(version)} cannot be read ({what_happened(error)})")
        ) from error
    if lineage.is_marked(standing):
        raise VersionRetired(
            f"the anchor of version {version} was collected, and is not made again. Name a newer version."
        )
    flaw = bytes_flaw(lineage.store, standing)
    if flaw is not None:
        raise ShardCorrupt(_damaged(version, flaw))
    list_anchor(lineage, standing, clock)
    return standing


def _damaged(version: int, flaw: str) -> str:
    return (
        f"version {version} has an anchor, and it is damaged: {flaw}. Nothing was made or changed, and gc lets "
        "nothing go for its sake; make an anchor of a newer version."
    )


def _batches(state: State, keys: Iterable[PartKey], shard_bytes: int) -> Iterator[tuple[PartKey, ...]]:
    filling: list[PartKey] = []
    nbytes = 0
    for key in keys:
        if filling and nbytes + state.rows[key].nbytes > shard_bytes:
            yield tuple(filling)
            filling, nbytes = [], 0
        filling.append(key)
        nbytes += state.rows[key].nbytes
    if filling:
        yield tuple(filling)


_Shard = tuple[ShardInfo, tuple[PartRow, ...]]


class _Writer:
    """One attempt. `write` may run in many threads, `commit` runs once, after all of them."""

    def __init__(
        self, lineage: Lineage, state: State, part_of: PartOf, commit_id: str, spool: Path, disk: Disk, clock: Clock
    ) -> None:
        self._lineage, self._state, self._part_of = lineage, state, part_of
        self._commit_id, self._spool, self._disk, self._clock = commit_id, spool, disk, clock
        self._names: set[str] = set()
        self._in_doubt = False

    def write(self, batch: tuple[int, tuple[PartKey, ...]]) -> tuple[int, _Shard]:
        """Makes, encodes and uploads one shard."""
        index, keys = batch
        manifest, rows = self._state.manifest, self._state.rows
        encoded = encode_whole(
            [(key, rows[key].dtype, self._part_of(key)) for key in keys], digest_kind=manifest.digest_kind
        )
        wrong = sorted({part.key.tensor for part in encoded.parts if part.after != rows[part.key].after})
        if wrong:
            raise DigestMismatch(
                f"{', '.join(wrong[:3])}: these are not the bytes of version {manifest.version}, which was to be "
                "anchored. Nothing of it is visible; give a replica that holds this version, or let it be rebuilt."
            )
        info = ShardInfo(
            f"anchor-{self._commit_id}-{index:05d}.safetensors",
            len(encoded.payload),
            digest_bytes(manifest.digest_kind, encoded.payload),
        )
        path = self._spool / info.name
        self._names.add(info.name)
        self._disk.write_atomic(path, encoded.payload)
        try:
            upload_file(self._lineage.store, shard_key(manifest.version, info), path, clock=self._clock)
        finally:
            self._disk.unlink(path)
        made = (self._row(key, part.codec, index) for key, part in zip(keys, encoded.parts, strict=True))
        return index, (info, tuple(made))

    def commit(self, shards: Sequence[_Shard]) -> Manifest:
        """Creates the anchor; when another stands already, takes ours back and returns that one."""
        of, store = self._state.manifest, self._lineage.store
        data, anchor = to_bytes(
            Manifest(
                run_id=of.run_id,
                version=of.version,
                parent=of.version,
                parent_digest=of.digest,
                writer="anchor",
                commit_id=self._commit_id,
                created_ns=self._clock.now_ns(),
                digest_kind=of.digest_kind,
                state_digest=of.state_digest,
                model_bytes=of.model_bytes,
                model_elements=of.model_elements,
                tensors=of.tensors,
                shards=tuple(info for info, _ in shards),
                rows=tuple(row for _, rows in shards for row in rows),
                aliases=of.aliases,
                kind="anchor",
            )
        )
        self._in_doubt = True
        try:
            ours = put_if_absent(store, anchor_key(of.version), data, clock=self._clock)
        except StoreRefused:  # nothing of ours can have landed
            self._in_doubt = False
            raise
        if not ours:
            self._in_doubt = False
            self.discard()
            anchor = self._lineage.anchor(of.version)
        list_anchor(self._lineage, anchor, self._clock)
        return anchor

    def discard(self) -> None:
        """Takes back what was uploaded, unless it may stand committed. What stays is an orphan, which gc takes."""
        if self._in_doubt:
            return
        for name in sorted(self._names):
            key = shard_key(self._state.manifest.version, ShardInfo(name, 0, b""))
            try:
                self._lineage.store.delete(key)
            except StoreError as error:
                log.warning("orphan shard left behind", key=key, error=str(error))

    def _row(self, key: PartKey, codec: str, shard: int) -> PartRow:
        row = self._state.rows[key]
        return PartRow(
            key=key,
            dtype=row.dtype,
            shape=row.shape,
            nbytes=row.nbytes,
            codec=codec,
            shard=shard,
            changed=0,
            before=b"",
            after=row.after,
            tensor_digest=self._state.tensors[key.tensor],
        )


def list_anchor(lineage: Lineage, anchor: Manifest, clock: Clock) -> None:
    """Makes a listing show an anchor that stands. One that fails is made good by the next anchor of this version."""
    key = anchor_hint_key(anchor.version)
    try:
        put_if_absent(lineage.store, key, anchor.commit_id.encode(), clock=clock)
    except StoreError as error:
        log.warning("the anchor stands and is not listed yet", key=key, error=str(error))
