"""One attempt of a host at a version, as plain steps: plan and fetch, apply, verify, cut over, record. Knows the
replica and the engine; must not know Prefect, which only decides when each step runs and how often."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from weighbridge.errors import DigestMismatch, WeighbridgeError
from weighbridge.storage.records import SERVED, SUPERSEDED, write_record
from weighbridge.tasks.cutover import Copies, CutOverFailed, Stage, cut_over
from weighbridge.tasks.host import Host, HostReplica, Prepared
from weighbridge.tasks.metrics import count_attempt
from weighbridge.tasks.nodes import await_nodes
from weighbridge.values import HostRecord

log = structlog.get_logger("weighbridge.host")

FAILED = "failed"
_PROGRESS_SECONDS = 2.0


class _Standing:
    """A replica whose `current` is right already, for an engine that is not known to have loaded it. It may have been
    served before, so there is nothing to fall back to: the other copy is older, and a host never goes back unasked."""

    def __init__(self, replica: HostReplica) -> None:
        self._replica = replica

    @property
    def current(self) -> Path:
        return self._replica.current

    def switch(self) -> int:
        return self._replica.version

    def fall_back(self) -> int:
        return self._replica.version

    def is_untouched(self) -> bool:
        return self._replica.is_untouched()


class HostAttempt:
    """The steps, in the order of their definition; each returns a number that a person likes to see."""

    def __init__(self, host: Host, version: int) -> None:
        self.host = host
        self.version = version
        self.attempt = uuid.uuid4().hex
        self.stage = Stage.WAITING
        self.from_version, self._from_digest = host.replica.version, host.replica.state_digest
        self.seconds: dict[str, float] = {}
        self._started_ns = host.clock.now_ns()
        self._fetched: Any = None
        self._applied: Any = None
        self._fetched_bytes = 0
        self._repaired = 0
        self._sent: HostRecord | None = None
        if host.prepared is not None and host.prepared.version == version:
            self._go_on_from(host.prepared)
            host.prepared = None

    @property
    def is_superseded(self) -> bool:
        """Whether this host serves a newer version already: it only moves forward."""
        return self.host.replica.version > self.version

    @property
    def is_standing(self) -> bool:
        """Whether this host holds exactly this version already."""
        return self.host.replica.version == self.version

    def fetch(self) -> int:
        """Plans, and fetches what the plan needs; returns the bytes that came over the wire. Safe to repeat: it plans
        again, from what stands then in the replica and in the store."""
        with self._timed("fetch"):
            self.host.hooks.reading(self.host.store.url, self.version)
            self._receive()
            self._fetched = self.host.replica.plan_and_fetch(self.version, on_progress=self._progress())
            # Planning may have finished an apply that was cut short.
            self.from_version, self._from_digest = self.host.replica.version, self.host.replica.state_digest
        self._fetched_bytes += self._fetched.downloaded_bytes
        self.stage = Stage.FETCHED
        return int(self._fetched.downloaded_bytes)

    def _receive(self) -> None:
        """Lets the transport bring what it can: a fetch goes on from that."""
        host = self.host
        if host.transport is not None and (landing := host.replica.landing(self.version)) is not None:
            with self._timed("receive"):
                host.transport.receive(host.name, landing)

    def apply(self) -> int:
        """Patches the spare copy, each part proven before it is written; returns the parts written. Safe to repeat."""
        with self._timed("apply"):
            self._applied = self.host.replica.apply(self._fetched)
        self._repaired += int(self._applied.repaired)
        self.stage = Stage.APPLIED
        return int(self._applied.parts)

    def verify(self) -> str:
        """Holds the proven state against the manifest, before anything pauses; returns the whole state's digest."""
        with self._timed("verify"):
            wanted = self.host.lineage.manifest(self.version).state_digest
            found = str(self._applied.state_digest)
            if found != wanted or self._applied.version != self.version:
                raise DigestMismatch(
                    f"the replica holds version {self._applied.version} with state {found}, but version "
                    f"{self.version} must have state {wanted}. The engine was not touched, and serves version "
                    f"{self.from_version}."
                )
        return found

    def hold(self, *, seconds: float) -> None:
        """Leaves what was applied and proven to its rollout, for at most so long, to be cut over with other hosts."""
        clock = self.host.clock
        self.host.prepared = Prepared(
            version=self.version,
            until=clock.monotonic() + seconds,
            started_ns=self._started_ns,
            fetched_bytes=self._fetched_bytes,
            repaired=self._repaired,
            seconds=dict(self.seconds),
        )

    def cut_over(self) -> float:
        """Makes the engine serve the version; returns the seconds it was paused. Never repeated blindly."""
        host = self.host
        if host.nodes:
            with self._timed("nodes"):
                await_nodes(host.store, host.nodes, self.version, seconds=host.engine_seconds, clock=host.clock)
        standing = self._applied is None
        if standing and host.engine_is_at(self.version):
            self._ask_canary()
            return 0.0
        if standing:  # no plan was made, which would have looked
            host.replica.settle()
        copies: Copies = _Standing(host.replica) if standing else host.replica
        known = not standing and host.engine_is_at(self.from_version)
        changes = not standing and self._applied.reload and self._applied.state_digest != self._from_digest
        host.engine_version, host.engine_in_doubt = None, True  # until the end of what follows nobody knows
        try:
            done = cut_over(
                copies,
                host.engine,
                version=self.version,
                previous=self.from_version if known else None,
                reload=not known or changes,
                deadline_seconds=host.engine_seconds,
                on_stage=self._reach,
                watch=host.watch,
                monotonic=host.clock.monotonic,
            )
        except CutOverFailed as failure:
            host.engine_version, host.engine_in_doubt = failure.served, failure.served is None
            host.engine_says |= failure.said
            self.seconds["pause"] = failure.pause_seconds
            if failure.served is None and host.restart is not None:
                raise self._restarted(host.restart, failure) from failure
            raise
        host.engine_version, host.engine_in_doubt, host.engine_says = done.version, False, done.said
        self.seconds.update(done.seconds)
        self.seconds["pause"] = done.pause_seconds
        if not standing:
            self._tidy()
        return done.pause_seconds

    def _restarted(self, restart: Callable[[Path], None], failure: CutOverFailed) -> CutOverFailed:
        """Starts an engine anew that holds nobody knows what: from `current` it can only load a proven version. The
        attempt has failed all the same, and the next one loads and numbers it as ever."""
        folder = self.host.replica.current
        try:
            with self._timed("restart"):
                restart(folder)
            then = f"It was restarted on {folder}; the next attempt gives it its version."
        except WeighbridgeError as second:
            then = f"It could not be restarted either: {second}"
        log.error("engine restarted", host=self.host.name, version=self.version, outcome=then)
        return CutOverFailed(f"{failure} {then}", stage=failure.stage, served=None, pause_seconds=failure.pause_seconds)

    def _tidy(self) -> None:
        try:
            self.host.replica.tidy()
        except (WeighbridgeError, OSError) as failure:  # the next attempt's will
            log.warning("the spool was not tidied", version=self.version, error=str(failure))

    def _ask_canary(self) -> None:
        """Whether an engine that holds the version answers: an attempt before this one may have failed at its canary,
        or have died with its process while the engine was paused. Then the next attempt loads and resumes it."""
        host = self.host
        self.stage = Stage.RESUMED
        try:
            host.engine.probe(seconds=host.engine_seconds)
        except WeighbridgeError:
            host.engine_in_doubt = host.engine_version is None
            raise
        host.engine_version = self.version
        self.stage = Stage.CANARY

    def record_served(self) -> HostRecord:
        """Writes that this host serves the version."""
        return self._record(SERVED)

    def record_superseded(self) -> HostRecord:
        """Writes that this host went on to a newer version, which `from_version` names."""
        return self._record(SUPERSEDED)

    def record_failed(self, error: BaseException) -> HostRecord:
        """Writes why the version is not served. Never hides the failure that it is about."""
        if self._sent is not None:  # it may stand, or yet land; this is another, since no object is ever changed
            self.attempt = uuid.uuid4().hex
        record = self._draft(FAILED, f"{type(error).__name__}: {error}")
        count_attempt(record, serves=self.host.replica.version)
        try:
            write_record(self.host.store, record)
        except WeighbridgeError as second:
            log.warning("record not written", version=self.version, attempt=self.attempt, error=str(second))
        return record

    def _record(self, outcome: str) -> HostRecord:
        self._sent = self._sent or self._draft(outcome, "")  # tried again, it is the same to the byte
        write_record(self.host.store, self._sent)
        count_attempt(self._sent, serves=self.host.replica.version)
        return self._sent

    def _draft(self, outcome: str, error: str) -> HostRecord:
        return HostRecord(
            run_id=self.host.run_id,
            host=self.host.name,
            version=self.version,
            attempt=self.attempt,
            outcome=outcome,
            stage=str(self.stage),
            from_version=self.host.replica.version if outcome == SUPERSEDED else self.from_version,
            state_digest=self.host.replica.state_digest,
            started_ns=self._started_ns,
            ended_ns=self.host.clock.now_ns(),
            fetched_bytes=self._fetched_bytes,
            repaired=self._repaired,
            seconds={phase: round(taken, 6) for phase, taken in self.seconds.items()},
            engine=self.host.engine.name,
            error=error,
            head=self._head(),
        )

    def _go_on_from(self, prepared: Prepared) -> None:
        """Counts what another run of this host did for this version already."""
        self._started_ns = prepared.started_ns
        self._fetched_bytes, self._repaired = prepared.fetched_bytes, prepared.repaired
        self.seconds.update(prepared.seconds)

    def _head(self) -> int:
        """The newest version known here. A store that is away must not keep anybody from saying what happened."""
        try:
            return self.host.lineage.head()
        except WeighbridgeError:
            return self.version

    def _reach(self, stage: Stage) -> None:
        self.stage = stage
        log.info("cut over", version=self.version, stage=str(stage))

    def _progress(self) -> Callable[[int, int], None]:
        told = self.host.clock.monotonic()

        def tell(done: int, total: int) -> None:
            nonlocal told
            if self.host.clock.monotonic() - told >= _PROGRESS_SECONDS:
                told = self.host.clock.monotonic()
                log.info("fetching", version=self.version, done_bytes=done, total_bytes=total)

        return tell

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begun = self.host.clock.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + self.host.clock.monotonic() - begun
