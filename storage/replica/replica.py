"""A host's replica: one or two whole HF folders under one owner, brought from version to version so that `current`
always leads to exactly the bytes of one. Composes the steps, each a module of its own. Must not know engines or flows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import structlog

from weighbridge.errors import DigestMismatch, ForeignRun, ReplicaAhead, ReplicaError, UsageError
from weighbridge.storage.clock import Clock, SystemClock
from weighbridge.storage.codecs import warm
from weighbridge.storage.lineage import Lineage
from weighbridge.storage.localdisk import PRIVATE_FOLDER, Disk, Durability, LocalDisk
from weighbridge.storage.lock import owned
from weighbridge.storage.replica.apply import apply_deltas, journal_bytes
from weighbridge.storage.replica.examine import is_of
from weighbridge.storage.replica.fetch import OnProgress, Spool, around_gaps, fetchers, need_room
from weighbridge.storage.replica.landing import Landing, open_landing
from weighbridge.storage.replica.layout import COPIES, Identity, Layout, read_identity
from weighbridge.storage.replica.plan import Plan, make_plan
from weighbridge.storage.replica.recover import Recovery, recover
from weighbridge.storage.replica.seed import seed_by_way
from weighbridge.storage.replica.site import Site
from weighbridge.storage.replica.state import CopyState, read_state, touched
from weighbridge.storage.replica.witness import Witness
from weighbridge.storage.state import base_digests
from weighbridge.storage.stores.contract import Store
from weighbridge.storage.ways import Way

_log = structlog.get_logger("weighbridge.replica")

Foreign = Literal["reseed", "refuse"]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A plan whose shards are all in the spool, right by their digests. `downloaded_bytes` is what travelled for it."""

    plan: Plan
    downloaded_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Applied:
    """A copy that was proven to hold `version`; `current` still leads where it did. `parts` were written, `repaired`
    old parts made again; `reload` says whether an engine has other bytes to load."""

    version: int
    copy: str
    state_digest: str
    parts: int
    repaired: int
    reload: bool
    seconds: float


