"""What the server tells of by itself, runs whose process died and hosts that were left behind, and what a start and a
worker say of runs and steps whose end it never heard."""

import uuid
from datetime import timedelta

from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.states import Completed, Running
from tests.flows.conftest import until
from tests.flows.small_run import SmallRun

from weighbridge.flows import names
from weighbridge.flows.automations import DEAD_RUNS, LEFT_BEHIND, automations, ensure_automations
from weighbridge.flows.dispatch import ensure_host_sync
from weighbridge.flows.sweep import LaterSweep, sweep_trainer


@flow(name=names.SYNC)
def stand_in(run: str) -> None:
    """Never executed: its runs are made Running as a process that died leaves them."""


@flow(name=names.PUBLISH)
def stand_in_for_version(run: str, version: int) -> None:
    """Likewise."""


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


def open_step(client: SyncPrefectClient, flow_run: uuid.UUID) -> uuid.UUID:
    """A step of a run that is Running, as a server has it that never heard of its end."""
    step = task(lambda: None, name="step")
    return client.create_task_run(
        task=step, flow_run_id=flow_run, dynamic_key=uuid.uuid4().hex, state=Running(), name="step"
    ).id


def step_state(client: SyncPrefectClient, step: uuid.UUID) -> StateType | None:
    return client.read_task_run(step).state_type


def test_steps_of_a_trainer_end_as_their_runs_do_and_what_it_is_at_work_on_is_left_alone(
    client: SyncPrefectClient, run: SmallRun
) -> None:
    crashed, completed = left_running(client, run.run_id), left_running(client, run.run_id)
    steps = [open_step(client, flow_run) for flow_run in (crashed, completed)]
    client.set_flow_run_state(completed, Completed(), force=True)
    at_work = client.create_flow_run(
        stand_in_for_version, parameters={"run": run.run_id, "version": 7}, state=Running()
    )
    steps.append(open_step(client, at_work.id))
    assert sweep_trainer(client, run=run.run_id, under_way={7}) == 1
    assert [step_state(client, step) for step in steps] == [StateType.CRASHED, StateType.COMPLETED, StateType.RUNNING]
    assert client.read_flow_run(at_work.id).state_type is StateType.RUNNING
    assert sweep_trainer(client, run=run.run_id) == 1


def test_a_worker_ends_what_two_looks_in_a_row_have_found_and_nothing_that_it_runs(client: SyncPrefectClient) -> None:
    host = f"host-{uuid.uuid4().hex[:8]}"
    deployment = ensure_host_sync(client)
    made = [
        client.create_flow_run_from_deployment(
            deployment, parameters={"run": "r", "version": version, "host": host}, work_queue_name=host, state=Running()
        ).id
        for version in (1, 2, 3)
    ]
    _, running, ended = made
    steps = [open_step(client, flow_run) for flow_run in made]
    client.set_flow_run_state(ended, Completed(), force=True)
    later = LaterSweep(pool=names.HOSTS_POOL, queue=host, running={running})
    assert later.look(client)
    assert [client.read_flow_run(id_).state_type for id_ in made] == ["RUNNING", "RUNNING", "COMPLETED"]
    assert [step_state(client, step) for step in steps] == ["RUNNING"] * 3
    assert later.look(client)
    assert [client.read_flow_run(id_).state_name for id_ in made] == ["AwaitingRetry", "Running", "Completed"]
    assert [step_state(client, step) for step in steps] == ["CRASHED", "RUNNING", "COMPLETED"]
    assert not later.look(client)
