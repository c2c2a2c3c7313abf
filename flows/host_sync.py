"""Host-sync: a host's part in a version, executed by its own worker. Takes a run, a version and a host's name; store,
replica and engine are the process' own. Cancel takes effect between steps, never between dirty and clean."""

from typing import Any

from prefect.client.schemas.objects import State

from weighbridge.flows import names
from weighbridge.flows.healing import heal_after
from weighbridge.flows.host_steps import serve, take_turn
from weighbridge.flows.ours import our_flow


@our_flow(
    name=names.HOST_SYNC,
    flow_run_name="v{version} on {host}",
    on_completion=[heal_after],
)
def host_sync(run: str, version: int, host: str) -> State[Any]:
    """Brings one host to a version: fetch, apply, verify, cut over, record. What `prepare` did is not done again."""
    return take_turn(run, version, host, serve)
