"""Prepare: a host's part in a version up to the cut over, which then comes with that of the other hosts, as a host-sync
run. Must not touch the engine, nor what `current` leads to."""

from typing import Any

from prefect.client.schemas.objects import State

from weighbridge.flows import names
from weighbridge.flows.host_steps import bring_up_copy, summary, take_turn
from weighbridge.flows.ours import our_flow
from weighbridge.tasks.handle import Handle
from weighbridge.tasks.host_attempt import HostAttempt


@our_flow(
    name=names.PREPARE,
    flow_run_name="prepare v{version} on {host}",
)
def prepare(run: str, version: int, host: str, hold_seconds: float) -> State[Any]:
    """Fetch, apply, verify. Afterwards the host waits for its host-sync run, but for `hold_seconds` at most: then it
    goes on by itself, for whoever asked is gone."""

    def carry_out(attempt: Handle[HostAttempt]) -> str:
        if not attempt.value.is_standing:
            bring_up_copy(attempt)
            attempt.value.hold(seconds=hold_seconds)
        return summary(attempt.value, "has prepared")

    return take_turn(run, version, host, carry_out)
