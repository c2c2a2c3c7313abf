"""`retry`: failed host syncs run again on their hosts, as the UI's Retry button does for one."""

from typing import Annotated

from cyclopts import Parameter

from weighbridge import logs
from weighbridge.cli.options import Json, Store, settings_of, store_of
from weighbridge.cli.report import print_json, print_line


def retry(
    version: int | None = None,
    *,
    host: Annotated[str | None, Parameter(help="Only this host's.")] = None,
    store: Store = None,
    wait: Annotated[float, Parameter(help="Seconds to wait for the outcome; 0 only asks.")] = 60.0,
    json: Json = False,
) -> None:
    """Run the failed host syncs of a version again, on the same hosts. Exits with 15 when hosts are still behind.

    Parameters
    ----------
    version
        The version; by default every one with failed runs.
    """
    settings = settings_of(("store",), store=store)
    logs.configure()
    from weighbridge.errors import SyncIncomplete
    from weighbridge.flows.connection import connected, find_api
    from weighbridge.flows.retry import retry_failed
    from weighbridge.storage.history.questions import outcome as outcome_now
    from weighbridge.storage.history.reader import History

    history = History(store_of(settings))
    run = history.lineage.run.run_id
    with connected(find_api(settings.home, start=False)) as client:
        again = retry_failed(client, run=run, version=version, host=host, wait_seconds=wait)
    states = {name: flow_run.state.name if flow_run.state else "unknown" for name, flow_run in again.items()}
    outcome = outcome_now(history, history.head if version is None else version)
    if json:
        print_json({"run": run, "retried": states, "outcome": outcome})
    else:
        for name, state in states.items():
            print_line(f"{name}: {state}")
        print_line(f"{len(states)} runs asked again; the version is {outcome}" if states else "no failed run to retry")
    late = [name for name, flow_run in again.items() if flow_run.state is None or not flow_run.state.is_completed()]
    if wait > 0 and late:
        raise SyncIncomplete(f"{', '.join(late)} did not complete. The hosts serve what they served before.")
