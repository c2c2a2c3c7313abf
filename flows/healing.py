"""Healing: Prefect's states mirror the hosts' records. When the records say that every host made a version after all,
the rollout that ended partial, and the sync above it, turn Completed under the name Healed. Decides nothing itself."""

from typing import Any

import structlog
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterTags,
    TaskRunFilter,
    TaskRunFilterId,
)
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import SyncClientContext
from prefect.states import Completed

from weighbridge.errors import WeighbridgeError
from weighbridge.flows import names
from weighbridge.flows.connection import UNREACHABLE
from weighbridge.flows.context import store_here
from weighbridge.storage.records import outcome_of, pass_over, read_records
from weighbridge.storage.stores.contract import Store

log = structlog.get_logger("weighbridge.healing")

_PAGE = 50


def heal(client: SyncPrefectClient, store: Store, *, run: str, version: int | None = None) -> int:
    """Turns partial rollouts of a run (of one version, or of any) Healed where the records say so; returns how many."""
    tags = [names.run_tag(run)] + ([names.version_tag(version)] if version is not None else [])
    partial = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            tags=FlowRunFilterTags(all_=tags),
            state=FlowRunFilterState(name=FlowRunFilterStateName(any_=[names.PARTIAL])),
        ),
        limit=_PAGE,
    )
    healed = 0
    for rollout in partial:
        reached = rollout.parameters.get("version")
        if isinstance(reached, int) and outcome_of(read_records(store, version=reached, on_corrupt=pass_over)) in (
            "healed",
            "complete",
        ):
            _turn_healed(client, rollout)
            healed += 1
    return healed


def heal_after(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """A flow's hook: heals what the run that just completed was missing from."""
    run, version = flow_run.parameters["run"], flow_run.parameters["version"]
    try:
        with SyncClientContext.get_or_create() as context:
            heal(context.client, store_here(run), run=run, version=version)
    except (WeighbridgeError, *UNREACHABLE) as error:
        # Only a mirror: the records say healed already, and the next start of a host reconciles.
        log.warning("rollout not marked healed yet", version=version, error=str(error))


def _turn_healed(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    message = "Every host serves this version or a newer one now."
    client.set_flow_run_state(flow_run.id, Completed(name=names.HEALED, message=message), force=True)
    log.info("rollout healed", flow_run=flow_run.name)
    above = _parent(client, flow_run)
    if above is not None and above.state is not None and above.state.is_failed() and above.state.name == names.PARTIAL:
        _turn_healed(client, above)


def _parent(client: SyncPrefectClient, flow_run: FlowRun) -> FlowRun | None:
    if flow_run.parent_task_run_id is None:
        return None
    found = client.read_task_runs(task_run_filter=TaskRunFilter(id=TaskRunFilterId(any_=[flow_run.parent_task_run_id])))
    owner = found[0].flow_run_id if found else None
    return client.read_flow_run(owner) if owner is not None else None
