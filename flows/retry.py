"""Retry: runs the failed host-sync runs again, each on its own host, as the UI's Retry button does. Must not know how a
host's sync works."""

from collections.abc import Mapping

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort

from weighbridge.flows import names
from weighbridge.flows.dispatch import ask_again, follow

_LOOKED_AT = 200


def failed_runs(
    client: SyncPrefectClient, *, run: str, version: int | None = None, host: str | None = None
) -> list[FlowRun]:
    """The host-sync runs that ended without success, the newest first; of one version, of one host."""
    tags = [names.run_tag(run)]
    tags += [names.version_tag(version)] if version is not None else []
    tags += [names.host_tag(host)] if host is not None else []
    return client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[names.HOST_SYNC])),
        flow_run_filter=FlowRunFilter(
            tags=FlowRunFilterTags(all_=tags),
            state=FlowRunFilterState(
                type=FlowRunFilterStateType(any_=[StateType.FAILED, StateType.CRASHED, StateType.CANCELLED])
            ),
        ),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=_LOOKED_AT,
    )


def retry_failed(
    client: SyncPrefectClient,
    *,
    run: str,
    version: int | None = None,
    host: str | None = None,
    wait_seconds: float = 0.0,
) -> Mapping[str, FlowRun]:
    """Runs failed host-sync runs again and waits up to `wait_seconds` for them; returns them by name ("v3 on host-0").

    Empty when nothing failed. Raises OrchestrationError when Prefect refuses to schedule one.
    """
    again = failed_runs(client, run=run, version=version, host=host)
    for flow_run in again:
        ask_again(client, flow_run)
    return follow(client, {flow_run.name: flow_run.id for flow_run in again}, deadline_seconds=wait_seconds)
