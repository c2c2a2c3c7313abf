"""Brings a replica up from the store alone, in one call and without an orchestrator: open, plan, fetch, apply, switch.
Must not know engines; whoever has one puts its own steps between these."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weighbridge.storage.clock import Clock, SystemClock
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import Disk, Durability
from weighbridge.storage.replica.fetch import OnProgress
from weighbridge.storage.replica.recover import Recovery
from weighbridge.storage.replica.replica import Foreign, open_replica
from weighbridge.storage.signing import Trust
from weighbridge.storage.stores.contract import Store


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull did. `outcome` is "current" (nothing to do), "applied", "superseded" (the replica serves a newer
    version than was asked for). `repaired` counts parts that had rotted and were made again, on opening or on the way.
    """

    outcome: str
    version: int
    from_version: int
    state_digest: str
    folder: Path
    fetched_bytes: int
    repaired: int
    recovery: Recovery
    seconds: Mapping[str, float]


def bring_up(
    folder: Path,
    *,
    store: Store,
    base: Path | None,
    version: int | None = None,
    rollback: bool = False,
    scrub: bool = False,
    copies: int = 2,
    durability: Durability = "power",
    lock_seconds: float = 10.0,
    foreign: Foreign = "refuse",
    trust: Trust | None = None,
    threads: int = 2,
    clock: Clock | None = None,
    disk: Disk | None = None,
    on_progress: OnProgress | None = None,
) -> PullResult:
    """Makes, mends and brings the replica in `folder` to a version (None: the head). `folder`/current is the result.

    A replica that is ahead of its store goes back only with `rollback` and a `version`; else ReplicaAhead is raised.
    `scrub` first digests every byte and mends what differs. With `trust` only what its keys signed is believed. Raises
    like `open_replica`, `Replica.fetch` and `Replica.apply`; whatever fails, the version that `current` leads to
    stays whole.
    """
    clock = clock or SystemClock()
    started = clock.monotonic()
    with open_replica(
        folder,
        store=store,
        base=base,
        copies=copies,
        durability=durability,
        lock_seconds=lock_seconds,
        foreign=foreign,
        rewound_to=version if rollback else None,
        threads=threads,
        toward=version,
        lineage=Lineage(store, trust=trust),
        clock=clock,
        disk=disk,
    ) as replica:
        recovery = replica.recovery
        if scrub:
            recovery = recovery.then(replica.scrub())
        opened = clock.monotonic()
        before = replica.version
        fetched = replica.plan_and_fetch(version, rollback=rollback, on_progress=on_progress)
        plan, applied = fetched.plan, replica.apply(fetched)
        moving = plan.action not in ("nothing", "superseded")
        switching = clock.monotonic()
        if moving:
            replica.switch()
            replica.tidy()
        return PullResult(
            outcome="applied" if moving else {"nothing": "current"}.get(plan.action, plan.action),
            version=replica.version,
            from_version=before,
            state_digest=replica.state_digest,
            folder=replica.current,
            fetched_bytes=fetched.downloaded_bytes,
            repaired=recovery.repaired + applied.repaired,
            recovery=recovery,
            seconds={
                "open": opened - started,
                "fetch": fetched.seconds,
                "apply": applied.seconds,
                "switch": clock.monotonic() - switching,
            },
        )
