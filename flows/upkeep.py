"""The upkeep of a training run and of its hosts, on schedules: which flows, and how often. The run's steward, or the
host, makes their deployments and executes them. Must not know what they do; a flow of upkeep names only the run (and
the host), and may run beside anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient

from weighbridge.flows import names
from weighbridge.flows.anchor import anchor
from weighbridge.flows.audit import audit
from weighbridge.flows.compact import compact
from weighbridge.flows.deployments import ensure_deployment
from weighbridge.flows.gc import gc
from weighbridge.flows.retry_failed import retry_failed
from weighbridge.flows.scrub import scrub


@dataclass(frozen=True, slots=True)
class Upkeep:
    """One flow of upkeep, and how often it runs unless somebody changed its schedule in the UI; None: when asked."""

    flow: Flow[..., Any]
    every: timedelta | None


UPKEEP: Sequence[Upkeep] = (
    Upkeep(anchor, timedelta(hours=1)),
    Upkeep(compact, timedelta(hours=1)),
    Upkeep(gc, timedelta(days=1)),
    Upkeep(audit, timedelta(days=1)),
    Upkeep(retry_failed, None),
)
OF_HOST = Upkeep(scrub, timedelta(days=7))
"""What a host's own worker executes."""
FLOWS: Mapping[str, Flow[..., Any]] = {upkeep.flow.name: upkeep.flow for upkeep in UPKEEP}
"""What a steward must be able to execute, by name."""


def ensure_upkeep(client: SyncPrefectClient, run: str) -> None:
    """Makes sure that a training run's upkeep is deployed; schedules that stand are left as they are."""
    for upkeep in UPKEEP:
        ensure_deployment(
            client,
            upkeep.flow,
            deployment=names.upkeep_deployment(upkeep.flow.name, run),
            pool=names.STEWARD_POOL,
            queue=run,
            parameters={"run": run},
            every=upkeep.every,
        )


def ensure_host_upkeep(client: SyncPrefectClient, run: str, host: str) -> None:
    """Makes sure that a host's scrub is deployed, on the host's own queue; likewise."""
    ensure_deployment(
        client,
        OF_HOST.flow,
        deployment=names.scrub_deployment(host),
        pool=names.HOSTS_POOL,
        queue=host,
        parameters={"run": run, "host": host},
        every=OF_HOST.every,
    )
