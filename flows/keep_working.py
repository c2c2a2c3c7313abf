"""Keeps one worker at work until it is told to stop: finds the server, connects, and does so again whenever the server
was away. Must not know what the runs do."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import structlog
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun

from weighbridge.errors import NameTaken, WeighbridgeError
from weighbridge.flows.connection import UNREACHABLE, connected, find_api
from weighbridge.flows.deployments import ensure_pool, forget_deployments
from weighbridge.flows.flow_worker import FlowWorker
from weighbridge.flows.presence import Presence
from weighbridge.flows.sweep import LaterSweep
from weighbridge.storage.backoff import Backoff

log = structlog.get_logger("weighbridge.worker")

_LOOK_SECONDS = 0.1
_SWEEP_SECONDS = 10.0
_MOST_SWEEP_SECONDS = 300.0
_AGAIN_SECONDS = 1.0
_RECONNECT = partial(Backoff, first_seconds=0.5, most_seconds=15.0)


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker is for, and where: `place` tells it from any other that might serve its queue. `prepare` runs
    before the first poll over each new connection; `tell` after each change of the connection. `running` are the runs
    under way, which outlive a connection."""

    pool: str
    queue: str
    place: str
    flows: Mapping[str, Flow[..., Any]]
    limit: int
    order: Callable[[FlowRun], Any]
    prepare: Callable[[SyncPrefectClient], None]
    tell: Callable[[bool], None]
    running: set[UUID] = field(default_factory=set)

    @property
    def presence(self) -> Presence:
        """The worker's place on its queue."""
        return Presence(pool=self.pool, queue=self.queue, place=self.place)


async def keep_working(work: Work, *, home: Path | None, poll_seconds: float, stop: threading.Event) -> None:
    """Works until `stop` is set, then ends after the runs under way. Starts the embedded server at the first look only:
    one that somebody stopped stays stopped. Raises NameTaken when another worker serves the queue."""
    waits, start, taken = _RECONNECT().waits(), True, None
    told: bool | None = None
    while not stop.is_set() and taken is None:
        try:
            api_url = await asyncio.to_thread(find_api, home, start=start)
            with connected(api_url) as client:
                await asyncio.to_thread(ensure_pool, client, work.pool)
                if not await asyncio.to_thread(work.presence.take, client, stop):
                    break
                await asyncio.to_thread(work.prepare, client)
                work.tell(True)
                told = True
                waits = _RECONNECT().waits()
                await _work(work, api_url, client, poll_seconds=poll_seconds, stop=stop)
                work.presence.leave(client)
        except* NameTaken as failures:
            taken = _first(failures)
        except* (WeighbridgeError, *UNREACHABLE) as failures:
            say = log.debug if told is False else log.warning  # once, for it may be meant to be so
            say("no Prefect server for now; will look again", queue=work.queue, error=_say(_first(failures)))
        start = False
        forget_deployments()
        if not stop.is_set() and taken is None:
            if told is not False:
                work.tell(False)
                told = False
            await _stopped(stop, within_seconds=next(waits))
    if taken is not None:
        raise taken


async def _work(
    work: Work, api_url: str, client: SyncPrefectClient, *, poll_seconds: float, stop: threading.Event
) -> None:
    worker = FlowWorker(
        pool=work.pool,
        queue=work.queue,
        name=work.presence.name,
        flows=work.flows,
        api_url=api_url,
        limit=work.limit,
        order=work.order,
        running=work.running,
    )
    async with worker, asyncio.TaskGroup() as group:
        services = [
            group.create_task(worker.poll(seconds=poll_seconds)),
            group.create_task(worker.report()),
            group.create_task(_listen(worker)),
            group.create_task(_look_again(work, client)),
        ]
        await _stopped(stop)
        await _end(services)


async def _look_again(work: Work, client: SyncPrefectClient) -> None:
    """Ends what ended unheard: soon after a connection was lost and made again, and seldom while all is well."""
    later, wait = LaterSweep(pool=work.pool, queue=work.queue, running=work.running), _SWEEP_SECONDS
    while True:
        await asyncio.sleep(wait)
        found = await asyncio.to_thread(later.look, client)
        wait = _SWEEP_SECONDS if found else min(2 * wait, _MOST_SWEEP_SECONDS)


async def _end(services: Iterable[asyncio.Task[None]]) -> None:
    """Cancels until it took: a library below may lose a cancellation that comes together with what it waits for."""
    left = set(services)
    while left:
        for service in left:
            service.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_SECONDS)


async def _listen(worker: FlowWorker) -> None:
    """Events make a run start sooner; without them the polls find it. So their loss is never the worker's."""
    waits = _RECONNECT().waits()
    while True:
        try:
            await worker.listen()
        except Exception as error:  # noqa: BLE001 - the edge to a websocket library with errors of many kinds
            log.info("events lost; polling goes on", queue=worker.queue, error=_say(error))
        await asyncio.sleep(next(waits))


async def _stopped(stop: threading.Event, *, within_seconds: float = float("inf")) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_seconds
    while not stop.is_set() and loop.time() < deadline:
        await asyncio.sleep(_LOOK_SECONDS)


def _first(failures: BaseExceptionGroup[Any]) -> BaseException:
    first: BaseException = failures
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
