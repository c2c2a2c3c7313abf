"""Gc: upkeep of a training run, carried out by its steward. Collects what nobody needs. Safe beside a running trainer,
hosts, and itself; what fails is tried again by the next run."""

from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Completed

from weighbridge.flows import names
from weighbridge.flows.context import retention_here, store_here
from weighbridge.flows.ours import our_flow
from weighbridge.storage.clock import SystemClock
from weighbridge.storage.gc import run_gc
from weighbridge.storage.lineage import Lineage


@our_flow(name=names.GC, flow_run_name="gc of {run}")
def gc(run: str, keep: int | None = None, grace_seconds: float | None = None) -> State[Any]:
    """Collects all but the last `keep` versions, named ones, and those that hosts heard of in the last `grace_seconds`
    may fetch. Never more than its steward's own settings let go: what is gone cannot be brought back by anybody."""
    least = retention_here(run)
    result = run_gc(
        Lineage(store_here(run)),
        keep=max(least.keep, keep or 0),
        clock=SystemClock(),
        grace_seconds=max(least.grace_seconds, grace_seconds or 0.0),
    )
    freed = f"{result.deleted_bytes:,} bytes freed, {result.leftovers} leftovers removed."
    said = f"{len(result.collected)} collected, {freed}"
    return Completed(message=f"{said} Not yet: {'; '.join(result.failures)}" if result.failures else said)
