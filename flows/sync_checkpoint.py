"""Sync-checkpoint: the folder of checkpoints that a run's steward was started with becomes the next version, by number
of the run alone; executed by that steward. What `weighbridge sync` does, for the UI, for schedules and for automations.
"""

from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.states import Completed

from weighbridge.flows import names
from weighbridge.flows.context import checkpoint_here
from weighbridge.flows.deployments import ensure_deployment
from weighbridge.flows.ours import our_flow


@our_flow(
    name=names.SYNC_CHECKPOINT,
    flow_run_name="sync checkpoint of {run}",
)
def sync_checkpoint(run: str, hosts: list[str] | None = None) -> State[Any]:
    """Publishes what the steward's checkpoint folder holds now and brings hosts to it: those named here, else those of
    the steward's own settings. It shows as a `sync` run of its own; ends Failed when that does."""
    return Completed(message=checkpoint_here(run)(tuple(hosts or ())))


def ensure_sync_checkpoint(client: SyncPrefectClient, run: str) -> None:
    """Makes sure that a run's checkpoints can be synced from the UI, for its steward to execute."""
    ensure_deployment(
        client,
        sync_checkpoint,
        deployment=names.upkeep_deployment(names.SYNC_CHECKPOINT, run),
        pool=names.STEWARD_POOL,
        queue=run,
        parameters={"run": run},
    )
