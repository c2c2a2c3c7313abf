"""The shortest path from what a replica holds to a target version. Only reads; must not know how a plan is carried
out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from weighbridge.errors import LineageError
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.replica.state import CopyState
from weighbridge.values import Manifest

Action = Literal["nothing", "superseded", "renumber", "switch", "deltas", "rebuild"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How to reach `target`. `copy` is the copy that is worked on, `start` the version from which it goes.

    "nothing": `current` serves the target already. "superseded": it serves a newer one, and nobody asked to go back.
    "renumber": the versions in between are empty, so the loaded copy only gets a new number. "switch": the spare copy
    holds the target already. "deltas": the spare is patched by `deltas` in one fold. "rebuild": the spare is seeded
    from the base, then patched by `deltas`. `fetch_bytes` is what has still to be downloaded.
    """

    action: Action
    copy: str
    start: int
    target: int
    serves: int
    fetch_bytes: int = 0
    deltas: tuple[Manifest, ...] = field(default=(), repr=False)

    @property
    def reload(self) -> bool:
        """Whether an engine has other bytes to load once the plan is carried out."""
        return self.action in ("switch", "deltas", "rebuild")


def make_plan(
    lineage: Lineage, states: Mapping[str, CopyState], loaded: str, *, target: int | None, rollback: bool
) -> Plan:
    """The plan for clean copies of which `loaded` is the one in use; `fetch_bytes` is left to the caller.

    `target` None is the head. Raises VersionUnknown, and LineageError for a roll-back to the head.
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
    if target > serves:
        ahead = lineage.chain(serves, target)
        if not any(manifest.rows for manifest in ahead):
            return Plan("renumber", loaded, serves, target, serves, deltas=ahead)
    held = states[spare].version
    if held == target:
        return Plan("switch", spare, held, target, serves)
    if held < target:
        return Plan("deltas", spare, held, target, serves, deltas=lineage.chain(held, target))
    return Plan("rebuild", spare, 0, target, serves, deltas=lineage.chain(0, target))
