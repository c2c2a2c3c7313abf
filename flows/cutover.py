"""Cutover: a host that has prepared a version changes its engine over to it, when somebody says so. Does nothing on a
host that has not prepared it; `host-sync` does the whole of it on any host."""

from typing import Any

from prefect.client.schemas.objects import State

from weighbridge.errors import OrchestrationError
from weighbridge.flows import names
from weighbridge.flows.healing import heal_after
from weighbridge.flows.host_steps import serve, take_turn
from weighbridge.flows.ours import our_flow
from weighbridge.tasks.handle import Handle
from weighbridge.tasks.host_attempt import HostAttempt


@our_flow(
    name=names.CUTOVER,
    flow_run_name="cut over v{version} on {host}",
    on_completion=[heal_after],
)
def cutover(run: str, version: int, host: str) -> State[Any]:
    """Pauses, reloads, resumes, and records. Ends Failed on a host of which no copy holds the version: its engine was
    not touched then."""
    return take_turn(run, version, host, _serve_prepared)


def _serve_prepared(attempt: Handle[HostAttempt]) -> str:
    host, version = attempt.value.host, attempt.value.version
    if version not in host.replica.held.values():
        raise OrchestrationError(
            f"{host.name} has not prepared version {version}, and serves version {host.replica.version} as before. Run "
            f"{names.PREPARE_DEPLOYMENT} for it first, or {names.HOST_DEPLOYMENT}, which does both."
        )
    return serve(attempt)
