"""A host's process: a warm Prefect worker on the queue of the host's name, and a follower that keeps up with the store
by itself when nobody asks. Goes on, and comes back, when Prefect's server is away. Must not know how a sync works."""

import asyncio
import json
import os
import platform
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import structlog
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun

from weighbridge.flows import names, upkeep
from weighbridge.flows.automations import ensure_automations
from weighbridge.flows.context import Retention, SyncCheckpoint, hosting, using_checkpoint, using_store
from weighbridge.flows.cutover import cutover
from weighbridge.flows.dispatch import ensure_host_flows
from weighbridge.flows.follower import Follower
from weighbridge.flows.healing import heal
from weighbridge.flows.host_sync import host_sync
from weighbridge.flows.keep_working import Work, keep_working
from weighbridge.flows.prepare import prepare as prepare_flow
from weighbridge.flows.rollout import ensure_rollout, rollout
from weighbridge.flows.sweep import sweep
from weighbridge.flows.sync_checkpoint import ensure_sync_checkpoint, sync_checkpoint
from weighbridge.storage.digests import chain_digest
from weighbridge.storage.localdisk import SHARED_FILE, LocalDisk
from weighbridge.storage.stores.contract import Store
from weighbridge.tasks.host import Host

log = structlog.get_logger("weighbridge.worker")

_STEWARD_LIMIT = 4


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker keeps in touch. Times in seconds.

    `home` is where the embedded server lives. `ready_file` gets a JSON object (host, pid, version, connected) whenever
    that changes, and is removed at the end. `patience_seconds` is how long a new version is left to its rollout before
    the host takes it up by itself.
    """

    home: Path | None = None
    poll_seconds: float = 1.0
    follow_seconds: float = 10.0
    patience_seconds: float = 30.0
    ready_file: Path | None = None


def serve_host(host: Host, *, options: WorkerOptions | None = None, stop: threading.Event | None = None) -> None:
    """Serves a host until SIGTERM, SIGINT or `stop`: its host-sync runs, and the store's head when nobody asks.

    The caller holds the replica open. The first signal ends it after the run under way, a second one at once.
    """
    with hosting(host), _stopped_by_signals(stop or threading.Event()) as ended:
        _HostProcess(host, options or WorkerOptions()).serve(ended)


def serve_steward(
    run: str,
    store: Store,
    *,
    base: Path | None = None,
    retention: Retention | None = None,
    checkpoint: SyncCheckpoint | None = None,
    options: WorkerOptions | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Executes the rollouts of one training run that somebody starts from the UI, and its upkeep, until stopped like a
    host. `base` is the folder of the run's base, which the first anchor is made from, `retention` what its gc keeps at
    least. With `checkpoint` its syncs can be started from the UI too."""
    chosen = options or WorkerOptions()

    def prepare(client: SyncPrefectClient) -> None:
        ensure_host_flows(client)
        ensure_rollout(client, run)
        upkeep.ensure_upkeep(client, run)
        if checkpoint is not None:
            ensure_sync_checkpoint(client, run)
        ensure_automations(client)
        sweep(client, pool=names.STEWARD_POOL, queue=run, running=work.running)
        heal(client, store, run=run)

    work = Work(
        pool=names.STEWARD_POOL,
        queue=run,
        place=_place(str(os.getpid())),
        flows={names.ROLLOUT: rollout, names.SYNC_CHECKPOINT: sync_checkpoint, **upkeep.FLOWS},
        limit=_STEWARD_LIMIT,
        order=lambda flow_run: flow_run.expected_start_time,
        prepare=prepare,
        tell=lambda connected: log.info("steward ready", run=run, connected=connected),
    )
    with (
        using_store(run, store, base=base, retention=retention),
        nullcontext() if checkpoint is None else using_checkpoint(run, checkpoint),
        _stopped_by_signals(stop or threading.Event()) as ended,
    ):
        asyncio.run(keep_working(work, home=chosen.home, poll_seconds=chosen.poll_seconds, stop=ended))


class _HostProcess:
    def __init__(self, host: Host, options: WorkerOptions) -> None:
        self._host = host
        self._options = options
        self._connected = False
        self._swept = 0
        self._follower: Follower | None = None
        self._work = Work(
            pool=names.HOSTS_POOL,
            queue=host.name,
            # Its replica's lock, and its name's on this machine, keep any other process from the same place.
            place=_place(chain_digest(str(host.replica.current.parent).encode())[:6]),
            flows={
                names.HOST_SYNC: host_sync,
                names.PREPARE: prepare_flow,
                names.CUTOVER: cutover,
                names.SCRUB: upkeep.OF_HOST.flow,
            },
            limit=1,  # one replica: one sync at a time
            order=_newest_first,
            prepare=self._prepare,
            tell=self._tell,
        )

    def serve(self, stop: threading.Event) -> None:
        options = self._options
        try:
            asyncio.run(keep_working(self._work, home=options.home, poll_seconds=options.poll_seconds, stop=stop))
        finally:
            if self._follower is not None:
                self._follower.stop()
            if options.ready_file is not None:
                options.ready_file.unlink(missing_ok=True)
            log.info("host stopped", host=self._host.name, version=self._host.replica.version)

    def _prepare(self, client: SyncPrefectClient) -> None:
        ensure_host_flows(client)
        upkeep.ensure_host_upkeep(client, self._host.run_id, self._host.name)
        self._swept = sweep(client, pool=names.HOSTS_POOL, queue=self._host.name, running=self._work.running)
        heal(client, self._host.store, run=self._host.run_id)

    def _tell(self, connected: bool) -> None:
        self._connected = connected
        if self._follower is None:
            self._follower = Follower(
                self._host,
                is_connected=lambda: self._connected,
                every_seconds=self._options.follow_seconds,
                patience_seconds=self._options.patience_seconds,
                at_once=self._swept == 0,  # what was swept is about to run, and shows in the UI
            )
            self._follower.start()
        host = self._host
        log.info("host ready", host=host.name, pid=os.getpid(), version=host.replica.version, connected=connected)
        if (path := self._options.ready_file) is not None:
            said = {"host": host.name, "pid": os.getpid(), "version": host.replica.version, "connected": connected}
            LocalDisk("process").write_atomic(path, json.dumps(said).encode(), mode=SHARED_FILE)


def _place(within: str) -> str:
    """Where a worker is: the machine, and what tells it from others there."""
    return f"{platform.node() or 'localhost'} {within}"


def _newest_first(flow_run: FlowRun) -> int:
    """Waiting runs coalesce: the newest version does the work of all, and the older ones end as superseded."""
    version = flow_run.parameters.get("version")  # a scrub has none, and comes last
    return -version if isinstance(version, int) else 0


@contextmanager
def _stopped_by_signals(stop: threading.Event) -> Iterator[threading.Event]:
    """SIGTERM and SIGINT set `stop`; a second one ends the process, which the replica's journal is made for."""
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
