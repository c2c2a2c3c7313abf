"""The sweep: a host that starts asks again for what its last process left Running, so that a kill heals by itself. Only
its own queue; only runs that nobody executes, which the replica's lock guarantees. Must not know how a sync works."""

from collections.abc import Set as AbstractSet
from typing import Any
from uuid import UUID

import structlog
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterWorkQueueName,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import State, StateType
from prefect.states import AwaitingRetry, Cancelled

log = structlog.get_logger("weighbridge.worker")

_LEFT_BEHIND = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
_PAGE = 200


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