class Replica:
    """An owned replica, from `open_replica`. One thread at a time calls it; it uses threads of its own."""

    def __init__(self, site: Site, states: dict[str, CopyState], recovery: Recovery) -> None:
        self._site = site
        self._witness = Witness(site.layout.seen, site.lineage, disk=site.disk, clock=site.clock)
        self._states = states
        self._applied: Applied | None = None
        self._last_good: str | None = None  # what `current` led to before the last switch, if it still holds that
        self._in_doubt = False
        self.recovery = recovery
        """What opening this replica had to mend."""

    @property
    def current(self) -> Path:
        """The folder that an engine loads, always: a link that moves."""
        return self._site.layout.current

    @property
    def version(self) -> int:
        """The version that `current` leads to."""
        return self._states[self._loaded].version

    @property
    def state_digest(self) -> str:
        """The state digest of that version."""
        return self._states[self._loaded].state_digest

    @property
    def held(self) -> dict[str, int]:
        """The version that each copy holds."""
        return {name: state.version for name, state in self._states.items()}

    def plan(self, target: int | None = None, *, rollback: bool = False) -> Plan:
        """The shortest path to a version (None: the head). Never goes back unless `rollback`. Raises VersionUnknown,
        VersionRetired, ReplicaError when only a base would do and none was given; NotTrusted where keys are trusted."""
        self._settle()
        site = self._site
        self._witness.look(goes_back=rollback)
        return make_plan(
            site.lineage,
            self._states,
            self._loaded,
            target=target,
            rollback=rollback,
            has_base=site.base is not None,
            weigh=site.spool.missing_bytes_of,
        )

    def fetch(self, plan: Plan, on_progress: OnProgress | None = None) -> Fetched:
        """Fetches the plan's shards. Good ones that are in the spool stay.

        Raises DiskFull before it starts when the shards and the journal would not fit, ObjectMissing or VersionRetired
        for a shard that is gone (plan again), ShardCorrupt, StoreError.
        """
        site = self._site
        started, before = site.clock.monotonic(), site.spool.downloaded_bytes
        if plan.action in ("deltas", "rebuild"):
            _log.info("fetching", version=plan.target, start=plan.start, way=plan.action, fetch_bytes=plan.fetch_bytes)
            room = journal_bytes(plan.deltas) if plan.action == "deltas" else plan.model_bytes
            needed = site.spool.missing_bytes(plan.needs) + room
            need_room(site.disk, site.layout.folder, needed, f"the way to version {plan.target}")
            site.spool.fetch(plan.needs, on_progress)
        seconds = site.clock.monotonic() - started
        fetched = Fetched(plan, site.spool.downloaded_bytes - before, seconds)
        _log.info("fetched", version=plan.target, downloaded_bytes=fetched.downloaded_bytes, seconds=round(seconds, 3))
        return fetched

    def plan_and_fetch(
        self, target: int | None = None, *, rollback: bool = False, on_progress: OnProgress | None = None
    ) -> Fetched:
        """Plans and fetches; plans again, PLANS times in all, around shards that were collected meanwhile and what is
        damaged in the store. Raises like `plan` and `fetch`."""
        site = self._site
        return around_gaps(
            site.spool,
            site.lineage,
            site.clock,
            find=lambda: self.plan(target, rollback=rollback),
            way_of=lambda plan: plan.way,
            go=lambda plan: self.fetch(plan, on_progress),
        )

    def landing(self, version: int) -> Landing | None:
        """See `open_landing`. Raises VersionUnknown."""
        site, newest = self._site, max(self.held.values())
        return open_landing(site.lineage.manifest(version), site.spool, site.disk, newest=newest)

    def apply(self, fetched: Fetched) -> Applied:
        """Brings the plan's copy to the target and proves it; `current` does not move (with one copy it is that copy).

        Nothing is written before everything is proven. Raises DigestMismatch, PayloadCorrupt or ShardCorrupt when what
        was published is wrong, DiskFull, and ReplicaError when the replica is no longer where the plan started.
        """
        self._settle()
        site, plan, started = self._site, fetched.plan, self._site.clock.monotonic()
        state = self._states[plan.copy]
        finished = plan.action in ("deltas", "rebuild") and state.version == plan.target  # by the journal, or before
        if plan.serves != self.version or not (finished or plan.action == "rebuild" or state.version == plan.start):
            raise ReplicaError(
                f"{site.layout.folder} serves version {self.version} and the plan was made for {plan.serves}. Nothing "
                "was changed; plan again."
            )
        parts = repaired = 0
        if plan.action in ("deltas", "rebuild") and not finished:
            self._in_doubt = True
            if plan.way is not None and plan.action == "rebuild":
                state = self._states[plan.copy] = self._rebuild(plan.copy, plan.way)
                parts = len(state.parts)
            else:
                others = [self._states[name] for name in self._states if name != plan.copy]
                done = apply_deltas(site, state, plan.deltas, others)
                state, parts, repaired = done.state, done.parts, done.repaired
            self._states[plan.copy] = state
            self._in_doubt = False
        renumbered = plan.action == "renumber"
        self._applied = Applied(
            version=plan.target if renumbered else state.version,
            copy=plan.copy,
            state_digest=state.state_digest,
            parts=parts,
            repaired=repaired,
            reload=plan.reload,
            seconds=site.clock.monotonic() - started,
        )
        if renumbered and state.state_digest != plan.deltas[-1].state_digest:
            raise DigestMismatch(f"version {plan.target} changes nothing and yet names another state. Audit the store.")
        _log.info("applied", version=self._applied.version, parts=parts, repaired=repaired, action=plan.action)
        return self._applied

    def _rebuild(self, copy: str, way: Way) -> CopyState:
        """Makes a copy anew by a way, and lets go of the anchor's shards."""
        site = self._site
        if way.anchor is not None:
            state = seed_by_way(site, copy, way, None, {})
            site.spool.drop(way.anchor)
            return state
        other = next((s for s in self._states.values() if s.version == way.start and s.copy != copy), None)
        if other is not None:
            return seed_by_way(site, copy, way, site.folder(other.copy), other.parts)
        return seed_by_way(site, copy, way, site.base, base_digests(site.lineage.manifest(0)))

    def switch(self) -> int:
        """Makes `current` lead to what the last `apply` proved, atomically, and returns its version."""
        self._settle()
        applied = self._applied
        if applied is None:
            raise ReplicaError(
                "nothing was applied that could be switched to. Nothing was changed; plan and apply first."
            )
        self._applied = None
        site, state, before = self._site, self._states[applied.copy], self._loaded
        self._last_good = before if before != applied.copy or not applied.reload else None
        if state.version != applied.version:  # an empty version: only the number moves
            manifest = site.lineage.manifest(applied.version)
            moved = replace(state, version=manifest.version, manifest=manifest.digest)
            self._states[applied.copy] = site.save(moved)
        self._point(applied.copy)
        _log.info("switched", version=self.version, copy=applied.copy)
        return self.version

    def tidy(self) -> None:
        """Removes the shards that no copy will need again. Apart from `switch`, since an engine is paused during that,
        and a file system may take a second over it."""
        self._site.spool.prune(min(self.held.values()))

    def fall_back(self) -> int:
        """Makes `current` lead to the last good copy, and returns its version: to what it led to before the last
        switch, which for an empty version is the same copy; else to the other one. Raises ReplicaError when there is
        none."""
        self._settle()
        other = self._last_good or next((name for name in self._states if name != self._loaded), None)
        if other is None:
            raise ReplicaError(
                f"{self._site.layout.folder} keeps one copy, so there is none to fall back to. Nothing was changed; "
                "plan a roll-back, which rebuilds the version from base and store."
            )
        self._applied = None
        self._point(other)
        _log.warning("fell back to the last good copy", version=self.version, copy=other)
        return self.version

    def settle(self) -> None:
        """Mends the copies if an apply ended badly, or if files changed behind our back, since the last step."""
        self._settle()

    def is_untouched(self) -> bool:
        """Whether every file of the copy that `current` leads to has the size and the time that we left it with."""
        state = self._states[self._loaded]
        return not touched(self._site.folder(state.copy), state.files, state.files)

    def scrub(self) -> Recovery:
        """Digests every byte of every copy and mends what differs."""
        self._applied = None
        self._states, recovery = recover(self._site, thorough=True)
        return recovery

    @property
    def _loaded(self) -> str:
        loaded = self._site.layout.pointed()
        if loaded is None or loaded not in self._states:
            raise ReplicaError(f"{self.current} does not lead to a copy. Open the replica again, and it is mended.")
        return loaded

    def _point(self, copy: str) -> None:
        if self._site.layout.pointed() != copy:
            self._site.disk.point(self._site.layout.current, f"copies/{copy}")

    def _settle(self) -> None:
        """Mends the replica if an apply ended badly, or if files changed behind our back, since the last step."""
        site = self._site
        moved = any(touched(site.folder(n), state.files, state.files) for n, state in self._states.items())
        if not (self._in_doubt or moved or site.layout.pointed() not in self._states):
            return
        self._applied = None
        self._states, self.recovery = recover(site)
        self._in_doubt = False


