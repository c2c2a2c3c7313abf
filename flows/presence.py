"""A worker's place on its queue: one worker serves a queue, on whichever machine, for hosts' names are unique. Seen by
the workers' reports to Prefect's server, and judged by that server's clock. Must not know what the workers run."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import structlog
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import Worker, WorkerStatus

from weighbridge.errors import NameTaken
from weighbridge.flows.connection import UNREACHABLE
from weighbridge.storage.manifest import check_name

log = structlog.get_logger("weighbridge.worker")

REPORT_SECONDS = 15
"""Between a worker's reports. The server takes one for gone that has missed three."""

WAIT_SECONDS = 90.0
"""How long one that was killed may still count as there, and a little."""

_LOOK_SECONDS = 2.0
_PAGE = 200
_ON = " on "


def queue_of(worker: str) -> str:
    """The queue that a worker serves, by the worker's name."""
    return worker.partition(_ON)[0]


def workers_of(client: SyncPrefectClient, pool: str) -> Iterator[Worker]:
    """All that ever reported to a pool, page by page. Raises ObjectNotFound where there is no such pool."""
    offset = 0
    while True:
        page = client.read_workers_for_work_pool(pool, offset=offset, limit=_PAGE)
        yield from page
        if len(page) < _PAGE:
            return
        offset += _PAGE


class Presence:
    """One worker's place. `place` tells it from every other worker that could serve this queue, and people where it is;
    a process that follows it in the same place may go on at once."""

    def __init__(self, *, pool: str, queue: str, place: str) -> None:
        self.name = f"{queue}{_ON}{place}"
        self._pool, self._queue = pool, check_name("queue", queue)

    def take(self, client: SyncPrefectClient, stop: threading.Event, *, seconds: float | None = None) -> bool:
        """Takes the queue of a pool that stands, once no other worker is on it; False when told to stop before. Raises
        NameTaken when one still is after `seconds` (WAIT_SECONDS)."""
        until, told = time.monotonic() + (WAIT_SECONDS if seconds is None else seconds), False
        while True:
            rival = self._rival(client)
            if rival is None:
                client.send_worker_heartbeat(self._pool, self.name, heartbeat_interval_seconds=REPORT_SECONDS)
                rival = self._rival(client)  # one that looked when we did
                if rival is None:
                    return True
                self.leave(client)
            if time.monotonic() >= until:
                raise NameTaken(
                    f"another process serves {self._queue!r}, as Prefect's server hears from it: {rival}. Names are "
                    "unique; nothing was started here. End that one, or give this one a name of its own."
                )
            if not told:
                log.warning("waiting for another process of this name to end", queue=self._queue, other=rival)
                told = True
            if stop.wait(_LOOK_SECONDS * random.uniform(0.5, 1.5)):
                return False

    def leave(self, client: SyncPrefectClient) -> None:
        """Gives the place up, so that another may take it at once; else that one waits until we are taken for gone."""
        with suppress(*UNREACHABLE):
            client.request(
                "DELETE",
                "/work_pools/{work_pool_name}/workers/{name}",
                path_params={"work_pool_name": self._pool, "name": self.name},
            )

    def _rival(self, client: SyncPrefectClient) -> str | None:
        for worker in workers_of(client, self._pool):
            is_other = queue_of(worker.name) == self._queue and worker.name != self.name
            if is_other and worker.status == WorkerStatus.ONLINE:
                return worker.name
        return None
