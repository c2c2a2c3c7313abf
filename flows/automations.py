"""Automations on the Prefect server, by which it tells of what no process of ours can tell any more. Made once; whoever
changes or disables one in the UI is left alone. Must not know any one run."""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, DoNothing
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

from weighbridge.flows import names

DEAD_AFTER = timedelta(hours=2)
"""Longer than any run of ours takes, the seeding of a host that has the largest model included."""

DEAD_RUNS = "weighbridge: runs of dead processes are Crashed"
LEFT_BEHIND = "weighbridge: hosts left behind"

_ENDS = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Crashed", "Cancelled", "AwaitingRetry")}
# Our flows end in states of these names too, and Prefect names an event after the state's name.
_OUR_ENDS = {
    f"prefect.flow-run.{state}" for state in (names.PARTIAL, names.HEALED, names.SUPERSEDED, names.ENOUGH, "Retrying")
}


def automations(*, dead_after: timedelta = DEAD_AFTER) -> Sequence[AutomationCore]:
    """Those that belong on every server.

    A run that has been Running for `dead_after` without an end is marked Crashed: our runs send no heartbeats, and a
    host's or a steward's next start takes up its own; this is for those that never start again. A rollout that ends
    PartialRollout is named by an automation that does nothing, for a notification to be added to.
    """
    for_each_of_our_runs = partial(
        EventTrigger,
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related={"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.run:*"},
        for_each={"prefect.resource.id"},
        threshold=1,
    )
    return (
        AutomationCore(
            name=DEAD_RUNS,
            description="Looks for runs of weighbridge whose process died and was not started again.",
            trigger=for_each_of_our_runs(
                posture=Posture.Proactive,
                after={"prefect.flow-run.Running"},
                expect=_ENDS | _OUR_ENDS,
                within=dead_after,
            ),
            actions=[
                ChangeFlowRunState(
                    state=StateType.CRASHED,
                    name="Crashed",
                    message=f"Nothing was heard of it for {dead_after}: its process died. Hosts catch up again.",
                    force=True,
                )
            ],
        ),
        AutomationCore(
            name=LEFT_BEHIND,
            description="A rollout reached fewer hosts than its policy asks for. Add a notification to its actions.",
            trigger=for_each_of_our_runs(
                posture=Posture.Reactive,
                expect={f"prefect.flow-run.{names.PARTIAL}"},
                within=timedelta(0),
            ),
            actions=[DoNothing()],
        ),
    )


def ensure_automations(client: SyncPrefectClient, wanted: Sequence[AutomationCore] | None = None) -> None:
    """Makes those that do not stand yet, by name."""
    for automation in automations() if wanted is None else wanted:
        if not client.read_automations_by_name(automation.name):
            client.create_automation(automation)
