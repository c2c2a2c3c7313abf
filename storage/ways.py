"""The shortest way to a version, by the bytes that have still to travel: deltas from a state that is at hand, or an
anchor and the deltas after it. Only reads; must not know who goes it, nor how."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from weighbridge.errors import ManifestCorrupt, ObjectMissing, ReplicaError, VersionRetired, VersionUnknown
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.manifest import shard_key
from weighbridge.values import Manifest

log = structlog.get_logger("weighbridge.ways")

Weigh = Callable[[Manifest], int]
"""How many bytes of a manifest's shards have still to travel."""

_LIGHT = 8
"""Deltas that weigh less than this part of the model are taken without looking for anchors: none weighs so little."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to `target`. It begins at version `start`, whose state is at hand, or is the `anchor` that comes first.

    `deltas` follow each other from `start` to `target`; `nbytes` have still to travel.
    """

    start: int
    target: int
    anchor: Manifest | None = field(repr=False)
    deltas: tuple[Manifest, ...] = field(repr=False)
    nbytes: int

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """Everything whose shards are needed, in the order in which it is decoded."""
        return self.deltas if self.anchor is None else (self.anchor, *self.deltas)


def wire_bytes(manifest: Manifest) -> int:
    """All shards of a manifest: what travels to one who has nothing of it."""
    return manifest.wire_bytes


def find_way(lineage: Lineage, target: int, *, held: Mapping[int, int], weigh: Weigh = wire_bytes) -> Way:
    """The shortest way. `held` are the versions that are at hand, with a rank: of two ways that weigh the same, the one
    from the version of lower rank is taken, and an anchor last.

    Whether the shards of a way still stand is asked only of its first, and of all where an anchor leads past them or
    once one was found gone (`learn_gaps`). A manifest that cannot be read is in the way of what lies below it, and of
    nothing else. Raises VersionUnknown, VersionRetired when collected shards are in every way, ReplicaError when only a
    base would do and none is at hand, ManifestCorrupt when an unreadable manifest is in every way.
    """
    while True:
        search = _Search(lineage, target, held, weigh)
        way = search.find()
        asked = [m for m in way.manifests if m.shards] if len(way.manifests) > 1 else []
        if not any(way.start < anchor for anchor in search.anchors):
            asked = asked[:1]
        gone = next((m for m in asked if weigh(m) and _is_gone(lineage, m) and lineage.is_marked(m)), None)
        if gone is None:
            return way
        lineage.forget_shards(gone)


def learn_gaps(lineage: Lineage, way: Way, *, damaged: list[Manifest]) -> None:
    """Looks which shards of a way are gone, so that the next way does not count on them, nor on what is `damaged`.

    Those that nobody collected are added to `damaged`: somebody may restore them, so the caller recalls them at its
    end. For one who met a gap.
    """
    for manifest in way.manifests:
        if manifest not in damaged and _is_gone(lineage, manifest):
            if not lineage.is_marked(manifest):
                damaged.append(manifest)
            lineage.forget_shards(manifest)
    for manifest in damaged:
        lineage.forget_shards(manifest)


def explain_missing(lineage: Lineage, manifest: Manifest, missing: ObjectMissing) -> ObjectMissing | VersionRetired:
    """What a shard that is not there means: that its version was retired, or just that it is not there."""
    if not lineage.is_marked(manifest):
        return missing
    what = "the anchor of version" if manifest.kind == "anchor" else "version"
    return VersionRetired(
        f"{what} {manifest.version} is retired: its shards were collected. What was there keeps its version; plan "
        "again from the head."
    )


def _is_gone(lineage: Lineage, manifest: Manifest) -> bool:
    if not manifest.shards:
        return False
    try:
        lineage.store.size(shard_key(manifest.version, manifest.shards[0]))
    except ObjectMissing:
        return True
    return False


