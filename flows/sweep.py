"""The sweep: a host that starts asks again for what its last process left Running, so that a kill heals by itself; a
trainer says of its last process' runs that they crashed. While it is connected a worker looks again, for what ended
unheard because the server was away. Must not know how a sync works."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any
from uuid import UUID

import structlog
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterWorkQueueName,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
    TaskRunFilterSubFlowRuns,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, State, StateType, TaskRun
from prefect.states import AwaitingRetry, Cancelled, Completed, Crashed

from weighbridge.flows import names

log = structlog.get_logger("weighbridge.worker")

_LEFT_BEHIND = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
_ENDED = FlowRunFilterState(type=FlowRunFilterStateType(any_=sorted(TERMINAL_STATES)))
_OF_TRAINERS = FlowFilter(name=FlowFilterName(any_=[names.SYNC, names.PUBLISH, names.ROLLOUT]))
_NOT_DEPLOYED = FlowRunFilterDeploymentId(is_null_=True)  # those of a deployment are the steward's
_PAGE = 200


def sweep_trainer(client: SyncPrefectClient, *, run: str, under_way: AbstractSet[int] = frozenset()) -> int:
    """Marks Crashed what a training run's trainer left under way, and ends the steps of it that the server never heard
    the end of; returns how many runs.

    For a writer that has just begun, before its first flow, or that lost its server since: it alone writes the run, and
    what an earlier one still does cannot be committed any more. `under_way` are versions that it is at work on itself.
    """
    left = client.read_flow_runs(
        flow_filter=_OF_TRAINERS,
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_LEFT_BEHIND)), deployment_id=_NOT_DEPLOYED
        ),
        limit=_PAGE,
    )
    ours = [r for r in left if _is_of(r, run, under_way) and r.state is not None]
    for flow_run in ours:
        crashed: State[Any] = Crashed(message="The trainer's process that ran it had ended, or lost its server.")
        client.set_flow_run_state(flow_run.id, crashed, force=True)
        log.info("left behind by a trainer", flow_run=flow_run.name, was=flow_run.state_name)
    steps = _open_steps(client, FlowRunFilter(state=_ENDED, deployment_id=_NOT_DEPLOYED), of=_OF_TRAINERS)
    for step, flow_run in _with_runs(client, steps):
        if _is_of(flow_run, run, under_way):
            _end(client, step, flow_run)
    return len(ours)


def sweep(client: SyncPrefectClient, *, pool: str, queue: str, running: AbstractSet[UUID]) -> int:
    """Schedules again, or cancels for good, the runs of a queue that a dead process left; returns how many.

    `running` are those that this process still executes, from before it lost its server.
    """
    left = _left(client, pool, queue, running)
    _ask_again(client, left)
    return len(left)


class LaterSweep:
    """The looks after the first, of a worker that stays connected. An end may be on its way to the server when it is
    looked at: only what two looks in a row have found is ended."""

    def __init__(self, *, pool: str, queue: str, running: AbstractSet[UUID]) -> None:
        self._pool, self._queue, self._running = pool, queue, running
        self._seen: set[UUID] = set()

    def look(self, client: SyncPrefectClient) -> bool:
        """One look; whether anything was found, so that another should follow soon."""
        left = _left(client, self._pool, self._queue, self._running)
        of_queue = FlowRunFilterWorkQueueName(any_=[self._queue])
        steps = _open_steps(client, FlowRunFilter(work_queue_name=of_queue, state=_ENDED))
        _ask_again(client, [flow_run for flow_run in left if flow_run.id in self._seen])
        lost = [step for step in steps if step.id in self._seen]
        for step, flow_run in _with_runs(client, lost):
            _end(client, step, flow_run)
        self._seen = {found.id for found in (*left, *steps)} - {step.id for step in lost}
        return bool(left or steps)


def _left(client: SyncPrefectClient, pool: str, queue: str, running: AbstractSet[UUID]) -> list[FlowRun]:
    """The runs of a queue that are under way as far as the server knows, and not in this process."""
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            work_queue_name=FlowRunFilterWorkQueueName(any_=[queue]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_LEFT_BEHIND)),
        ),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
        limit=_PAGE,
    )
    return [flow_run for flow_run in found if flow_run.id not in running and flow_run.state is not None]


def _ask_again(client: SyncPrefectClient, left: Sequence[FlowRun]) -> None:
    if left:
        # Before they run again, and have new steps.
        for step in _open_steps(client, FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id for flow_run in left]))):
            _end(client, step)
    for flow_run in left:
        state: State[Any]
        if flow_run.state is not None and flow_run.state.is_cancelling():
            state = Cancelled(message="Cancelled; the process that ran it had ended.")
        else:
            state = AwaitingRetry(message="The process that ran it had ended, or lost its server; it runs again.")
        client.set_flow_run_state(flow_run.id, state, force=True)
        log.info("left behind by an earlier process", flow_run=flow_run.name, was=flow_run.state_name, now=state.name)


def _open_steps(client: SyncPrefectClient, runs: FlowRunFilter, *, of: FlowFilter | None = None) -> list[TaskRun]:
    """The steps of flow runs that have not ended, as far as the server knows. Those that stand for a child run follow
    that one by themselves."""
    return client.read_task_runs(
        flow_filter=of,
        flow_run_filter=runs,
        task_run_filter=TaskRunFilter(
            state=TaskRunFilterState(type=TaskRunFilterStateType(any_=_LEFT_BEHIND)),
            subflow_runs=TaskRunFilterSubFlowRuns(exists_=False),
        ),
        limit=_PAGE,
    )


def _with_runs(client: SyncPrefectClient, steps: Sequence[TaskRun]) -> list[tuple[TaskRun, FlowRun]]:
    """Each step with the flow run that it is one of, where the server still has that."""
    ids = sorted({step.flow_run_id for step in steps if step.flow_run_id is not None})
    if not ids:
        return []
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=ids)), limit=_PAGE)
    runs = {flow_run.id: flow_run for flow_run in found}
    return [(step, runs[step.flow_run_id]) for step in steps if step.flow_run_id in runs]


def _end(client: SyncPrefectClient, step: TaskRun, flow_run: FlowRun | None = None) -> None:
    """Ends a step whose own last word was lost, with its process or with the server: as its run has ended."""
    state: State[Any]
    if flow_run is not None and flow_run.state is not None and flow_run.state.is_completed():
        state = Completed(message="Its end was not heard; the run that it is a step of completed.")
    else:
        state = Crashed(message="Its end was not heard; the process that ran it had ended, or lost its server.")
    client.set_task_run_state(step.id, state, force=True)


def _is_of(flow_run: FlowRun, run: str, under_way: AbstractSet[int]) -> bool:
    return flow_run.parameters.get("run") == run and flow_run.parameters.get("version") not in under_way
