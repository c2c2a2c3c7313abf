"""The follower: a host looks at the store's head by itself, and catches up when nobody asked it to: at its start, while
Prefect is away, and when a version has stood for a while. Must not know Prefect."""

import threading
from collections.abc import Callable

import structlog

from weighbridge.storage.records import SERVED, pass_over, read_records
from weighbridge.tasks.host import Host, Prepared
from weighbridge.tasks.host_attempt import HostAttempt

log = structlog.get_logger("weighbridge.follower")

_MOST_SECONDS = 300.0


class Follower:
    """Runs in a thread of its own until it is stopped.

    `is_connected` says whether Prefect would tell us of a version; then a new one is left to its rollout for
    `patience_seconds`, except at the first look when `at_once` is set.
    """

    def __init__(
        self,
        host: Host,
        *,
        is_connected: Callable[[], bool],
        every_seconds: float,
        patience_seconds: float,
        at_once: bool,
    ) -> None:
        self._host = host
        self._is_connected = is_connected
        self._every = every_seconds
        self._patience = patience_seconds
        self._at_once = at_once
        self._behind_since: float | None = None
        self._recorded = -1
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"follow-{host.name}", daemon=True)

    def start(self) -> None:
        """Begins to follow; the first look is taken now."""
        self._thread.start()

    def stop(self) -> None:
        """Ends following, after the attempt that is under way."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        wait = 0.0
        while not self._stopped.wait(wait):
            try:
                self.look()
                wait = self._every
            except Exception as error:  # noqa: BLE001 - the edge of this thread: a host must go on following
                wait = min(_MOST_SECONDS, max(self._every, wait * 2))
                log.warning("could not catch up", host=self._host.name, error=str(error), again_in_seconds=wait)

    def look(self) -> bool:
        """One look at the head: catches up if this host is behind and should not wait to be asked; whether it did."""
        host = self._host
        if not host.turn.acquire(blocking=False):
            return False  # a run is under way
        try:
            host.hooks.reading(host.store.url)
            target = max(host.lineage.head(), host.replica.version)
            engine_is_known = host.engine_version is not None or host.engine_is_at(host.replica.version)
            if target < 0 or (target == host.replica.version and engine_is_known and self._is_recorded()):
                self._behind_since, self._at_once = None, False
                return False
            now = host.clock.monotonic()
            if self._is_connected() and host.prepared is not None and _is_left(host.prepared, target, now):
                return False
            self._behind_since = self._behind_since if self._behind_since is not None else now
            if self._is_connected() and not self._at_once and now - self._behind_since < self._patience:
                return False
            self._at_once = False
            catch_up(host, target)
            self._behind_since = None
            return True
        finally:
            host.turn.release()

    def _is_recorded(self) -> bool:
        """Whether the history knows that this host serves what it holds: it does not if the host died, or the store
        was away, between the two."""
        version = self._host.replica.version
        if version != self._recorded:
            records = read_records(self._host.store, host=self._host.name, version=version, on_corrupt=pass_over)
            if not any(record.outcome == SERVED for record in records):
                return False
            self._recorded = version
        return True


def _is_left(prepared: Prepared, target: int, now: float) -> bool:
    """Whether a version is still its rollout's to cut over, together with other hosts."""
    return prepared.version == target and now < prepared.until


def catch_up(host: Host, version: int) -> None:
    """The steps of a host-sync run without Prefect, for a host that finds itself behind. The caller holds the host's
    turn."""
    attempt = HostAttempt(host, version)
    try:
        if not attempt.is_standing:
            attempt.fetch()
            attempt.apply()
            attempt.verify()
        attempt.cut_over()
        attempt.record_served()
    except Exception as failure:
        attempt.record_failed(failure)
        raise
    log.info("caught up", version=version, **attempt.seconds)
