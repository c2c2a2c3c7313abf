"""`host`: the process on an inference host."""

import time
from pathlib import Path
from typing import Annotated

import structlog
from cyclopts import Parameter

from weighbridge import logs
from weighbridge.cli.options import Base, LogJson, ReplicaFolder, Store, settings_of, store_of
from weighbridge.errors import UsageError
from weighbridge.settings import Settings
from weighbridge.storage.lineage import Lineage, RunInfo
from weighbridge.storage.stores import contract
from weighbridge.storage.stores.hooks import Hooks
from weighbridge.tasks.engines.contract import Engine

log = structlog.get_logger("weighbridge.host")


def host(
    *,
    name: str | None = None,
    store: Store = None,
    base: Base = None,
    replica: ReplicaFolder = None,
    engine: str | None = None,
    engine_command: str | None = None,
    copies: int | None = None,
    durability: str | None = None,
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
        none, or command.
    engine_command
        The command that makes the engine load; {path} and {version} in it are filled in.
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
        copies=copies,
        durability=durability,
    )
    logs.to_stderr(json_lines=log_json or settings.log_json)
    _serve(settings, ready_file)


def _serve(settings: Settings, ready_file: Path | None) -> None:
    from weighbridge.flows.worker import WorkerOptions, serve_host
    from weighbridge.storage.replica import open_replica
    from weighbridge.tasks.host_attempt import Host

    assert settings.replica is not None and settings.name is not None
    store = store_of(settings)
    run = _run_of(store, settings.hooks, every_seconds=settings.follow_seconds)
    with open_replica(
        settings.replica,
        store=store,
        base=settings.base,
        copies=settings.copies,
        durability=settings.durability,
        lock_seconds=settings.lock_deadline,
        threads=settings.encode_threads,
    ) as replica:
        served = Host(
            name=settings.name,
            run_id=run.run_id,
            store=store,
            replica=replica,
            engine=_engine(settings),
            engine_seconds=settings.engine_deadline,
            hooks=settings.hooks,
        )
        options = WorkerOptions(
            home=settings.home,
            poll_seconds=settings.poll_seconds,
            follow_seconds=settings.follow_seconds,
            ready_file=ready_file,
        )
        serve_host(served, options=options)


def _run_of(store: contract.Store, hooks: Hooks, *, every_seconds: float) -> RunInfo:
    """The run that the store belongs to; a host may be there before its trainer, and waits for it."""
    lineage = Lineage(store)
    hooks.reading(store.url)
    while not lineage.is_committed(0):
        log.info("waiting for a run", store=store.url)
        time.sleep(every_seconds)
        hooks.reading(store.url)
    return lineage.run


def _engine(settings: Settings) -> Engine:
    if settings.engine == "none":
        from weighbridge.tasks.engines.none import NoEngine

        return NoEngine()
    if settings.engine == "command":
        from weighbridge.tasks.engines.command import CommandEngine

        assert settings.engine_command is not None
        return CommandEngine(settings.engine_command)
    raise UsageError(f"engine {settings.engine!r} is not known here: none, command. Nothing was started.")