class _Search:
    """Walks down from the target, over what the deltas weigh, and stops where no lower start can be better."""

    def __init__(self, lineage: Lineage, target: int, held: Mapping[int, int], weigh: Weigh) -> None:
        self._lineage, self._target, self._held, self._weigh = lineage, target, held, weigh
        self._trail: list[tuple[Manifest, int]] = []  # newest first, with what all deltas above it weigh
        self._best: tuple[int, int, int, Manifest | None] | None = None  # weight, rank, steps on the trail, anchor
        self._anchors: frozenset[int] | None = None
        self._gap: Manifest | None = None
        self._unreadable: ManifestCorrupt | None = None
        self._is_link_broken = False
        self.anchors: Sequence[int] = ()
        """Those up to the target of which the store says that they are there, if it was asked."""

    def find(self) -> Way:
        total, lowest = 0, min(self._held, default=-1)
        for manifest in self._back():
            self._trail.append((manifest, total))
            if manifest.version in self._held:
                self._offer(total, self._held[manifest.version], len(self._trail) - 1, None)
            if self._anchors is not None:
                self._look_at(len(self._trail) - 1)
            elif not self._held or total * _LIGHT > manifest.model_bytes:
                self._look_for_anchors()
            if manifest.version in (lowest, 0) or (self._best is not None and total > self._best[0]):
                break
            if self._lineage.are_shards_gone(manifest):
                self._gap = manifest
                break
            total += self._weigh(manifest)
        below = self._trail[-1][0].version - 1
        if self._unreadable is not None and below in self._held and not self._is_link_broken:
            self._offer(total, self._held[below], len(self._trail), None)  # it is at hand: its manifest is not needed
        if self._best is None and self._anchors is None:
            self._look_for_anchors()
        if self._best is None:
            raise self._no_way()
        if self._unreadable is not None:
            log.warning("going round a manifest that cannot be read", error=str(self._unreadable))
        nbytes, _, place, anchor = self._best
        deltas = tuple(manifest for manifest, _ in reversed(self._trail[:place]))
        return Way(self._target - place, self._target, anchor, deltas, nbytes)

    def _back(self) -> Iterator[Manifest]:
        """Down from the target, as far as manifests can be read."""
        try:
            yield from self._lineage.back(self._target)
        except (ManifestCorrupt, VersionUnknown) as error:
            if not self._trail:
                raise
            self._unreadable = error if isinstance(error, ManifestCorrupt) else ManifestCorrupt(str(error))
            with suppress(ManifestCorrupt, VersionUnknown):
                self._lineage.manifest(self._trail[-1][0].version - 1)
                self._is_link_broken = True

    def _look_for_anchors(self) -> None:
        self.anchors = [version for version in self._lineage.anchors() if version <= self._target]
        self._anchors = frozenset(self.anchors)
        for place in range(len(self._trail)):
            self._look_at(place)

    def _look_at(self, place: int) -> None:
        manifest, above = self._trail[place]
        if self._anchors is None or manifest.version not in self._anchors:
            return
        try:
            anchor = self._lineage.anchor(manifest.version)
        except (VersionUnknown, ManifestCorrupt) as error:
            log.warning("an anchor is of no use", version=manifest.version, error=str(error))
            return
        if not self._lineage.are_shards_gone(anchor):
            self._anchors = frozenset()  # an older one weighs about as much, and needs more deltas
            self._offer(above + self._weigh(anchor), len(self._held) + 1, place, anchor)

    def _offer(self, nbytes: int, rank: int, place: int, anchor: Manifest | None) -> None:
        if self._best is None or (nbytes, rank) < self._best[:2]:
            self._best = (nbytes, rank, place, anchor)

    def _no_way(self) -> VersionRetired | ReplicaError | ManifestCorrupt:
        if self._unreadable is not None:
            return self._unreadable
        if self._gap is not None:
            return VersionRetired(
                f"version {self._target} is retired: the shards of version {self._gap.version} were collected, and no "
                "anchor leads past them. Nothing was changed; ask for the head, or for a version that is kept."
            )
        return ReplicaError(
            f"version {self._target} is kept as changes since the base, no anchor leads to it, and no base folder was "
            f"given. Nothing was changed; give the folder of the checkpoint on which run {self._lineage.run.run_id} is "
            "based, or let `weighbridge anchor` make an anchor where there is one."
        )
