"""The sweep: a host that starts asks again for what its last process left Running, so that a kill heals by itself; a
trainer that starts says of its last process' runs that they crashed. Must not know how a sync works."""

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
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterWorkQueueName,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import State, StateType
from prefect.states import AwaitingRetry, Cancelled, Crashed

from weighbridge.flows import names

log = structlog.get_logger("weighbridge.worker")

_LEFT_BEHIND = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
_PAGE = 200


def sweep_trainer(client: SyncPrefectClient, *, run: str) -> int:
    """Marks Crashed what an earlier process of a training run's trainer left under way; returns how many.

    For a writer that has just begun, before its first flow: it alone writes the run, and what an earlier one still does
    cannot be committed any more.
    """
    left = client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[names.SYNC, names.PUBLISH, names.ROLLOUT])),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_LEFT_BEHIND)),
            deployment_id=FlowRunFilterDeploymentId(is_null_=True),  # those of a deployment are the steward's
        ),
        limit=_PAGE,
    )
    swept = 0
    for flow_run in left:
        if flow_run.parameters.get("run") != run or flow_run.state is None:
            continue
        crashed: State[Any] = Crashed(message="The trainer's process that ran it had ended.")
        client.set_flow_run_state(flow_run.id, crashed, force=True)
        log.info("left behind by an earlier trainer", flow_run=flow_run.name, was=flow_run.state.name)
        swept += 1
    return swept


def sweep(client: SyncPrefectClient, *, pool: str, queue: str, running: AbstractSet[UUID]) -> int:
    """Schedules again, or cancels for good, the runs of a queue that a dead process left; returns how many.

    `running` are those that this process still executes, from before it lost its server.
    """
    left = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            work_queue_name=FlowRunFilterWorkQueueName(any_=[queue]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_LEFT_BEHIND)),
        ),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
        limit=_PAGE,
    )
    swept = 0
    for flow_run in left:
        if flow_run.id in running or flow_run.state is None:
            continue
        state: State[Any]
        if flow_run.state.is_cancelling():
            state = Cancelled(message="Cancelled; the process that ran it had ended.")
        else:
            state = AwaitingRetry(message="The process that ran it had ended; it runs again.")
        client.set_flow_run_state(flow_run.id, state, force=True)
        log.info("left behind by an earlier process", flow_run=flow_run.name, was=flow_run.state.name, now=state.name)
        swept += 1
    return swept
