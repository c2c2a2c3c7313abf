"""The shortest path from what a replica holds to a target version. Only reads; must not know how a plan is carried
out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from weighbridge.errors import LineageError, ManifestCorrupt
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.replica.state import CopyState
from weighbridge.storage.ways import Way, Weigh, find_way, wire_bytes
from weighbridge.values import Manifest

Action = Literal["nothing", "superseded", "renumber", "switch", "deltas", "rebuild"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How to reach `target`. `copy` is the copy that is worked on, `start` the version from which it goes.

    "nothing": `current` serves the target already. "superseded": it serves a newer one, and nobody asked to go back.
    "renumber": the versions in between are empty, so the loaded copy only gets a new number. "switch": the spare copy
    holds the target already. "deltas": the spare is patched by `deltas` in one fold. "rebuild": the spare is made anew,
    in a new folder, from what `way` begins with: an anchor, the loaded copy, or the base. `fetch_bytes` is what has
    still to be downloaded.
    """

    action: Action
    copy: str
    start: int
    target: int
    serves: int
    fetch_bytes: int = 0
    deltas: tuple[Manifest, ...] = field(default=(), repr=False)
    way: Way | None = field(default=None, repr=False)

    @property
    def needs(self) -> tuple[Manifest, ...]:
        """Everything whose shards the plan takes."""
        return self.deltas if self.way is None else self.way.manifests

    @property
    def model_bytes(self) -> int:
        """Bytes of a whole copy."""
        return max((manifest.model_bytes for manifest in self.needs), default=0)

    @property
    def reload(self) -> bool:
        """Whether an engine has other bytes to load once the plan is carried out."""
        return self.action in ("switch", "deltas", "rebuild")


def make_plan(
    lineage: Lineage,
    states: Mapping[str, CopyState],
    loaded: str,
    *,
    target: int | None,
    rollback: bool,
    has_base: bool = True,
    weigh: Weigh = wire_bytes,
) -> Plan:
    """The plan for clean copies of which `loaded` is the one in use. `weigh` says what of a manifest has to travel.

    `target` None is the head. Raises VersionUnknown, VersionRetired, ReplicaError when only a base would do and
    `has_base` is false, and LineageError for a roll-back to the head.
    """
    serves = states[loaded].version
    if target is None:
        if rollback:
            raise LineageError("a roll-back needs the version to go back to. Nothing was changed; name it.")
        target = max(lineage.head(), 0)
    spare = next((name for name in sorted(states) if name != loaded), loaded)
    lineage.manifest(target)
    if target == serves:
        return Plan("nothing", loaded, serves, target, serves)
    if target < serves and not rollback:
        return Plan("superseded", loaded, serves, target, serves)
    if target > serves and (empty := _empty_chain(lineage, serves, target)):
        return Plan("renumber", loaded, serves, target, serves, deltas=empty)
    held = states[spare].version
    if held == target:
        return Plan("switch", spare, held, target, serves)
    at_hand = {**({0: 2} if has_base else {}), serves: 1, held: 0}  # patching the spare in place writes the least
    way = find_way(lineage, target, held=at_hand, weigh=weigh)
    if way.anchor is None and way.start == held:
        return Plan("deltas", spare, held, target, serves, way.nbytes, way.deltas, way)
    return Plan("rebuild", spare, way.start, target, serves, way.nbytes, way.deltas, way)


def _empty_chain(lineage: Lineage, after: int, upto: int) -> tuple[Manifest, ...]:
    """The versions in between, if none of them changes a byte."""
    found: list[Manifest] = []
    try:
        for manifest in lineage.walk(after, upto):
            if manifest.rows:
                return ()
            found.append(manifest)
    except ManifestCorrupt:  # there may be a way round it
        return ()
    return tuple(found)
