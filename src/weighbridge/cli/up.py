"""`up`: the steward of a training run, a process anywhere that reaches its store and Prefect."""

from weighbridge import logs
from weighbridge.cli.options import Base, LogJson, Store, settings_of, store_of


def up(*, store: Store = None, base: Base = None, log_json: LogJson = False) -> None:
    """Run the steward of a training run: rollouts started from the UI, and upkeep on its schedules.

    Runs until SIGTERM or Ctrl-C. Give it the base: a run's first anchor is made from it.
    """
    settings = settings_of(("store",), store=store, base=base)
    logs.to_stderr(json_lines=log_json or settings.log_json)
    from weighbridge.flows.worker import WorkerOptions, serve_steward
    from weighbridge.storage.lineage import Lineage

    chosen = store_of(settings)
    options = WorkerOptions(home=settings.home, poll_seconds=settings.poll_seconds)
    serve_steward(Lineage(chosen).run.run_id, chosen, base=settings.base, options=options)
