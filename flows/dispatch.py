"""Dispatch: asks one host-sync run of each host and follows all of them by one call. Must not judge how a version went:
that is for the hosts' records."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry

from weighbridge.errors import OrchestrationError
from weighbridge.flows import names
from weighbridge.flows.deployments import ensure_deployment, forget_deployments
from weighbridge.flows.host_sync import host_sync

_PAGE = 200
_POLL_SECONDS = 0.15


def ensure_host_sync(client: SyncPrefectClient) -> UUID:
    """Makes sure that the hosts' deployment exists; returns its id."""
    return ensure_deployment(client, host_sync, deployment=names.HOST_DEPLOYMENT, pool=names.HOSTS_POOL)


def dispatch(client: SyncPrefectClient, *, run: str, version: int, hosts: Sequence[str]) -> dict[str, UUID]:
    """One run for each host, on the queue of its name; children of the flow run that calls. Returns their ids.

    Asking again asks for the same run; one that failed is set back to run again. A host that is down finds its run
    waiting when it comes up.
    """
    return {host: _ask(client, run=run, version=version, host=host) for host in hosts}


def _ask(client: SyncPrefectClient, *, run: str, version: int, host: str) -> UUID:
    for again in (True, False):
        try:
            flow_run = run_deployment(
                ensure_host_sync(client),
                parameters={"run": run, "version": version, "host": host},
                flow_run_name=f"v{version} on {host}",
                tags=[names.run_tag(run), names.version_tag(version), names.host_tag(host)],
                idempotency_key=names.host_key(run, version, host),
                work_queue_name=host,
                timeout=0,
                _sync=True,
            )
            break
        except ObjectNotFound:
            if not again:
                raise
            forget_deployments()
    if flow_run.state is not None and flow_run.state.is_final() and not flow_run.state.is_completed():
        ask_again(client, flow_run)
    return flow_run.id


def ask_again(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    """What the UI's Retry button does: the run is scheduled again, on the queue that it has always had.

    Raises OrchestrationError when Prefect refuses.
    """
    answer = client.set_flow_run_state(flow_run.id, AwaitingRetry(message="Asked for again"))
    if not answer.state.is_scheduled():
        raise OrchestrationError(
            f"Prefect did not schedule {flow_run.name!r} again; it is {answer.state.name}. Nothing was changed."
        )


def follow(
    client: SyncPrefectClient,
    runs: Mapping[str, UUID],
    *,
    deadline_seconds: float,
    enough: Callable[[Mapping[str, FlowRun]], bool] = lambda _: False,
) -> dict[str, FlowRun]:
    """Waits until all runs have ended, `enough` says so, or the deadline passes; returns them as they are then."""
    deadline = time.monotonic() + deadline_seconds
    while True:
        found = {flow_run.id: flow_run for flow_run in _read(client, runs.values())}
        latest = {host: found[id_] for host, id_ in runs.items() if id_ in found}
        ended = [f for f in latest.values() if f.state is not None and f.state.is_final()]
        left = deadline - time.monotonic()
        if len(ended) == len(runs) or left <= 0 or enough(latest):
            return latest
        time.sleep(min(_POLL_SECONDS, left))


def _read(client: SyncPrefectClient, ids: Iterable[UUID]) -> list[FlowRun]:
    wanted = list(ids)
    found: list[FlowRun] = []
    for start in range(0, len(wanted), _PAGE):
        some = FlowRunFilter(id=FlowRunFilterId(any_=wanted[start : start + _PAGE]))
        found += client.read_flow_runs(flow_run_filter=some, limit=_PAGE)
    return found