@contextmanager
def open_replica(
    folder: Path,
    *,
    store: Store,
    base: Path | None,
    copies: int = 2,
    durability: Durability = "power",
    lock_seconds: float = 10.0,
    foreign: Foreign = "refuse",
    rewound_to: int | None = None,
    threads: int = 2,
    toward: int | None = None,
    lineage: Lineage | None = None,
    clock: Clock | None = None,
    disk: Disk | None = None,
) -> Iterator[Replica]:
    """Takes ownership of the replica in `folder`, makes or mends it, and gives it back at the end.

    A new replica is seeded from `base`, or, without one, from the newest anchor up to version `toward`. A replica of
    another run or base raises ForeignRun, or with `foreign="reseed"` is seeded anew, which `recovery` says. One that is
    ahead of its store, or of a history that the store no longer has, raises ReplicaAhead, or is mended for the store as
    it is when the version `rewound_to` is wanted.
    Raises ReplicaLocked, LineageError when the store holds no run, UsageError for a folder that holds something
    else, DiskFull, NotTrusted where the lineage trusts keys, and what the store raises.
    """
    if copies not in (1, 2):
        raise UsageError(f"a replica keeps one or two copies, not {copies}")
    clock = clock or SystemClock()
    disk = disk or LocalDisk(durability)
    lineage = lineage or Lineage(store)
    layout = Layout(folder.absolute())
    _check_folder(layout)
    disk.make_folder(layout.folder)
    with owned(layout.lock, disk=disk, clock=clock, seconds=lock_seconds):
        identity, first, note = _identify(layout, lineage, copies, foreign)
        # A host that starts again while its trainer rests goes on serving; a new one must not begin with what is old.
        witness = Witness(layout.seen, lineage, disk=disk, clock=clock)
        witness.look(goes_back=rewound_to is not None, at_any_age=not first)
        rewound = _is_ahead(layout, lineage, identity, rewound_to)
        spool = Spool(layout.spool, lineage, disk=disk, clock=clock, threads=fetchers(threads))
        if first or note or rewound:
            spool.empty()
            disk.write_atomic(layout.identity, identity.to_bytes())
        disk.make_folder(layout.states, mode=PRIVATE_FOLDER)
        site = Site(layout, identity, lineage, spool, base, disk, clock, threads)
        warm()
        states, recovery = recover(site, first=first, toward=toward)
        if note:
            recovery = Recovery(recovery.how, recovery.repaired, recovery.digested, (note, *recovery.notes))
        yield Replica(site, states, recovery)


