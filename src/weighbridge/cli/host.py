"""`host`: the process on an inference host."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import structlog
from cyclopts import Parameter

from weighbridge import logs
from weighbridge.cli.options import (
    Base,
    Layout,
    LogJson,
    ReplicaFolder,
    Reseed,
    Store,
    Trust,
    lineage_of,
    neighbour_of,
    settings_of,
    store_of,
)
from weighbridge.errors import UsageError
from weighbridge.settings import Settings
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.digests import chain_digest
from weighbridge.storage.lineage import Lineage, RunInfo
from weighbridge.storage.localdisk import PRIVATE_FOLDER, LocalDisk
from weighbridge.storage.lock import owned
from weighbridge.storage.manifest import check_name
from weighbridge.storage.peers.following import following
from weighbridge.storage.peers.mirror import Mirror
from weighbridge.storage.peers.pull import open_mirror
from weighbridge.storage.stores import contract
from weighbridge.storage.stores.hooks import Hooks

log = structlog.get_logger("weighbridge.host")


def host(
    *,
    name: str | None = None,
    store: Store = None,
    base: Base = None,
    replica: ReplicaFolder = None,
    engine: str | None = None,
    engine_command: str | None = None,
    engine_url: str | None = None,
    copies: int | None = None,
    durability: str | None = None,
    reseed: Reseed = False,
    trust: Trust = None,
    layout: Layout = None,
    ready_file: Annotated[Path | None, Parameter(help="Written when the host is ready, removed when it ends.")] = None,
    log_json: LogJson = False,
) -> None:
    """Run on an inference host: keep its replica and its engine at the versions that Prefect, or the store's head, say.

    Runs until SIGTERM or Ctrl-C. The engine loads `<replica>/current`, always.

    Parameters
    ----------
    name
        This host's name; unique in the fleet.
    engine
        none, vllm, sglang, command, or module:Class for one of your own.
    engine_command
        The command that makes the engine load; {path} and {version} in it are filled in.
    engine_url
        Where the engine's server listens, as http://127.0.0.1:8000. Keys come from WEIGHBRIDGE_ENGINE_API_KEY and
        WEIGHBRIDGE_ENGINE_ADMIN_KEY, or files named by the same with _FILE.
    copies
        2 keeps the last good version beside the current one; 1 saves the space.
    durability
        power survives a power cut; process (for tmpfs) only a killed process.
    """
    settings = settings_of(
        ("name", "store", "replica"),
        name=name,
        store=store,
        base=base,
        replica=replica,
        engine=engine,
        engine_command=engine_command,
        engine_url=engine_url,
        copies=copies,
        durability=durability,
        trust=trust,
        layout=layout,
    )
    logs.to_stderr(json_lines=log_json or settings.log_json)
    _serve(settings, ready_file, "reseed" if reseed else "refuse")


def _serve(settings: Settings, ready_file: Path | None, foreign: Literal["reseed", "refuse"]) -> None:
    from weighbridge.flows.worker import WorkerOptions, serve_host
    from weighbridge.storage.replica import open_replica
    from weighbridge.tasks.engines.choose import open_engine
    from weighbridge.tasks.engines.guard import guarded
    from weighbridge.tasks.engines.restart import Restart, await_engine
    from weighbridge.tasks.host import Host
    from weighbridge.tasks.metrics import serve_metrics
    from weighbridge.transport import open_receiver

    assert settings.replica is not None and settings.name is not None
    serve_metrics(settings.metrics_listen)
    mirror = _mirror_of(settings) if settings.layout else None
    if mirror is None:
        store = store_of(settings)
        run = _run_of(store, settings.hooks, every_seconds=settings.follow_seconds)
        lineage = lineage_of(settings)
    else:
        store, run, lineage = mirror.store, mirror.lineage.run, mirror.lineage
    spec = settings.engine_spec
    restart, engine = settings.engine_restart, open_engine(spec)
    restarts = None if restart is None else Restart(restart, engine, seconds=settings.engine_deadline)
    await_engine(engine, seconds=settings.engine_deadline)
    with (
        _only_one(settings, store),
        open_replica(
            settings.replica,
            store=store,
            base=settings.base,
            copies=settings.copies,
            durability=settings.durability,
            lock_seconds=settings.lock_deadline,
            foreign=foreign,
            threads=settings.encode_threads,
            lineage=lineage,
        ) as replica,
        guarded(spec, settings.replica) as guard,
    ):
        served = Host(
            name=settings.name,
            run_id=run.run_id,
            store=store,
            replica=replica,
            engine=engine,
            engine_seconds=settings.engine_deadline,
            engine_in_doubt=guard is not None and guard.marked(),
            watch=guard,
            restart=restarts,
            nodes=settings.engine_nodes,
            hooks=settings.hooks if mirror is None else following(mirror, replica, settings.hooks),
            trust=settings.trusted,
            transport=open_receiver(settings) if mirror is None else None,
        )
        options = WorkerOptions(
            home=settings.home,
            poll_seconds=settings.poll_seconds,
            follow_seconds=settings.follow_seconds,
            ready_file=ready_file,
        )
        serve_host(served, options=options)


@contextmanager
def _only_one(settings: Settings, store: contract.Store) -> Iterator[None]:
    """One process serves under a host's name on this machine: two would take each other's runs, and write records that
    contradict each other. Raises ReplicaLocked."""
    assert settings.name is not None
    disk, folder = LocalDisk("process"), settings.home / "hosts"
    disk.make_folder(folder, mode=PRIVATE_FOLDER)
    of_store = chain_digest(store.url.encode())[:16]
    what = f"the host name {settings.name} at {store.url}"
    with owned(
        folder / f"{check_name('host', settings.name)}-{of_store}.lock",
        disk=disk,
        clock=SystemClock(),
        seconds=settings.lock_deadline,
        what=what,
        instead="give this one a name of its own",
    ):
        yield


def _mirror_of(settings: Settings) -> Mirror:
    """The mirror of the neighbour that the settings name."""
    assert settings.replica is not None
    if settings.base is None:
        raise UsageError("missing: --base, on which a neighbour's deltas go. Nothing was started.")
    layout, foreign = neighbour_of(settings)
    disk = LocalDisk(settings.durability)
    return open_mirror(
        settings.replica, layout=layout, foreign=foreign, base=settings.base, disk=disk, clock=SystemClock()
    )


def _run_of(store: contract.Store, hooks: Hooks, *, every_seconds: float) -> RunInfo:
    """The run that the store belongs to; a host may be there before its trainer, and waits for it."""
    lineage = Lineage(store)
    hooks.reading(store.url)
    while not lineage.is_committed(0):
        log.info("waiting for a run", store=store.url)
        time.sleep(every_seconds)
        hooks.reading(store.url)
    return lineage.run
