"""Retry-failed: failed host-sync runs of a training run asked for again, by number of the run alone; executed by its
steward. What `weighbridge retry` does, for the UI and for automations."""

from prefect.context import SyncClientContext

from weighbridge.flows import names
from weighbridge.flows.ours import our_flow
from weighbridge.flows.retry import retry_failed as ask_again


@our_flow(
    name=names.RETRY_FAILED,
    flow_run_name="retry failed hosts of {run}",
)
def retry_failed(run: str, version: int | None = None, host: str | None = None) -> int:
    """Schedules what failed again, of one version or of one host if told; returns how many. Does not wait for them."""
    with SyncClientContext.get_or_create() as context:
        return len(ask_again(context.client, run=run, version=version, host=host))
