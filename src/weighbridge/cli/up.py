"""`up`: the steward of a training run, a process anywhere that reaches its store and Prefect."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from weighbridge import logs
from weighbridge.cli.options import Base, LogJson, Store, settings_of, store_of
from weighbridge.cli.report import share, size
from weighbridge.settings import Settings


def up(
    *,
    store: Store = None,
    base: Base = None,
    checkpoint: Annotated[
        Path | None, Parameter(help="The folder that sync-checkpoint publishes whenever it is run in the UI.")
    ] = None,
    log_json: LogJson = False,
) -> None:
    """Run the steward of a training run: rollouts started from the UI, and upkeep on its schedules.

    Runs until SIGTERM or Ctrl-C. Give it the base: a run's first anchor is made from it. With a checkpoint's folder it
    is a writer of the run as well, whenever sync-checkpoint runs: name one only where no trainer pushes.
    """
    settings = settings_of(("store",), store=store, base=base, checkpoint=checkpoint)
    if settings.checkpoint is not None:
        settings = settings_of(("store", "base"), store=store, base=base, checkpoint=checkpoint)
    logs.to_stderr(json_lines=log_json or settings.log_json)
    from weighbridge.flows.context import KEPT, Retention
    from weighbridge.flows.worker import WorkerOptions, serve_steward
    from weighbridge.storage.lineage import Lineage

    chosen = store_of(settings)
    run = Lineage(chosen).run.run_id
    serve_steward(
        run,
        chosen,
        base=settings.base,
        retention=Retention(settings.keep or KEPT, settings.grace),
        checkpoint=None if settings.checkpoint is None else _Checkpoint(run, settings, settings.checkpoint).sync,
        options=WorkerOptions(home=settings.home, poll_seconds=settings.poll_seconds),
    )


class _Checkpoint:
    """Publishes a folder, whenever it is asked to; one time after the other."""

    def __init__(self, run: str, settings: Settings, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        names = ("policy", "cutover", "sign", "layout", "home")
        self._chosen: dict[str, Any] = {name: getattr(settings, name) for name in names} | {"run": run}
        self._turn = threading.Lock()

    def sync(self, hosts: Sequence[str]) -> str:
        """See SyncCheckpoint. Raises what a push raises."""
        from weighbridge.weight_sync import WeightSync

        settings = self._settings
        # Prometheus asks a process at one address, which a second WeightSync in it could not open again.
        with (
            self._turn,
            WeightSync(
                settings.store, settings.base, tuple(hosts) or settings.hosts, **self._chosen, metrics_listen=""
            ) as front,
        ):
            result = front.push(self._folder)
        return (
            f"version {result.version}: {result.outcome}, {result.changed_elements} elements changed "
            f"({share(result.density)}), {size(result.wire_bytes)}."
        )
