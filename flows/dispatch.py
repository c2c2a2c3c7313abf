"""Dispatch: asks one host-sync run of each host and follows all of them by one call. Must not judge how a version went:
that is for the hosts' records."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, State
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry, Pending
from prefect.tasks import Task

from weighbridge.errors import OrchestrationError
from weighbridge.flows import names
from weighbridge.flows.cutover import cutover
from weighbridge.flows.deployments import ensure_deployment, forget_deployments
from weighbridge.flows.host_sync import host_sync
from weighbridge.flows.prepare import prepare

_PAGE = 200
_POLL_SECONDS = 0.2


def ensure_host_flows(client: SyncPrefectClient) -> None:
    """Makes sure that the hosts' deployments exist."""
    ensure_host_sync(client)
    ensure_prepare(client)
    ensure_deployment(client, cutover, deployment=names.CUTOVER_DEPLOYMENT, pool=names.HOSTS_POOL)


def ensure_host_sync(client: SyncPrefectClient) -> UUID:
    """Makes sure that the deployment of the hosts' syncs exists; returns its id."""
    return ensure_deployment(client, host_sync, deployment=names.HOST_DEPLOYMENT, pool=names.HOSTS_POOL)


def ensure_prepare(client: SyncPrefectClient) -> UUID:
    """Makes sure that the deployment of what comes before a common cut over exists; returns its id."""
    return ensure_deployment(client, prepare, deployment=names.PREPARE_DEPLOYMENT, pool=names.HOSTS_POOL)


def dispatch(client: SyncPrefectClient, *, run: str, version: int, hosts: Sequence[str]) -> dict[str, UUID]:
    """One run for each host, on the queue of its name; children of the flow run that calls. Returns their ids.

    Asking again asks for the same run; one that failed is set back to run again. A host that is down finds its run
    waiting when it comes up.
    """
    return {
        host: _ask(client, names.HOST_SYNC, ensure_host_sync, f"v{version} on {host}", run, version, host)
        for host in hosts
    }


def dispatch_prepare(
    client: SyncPrefectClient, *, run: str, version: int, hosts: Sequence[str], hold_seconds: float
) -> dict[str, UUID]:
    """Like `dispatch`, up to the cut over, for which each host then waits at most `hold_seconds`."""
    return {
        host: _ask(
            client,
            names.PREPARE,
            ensure_prepare,
            f"prepare v{version} on {host}",
            run,
            version,
            host,
            hold_seconds=hold_seconds,
        )
        for host in hosts
    }


def _ask(
    client: SyncPrefectClient,
    flow: str,
    ensure: Callable[[SyncPrefectClient], UUID],
    name: str,
    run: str,
    version: int,
    host: str,
    **more: float,
) -> UUID:
    wanted: dict[str, Any] = {
        "parameters": {"run": run, "version": version, "host": host, **more},
        "name": name,
        "tags": [names.run_tag(run), names.version_tag(version), names.host_tag(host)],
        "idempotency_key": names.host_key(flow, run, version, host),
        "work_queue_name": host,
        "parent_task_run_id": _place_in_parent(client, flow, host),
    }
    try:
        flow_run = client.create_flow_run_from_deployment(ensure(client), **wanted)
    except ObjectNotFound:  # somebody deleted the deployment, or the server has a new database
        forget_deployments()
        flow_run = client.create_flow_run_from_deployment(ensure(client), **wanted)
    if flow_run.state is not None and flow_run.state.is_final() and not flow_run.state.is_completed():
        ask_again(client, flow_run)
    return flow_run.id


def _place_in_parent(client: SyncPrefectClient, flow: str, host: str) -> UUID | None:
    """The task run that stands for a host's run within the calling flow run, so that the UI shows it as its child.

    `run_deployment` does the same with twice the calls, which count when there are many hosts.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return None
    stand_in = Task(name=host, fn=lambda: None)
    stand_in.task_key = f"{flow}-{host}"
    place = client.create_task_run(
        task=stand_in, flow_run_id=context.flow_run.id, dynamic_key=host, name=host, state=Pending()
    )
    return place.id


def ask_again(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    """What the UI's Retry button does: the run is scheduled again, on the queue that it has always had.

    Raises OrchestrationError when Prefect refuses.
    """
    wanted: State[Any] = AwaitingRetry(message="Asked for again")
    given = client.set_flow_run_state(flow_run.id, wanted).state
    if given is None or not given.is_scheduled():
        is_now = given.name if given is not None else "not known"
        raise OrchestrationError(
            f"Prefect did not schedule {flow_run.name!r} again; it is {is_now}. Nothing was changed."
        )


def follow(
    client: SyncPrefectClient,
    runs: Mapping[str, UUID],
    *,
    deadline_seconds: float,
    enough: Callable[[Mapping[str, FlowRun]], bool] = lambda _: False,
    look_seconds: float = math.inf,
) -> dict[str, FlowRun]:
    """Waits until all runs have ended, `enough` says so, or the deadline passes; returns them as they are then.

    `enough` is asked whenever a run has ended, and every `look_seconds`.
    """
    deadline = time.monotonic() + deadline_seconds
    ended, looked = 0, time.monotonic()
    while True:
        left, before, ended = deadline - time.monotonic(), ended, _count_ended(client, runs.values())
        if ended == len(runs) or left <= 0 or ended != before or time.monotonic() - looked >= look_seconds:
            looked = time.monotonic()
            found = {flow_run.id: flow_run for flow_run in _read(client, runs.values())}
            latest = {name: found[id_] for name, id_ in runs.items() if id_ in found}
            if ended == len(runs) or left <= 0 or enough(latest):
                return latest
        time.sleep(min(_POLL_SECONDS, max(left, 0.0)))


def _count_ended(client: SyncPrefectClient, ids: Iterable[UUID]) -> int:
    """The cheap question, asked often: it costs the server a tenth of reading the runs."""
    wanted = list(ids)
    final = FlowRunFilterState(type=FlowRunFilterStateType(any_=sorted(TERMINAL_STATES)))
    some = (wanted[start : start + _PAGE] for start in range(0, len(wanted), _PAGE))
    return sum(
        client.count_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=page), state=final))
        for page in some
    )


def _read(client: SyncPrefectClient, ids: Iterable[UUID]) -> list[FlowRun]:
    wanted = list(ids)
    found: list[FlowRun] = []
    for start in range(0, len(wanted), _PAGE):
        some = FlowRunFilter(id=FlowRunFilterId(any_=wanted[start : start + _PAGE]))
        found += client.read_flow_runs(flow_run_filter=some, limit=_PAGE)
    return found