def _check_folder(layout: Layout) -> None:
    if layout.folder.is_symlink() or (layout.folder.exists() and not layout.folder.is_dir()):
        raise UsageError(f"{layout.folder} is not a folder. Nothing was changed; give a folder on the host's own disk.")
    if not layout.folder.is_dir() or layout.identity.exists() or layout.copies.is_dir():
        return
    if strangers := layout.strangers():
        raise UsageError(
            f"{layout.folder} is not a replica and not empty ({', '.join(strangers[:3])}). Nothing was changed; give "
            "an empty folder."
        )


def _is_ahead(layout: Layout, lineage: Lineage, identity: Identity, rewound_to: int | None) -> bool:
    """Whether a copy holds a version that the store does not have, or has another of that number. Raises ReplicaAhead
    for that unless `rewound_to` says which version is wanted, and VersionUnknown when the store does not have that one
    either."""
    states = [read_state(layout.state(name), replica_id=identity.replica_id, copy=name) for name in identity.names]
    newest = max((state for state in states if state is not None), key=lambda state: state.version, default=None)
    if newest is None:
        return False
    head = lineage.head()
    if newest.version > head:
        what = (
            f"holds version {newest.version} and is ahead of {lineage.store.url}, whose head is {head}: the store was "
        )
        what += "rewound, or is an older copy"
    elif not is_of(lineage, newest):
        what = f"holds another version {newest.version} than {lineage.store.url}, whose head is {head}: the store was "
        what += "rewound, and another writer went on from there"
    else:
        return False
    if rewound_to is None:
        raise ReplicaAhead(
            f"{layout.folder} {what}. Nothing was changed; check the store, and if its version is wanted, "
            f"`weighbridge pull --rollback --version {max(head, 0)}`."
        )
    lineage.manifest(rewound_to)
    return True


def _identify(layout: Layout, lineage: Lineage, copies: int, foreign: Foreign) -> tuple[Identity, bool, str]:
    """The replica's identity, whether it is a new replica, and a note when another run's or base's is taken over."""
    run = lineage.run
    fresh = Identity.new(run_id=run.run_id, base_digest=run.base_digest, digest_kind=run.digest_kind, copies=copies)
    found = read_identity(layout.identity)
    if found is None:
        if not layout.identity.exists() and not layout.copies.is_dir():
            return fresh, True, ""
        return fresh, False, "replica.json was lost or garbage: every copy was digested"
    if (found.run_id, found.base_digest, found.digest_kind) != (run.run_id, run.base_digest, run.digest_kind):
        if foreign == "refuse":
            raise ForeignRun(
                f"{layout.folder} is a replica of run {found.run_id} and {lineage.store.url} holds run {run.run_id}, "
                "or another base. Nothing was changed; check the store, give another replica folder, or have this one "
                "seeded anew with `--reseed`."
            )
        return (
            fresh,
            False,
            f"it was a replica of run {found.run_id}, or of another base, and belongs to {run.run_id} now",
        )
    if found.copies != copies:
        return replace(found, copies=copies), False, f"it keeps {copies} of {len(COPIES)} copies from now on"
    return found, False, ""
