"""What must stand on a Prefect server before a run can be asked of a worker: a pool of our own type, and a deployment
that names the flow by module. Must not know any one flow. Everything here may be repeated."""

from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.utilities.callables import parameter_schema

from weighbridge.flows import names
from weighbridge.flows.flow_worker import FlowWorker

_known: dict[tuple[str, str], UUID] = {}


def ensure_pool(client: SyncPrefectClient, pool: str) -> None:
    """Makes sure that a work pool of our own worker type exists."""
    try:
        client.read_work_pool(pool)
    except ObjectNotFound:
        wanted = WorkPoolCreate(
            name=pool, type=FlowWorker.type, base_job_template=FlowWorker.get_default_base_job_template()
        )
        with suppress(ObjectAlreadyExists):  # another process was faster
            client.create_work_pool(wanted)


def ensure_deployment(
    client: SyncPrefectClient,
    flow: Flow[..., Any],
    *,
    deployment: str,
    pool: str,
    queue: str | None = None,
    parameters: dict[str, Any] | None = None,
    every: timedelta | None = None,
) -> UUID:
    """Makes sure that a deployment ("flow/name") of a flow exists in a pool; returns its id. A new one is scheduled
    `every` so often, and its runs carry the training run that its `parameters` name from the first.

    Its entry point names a module, since a file would be loaded a second time under another name. Our worker never
    follows it: it runs the flows it knows.
    """
    key = (str(client.api_url), deployment)
    if key in _known:
        return _known[key]
    run = (parameters or {}).get("run")
    ensure_pool(client, pool)
    _known[key] = client.create_deployment(
        flow_id=client.create_flow(flow),
        name=deployment.partition("/")[2],
        description=flow.description,
        entrypoint=f"{flow.fn.__module__}:{flow.fn.__qualname__}",
        work_pool_name=pool,
        work_queue_name=queue,
        parameters=parameters,
        tags=["weighbridge", *([] if run is None else [names.run_tag(run)])],
        parameter_openapi_schema=parameter_schema(flow.fn).model_dump_for_openapi(),
        enforce_parameter_schema=True,
        schedules=None if every is None else _schedules(client, deployment, every),
    )
    return _known[key]


def _schedules(client: SyncPrefectClient, deployment: str, every: timedelta) -> list[DeploymentScheduleCreate]:
    """Those that stand, paused ones too, for somebody may have changed them in the UI; else our own."""
    try:
        standing = client.read_deployment_by_name(deployment).schedules
    except ObjectNotFound:
        return [DeploymentScheduleCreate(schedule=IntervalSchedule(interval=every), active=True)]
    return [DeploymentScheduleCreate(schedule=one.schedule, active=one.active) for one in standing]


def forget_deployments() -> None:
    """Looks again before the next use: a server may have been started on an empty database meanwhile."""
    _known.clear()
