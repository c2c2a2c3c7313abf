"""What the server tells of by itself: runs whose process died, and hosts that were left behind."""

import uuid
from datetime import timedelta

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.states import Running
from tests.flows.conftest import until
from tests.flows.small_run import SmallRun

from weighbridge.flows import names
from weighbridge.flows.automations import DEAD_RUNS, LEFT_BEHIND, automations, ensure_automations
from weighbridge.flows.sweep import sweep_trainer


@flow(name=names.SYNC)
def stand_in(run: str) -> None:
    """Never executed: its runs are made Running as a process that died leaves them."""


def left_running(client: SyncPrefectClient, run: str) -> uuid.UUID:
    made = client.create_flow_run(stand_in, parameters={"run": run}, tags=[names.run_tag(run)])
    client.set_flow_run_state(made.id, Running())
    return made.id


def test_automations_are_made_once_and_left_as_somebody_changed_them(client: SyncPrefectClient) -> None:
    ensure_automations(client)
    ensure_automations(client)
    for name in (DEAD_RUNS, LEFT_BEHIND):
        assert len(client.read_automations_by_name(name)) == 1


def test_a_run_whose_process_died_and_never_starts_again_is_marked_crashed(client: SyncPrefectClient) -> None:
    quick = automations(dead_after=timedelta(seconds=10))[0].model_copy(update={"name": f"quick {uuid.uuid4().hex}"})
    made = client.create_automation(quick)
    try:
        run = left_running(client, f"run-{uuid.uuid4().hex[:8]}")
        until(lambda: client.read_flow_run(run).state_type is StateType.CRASHED, seconds=90, what="Crashed")
    finally:
        client.request("DELETE", "/automations/{id}", path_params={"id": made})


def test_a_trainer_that_starts_again_says_what_its_last_process_left(client: SyncPrefectClient, run: SmallRun) -> None:
    ours, theirs = left_running(client, run.run_id), left_running(client, f"other-{run.run_id}")
    assert sweep_trainer(client, run=run.run_id) == 1
    assert client.read_flow_run(ours).state_type is StateType.CRASHED
    assert client.read_flow_run(theirs).state_type is StateType.RUNNING
    assert sweep_trainer(client, run=run.run_id) == 0
