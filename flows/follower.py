"""The follower: a host looks at the store's head by itself, and catches up when nobody asked it to: at its start, while
Prefect is away, and when a version has stood for a while. Must not know Prefect."""

import threading
from collections.abc import Callable

import structlog

from weighbridge.flows.host_sync import catch_up
from weighbridge.tasks.host_attempt import Host

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
            if target < 0 or (target == host.replica.version and engine_is_known):
                self._behind_since, self._at_once = None, False
                return False
            now = host.clock.monotonic()
            self._behind_since = self._behind_since if self._behind_since is not None else now
            if self._is_connected() and not self._at_once and now - self._behind_since < self._patience:
                return False
            self._at_once = False
            catch_up(host, target)
            self._behind_since = None
            return True
        finally:
            host.turn.release()
