"""What must stand on a Prefect server before a run can be asked of a worker: a pool of our own type, and a deployment
that names the flow by module. Must not know any one flow. Everything here may be repeated."""

from contextlib import suppress
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.utilities.callables import parameter_schema

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
) -> UUID:
    """Makes sure that a deployment ("flow/name") of a flow exists in a pool; returns its id.

    Its entry point names a module, since a file would be loaded a second time under another name. Our worker never
    follows it: it runs the flows it knows.
    """
    key = (str(client.api_url), deployment)
    if key in _known:
        return _known[key]
    ensure_pool(client, pool)
    _known[key] = client.create_deployment(
        flow_id=client.create_flow(flow),
        name=deployment.partition("/")[2],
        description=flow.description,
        entrypoint=f"{flow.fn.__module__}:{flow.fn.__qualname__}",
        work_pool_name=pool,
        work_queue_name=queue,
        parameters=parameters,
        tags=["weighbridge"],
        parameter_openapi_schema=parameter_schema(flow.fn).model_dump_for_openapi(),
        enforce_parameter_schema=True,
    )
    return _known[key]


def forget_deployments() -> None:
    """Looks again before the next use: a server may have been started on an empty database meanwhile."""
    _known.clear()
