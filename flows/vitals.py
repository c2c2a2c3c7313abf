"""Which hosts' workers still report to Prefect's server: one that was killed leaves its run Running, as one at work
does. Compares no clocks: a host is silent when its report has not changed for a while on ours. Must not know what they
run."""

import time
from collections.abc import Callable
from contextlib import suppress

from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound

from weighbridge.flows import names
from weighbridge.flows.presence import queue_of, workers_of

SILENT_SECONDS = 50.0
"""A worker reports every 15 s."""


class Vitals:
    """What was seen of the hosts' reports since this was made."""

    def __init__(
        self,
        client: SyncPrefectClient,
        *,
        silent_seconds: float = SILENT_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._silent, self._now = client, silent_seconds, monotonic
        self._begun = monotonic()
        self._seen: dict[str, tuple[object, float]] = {}

    def is_silent(self, host: str) -> bool:
        """Whether a host has not reported for `silent_seconds`, as far as the last `look` saw."""
        heard = [when for worker, (_, when) in self._seen.items() if queue_of(worker) == host]
        return self._now() - max(heard, default=self._begun) >= self._silent

    def look(self) -> None:
        """Reads all reports; never judges by one look alone."""
        now = self._now()
        with suppress(ObjectNotFound):  # no host has ever reported
            for worker in workers_of(self._client, names.HOSTS_POOL):
                if self._seen.get(worker.name, (None, 0.0))[0] != worker.last_heartbeat_time:
                    self._seen[worker.name] = (worker.last_heartbeat_time, now)
